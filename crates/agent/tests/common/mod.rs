//! Fixture of the agent's tests: [`TestAgent`] starts a separate agent for each test, as a program
//! of this host.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(
    clippy::unwrap_used,
    reason = "test helpers, in which a panic is a failed test"
)]

use flate2::Compression;
use flate2::read::GzEncoder;
use jiffy_agent_client::{AgentClient, ExitStatus, ProcessSpec};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Maximum size of the output that a test collects, in bytes.
pub const LIMIT: usize = 64 * 1024 * 1024;

/// Agent process that serves a socket in a temporary directory, and its client.
pub struct TestAgent {
    child: Child,
    pub directory: TempDir,
    pub client: AgentClient,
}

impl TestAgent {
    /// Starts an agent.
    pub fn new() -> Self {
        Self::with(&[])
    }

    /// Starts an agent with additional command-line arguments.
    pub fn with(arguments: &[&str]) -> Self {
        Self::start(arguments, None)
    }

    /// Starts an agent in a private mount namespace. `mounts` is a shell script that mounts file
    /// systems; `$1` is the agent's directory.
    pub fn with_mounts(arguments: &[&str], mounts: &str) -> Self {
        Self::start(arguments, Some(mounts))
    }

    /// Starts an agent in a user namespace with a limit of `/proc/sys/user`. Returns `None` if the
    /// host does not permit user namespaces.
    pub fn with_user_limits(limit: &str, value: u32) -> Option<Self> {
        let set = format!("echo {value} > /proc/sys/user/{limit}");
        let tried = Command::new("unshare")
            .args(["-Ur", "sh", "-c", &set])
            .status();
        tried.ok().filter(|status| status.success())?;
        let script = format!("exec unshare -Ur sh -c '{set}; shift; exec \"$@\"' sh \"$@\"");
        Some(Self::start(&[], Some(&script)))
    }

    /// Starts the agent. `mounts` is a shell script that runs before the agent, in its mount
    /// namespace.
    fn start(arguments: &[&str], mounts: Option<&str>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // Test users must be able to enter the directory.
        std::fs::set_permissions(
            directory.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        let socket = directory.path().join("agent.sock");
        let program = env!("CARGO_BIN_EXE_jiffy-agent");
        let mut command = Command::new(program);
        if let Some(mounts) = mounts {
            let script = format!("set -e; {mounts}\nshift; exec \"$@\"");
            command = Command::new("unshare");
            command.args(["-m", "sh", "-c", &script, "sh"]);
            command.arg(directory.path()).arg(program);
        }
        let child = command
            .arg("--listen-unix")
            .arg(&socket)
            .arg("--listen-tcp-unix")
            .arg(directory.path().join("tcp.sock"))
            .args(arguments)
            .spawn()
            .unwrap();
        wait_for("the agent's socket", || {
            UnixStream::connect(&socket).is_ok()
        });
        Self {
            child,
            client: AgentClient::unix(&socket),
            directory,
        }
    }

    /// Returns the process id of the agent.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the path of the socket on which the agent serves its API.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("agent.sock")
    }

    /// Returns the path of a file in the agent's directory.
    pub fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// Runs a shell command. Returns its status, and its output to stdout and stderr.
    pub async fn shell(&self, line: &str) -> (ExitStatus, Vec<u8>, Vec<u8>) {
        let spec = ProcessSpec::new("/bin/sh", ["-c", line]);
        let process = self.client.start(&spec).await.unwrap();
        process.output(LIMIT).await.unwrap()
    }

    /// Sends a raw request. `head` is its method and path. Returns the status line with the headers
    /// of the response, and its body; chunks are joined.
    pub fn raw(&self, head: &str, headers: &[&str], body: &[u8]) -> (String, Vec<u8>) {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut request = format!(
            "{head} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n",
            body.len()
        );
        for header in headers {
            request.push_str(header);
            request.push_str("\r\n");
        }
        request.push_str("\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let split = answer.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(answer[..split].to_vec()).unwrap();
        let body = answer[split + 4..].to_vec();
        let body = if head.contains("transfer-encoding: chunked") {
            join_chunks(&body)
        } else {
            body
        };
        (head, body)
    }

    /// Calls a method with a single message. Returns the head and the body of the response.
    pub fn rpc(&self, path: &str, json: &str) -> (String, String) {
        let (head, body) = self.raw(
            &format!("POST {path}"),
            &["Content-Type: application/json"],
            json.as_bytes(),
        );
        (head, String::from_utf8(body).unwrap())
    }

    /// Calls a streaming method with one message. Returns the messages of the response like
    /// [`frames`].
    pub fn stream(&self, path: &str, headers: &[&str], message: &[u8]) -> Vec<String> {
        let mut headers = headers.to_vec();
        headers.push("Content-Type: application/connect+json");
        let (head, body) = self.raw(&format!("POST {path}"), &headers, &frame(message));
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        frames(&body)
    }
}

impl Drop for TestAgent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Encodes a message of a stream: a byte of flags, the length, and the message.
pub fn frame(message: &[u8]) -> Vec<u8> {
    let mut frame = vec![0];
    frame.extend_from_slice(&(message.len() as u32).to_be_bytes());
    frame.extend_from_slice(message);
    frame
}

/// Returns messages with their flag in front: `0{...}`, `2{...}`.
pub fn frames(mut bytes: &[u8]) -> Vec<String> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let length = u32::from_be_bytes(bytes[1..5].try_into().unwrap()) as usize;
        let text = std::str::from_utf8(&bytes[5..5 + length]).unwrap();
        found.push(format!("{}{text}", bytes[0]));
        bytes = &bytes[5 + length..];
    }
    found
}

/// Decodes a body in the chunked transfer encoding.
fn join_chunks(mut bytes: &[u8]) -> Vec<u8> {
    let mut joined = Vec::new();
    loop {
        let line = bytes.windows(2).position(|w| w == b"\r\n").unwrap();
        let size = std::str::from_utf8(&bytes[..line]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return joined;
        }
        joined.extend_from_slice(&bytes[line + 2..line + 2 + size]);
        bytes = &bytes[line + size + 4..];
    }
}

/// Reads up to and including `end`.
pub fn until(stream: &mut UnixStream, end: &[u8]) -> String {
    let mut got = Vec::new();
    let mut byte = [0];
    while !got.ends_with(end) {
        stream.read_exact(&mut byte).unwrap();
        got.push(byte[0]);
    }
    String::from_utf8_lossy(&got).into_owned()
}

/// Polls the condition until it is true. Panics after 10 seconds.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "timed out waiting for {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns whether a process exists and is not a zombie.
pub fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(") ").next().unwrap().starts_with('Z'))
}

/// Compresses bytes.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    GzEncoder::new(bytes, Compression::fast())
        .read_to_end(&mut out)
        .unwrap();
    out
}
