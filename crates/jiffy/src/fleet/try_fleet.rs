//! `jiffy fleet try`: a fleet of three hosts on this machine, in network namespaces, with an S3
//! server. Everything is removed at exit.

mod namespace;

use crate::cli::FleetTryArgs;
use anyhow::Context;
use jiffy_image::Home;
use namespace::Namespace;
use std::fs::File;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

/// Template that the hosts have.
const TEMPLATE: &str = "base";
/// Bucket and prefix of the store.
const STORE: &str = "s3://fleet/try";
/// Address of the S3 server, on the bridge.
const SERVER: &str = "10.231.77.1";
const S3_PORT: u16 = 7070;
/// Ports of members and of their APIs.
const FLEET_PORT: u16 = 7946;
const API_PORT: u16 = 3000;
/// Maximum time until a server or daemon accepts connections.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the address of a host on the bridge.
fn address(number: usize) -> String {
    format!("10.231.77.{}", 10 + number)
}

/// Starts the fleet, prints how to use it, and removes it after a signal.
pub fn run(args: &FleetTryArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        rustix::process::geteuid().is_root(),
        "network namespaces need root: run `sudo jiffy fleet try`"
    );
    let server = find_server()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    // Registered first, so that a signal during the start removes everything as well.
    let mut signals = runtime.block_on(async {
        anyhow::Ok([
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
        ])
    })?;
    let hosts = usize::from(args.hosts);
    let started = Instant::now();
    let start = runtime.spawn_blocking(move || Fleet::start(&server, hosts));
    let [interrupt, terminate] = &mut signals;
    let fleet = runtime.block_on(async {
        let mut start = start;
        tokio::select! {
            fleet = &mut start => fleet.context("the start panicked")?.map(Some),
            _ = interrupt.recv() => { let _ = start.await; Ok(None) }
            _ = terminate.recv() => { let _ = start.await; Ok(None) }
        }
    })?;
    if let Some(fleet) = &fleet {
        fleet.explain(started.elapsed());
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        outln!("removing the fleet");
    }
    drop(fleet);
    Ok(())
}

/// Finds the S3 server.
fn find_server() -> anyhow::Result<PathBuf> {
    let given = std::env::var_os("JIFFY_VERSITYGW").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|folder| folder.join("versitygw"));
    given
        .into_iter()
        .chain(in_path)
        .find(|file| file.is_file())
        .context(
            "versitygw, the S3 server of the trial, is not in PATH: install it with `go install \
             github.com/versity/versitygw/cmd/versitygw@v1.8.0`, or set JIFFY_VERSITYGW",
        )
}

/// Running fleet. Fields are dropped in this order.
struct Fleet {
    hosts: Vec<Host>,
    /// Bridge and S3 server.
    _network: Namespace,
    dir: TempDir,
}

/// Host with its data directory.
struct Host {
    namespace: Namespace,
    home: PathBuf,
    address: String,
}

impl Fleet {
    fn start(server: &Path, count: usize) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("jiffy-fleet-")
            .tempdir_in("/var/tmp")
            .context("cannot create a directory in /var/tmp")?;
        let network = Namespace::new()?;
        for arguments in [
            "link add br0 type bridge".to_owned(),
            format!("addr add {SERVER}/24 dev br0"),
            "link set br0 up".to_owned(),
            "link set lo up".to_owned(),
        ] {
            network.ip(&arguments)?;
        }
        start_s3(&network, server, dir.path())?;
        let mut fleet = Self {
            hosts: Vec::new(),
            _network: network,
            dir,
        };
        for number in 1..=count {
            let host = fleet.add(number)?;
            fleet.hosts.push(host);
        }
        Ok(fleet)
    }

    /// Starts a host, which creates the fleet or joins it.
    fn add(&self, number: usize) -> anyhow::Result<Host> {
        let home = self.dir.path().join(format!("h{number}"));
        create_home(&home, number == 1)?;
        let namespace = Namespace::new()?;
        let address = address(number);
        self._network.connect(&namespace, number, &address)?;
        let host = Host {
            namespace,
            home,
            address,
        };
        let listen = format!("{}:{FLEET_PORT}", host.address);
        let name = format!("host{number}");
        let common = ["--fleet-listen", &listen, "--name", &name];
        let text = match self.hosts.first() {
            None => host.run(&[&["fleet", "init", "--store", STORE], &common[..]].concat())?,
            Some(first) => {
                let token = first.run(&["fleet", "token", "--json"])?;
                let token: serde_json::Value = serde_json::from_str(&token)?;
                let field = |name: &str| token[name].as_str().unwrap_or_default().to_owned();
                let (url, token) = (field("joinUrl"), field("token"));
                host.run(&[&["fleet", "join", &url, &token], &common[..]].concat())?
            }
        };
        for line in text.lines() {
            outln!("host{number}# {}", jiffy_client::terminal::line(line));
        }
        host.serve()?;
        Ok(host)
    }

    fn explain(&self, time: Duration) {
        outln!("");
        outln!(
            "{} hosts run after {} s. Ctrl-C removes them.",
            self.hosts.len(),
            time.as_secs()
        );
        outln!("Each host has a data directory. In another shell, as root:");
        for host in &self.hosts {
            outln!(
                "  JIFFY_HOME={} jiffy fleet status      # host {}, log in {}",
                host.home.display(),
                host.address,
                host.log().display()
            );
        }
        let (first, last) = match (self.hosts.first(), self.hosts.last()) {
            (Some(first), Some(last)) => (first.home.display(), last.home.display()),
            _ => return,
        };
        outln!("Create a sandbox on the first host and list it on the last one:");
        outln!("  JIFFY_HOME={first} jiffy create --name demo");
        outln!("  JIFFY_HOME={last} jiffy ls");
    }
}

/// Creates a data directory with the programs and images of this host. Only the first host of a
/// fleet has the template: the others receive it from the store.
fn create_home(home: &Path, has_template: bool) -> anyhow::Result<()> {
    let own = Home::locate()?;
    let own = own.path();
    std::fs::create_dir(home)?;
    let images = home.join("images");
    let templates = home.join("templates");
    let locks = home.join("locks");
    for folder in [&images, &templates, &locks] {
        std::fs::create_dir(folder)?;
    }
    for image in std::fs::read_dir(own.join("images")).into_iter().flatten() {
        let image = image?;
        symlink(image.path(), images.join(image.file_name()))?;
    }
    for name in ["kernel", "disks"] {
        symlink(own.join(name), home.join(name))?;
        // Only one user of a shared directory creates its missing files.
        symlink(own.join("locks").join(name), locks.join(name))?;
    }
    let template = own.join("templates").join(TEMPLATE);
    if has_template && template.exists() {
        symlink(template, templates.join(TEMPLATE))?;
    }
    Ok(())
}

fn start_s3(network: &Namespace, server: &Path, dir: &Path) -> anyhow::Result<()> {
    let data = dir.join("s3");
    std::fs::create_dir_all(data.join("fleet"))?;
    network
        .command(server)
        .args(["--port", &format!("{SERVER}:{S3_PORT}"), "--quiet"])
        .args(["--access", "trial", "--secret", "trial-secret", "posix"])
        .arg(&data)
        .stdout(File::create(dir.join("s3.log"))?)
        .stderr(File::create(dir.join("s3.err"))?)
        .spawn()
        .context("cannot start the S3 server")?;
    let probe = format!("exec 3<>/dev/tcp/{SERVER}/{S3_PORT}");
    wait_for("the S3 server", || {
        let connected = network.command("bash").args(["-c", &probe]).output();
        connected.is_ok_and(|output| output.status.success())
    })
}

fn wait_for(what: &str, mut is_ready: impl FnMut() -> bool) -> anyhow::Result<()> {
    let started = Instant::now();
    while !is_ready() {
        anyhow::ensure!(
            started.elapsed() < START_TIMEOUT,
            "{what} did not start within {} s",
            START_TIMEOUT.as_secs()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

impl Host {
    fn log(&self) -> PathBuf {
        self.home.join("daemon.log")
    }

    /// Returns a command of `jiffy` on this host.
    fn jiffy(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = self.namespace.command(std::env::current_exe()?);
        command
            .args(arguments)
            .env("JIFFY_HOME", &self.home)
            .env("AWS_ENDPOINT_URL", format!("http://{SERVER}:{S3_PORT}"))
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_REGION", "us-east-1")
            .env("AWS_ACCESS_KEY_ID", "trial")
            .env("AWS_SECRET_ACCESS_KEY", "trial-secret");
        Ok(command)
    }

    /// Runs a command and returns its output.
    fn run(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = self.jiffy(arguments)?.output()?;
        anyhow::ensure!(
            output.status.success(),
            "`jiffy {}` failed on {}: {}",
            arguments
                .iter()
                .take(2)
                .copied()
                .collect::<Vec<_>>()
                .join(" "),
            self.address,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Starts the daemon.
    fn serve(&self) -> anyhow::Result<()> {
        let listen = format!("{}:{API_PORT}", self.address);
        let log = File::create(self.log())?;
        let mut daemon = self
            .jiffy(&["serve", "--listen", &listen])?
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let socket = self.home.join("run/jiffy.sock");
        let mut exit = None;
        let started = wait_for("the daemon", || {
            exit = daemon.try_wait().ok().flatten();
            exit.is_some() || UnixStream::connect(&socket).is_ok()
        });
        // The directory is removed with the fleet.
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        let last = text.lines().last().unwrap_or_default();
        anyhow::ensure!(
            exit.is_none(),
            "the daemon exited: {}",
            jiffy_client::terminal::line(last)
        );
        started.with_context(|| format!("last line of its log: {last}"))
    }
}
