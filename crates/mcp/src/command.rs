//! Commands in a sandbox: start, bounded output, timeout, and termination when the caller is
//! cancelled.

use crate::error::{ToolError, ToolResult};
use crate::output::{HeadTail, MAX_TEXT_BYTES};
use crate::session::{Session, random_word};
use jiffy_agent_client::{
    AgentClient, ClientError, ExitStatus, FileWriter, Process, ProcessEvent, ProcessSpec, RpcCode,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Number of SIGKILL.
const SIGKILL: i32 = 9;
/// Time for the agent to confirm a signal.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after the timeout of a command for the agent to kill it.
const KILL_TIMEOUT: Duration = Duration::from_secs(8);
/// Time after the end of a command for the agent to end its stream.
const STREAM_END_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum size of a file with complete output. Further output is discarded.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Directory of files with complete output in the sandbox.
const OUTPUT_DIRECTORY: &str = "/tmp/.jiffy-mcp";

/// Command to run.
#[derive(Debug, Clone, Default)]
pub struct CommandSpec {
    /// Shell command.
    pub command: String,
    /// Working directory. `None` for the default of the template.
    pub cwd: Option<String>,
    /// Additional environment variables.
    pub env: BTreeMap<String, String>,
    /// Time after which the command is killed.
    pub timeout: Option<Duration>,
}

/// Result of a command.
#[derive(Debug)]
pub struct CommandResult {
    /// Exit status. `None` if the timeout killed the command.
    pub status: Option<ExitStatus>,
    /// Standard output.
    pub stdout: StreamText,
    /// Standard error.
    pub stderr: StreamText,
}

/// Bounded text of a stream.
#[derive(Debug, Default)]
pub struct StreamText {
    /// Text: complete, or beginning and end.
    pub text: String,
    /// Number of bytes of the stream.
    pub bytes: u64,
    /// File in the sandbox with the complete stream, if the text is not complete.
    pub file: Option<String>,
}

/// Kills a process when it is dropped, unless the process has exited.
struct KillOnDrop {
    session: Arc<Session>,
    agent: AgentClient,
    pid: Option<u32>,
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Some(pid) = self.pid {
            let agent = self.agent.clone();
            self.session.spawn(async move { kill(&agent, pid).await });
        }
    }
}

/// Kills a process and its process group.
pub async fn kill(agent: &AgentClient, pid: u32) {
    // Ignore errors: the process may have exited.
    let _ = tokio::time::timeout(SIGNAL_TIMEOUT, agent.signal(pid, SIGKILL)).await;
}

/// Output of a stream while the command runs.
struct StreamCapture {
    agent: AgentClient,
    path: String,
    output: HeadTail,
    /// Open file of the complete output.
    file: Option<FileWriter>,
    /// True if the file was opened. It may be closed since then.
    has_file: bool,
    /// True if a write to the file has failed.
    failed: bool,
}

impl StreamCapture {
    fn new(agent: &AgentClient, id: &str, name: &str) -> Self {
        Self {
            agent: agent.clone(),
            path: format!("{OUTPUT_DIRECTORY}/{id}.{name}"),
            output: HeadTail::default(),
            file: None,
            has_file: false,
            failed: false,
        }
    }

    /// Adds output. From the first byte that exceeds the limit of a text, all output is also
    /// written to a file in the sandbox.
    async fn push(&mut self, chunk: &[u8]) {
        let total = self.output.bytes() + chunk.len() as u64;
        if total > MAX_TEXT_BYTES as u64 {
            self.open_file().await;
        }
        self.output.push(chunk);
        if let Some(file) = &mut self.file {
            let written = file.write(chunk.to_vec()).await;
            self.failed |= written.is_err();
            if self.failed || total >= MAX_FILE_BYTES {
                self.close_file().await;
            }
        }
    }

    /// Opens the file, and writes the previous output to it.
    async fn open_file(&mut self) {
        let Some(previous) = self.output.whole().filter(|_| !self.has_file) else {
            return;
        };
        let mut file = self.agent.write_stream(&self.path, None);
        self.has_file = true;
        self.failed = !previous.is_empty() && file.write(previous).await.is_err();
        self.file = Some(file);
    }

    async fn close_file(&mut self) {
        if let Some(file) = self.file.take() {
            self.failed |= file.finish().await.is_err();
        }
    }

    async fn finish(mut self) -> StreamText {
        // U+FFFD, which replaces each invalid byte, has three bytes, so the text of a short stream
        // may exceed the limit.
        if !self.output.text(None).1 {
            self.open_file().await;
        }
        self.close_file().await;
        let path = (self.has_file && !self.failed).then_some(self.path);
        StreamText {
            text: self.output.text(path.as_deref()).0,
            bytes: self.output.bytes(),
            file: path,
        }
    }
}

/// Starts a process. If the caller is cancelled meanwhile, the process is killed.
async fn start(
    session: &Arc<Session>,
    agent: &AgentClient,
    spec: &CommandSpec,
    stdin: bool,
) -> ToolResult<Result<Process, ClientError>> {
    let (starting, killing) = (agent.clone(), agent.clone());
    let mut process = ProcessSpec::new("/bin/bash", ["-c", &spec.command]);
    process.cwd = spec.cwd.clone();
    process.envs = spec.env.clone();
    process.timeout = spec.timeout;
    process.stdin = stdin;
    let work = async move {
        Ok(match starting.start(&process).await {
            // Small images have no bash.
            Err(ClientError::CommandNotFound(_)) => {
                process.cmd = "/bin/sh".to_owned();
                starting.start(&process).await
            }
            result => result,
        })
    };
    let undo = |started: Result<Process, ClientError>| async move {
        if let Ok(process) = started {
            kill(&killing, process.pid()).await;
        }
    };
    session.uncancelled(work, undo).await
}

/// Starts a process in the sandbox `id`. If `stdin` is true, the caller can write to the standard
/// input of the process. If the session has used the sandbox, its agent is called without a request
/// for the state of the sandbox.
async fn start_in(
    session: &Arc<Session>,
    id: &str,
    spec: &CommandSpec,
    stdin: bool,
) -> ToolResult<(AgentClient, Process)> {
    let used = session.used_agent(id);
    let is_used = used.is_some();
    let mut agent = match used {
        Some(agent) => agent,
        None => session.agent(id).await?,
    };
    let mut started = start(session, &agent, spec, stdin).await?;
    if is_used && started.as_ref().is_err_and(is_not_running) {
        // The sandbox was paused or has ended. The gateway has not passed the request to a guest,
        // so the start can be repeated. `Session::agent` resumes a paused sandbox.
        agent = session.agent(id).await?;
        started = start(session, &agent, spec, stdin).await?;
    }
    let process = started.map_err(|e| ToolError::new(format!("cannot start the command: {e}")))?;
    Ok((agent, process))
}

/// Returns whether the gateway has rejected a request because the sandbox does not run.
fn is_not_running(error: &ClientError) -> bool {
    matches!(error, ClientError::Status { status: 502, message }
        if message.starts_with("The sandbox was not found"))
}

/// Runs a command in the sandbox `id` to its end.
pub async fn run(
    session: &Arc<Session>,
    id: &str,
    spec: &CommandSpec,
) -> ToolResult<CommandResult> {
    let stdin = false;
    let (agent, mut process) = start_in(session, id, spec, stdin).await?;
    let agent = &agent;
    let mut guard = KillOnDrop {
        session: Arc::clone(session),
        agent: agent.clone(),
        pid: Some(process.pid()),
    };
    let id = random_word();
    let mut stdout = StreamCapture::new(agent, &id, "stdout");
    let mut stderr = StreamCapture::new(agent, &id, "stderr");
    // The agent enforces the timeout. This later deadline applies if the agent does not respond.
    let limit = spec.timeout.map(|timeout| timeout + KILL_TIMEOUT);
    let deadline = limit.map(|limit| tokio::time::Instant::now() + limit);
    let status = loop {
        let event = tokio::select! {
            event = process.next_event() => event,
            () = until(deadline) => break None,
        };
        match event {
            Ok(Some(ProcessEvent::Stdout(chunk) | ProcessEvent::Pty(chunk))) => {
                stdout.push(&chunk).await;
            }
            Ok(Some(ProcessEvent::Stderr(chunk))) => stderr.push(&chunk).await,
            Ok(Some(ProcessEvent::End(status))) => break Some(status),
            Ok(Some(ProcessEvent::Started { .. } | ProcessEvent::KeepAlive)) => {}
            Err(e) if is_timeout(&e) => break None,
            Ok(None) => return Err(ToolError::new("the agent reported no exit status")),
            Err(e) => {
                return Err(ToolError::new(format!(
                    "lost the command: {e}; check the sandbox with sandbox_list"
                )));
            }
        }
    };
    if status.is_some() {
        guard.pid = None;
        // After the end of the stream, its connection serves the next request. Ignore a late end:
        // the connection is closed instead.
        let _ = tokio::time::timeout(STREAM_END_TIMEOUT, process.next_event()).await;
    }
    Ok(CommandResult {
        status,
        stdout: stdout.finish().await,
        stderr: stderr.finish().await,
    })
}

fn is_timeout(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::Rpc {
            code: RpcCode::DeadlineExceeded,
            ..
        }
    )
}

/// Waits until a deadline. Waits forever without one.
async fn until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Command in the background.
pub struct Background {
    /// Process id in the sandbox.
    pub pid: u32,
    agent: AgentClient,
    state: Mutex<BackgroundState>,
    changed: Notify,
}

/// Output and end of a command in the background.
#[derive(Default)]
struct BackgroundState {
    stdout: HeadTail,
    stderr: HeadTail,
    end: Option<BackgroundEnd>,
}

/// End of a command in the background.
#[derive(Debug, Clone)]
pub enum BackgroundEnd {
    /// The process has exited.
    Exited(ExitStatus),
    /// The process was killed at its timeout.
    TimedOut,
    /// The events of the process are lost.
    Lost(String),
}

/// Output of a command in the background since the previous read.
#[derive(Debug)]
pub struct BackgroundOutput {
    /// Standard output.
    pub stdout: HeadTail,
    /// Standard error.
    pub stderr: HeadTail,
    /// End of the process. `None` while it runs.
    pub end: Option<BackgroundEnd>,
}

impl Background {
    /// Starts a command in the background in the sandbox `id`.
    pub async fn start(
        session: &Arc<Session>,
        id: &str,
        spec: &CommandSpec,
    ) -> ToolResult<Arc<Self>> {
        let stdin = true;
        let (agent, process) = start_in(session, id, spec, stdin).await?;
        Ok(Self::follow(&agent, process))
    }

    /// Receives the events of a running process. Its earlier output is lost.
    pub async fn connect(agent: &AgentClient, pid: u32) -> ToolResult<Arc<Self>> {
        let process = agent.connect(pid).await.map_err(|_| {
            ToolError::new(format!(
                "process {pid} does not run in this sandbox: use the id that sandbox_exec with \
                 `background` returned"
            ))
        })?;
        Ok(Self::follow(agent, process))
    }

    /// Collects the output and the end of a background process in a task.
    fn follow(agent: &AgentClient, mut process: Process) -> Arc<Self> {
        let background = Arc::new(Self {
            pid: process.pid(),
            agent: agent.clone(),
            state: Mutex::default(),
            changed: Notify::new(),
        });
        let following = Arc::clone(&background);
        tokio::spawn(async move {
            loop {
                let event = process.next_event().await;
                let mut state = following.state.lock();
                match event {
                    Ok(Some(ProcessEvent::Stdout(c) | ProcessEvent::Pty(c))) => {
                        state.stdout.push(&c);
                    }
                    Ok(Some(ProcessEvent::Stderr(c))) => state.stderr.push(&c),
                    Ok(Some(ProcessEvent::End(s))) => state.end = Some(BackgroundEnd::Exited(s)),
                    Ok(Some(ProcessEvent::Started { .. } | ProcessEvent::KeepAlive)) => continue,
                    Ok(None) => state.end = Some(BackgroundEnd::Lost("no exit status".to_owned())),
                    Err(e) if is_timeout(&e) => state.end = Some(BackgroundEnd::TimedOut),
                    Err(e) => state.end = Some(BackgroundEnd::Lost(e.to_string())),
                }
                following.changed.notify_waiters();
                if state.end.is_some() {
                    return;
                }
            }
        });
        background
    }

    /// Waits at most `limit` for output or the end, and returns the output since the previous read.
    pub async fn read(&self, limit: Duration) -> BackgroundOutput {
        self.wait(limit, |state| {
            state.stdout.bytes() + state.stderr.bytes() > 0 || state.end.is_some()
        })
        .await;
        let mut state = self.state.lock();
        BackgroundOutput {
            stdout: std::mem::take(&mut state.stdout),
            stderr: std::mem::take(&mut state.stderr),
            end: state.end.clone(),
        }
    }

    /// Writes to standard input.
    pub async fn write(&self, input: &[u8]) -> ToolResult<()> {
        Ok(self.agent.send_stdin(self.pid, input).await?)
    }

    /// Kills the process, and waits at most `limit` for its end.
    pub async fn kill(&self, limit: Duration) {
        kill(&self.agent, self.pid).await;
        self.wait(limit, |state| state.end.is_some()).await;
    }

    /// Waits until the state satisfies a condition, at most `limit`.
    async fn wait(&self, limit: Duration, is_done: impl Fn(&BackgroundState) -> bool) {
        let wait = async {
            loop {
                // Register for changes before the check, so that no change is missed.
                let mut changed = std::pin::pin!(self.changed.notified());
                changed.as_mut().enable();
                if is_done(&self.state.lock()) {
                    return;
                }
                changed.await;
            }
        };
        // Ignore an expired timeout: the caller checks the state.
        let _ = tokio::time::timeout(limit, wait).await;
    }
}
