//! A data directory of a test's own, with a daemon of its own.

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

/// A data directory of its own, with what takes long to build borrowed from the real one; its
/// daemon ends with it.
pub struct TestHome {
    /// The data directory.
    pub dir: TempDir,
    /// Program that its daemons start instead of `jiffy-vmm`, if any.
    pub vmm: Option<PathBuf>,
}

impl TestHome {
    pub fn new() -> Self {
        Self::beneath(&std::env::temp_dir())
    }

    /// Like `new`, with templates of its own beside the stock one. Building them needs root.
    pub fn with_templates() -> Self {
        let test_home = Self::new();
        test_home.own_templates();
        test_home
    }

    /// From here on templates are made here, beside the stock one.
    pub fn own_templates(&self) {
        let templates = self.dir.path().join("templates");
        let real = std::fs::read_link(&templates).unwrap();
        std::fs::remove_file(&templates).unwrap();
        std::fs::create_dir(&templates).unwrap();
        symlink(real.join("base"), templates.join("base")).unwrap();
    }

    /// Its templates, without a daemon.
    pub fn templates(&self) -> Templates {
        Templates::new(&Home::at(self.dir.path()).unwrap())
    }

    /// Creates a data directory in `directory`.
    pub fn beneath(directory: &Path) -> Self {
        let real = requirements::home();
        let dir = tempfile::tempdir_in(directory).unwrap();
        // Images one by one: those that a test makes are its own.
        let images = dir.path().join("images");
        std::fs::create_dir(&images).unwrap();
        for image in std::fs::read_dir(real.join("images")).into_iter().flatten() {
            let image = image.unwrap();
            symlink(image.path(), images.join(image.file_name())).unwrap();
        }
        for name in ["templates", "kernel", "disks"] {
            symlink(real.join(name), dir.path().join(name)).unwrap();
        }
        // Shared: of all that use a directory, one makes what is missing there.
        std::fs::create_dir(dir.path().join("locks")).unwrap();
        for name in ["kernel", "disks"] {
            let lock = Path::new("locks").join(name);
            symlink(real.join(&lock), dir.path().join(&lock)).unwrap();
        }
        Self { dir, vmm: None }
    }

    pub fn call(&self, args: &[&str]) -> Done {
        let mut command = jiffy(args);
        command
            .env("JIFFY_HOME", self.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        finish(command.spawn().unwrap())
    }

    /// The same with `input` on standard input.
    pub fn call_with(&self, args: &[&str], input: &[u8]) -> Done {
        let mut command = jiffy(args);
        command
            .env("JIFFY_HOME", self.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // Closed when it is written.
        child.stdin.take().unwrap().write_all(input).unwrap();
        finish(child)
    }

    /// Begins a call, to be finished.
    pub fn begin(&self, args: &[&str]) -> Child {
        let mut command = jiffy(args);
        command
            .env("JIFFY_HOME", self.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Output of a call that must succeed.
    pub fn ok(&self, args: &[&str]) -> String {
        let done = self.call(args);
        assert_eq!(done.code, Some(0), "{args:?}: {done:?}");
        done.stdout.trim_end().to_owned()
    }

    pub fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[args, &["--json"]].concat())).unwrap()
    }

    pub fn sh(&self, id: &str, script: &str) -> String {
        self.ok(&["exec", id, "--", "sh", "-c", script])
    }

    /// A daemon with options of its own, once it listens.
    pub fn serve(&self, options: &[&str]) -> Child {
        self.serve_with(options, &[])
    }

    /// The same with variables of its own.
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

    /// Ends the daemon without a word, and returns when it is gone.
    pub fn kill_daemon(&self) {
        let daemon = self.daemon();
        let pid = Pid::from_raw(daemon.try_into().unwrap());
        kill(pid, Signal::SIGKILL).unwrap();
        self.daemon_went();
        wait_for("the last of the daemon", || (!alive(daemon)).then_some(()));
        // A child that it was starting has its lock until it runs its program.
        let lock = std::fs::File::open(self.dir.path().join("locks/daemon")).unwrap();
        wait_for("the daemon's lock", || {
            let lock = lock.try_clone().unwrap();
            Flock::lock(lock, FlockArg::LockExclusiveNonblock).ok()
        });
    }

    /// Waits until the socket is closed: the last thread of a killed process may take its time.
    pub fn daemon_went(&self) {
        let socket = self.dir.path().join("run/jiffy.sock");
        wait_for("the daemon to go", || {
            UnixStream::connect(&socket).is_err().then_some(())
        });
    }

    /// The processes that isolate the sandboxes of this data directory, whatever their parent.
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

    /// Control sockets of VMMs.
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
        wait_for("the last VMM to go", || {
            self.vmms().is_empty().then_some(())
        });
        assert_eq!(self.sockets(), 0, "control sockets are left");
        let sandboxes = self.dir.path().join("run/gvisor");
        wait_for("the last directory of a sandbox to go", || {
            let names = std::fs::read_dir(&sandboxes).into_iter().flatten();
            let mut names = names.flatten().map(|entry| entry.file_name());
            names.all(|name| name == "state").then_some(())
        });
    }
}
