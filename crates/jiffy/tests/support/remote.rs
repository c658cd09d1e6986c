//! A daemon that is asked over the network, as from another host.

use super::test_home::TestHome;
use super::{Done, finish, jiffy};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A daemon at an address, and a key for it.
pub struct Remote {
    /// The data directory of the daemon.
    pub test_home: TestHome,
    /// Its address.
    pub url: String,
    /// A key that may make sandboxes of its own.
    pub key: String,
}

impl Remote {
    /// Starts a daemon with these additional options.
    pub fn new(options: &[&str]) -> Self {
        Self::of(TestHome::new(), options)
    }

    /// The same with a data directory that is there.
    pub fn of(test_home: TestHome, options: &[&str]) -> Self {
        let start = ["daemon", "start", "--listen", "127.0.0.1:0"];
        let told = test_home.ok(&[&start, options].concat());
        let url = told.lines().find_map(|l| l.strip_prefix("listening on "));
        let url = url.unwrap_or_else(|| panic!("{told}")).to_owned();
        let key = test_home.ok(&["key", "create", "--name", "test"]);
        Self {
            test_home,
            url,
            key,
        }
    }

    /// A data directory that nothing makes, because nothing is done on this host.
    pub fn elsewhere(&self) -> PathBuf {
        self.test_home.dir.path().join("elsewhere")
    }

    /// The certificate that clients must trust.
    pub fn authority(&self) -> PathBuf {
        self.test_home.dir.path().join("tls/authority.pem")
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = from(&self.elsewhere(), args);
        command
            .env("JIFFY_URL", &self.url)
            .env("JIFFY_API_KEY", &self.key);
        command
    }

    pub fn call(&self, args: &[&str]) -> Done {
        finish(self.command(args).spawn().unwrap())
    }

    /// Output of a call that must succeed.
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

/// A `jiffy` command with the data directory `home` and piped outputs.
pub fn from(home: &Path, args: &[&str]) -> Command {
    let mut command = jiffy(args);
    command
        .env("JIFFY_HOME", home)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}
