//! Session of a command in a booted guest: starts the process, and connects its streams, signals
//! and timeout with this process.

use super::command_target::CommandTarget;
use super::outcome::{self, Outcome, signal_code};
use super::streams::{self, Output};
use super::{Signals, terminal};
use crate::cli::ExecArgs;
use anyhow::Context;
use jiffy_agent_client::{
    AgentClient, ClientError, ExitStatus, Process, ProcessEvent, ProcessSpec, PtySize, RpcCode,
    StdinStream,
};
use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

// Exit codes of `docker run` and of the program `timeout`.
const TIMEOUT_EXIT_CODE: u8 = 124;
const NOT_EXECUTABLE_EXIT_CODE: u8 = 126;
const NOT_FOUND_EXIT_CODE: u8 = 127;
const FAILURE_EXIT_CODE: u8 = 125;
/// Time for the agent to kill a command after its timeout and to report this: SIGTERM, two seconds,
/// SIGKILL, two seconds, and the transfer.
const AGENT_KILL_TIMEOUT: Duration = Duration::from_secs(8);
/// Time for the agent to confirm the delivery of a signal.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for a command to exit after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for the exit of a guest to become known after its connection has broken.
const EXIT_REASON_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs the command of `args` and returns its outcome. The guest continues to run.
pub async fn run(
    args: &ExecArgs,
    target: &impl CommandTarget,
    env: BTreeMap<String, String>,
    signals: &mut Signals,
) -> anyhow::Result<Outcome> {
    let start = Instant::now();
    let process = match target.agent().start(&spec(args, env)).await {
        Ok(process) => process,
        Err(e) => return start_error(target, e).await,
    };
    // Raw mode starts after the process: an error message needs the usual mode.
    let raw = if args.tty {
        Some(terminal::RawMode::enter().context("cannot switch the terminal to raw mode")?)
    } else {
        None
    };
    let mut session = Session {
        args,
        target,
        process,
        stdout: OutputSink::new(args.json, Output::stdout),
        stderr: OutputSink::new(args.json, Output::stderr),
        interrupts: 0,
    };
    let mut outcome = session.follow(signals).await?;
    let (stdout, stderr) = (session.stdout.finish().await, session.stderr.finish().await);
    // The mode is restored before messages are printed.
    drop(raw);
    if outcome.message.is_none() {
        for result in [&stdout, &stderr] {
            if let Err(e) = result {
                outcome = write_error(e);
            }
        }
    }
    outcome.stdout = stdout.unwrap_or_default();
    outcome.stderr = stderr.unwrap_or_default();
    outcome.exec_us = u64::try_from(start.elapsed().as_micros())?;
    Ok(outcome)
}

/// Returns the description of the process for the agent.
fn spec(args: &ExecArgs, env: BTreeMap<String, String>) -> ProcessSpec {
    let mut envs = env;
    let mut spec = ProcessSpec::new(&args.command[0], &args.command[1..]);
    spec.cwd = args.workdir.clone();
    spec.user = args.user.clone();
    spec.stdin = args.interactive || args.tty;
    // The agent enforces the timeout, even if this process exits.
    spec.timeout = args.timeout;
    if args.tty {
        let size = terminal::size();
        spec.pty = Some(PtySize {
            cols: size.cols,
            rows: size.rows,
        });
        // Programs in the guest need the type of the terminal of this process.
        let term = std::env::var("TERM").unwrap_or_else(|_| "xterm-256color".to_owned());
        envs.entry("TERM".to_owned()).or_insert(term);
    }
    spec.envs = envs;
    spec
}

/// Returns the outcome of a process that did not start. The exit code distinguishes errors of the
/// command from errors of Jiffy.
async fn start_error(target: &impl CommandTarget, error: ClientError) -> anyhow::Result<Outcome> {
    let code = match &error {
        ClientError::CommandNotFound(_) => NOT_FOUND_EXIT_CODE,
        ClientError::CommandNotExecutable(_) => NOT_EXECUTABLE_EXIT_CODE,
        _ => FAILURE_EXIT_CODE,
    };
    // If the guest has exited, its exit reason is reported instead of the error that the exit
    // caused.
    if let Some(reason) = target.exit_reason(Duration::ZERO).await {
        return Ok(Outcome::failed(FAILURE_EXIT_CODE, reason));
    }
    Ok(Outcome::failed(code, error.to_string()))
}

/// Destination of output.
enum OutputSink {
    /// Stream of this process.
    Stream(Output),
    /// Buffer for the report.
    Buffer(outcome::CapturedOutput),
}

impl OutputSink {
    fn new(is_captured: bool, stream: impl FnOnce() -> Output) -> Self {
        if is_captured {
            Self::Buffer(outcome::CapturedOutput::default())
        } else {
            Self::Stream(stream())
        }
    }

    async fn write(&mut self, chunk: &[u8]) -> io::Result<()> {
        match self {
            Self::Stream(output) => output.write(chunk.to_vec()).await,
            Self::Buffer(captured) => {
                captured.push(chunk);
                Ok(())
            }
        }
    }

    async fn finish(self) -> io::Result<outcome::CapturedOutput> {
        match self {
            Self::Stream(output) => output.finish().await.map(|()| Default::default()),
            Self::Buffer(captured) => Ok(captured),
        }
    }
}

/// Process in a guest whose streams are connected with this process.
struct Session<'a, P> {
    args: &'a ExecArgs,
    target: &'a P,
    process: Process,
    stdout: OutputSink,
    stderr: OutputSink,
    /// Number of signals received so far.
    interrupts: u32,
}

/// Event that the loop of [`Session::follow`] handles.
enum SessionEvent {
    Event(Result<Option<ProcessEvent>, ClientError>),
    Signal(i32),
    Resized,
    TimedOut,
}

impl<P: CommandTarget> Session<'_, P> {
    /// Handles events until the process exits or the session is terminated.
    async fn follow(&mut self, signals: &mut Signals) -> anyhow::Result<Outcome> {
        let mut resized: Signal = signal(SignalKind::window_change())?;
        let with_input = self.args.interactive || self.args.tty;
        let client = self.process.client().clone();
        let chunks = with_input.then(streams::input);
        let input = copy_stdin(client, self.process.pid(), self.args.tty, chunks);
        tokio::pin!(input);
        let mut input_done = false;
        // The agent enforces the timeout. This later deadline applies if the agent does not
        // respond.
        let deadline = self
            .args
            .timeout
            .map(|limit| tokio::time::Instant::now() + limit + AGENT_KILL_TIMEOUT);
        loop {
            let event = tokio::select! {
                event = self.process.next_event() => SessionEvent::Event(event),
                number = signals.next() => SessionEvent::Signal(number),
                _ = resized.recv(), if self.args.tty => SessionEvent::Resized,
                () = until(deadline) => SessionEvent::TimedOut,
                () = &mut input, if !input_done => {
                    input_done = true;
                    continue;
                }
            };
            if let Some(outcome) = self.handle(event).await {
                return Ok(outcome);
            }
        }
    }

    /// Handles an event. Returns the outcome if the session is over.
    async fn handle(&mut self, event: SessionEvent) -> Option<Outcome> {
        match event {
            SessionEvent::Event(Ok(Some(event))) => self.on_event(event).await,
            // The agent has killed the command at its timeout.
            SessionEvent::Event(Err(ClientError::Rpc {
                code: RpcCode::DeadlineExceeded,
                message,
            })) => Some(Outcome {
                finished: true,
                ..self.timed_out(&message)
            }),
            SessionEvent::Event(result) => Some(self.connection_lost(result.err()).await),
            SessionEvent::Signal(number) => self.on_signal(number).await,
            SessionEvent::Resized => {
                let size = terminal::size();
                let size = PtySize {
                    cols: size.cols,
                    rows: size.rows,
                };
                // The error is ignored: a process that has just exited has no terminal.
                let _ = self.process.client().resize(self.process.pid(), size).await;
                None
            }
            SessionEvent::TimedOut => {
                Some(self.timed_out("the agent does not respond; the command may still be running"))
            }
        }
    }

    /// Handles an event of the process. Returns the outcome if the process has exited, or if its
    /// output cannot be written.
    async fn on_event(&mut self, event: ProcessEvent) -> Option<Outcome> {
        let result = match event {
            ProcessEvent::Stdout(chunk) | ProcessEvent::Pty(chunk) => {
                self.stdout.write(&chunk).await
            }
            ProcessEvent::Stderr(chunk) => self.stderr.write(&chunk).await,
            ProcessEvent::End(status) => return Some(self.exited(&status)),
            ProcessEvent::Started { .. } | ProcessEvent::KeepAlive => Ok(()),
        };
        // The output has no reader any longer, for example because `head` has exited, or cannot be
        // written. The command must not continue without its output.
        let error = result.err()?;
        self.hang_up().await;
        Some(write_error(&error))
    }

    /// Sends a signal to the process group of the command. Succeeds if the command has just exited,
    /// because its stream reports the exit status.
    async fn signal(&self, number: i32) -> Result<(), String> {
        let (client, pid) = (self.process.client(), self.process.pid());
        match tokio::time::timeout(SIGNAL_TIMEOUT, client.signal(pid, number)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) if e.is_not_found() => Ok(()),
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err("the agent does not respond".to_owned()),
        }
    }

    /// Sends SIGPIPE and SIGHUP to a command whose output has no reader, if its sandbox continues
    /// to run after this process. Without these signals, the command could run forever.
    async fn hang_up(&self) {
        if !self.target.ends_with_client() {
            for number in [libc::SIGPIPE, libc::SIGHUP] {
                // The error is ignored: the command may have exited.
                let _ = self.signal(number).await;
            }
        }
    }

    /// Forwards the first signal to the command. A second signal, or a signal that cannot be
    /// delivered, terminates the session.
    async fn on_signal(&mut self, number: i32) -> Option<Outcome> {
        self.interrupts += 1;
        if self.interrupts > 1 {
            return Some(self.kill(number).await);
        }
        let error = self.signal(number).await.err()?;
        Some(self.interrupted(number, &error))
    }

    /// Returns the outcome of signal `number` if the command may still be running, because of
    /// `error`.
    fn interrupted(&self, number: i32, error: &str) -> Outcome {
        let outcome = Outcome::interrupted(number);
        if self.target.ends_with_client() {
            return outcome;
        }
        let pid = self.process.pid();
        Outcome {
            message: Some(format!(
                "interrupted, but the command may still be running as process {pid} of the sandbox: {error}"
            )),
            ..outcome
        }
    }

    /// Terminates the command. If the sandbox is removed when this process exits, this removal
    /// terminates the command; otherwise the command receives SIGKILL.
    async fn kill(&mut self, number: i32) -> Outcome {
        if self.target.ends_with_client() {
            return Outcome::interrupted(number);
        }
        if let Err(error) = self.signal(libc::SIGKILL).await {
            return self.interrupted(number, &error);
        }
        let exit = async {
            loop {
                match self.process.next_event().await {
                    Ok(Some(ProcessEvent::End(_))) => return true,
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => return false,
                }
            }
        };
        match tokio::time::timeout(KILL_TIMEOUT, exit).await {
            Ok(true) => Outcome::interrupted(number),
            _ => self.interrupted(number, "it has not exited after SIGKILL"),
        }
    }

    /// Returns the outcome of an expired timeout. `result` describes the state of the command.
    fn timed_out(&self, result: &str) -> Outcome {
        let limit = self.args.timeout.unwrap_or_default().as_secs_f64();
        Outcome::failed(
            TIMEOUT_EXIT_CODE,
            format!("timed out after {limit} s: {result}"),
        )
    }

    /// Returns the outcome of a process that has exited.
    fn exited(&self, status: &ExitStatus) -> Outcome {
        let code = u8::try_from(status.exit_code).unwrap_or(u8::MAX);
        if status.oom_killed {
            let mib = self.target.memory_mib();
            let message = format!(
                "the command was killed because the guest ran out of memory ({mib} MiB); increase it with --memory"
            );
            return Outcome {
                finished: true,
                ..Outcome::failed(code, message)
            };
        }
        Outcome {
            code,
            finished: true,
            ..Outcome::default()
        }
    }

    /// Returns the outcome of a broken connection. If the guest has terminated, its exit reason is
    /// the message.
    async fn connection_lost(&self, error: Option<ClientError>) -> Outcome {
        // The connection may break before the exit of the guest is known.
        if let Some(reason) = self.target.exit_reason(EXIT_REASON_TIMEOUT).await {
            return Outcome::failed(FAILURE_EXIT_CODE, reason);
        }
        let reason = error.map_or_else(
            || "the agent closed the stream before the command exited".to_owned(),
            |e| e.to_string(),
        );
        Outcome::failed(
            FAILURE_EXIT_CODE,
            format!("lost the connection to the guest agent: {reason}"),
        )
    }
}

/// Returns the outcome of a failed write to an output of this process. A closed pipe has the exit
/// code of SIGPIPE.
fn write_error(error: &io::Error) -> Outcome {
    if error.kind() == io::ErrorKind::BrokenPipe {
        return Outcome {
            code: signal_code(libc::SIGPIPE),
            ..Outcome::default()
        };
    }
    Outcome::failed(
        FAILURE_EXIT_CODE,
        format!("cannot write the command's output: {error}"),
    )
}

/// Waits for a deadline. Never returns without one.
async fn until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Copies standard input to the process until the input ends or the process accepts no further
/// input. `pty` states whether the process has a terminal.
async fn copy_stdin(
    client: AgentClient,
    pid: u32,
    pty: bool,
    chunks: Option<mpsc::Receiver<Vec<u8>>>,
) {
    let Some(mut chunks) = chunks else { return };
    let Ok(mut stdin) = StdinStream::open(&client, pid, pty).await else {
        return;
    };
    while let Some(chunk) = chunks.recv().await {
        if stdin.write(&chunk).await.is_err() {
            return;
        }
    }
    // Standard input is closed only after all data was delivered. A terminal is not closed: its
    // program decides when to exit.
    if stdin.finish().await.is_ok() && !pty {
        // The error is ignored: the process may have exited.
        let _ = client.close_stdin(pid).await;
    }
}
