//! Daemon with two tenants.

use crate::support::Done;
use crate::support::finish;
use crate::support::remote::{Remote, from};
use crate::support::test_home::TestHome;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;

/// Daemon on the loopback address, and two keys of scope `create`.
pub struct TwoKeys {
    /// Daemon, called with the first tenant's key.
    pub remote: Remote,
    /// Key of the first tenant.
    pub alice: String,
    /// Key of the second tenant.
    pub mallory: String,
}

impl TwoKeys {
    /// Starts a daemon with these additional options.
    pub fn new(options: &[&str]) -> Self {
        Self::of(Remote::new(options))
    }

    /// Like [`TwoKeys::new`], with a data directory to which keys can add templates.
    pub fn with_templates(options: &[&str]) -> Self {
        Self::of(Remote::of(TestHome::with_templates(), options))
    }

    fn of(remote: Remote) -> Self {
        let mallory = remote.test_home.ok(&["key", "create", "--name", "mallory"]);
        Self {
            alice: remote.key.clone(),
            mallory,
            remote,
        }
    }

    /// Kills the daemon, and starts another daemon with these options.
    pub fn restart(&mut self, options: &[&str]) {
        self.remote.test_home.kill_daemon();
        let start = ["daemon", "start", "--listen", "127.0.0.1:0"];
        let report = self.remote.test_home.ok(&[&start, options].concat());
        let url = report.lines().find_map(|l| l.strip_prefix("listening on "));
        url.unwrap_or_else(|| panic!("{report}"))
            .clone_into(&mut self.remote.url);
    }

    /// Returns a `jiffy` command with the key `key`.
    pub fn command(&self, key: &str, args: &[&str]) -> Command {
        let mut command = from(&self.remote.elsewhere(), args);
        command
            .env("JIFFY_URL", &self.remote.url)
            .env("JIFFY_API_KEY", key);
        command
    }

    /// Runs a `jiffy` command with the key `key` until it exits.
    pub fn call(&self, key: &str, args: &[&str]) -> Done {
        finish(self.command(key, args).spawn().unwrap())
    }

    /// Returns the output of a command, which must succeed.
    pub fn ok(&self, key: &str, args: &[&str]) -> String {
        let done = self.call(key, args);
        assert_eq!(done.code, Some(0), "{args:?}: {done:?}");
        done.stdout.trim_end().to_owned()
    }

    /// Sends an API call. Returns status and body (null if empty).
    pub fn http(&self, key: &str, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let header = format!("X-API-KEY: {key}\r\n");
        let (status, text) = self.raw(method, path, &header, body);
        let value = if text.is_empty() {
            Value::Null
        } else {
            serde_json::from_str(&text).unwrap_or(Value::String(text))
        };
        (status, value)
    }

    /// Sends an HTTP/1.0 request with these header lines. Returns status and body.
    pub fn raw(&self, method: &str, path: &str, headers: &str, body: &Value) -> (u16, String) {
        let address = self.remote.url.strip_prefix("http://").unwrap();
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(crate::support::LIMIT))
            .unwrap();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: {address}\r\n{headers}\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }
}
