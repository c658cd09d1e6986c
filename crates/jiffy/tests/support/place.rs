//! A data directory of a test's own, with a daemon of its own.

use super::{Done, finish, guests, jiffy, skip};
use serde_json::Value;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Stdio;
use tempfile::TempDir;

/// A data directory of its own, with what takes long to build borrowed from the real one; its daemon ends with it.
pub struct Place {
    /// The data directory.
    pub dir: TempDir,
}

impl Place {
    pub fn new(test: &str) -> Option<Self> {
        if !guests(test) {
            return None;
        }
        let real = std::env::var_os("JIFFY_HOME")
            .map_or_else(|| PathBuf::from("/var/lib/jiffy"), PathBuf::from);
        if !real.join("templates/base").exists() {
            skip(test, "template base is not built");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        for name in ["templates", "kernel", "disks"] {
            symlink(real.join(name), dir.path().join(name)).unwrap();
        }
        Some(Self { dir })
    }

    pub fn call(&self, args: &[&str]) -> Done {
        let mut command = jiffy(args);
        command
            .env("JIFFY_HOME", self.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        finish(command.spawn().unwrap())
    }

    /// What a call that must succeed prints.
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
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.call(&["serve", "--stop"]);
    }
}
