//! Daemon that clients connect to over the network, as from another host.

use super::test_home::TestHome;
use super::{Done, finish, jiffy};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Daemon with an address, and a key for it.
pub struct Remote {
    /// Data directory of the daemon.
    pub test_home: TestHome,
    /// URL of the daemon.
    pub url: String,
    /// Key that may create sandboxes.
    pub key: String,
}

impl Remote {
    /// Starts a daemon with these additional options.
    pub fn new(options: &[&str]) -> Self {
        Self::of(TestHome::new(), options)
    }

    /// Like [`Remote::new`], with an existing data directory.
    pub fn of(test_home: TestHome, options: &[&str]) -> Self {
        let start = ["daemon", "start", "--listen", "127.0.0.1:0"];
        let report = test_home.ok(&[&start, options].concat());
        let url = report.lines().find_map(|l| l.strip_prefix("listening on "));
        let url = url.unwrap_or_else(|| panic!("{report}")).to_owned();
        let key = test_home.ok(&["key", "create", "--name", "test"]);
        Self {
            test_home,
            url,
            key,
        }
    }

    /// Data directory of the client. No command may create it, because commands for another host
    /// must not change this one.
    pub fn elsewhere(&self) -> PathBuf {
        self.test_home.dir.path().join("elsewhere")
    }

    /// Certificate that clients must trust.
    pub fn authority(&self) -> PathBuf {
        self.test_home.dir.path().join("tls/authority.pem")
    }

    /// Returns a command that calls the daemon over its address with the key. Its own data
    /// directory is another one.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = from(&self.elsewhere(), args);
        command
            .env("JIFFY_URL", &self.url)
            .env("JIFFY_API_KEY", &self.key);
        command
    }

    /// Runs such a command, and waits for its end.
    pub fn call(&self, args: &[&str]) -> Done {
        finish(self.command(args).spawn().unwrap())
    }

    /// Returns the output of a call, which must succeed.
    pub fn ok(&self, args: &[&str]) -> String {
        let done = self.call(args);
        assert_eq!(done.code, Some(0), "{args:?}: {done:?}");
        done.stdout.trim_end().to_owned()
    }

    pub fn json(&self, args: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.ok(&[args, &["--json"]].concat())).unwrap()
    }

    pub fn sh(&self, id: &str, script: &str) -> String {
        self.ok(&["exec", id, "--", "sh", "-c", script])
    }
}

/// Returns a `jiffy` command with the data directory `home` and piped outputs.
pub fn from(home: &Path, args: &[&str]) -> Command {
    let mut command = jiffy(args);
    command
        .env("JIFFY_HOME", home)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}
