//! Data directory of a test, with its own daemon.

use super::{Done, alive, finish, jiffy, requirements, wait_for};
use jiffy_image::{Home, Templates};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use tempfile::TempDir;

/// Data directory of a test. Objects that take long to build are links to the real data directory.
/// The daemon is killed when this value is dropped.
pub struct TestHome {
    /// The data directory.
    pub dir: TempDir,
    /// Program that its daemons start instead of `jiffy-vmm`, if any.
    pub vmm: Option<PathBuf>,
}

impl TestHome {
    pub fn new() -> Self {
        Self::in_directory(&std::env::temp_dir())
    }

    /// Like `new`, with a separate directory of templates, to which a test can add its own. It
    /// contains the stock template `base`. Building a template from a Dockerfile requires root.
    pub fn with_templates() -> Self {
        let test_home = Self::new();
        test_home.own_templates();
        test_home
    }

    /// Replaces the link to the shared templates by a directory with a link to the stock template
    /// `base`. Templates of the test are added to this directory.
    pub fn own_templates(&self) {
        let templates = self.dir.path().join("templates");
        let real = std::fs::read_link(&templates).unwrap();
        std::fs::remove_file(&templates).unwrap();
        std::fs::create_dir(&templates).unwrap();
        symlink(real.join("base"), templates.join("base")).unwrap();
    }

    /// Returns its templates, without a daemon.
    pub fn templates(&self) -> Templates {
        Templates::new(&Home::at(self.dir.path()).unwrap())
    }

    /// Creates a data directory in `directory`.
    pub fn in_directory(directory: &Path) -> Self {
        let real = requirements::home();
        let dir = tempfile::tempdir_in(directory).unwrap();
        // Images are linked individually, because a test may add its own.
        let images = dir.path().join("images");
        std::fs::create_dir(&images).unwrap();
        for image in std::fs::read_dir(real.join("images")).into_iter().flatten() {
            let image = image.unwrap();
            symlink(image.path(), images.join(image.file_name())).unwrap();
        }
        for name in ["templates", "kernel", "disks"] {
            symlink(real.join(name), dir.path().join(name)).unwrap();
        }
        // The locks of the linked directories are linked as well: only one user of such a directory
        // may create its missing files at a time.
        std::fs::create_dir(dir.path().join("locks")).unwrap();
        for name in ["kernel", "disks"] {
            let lock = Path::new("locks").join(name);
            symlink(real.join(&lock), dir.path().join(&lock)).unwrap();
        }
        Self { dir, vmm: None }
    }

    /// Runs a `jiffy` command with this data directory, and waits for its end.
    pub fn call(&self, args: &[&str]) -> Done {
        let mut command = jiffy(args);
        command
            .env("JIFFY_HOME", self.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        finish(command.spawn().unwrap())
    }

    /// Like `call`, with `input` on standard input.
    pub fn call_with(&self, args: &[&str], input: &[u8]) -> Done {
        let mut command = jiffy(args);
        command
            .env("JIFFY_HOME", self.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // The input is closed after the write.
        child.stdin.take().unwrap().write_all(input).unwrap();
        finish(child)
    }

    /// Starts a call without waiting for it.
    pub fn begin(&self, args: &[&str]) -> Child {
        let mut command = jiffy(args);
        command
            .env("JIFFY_HOME", self.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Returns the output of a call, which must succeed.
    pub fn ok(&self, args: &[&str]) -> String {
        let done = self.call(args);
        assert_eq!(done.code, Some(0), "{args:?}: {done:?}");
        done.stdout.trim_end().to_owned()
    }

    /// Runs a command with `--json`, which must succeed. Returns the printed value.
    pub fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[args, &["--json"]].concat())).unwrap()
    }

    /// Runs a shell script in a sandbox, which must succeed. Returns its output.
    pub fn sh(&self, id: &str, script: &str) -> String {
        self.ok(&["exec", id, "--", "sh", "-c", script])
    }

    /// Starts a daemon with options, and waits until it listens.
    pub fn serve(&self, options: &[&str]) -> Child {
        self.serve_with(options, &[])
    }

    /// Like `serve`, with environment variables.
    pub fn serve_with(&self, options: &[&str], variables: &[(&str, &str)]) -> Child {
        let mut command = jiffy(&[&["serve", "--no-listen"], options].concat());
        command.envs(variables.iter().copied());
        command.env("JIFFY_HOME", self.dir.path());
        if let Some(vmm) = &self.vmm {
            command.env("JIFFY_VMM", vmm);
        }
        command.stdout(Stdio::null());
        let mut daemon = command.spawn().unwrap();
        let socket = self.dir.path().join("run/jiffy.sock");
        wait_for("the daemon", || {
            assert_eq!(daemon.try_wait().unwrap(), None, "{options:?}");
            UnixStream::connect(&socket).ok()
        });
        daemon
    }

    /// Returns the process of the daemon.
    pub fn daemon(&self) -> u32 {
        let own = self.dir.path().as_os_str().to_owned();
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let mut found = processes.filter_map(|p| {
            let environment = std::fs::read(p.path().join("environ")).ok()?;
            let command = std::fs::read(p.path().join("cmdline")).ok()?;
            let ours = String::from_utf8_lossy(&environment).contains(own.to_str()?);
            let serves = String::from_utf8_lossy(&command).contains("\0serve");
            (ours && serves).then(|| p.file_name().to_str()?.parse().ok())?
        });
        found.next().unwrap()
    }

    /// Kills the daemon, and returns when it has exited.
    pub fn kill_daemon(&self) {
        let daemon = self.daemon();
        let pid = Pid::from_raw(daemon.try_into().unwrap());
        kill(pid, Signal::SIGKILL).unwrap();
        self.wait_for_daemon_exit();
        wait_for("the daemon to exit", || (!alive(daemon)).then_some(()));
        // A child that it was starting holds its lock until the child executes its program.
        let lock = std::fs::File::open(self.dir.path().join("locks/daemon")).unwrap();
        wait_for("the daemon's lock", || {
            let lock = lock.try_clone().unwrap();
            Flock::lock(lock, FlockArg::LockExclusiveNonblock).ok()
        });
    }

    /// Waits until the socket is closed: the last thread of a killed process may exit later.
    pub fn wait_for_daemon_exit(&self) {
        let socket = self.dir.path().join("run/jiffy.sock");
        wait_for("the daemon to exit", || {
            UnixStream::connect(&socket).is_err().then_some(())
        });
    }

    /// Returns the processes that isolate the sandboxes of this data directory, regardless of their
    /// parent.
    pub fn vmms(&self) -> BTreeSet<u32> {
        let store = self.dir.path().join("snapshots");
        let gvisors = self.dir.path().join("run/gvisor").display().to_string();
        let writes = |process: &Path| {
            let files = std::fs::read_dir(process.join("fd"));
            let mut targets = files
                .into_iter()
                .flatten()
                .filter_map(|f| std::fs::read_link(f.ok()?.path()).ok());
            let comm = std::fs::read_to_string(process.join("comm")).ok()?;
            let command = std::fs::read(process.join("cmdline")).ok()?;
            let is_gvisors = command.starts_with(b"runsc-sandbox")
                && String::from_utf8_lossy(&command).contains(&gvisors);
            let ours =
                is_gvisors || comm.trim() == "jiffy-vmm" && targets.any(|t| t.starts_with(&store));
            let pid = process.file_name()?.to_str()?.parse().ok()?;
            (ours && alive(pid)).then_some(pid)
        };
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        processes.filter_map(|p| writes(&p.path())).collect()
    }

    /// Returns the number of control sockets of VMMs.
    pub fn sockets(&self) -> usize {
        let sockets = std::fs::read_dir(self.dir.path().join("run/vmm"));
        sockets.map_or(0, Iterator::count)
    }
}

impl Drop for TestHome {
    fn drop(&mut self) {
        let done = self.call(&["serve", "--stop", "--kill-sandboxes"]);
        if std::thread::panicking() {
            return;
        }
        assert_eq!(done.code, Some(0), "{done:?}");
        wait_for("the last VMM to exit", || {
            self.vmms().is_empty().then_some(())
        });
        assert_eq!(self.sockets(), 0, "control sockets remain");
        let sandboxes = self.dir.path().join("run/gvisor");
        wait_for("the last directory of a sandbox to be removed", || {
            let names = std::fs::read_dir(&sandboxes).into_iter().flatten();
            let mut names = names.flatten().map(|entry| entry.file_name());
            names.all(|name| name == "state").then_some(())
        });
    }
}
