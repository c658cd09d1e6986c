//! Processes in a sandbox: starting them, receiving their events, and sending input and signals.

use super::AgentClient;
use crate::error::ClientError;
use crate::frame::{self, ResponseFrames};
use crate::request_body::RequestBody;
use crate::stdin_stream::StdinStream;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use jiffy_proto::process_mounts::ProcessMounts;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

/// Size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PtySize {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

/// Resource limits. Absent limits default to the sandbox's limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessLimits {
    /// Number of open files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nofile: Option<u64>,
    /// Number of processes of the user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nproc: Option<u64>,
    /// CPU time in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_s: Option<u64>,
    /// Address space in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub as_bytes: Option<u64>,
    /// Size of core files in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core: Option<u64>,
}

/// Configuration of a process: program, arguments and environment.
#[derive(Debug, Clone, Default)]
pub struct ProcessSpec {
    /// Program: a path, or a name looked up in the sandbox's `PATH`.
    pub cmd: String,
    /// Arguments after the program name.
    pub args: Vec<String>,
    /// Variables that are added to the sandbox's environment.
    pub envs: BTreeMap<String, String>,
    /// Working directory. Defaults to the user's home directory.
    pub cwd: Option<String>,
    /// User. Defaults to the sandbox's default user.
    pub user: Option<String>,
    /// Size of the terminal. If `None`, the process has no terminal.
    pub pty: Option<PtySize>,
    /// Set if the process has a stdin that is writable.
    pub stdin: bool,
    /// Tag for selecting the process.
    pub tag: Option<String>,
    /// Time after which the process is killed.
    pub timeout: Option<Duration>,
    /// Resource limits.
    pub limits: Option<ProcessLimits>,
    /// Set for a service of the sandbox, which does not count as a command of a client.
    pub is_service: bool,
    /// Mounts that only the process and its children see.
    pub mounts: Option<ProcessMounts>,
}

impl ProcessSpec {
    /// Creates the configuration of a program with arguments.
    pub fn new<A: Into<String>>(cmd: impl Into<String>, args: impl IntoIterator<Item = A>) -> Self {
        Self {
            cmd: cmd.into(),
            args: args.into_iter().map(Into::into).collect(),
            ..Self::default()
        }
    }
}

/// Exit status of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ExitStatus {
    /// Exit status. 128 + number if a signal terminated the process.
    pub exit_code: i32,
    /// Set if the process exited by itself.
    pub exited: bool,
    /// Description: `exit status 3`, `signal: killed`.
    pub status: String,
    /// Equal to [`Self::status`] if the process failed, otherwise `None`.
    pub error: Option<String>,
    /// Set if the process was killed because the guest had no memory left.
    pub oom_killed: bool,
    /// Set if background processes still had the output open. Their later output is not reported.
    pub output_open: bool,
}

/// Event of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// The process was started.
    Started {
        /// Process id in the sandbox.
        pid: u32,
    },
    /// The process wrote to stdout.
    Stdout(Bytes),
    /// The process wrote to stderr.
    Stderr(Bytes),
    /// The process wrote to its terminal.
    Pty(Bytes),
    /// The process exited.
    End(ExitStatus),
    /// Keepalive of a stream without other events.
    KeepAlive,
}

/// Process that was started through the agent.
#[derive(Debug, Clone, Deserialize)]
pub struct ProcessInfo {
    /// Process id in the sandbox.
    pub pid: u32,
    /// Tag of the process, if the start request had one.
    #[serde(default)]
    pub tag: Option<String>,
    /// Configuration with which the process was started.
    pub config: ProcessConfig,
}

/// Configuration of a process at its start.
#[derive(Debug, Clone, Deserialize)]
pub struct ProcessConfig {
    /// Program.
    pub cmd: String,
    /// Arguments.
    #[serde(default)]
    pub args: Vec<String>,
    /// Environment in the request.
    #[serde(default)]
    pub envs: BTreeMap<String, String>,
    /// Working directory in the request.
    #[serde(default)]
    pub cwd: Option<String>,
}

/// A process whose events the client receives. Dropping the value does not terminate the process.
pub struct Process {
    client: AgentClient,
    frames: ResponseFrames,
    pid: u32,
    /// Set if the process was started with a terminal. Then input goes to the terminal.
    pty: bool,
}

/// Message of the stream of a process.
#[derive(Deserialize)]
struct EventMessage<'a> {
    #[serde(borrow)]
    event: WireEvent<'a>,
}

/// Event of a process. Exactly one field is set.
#[derive(Deserialize)]
struct WireEvent<'a> {
    start: Option<WireStart>,
    #[serde(borrow)]
    data: Option<WireData<'a>>,
    end: Option<ExitStatus>,
}

/// Start of the process.
#[derive(Deserialize)]
struct WireStart {
    pid: u32,
}

/// Output of the process, in base64.
#[derive(Deserialize)]
struct WireData<'a> {
    #[serde(borrow)]
    stdout: Option<Cow<'a, str>>,
    #[serde(borrow)]
    stderr: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pty: Option<Cow<'a, str>>,
}

/// Parses an event of the agent. Output is encoded in base64.
fn parse(message: &[u8]) -> Result<ProcessEvent, ClientError> {
    let broken = |e: String| ClientError::Protocol(format!("process event: {e}"));
    // Strings are borrowed from the message where possible: output may be large.
    let EventMessage { event } =
        serde_json::from_slice(message).map_err(|e| broken(e.to_string()))?;
    let decode = |text: Cow<'_, str>| {
        STANDARD
            .decode(text.as_bytes())
            .map(Bytes::from)
            .map_err(|e| broken(e.to_string()))
    };
    // Each event has exactly one of these fields.
    if let Some(start) = event.start {
        return Ok(ProcessEvent::Started { pid: start.pid });
    }
    if let Some(end) = event.end {
        return Ok(ProcessEvent::End(end));
    }
    match event.data {
        Some(WireData {
            stdout: Some(b), ..
        }) => decode(b).map(ProcessEvent::Stdout),
        Some(WireData {
            stderr: Some(b), ..
        }) => decode(b).map(ProcessEvent::Stderr),
        Some(WireData { pty: Some(b), .. }) => decode(b).map(ProcessEvent::Pty),
        // A keepalive, or an event that only newer agents send.
        _ => Ok(ProcessEvent::KeepAlive),
    }
}

impl AgentClient {
    /// Starts a process. Returns when its program runs.
    pub async fn start(&self, spec: &ProcessSpec) -> Result<Process, ClientError> {
        let mut process = json!({ "cmd": spec.cmd, "args": spec.args, "envs": spec.envs });
        if let Some(cwd) = &spec.cwd {
            process["cwd"] = json!(cwd);
        }
        if let Some(limits) = &spec.limits {
            process["limits"] = json!(limits);
        }
        let mut request = json!({ "process": process, "stdin": spec.stdin });
        if let Some(size) = spec.pty {
            request["pty"] = json!({ "size": size });
        }
        if let Some(tag) = &spec.tag {
            request["tag"] = json!(tag);
        }
        if spec.is_service {
            request["service"] = json!(true);
        }
        if let Some(mounts) = &spec.mounts {
            request["mounts"] = json!(mounts);
        }
        let timeout: Vec<_> = spec
            .timeout
            .iter()
            // 0 would mean no timeout.
            .map(|t| ("connect-timeout-ms", t.as_millis().max(1).to_string()))
            .collect();
        let frames = self
            .stream(
                "/process.Process/Start",
                spec.user.as_deref(),
                &timeout,
                RequestBody::whole(frame::message(&request)?),
            )
            .await?;
        self.receive_start(frames, spec.pty.is_some()).await
    }

    /// Receives the events of a running process, or its exit status if it has exited. Earlier
    /// output is not repeated.
    pub async fn connect(&self, pid: u32) -> Result<Process, ClientError> {
        let request = json!({ "process": { "pid": pid } });
        let frames = self
            .stream(
                "/process.Process/Connect",
                None,
                &[],
                RequestBody::whole(frame::message(&request)?),
            )
            .await?;
        // `connect` does not know whether the process has a terminal. `Process::stdin_stream` of
        // the result therefore always writes to stdin.
        self.receive_start(frames, false).await
    }

    /// Waits for the first event, which has the process id. `pty` states whether the process has a
    /// terminal.
    async fn receive_start(
        &self,
        mut frames: ResponseFrames,
        pty: bool,
    ) -> Result<Process, ClientError> {
        // The agent sends this event when the program runs. An error of the start ends the stream
        // instead.
        let first = frames.next().await?.map(|m| parse(&m)).transpose()?;
        match first {
            Some(ProcessEvent::Started { pid }) => Ok(Process {
                client: self.clone(),
                frames,
                pid,
                pty,
            }),
            other => Err(ClientError::Protocol(format!(
                "the first event is not `start`: {other:?}"
            ))),
        }
    }

    /// Lists the running processes that were started through the agent.
    pub async fn list(&self) -> Result<Vec<ProcessInfo>, ClientError> {
        /// Response with the list of processes.
        #[derive(Deserialize)]
        struct ProcessList {
            #[serde(default)]
            processes: Vec<ProcessInfo>,
        }
        let list: ProcessList = self
            .unary("/process.Process/List", None, &json!({}))
            .await?;
        Ok(list.processes)
    }

    /// Sends a signal, by number, to a process and its process group.
    pub async fn signal(&self, pid: u32, signal: i32) -> Result<(), ClientError> {
        let request = json!({ "process": { "pid": pid }, "signal": signal });
        self.call_without_result("/process.Process/SendSignal", &request)
            .await
    }

    /// Writes to a process's stdin. [`Process::stdin_stream`] is faster for much data.
    pub async fn send_stdin(&self, pid: u32, bytes: &[u8]) -> Result<(), ClientError> {
        self.send_input(pid, "stdin", bytes).await
    }

    /// Writes input to a process's terminal.
    pub async fn send_pty(&self, pid: u32, bytes: &[u8]) -> Result<(), ClientError> {
        self.send_input(pid, "pty", bytes).await
    }

    async fn send_input(&self, pid: u32, field: &str, bytes: &[u8]) -> Result<(), ClientError> {
        // The agent limits the length of a request, so long input needs several requests.
        for piece in bytes.chunks(crate::stdin_stream::CHUNK_BYTES) {
            let input = json!({ field: STANDARD.encode(piece) });
            let request = json!({ "process": { "pid": pid }, "input": input });
            self.call_without_result("/process.Process/SendInput", &request)
                .await?;
        }
        Ok(())
    }

    /// Closes a process's stdin.
    pub async fn close_stdin(&self, pid: u32) -> Result<(), ClientError> {
        let request = json!({ "process": { "pid": pid } });
        self.call_without_result("/process.Process/CloseStdin", &request)
            .await
    }

    /// Resizes a process's terminal.
    pub async fn resize(&self, pid: u32, size: PtySize) -> Result<(), ClientError> {
        let request = json!({ "process": { "pid": pid }, "pty": { "size": size } });
        self.call_without_result("/process.Process/Update", &request)
            .await
    }

    /// Makes a call whose response is an empty object.
    pub(crate) async fn call_without_result(
        &self,
        path: &str,
        message: &impl Serialize,
    ) -> Result<(), ClientError> {
        self.unary::<serde::de::IgnoredAny>(path, None, message)
            .await
            .map(drop)
    }
}

impl Process {
    /// Returns the process id in the sandbox.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the client, for sending input and signals while waiting for events.
    pub fn client(&self) -> &AgentClient {
        &self.client
    }

    /// Returns the next event, or `None` after [`ProcessEvent::End`]. For a process that exceeded
    /// its timeout, returns the error [`crate::RpcCode::DeadlineExceeded`].
    pub async fn next_event(&mut self) -> Result<Option<ProcessEvent>, ClientError> {
        let message = self.frames.next().await?;
        message.map(|m| parse(&m)).transpose()
    }

    /// Waits for the exit and collects the output. Output of a terminal counts as stdout. At most
    /// `limit` bytes each of stdout and stderr are permitted.
    pub async fn output(
        mut self,
        limit: usize,
    ) -> Result<(ExitStatus, Vec<u8>, Vec<u8>), ClientError> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let mut status = None;
        while let Some(event) = self.next_event().await? {
            let (into, bytes) = match event {
                ProcessEvent::Stdout(b) | ProcessEvent::Pty(b) => (&mut stdout, b),
                ProcessEvent::Stderr(b) => (&mut stderr, b),
                ProcessEvent::End(end) => {
                    status = Some(end);
                    continue;
                }
                ProcessEvent::Started { .. } | ProcessEvent::KeepAlive => continue,
            };
            // Cannot overflow: both lengths are of memory in use.
            if into.len() + bytes.len() > limit {
                return Err(ClientError::TooLarge { limit });
            }
            into.extend_from_slice(&bytes);
        }
        let status = status
            .ok_or_else(|| ClientError::Protocol("the stream has no `end` event".to_owned()))?;
        Ok((status, stdout, stderr))
    }

    /// Opens a stream to the stdin or terminal of the process. Writes wait while the process does
    /// not read.
    pub async fn stdin_stream(&self) -> Result<StdinStream, ClientError> {
        StdinStream::open(&self.client, self.pid, self.pty).await
    }
}
