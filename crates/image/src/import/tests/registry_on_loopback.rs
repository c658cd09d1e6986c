//! A registry for one test: Debian's `docker-registry`. `skopeo` pushes the images.

use crate::import::ImportSource;
use crate::import::RegistryAccess;
use crate::skipped;
use crate::verified::sum_of;
use jiffy_registry_pull::{Cancel, PullerProgram, Registries};
use std::fs::{self, File};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Timeout for the start of the registry.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Source of an image in a registry without TLS, for the host's owner.
pub(super) fn from_registry(host: &str, name: &str) -> ImportSource {
    from_mirrors(host, name, &[])
}

/// Source like [`from_registry`], with mirrors of `host` without TLS.
pub(super) fn from_mirrors(host: &str, name: &str, mirrors: &[&str]) -> ImportSource {
    let mirrors = mirrors.iter();
    let mirrors = mirrors.map(|mirror| format!("{host}=http://{mirror}").parse().unwrap());
    let registries = Registries {
        plain_http: vec![host.to_owned()],
        mirrors: mirrors.collect::<Vec<_>>().into(),
        program: PullerProgram::Thread,
        ..Registries::default()
    };
    ImportSource::Registry {
        reference: format!("{host}/{name}"),
        access: RegistryAccess::Host,
        pull: registries.pull(false, &Cancel::new().unwrap()),
    }
}

/// A running registry and its data.
pub(super) struct Loopback {
    dir: tempfile::TempDir,
    host: String,
    user: Option<(String, String)>,
    child: Child,
}

impl Loopback {
    /// Starts the registry. `user` is the only accepted user name and password. Returns `None` and
    /// records that the test is skipped if a program is missing.
    pub(super) fn start(test: &str, user: Option<(&str, &str)>) -> Option<Self> {
        for program in ["docker-registry", "skopeo"] {
            if !Path::new("/usr/bin").join(program).exists() {
                skipped(
                    test,
                    &format!("{program} is not installed (a Debian package)"),
                );
                return None;
            }
        }
        if user.is_some() && !Path::new("/usr/bin/htpasswd").exists() {
            skipped(
                test,
                "htpasswd is not installed (Debian package apache2-utils)",
            );
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        // Reserves a free port until the configuration is written. Another process may take it
        // before the registry starts, which is unlikely.
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = free.local_addr().unwrap().to_string();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let auth = user.map_or(String::new(), |(name, password)| {
            let line = Command::new("htpasswd")
                .args(["-nbB", name, password])
                .output();
            fs::write(dir.path().join("users"), line.unwrap().stdout).unwrap();
            format!(
                "auth:\n  htpasswd:\n    realm: test\n    path: {}\n",
                path("users")
            )
        });
        // Debian's build lacks a default configuration.
        let config = format!(
            "version: 0.1\nlog:\n  level: info\nstorage:\n  filesystem:\n    rootdirectory: {}\n  \
             maintenance:\n    uploadpurging:\n      enabled: false\nhttp:\n  addr: \
             {host}\n{auth}",
            path("data")
        );
        fs::write(dir.path().join("config.yml"), config).unwrap();
        let log = File::create(dir.path().join("log")).unwrap();
        drop(free);
        let child = Command::new("docker-registry")
            .args(["serve", &path("config.yml")])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let user = user.map(|(name, password)| (name.to_owned(), password.to_owned()));
        let mut registry = Self {
            dir,
            host,
            user,
            child,
        };
        registry.await_ready();
        Some(registry)
    }

    /// Waits until the registry accepts connections.
    fn await_ready(&mut self) {
        let began = Instant::now();
        while TcpStream::connect(&self.host).is_err() {
            let ended = self.child.try_wait().unwrap();
            assert!(
                ended.is_none() && began.elapsed() < START_TIMEOUT,
                "{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Copies an OCI layout to the registry.
    pub(super) fn push(&self, layout: &Path, name: &str) {
        let mut skopeo = Command::new("skopeo");
        skopeo.args([
            "--insecure-policy",
            "copy",
            "--quiet",
            "--all",
            "--preserve-digests",
            "--dest-tls-verify=false",
        ]);
        if let Some((user, password)) = &self.user {
            skopeo.arg(format!("--dest-creds={user}:{password}"));
        }
        let pushed = skopeo
            .arg(format!("oci:{}", layout.display()))
            .arg(format!("docker://{}/{name}", self.host))
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&pushed.stderr).into_owned();
        assert!(pushed.status.success(), "{stderr}\n{}", self.log());
    }

    pub(super) fn source(&self, name: &str) -> ImportSource {
        from_registry(&self.host, name)
    }

    /// Address of the registry.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Returns the digest of a tag without `sha256:`.
    pub(super) fn digest(&self, name: &str) -> String {
        let mut skopeo = Command::new("skopeo");
        skopeo.args(["inspect", "--raw", "--tls-verify=false"]);
        let raw = skopeo
            .arg(format!("docker://{}/{name}", self.host))
            .output();
        let raw = raw.unwrap();
        assert!(raw.status.success(), "{raw:?}");
        sum_of(&raw.stdout)
    }

    /// File of a blob in the registry.
    pub(super) fn blob(&self, sha256: &str) -> PathBuf {
        let blobs = self.dir.path().join("data/docker/registry/v2/blobs/sha256");
        blobs.join(&sha256[..2]).join(sha256).join("data")
    }

    /// Log of the registry, with its requests.
    pub(super) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        // Ignore the error: the registry may have exited. It holds only test data.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::io::stdout().flush();
    }
}
