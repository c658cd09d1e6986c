//! One command in a booted guest: streams, signals, time limit.

use super::command_target::CommandTarget;
use super::outcome::{self, Outcome, signalled};
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

const TIMEOUT_EXIT_CODE: u8 = 124;
const NOT_EXECUTABLE_EXIT_CODE: u8 = 126;
const NOT_FOUND_EXIT_CODE: u8 = 127;
const FAILURE_EXIT_CODE: u8 = 125;
/// Time that the agent has to end a command that is over its time and to say so: SIGTERM, two
/// seconds, SIGKILL, two seconds, and the way here.
const AGENT_KILL_TIMEOUT: Duration = Duration::from_secs(8);
/// Time that the agent has to pass a signal on.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a command has to end after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the command of `args` and says what came of it. The guest is the caller's to end.
pub async fn run(
    args: &ExecArgs,
    target: &impl CommandTarget,
    env: BTreeMap<String, String>,
    signals: &mut Signals,
) -> anyhow::Result<Outcome> {
    let began = Instant::now();
    let process = match target.agent().start(&spec(args, env)).await {
        Ok(process) => process,
        Err(e) => return refused(target, e).await,
    };
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
    drop(raw);
    if outcome.message.is_none() {
        for result in [&stdout, &stderr] {
            if let Err(e) = result {
                outcome = unwritable(e);
            }
        }
    }
    outcome.stdout = stdout.unwrap_or_default();
    outcome.stderr = stderr.unwrap_or_default();
    outcome.exec_us = u64::try_from(began.elapsed().as_micros())?;
    Ok(outcome)
}

fn spec(args: &ExecArgs, env: BTreeMap<String, String>) -> ProcessSpec {
    let mut envs = env;
    let mut spec = ProcessSpec::new(&args.command[0], &args.command[1..]);
    spec.cwd = args.workdir.clone();
    spec.user = args.user.clone();
    spec.stdin = args.interactive || args.tty;
    // The agent's clock ends it also when this program is gone.
    spec.timeout = args.timeout;
    if args.tty {
        let size = terminal::size();
        spec.pty = Some(PtySize {
            cols: size.cols,
            rows: size.rows,
        });
        let term = std::env::var("TERM").unwrap_or_else(|_| "xterm-256color".to_owned());
        envs.entry("TERM".to_owned()).or_insert(term);
    }
    spec.envs = envs;
    spec
}

/// The process did not start: was it the command, or are we to blame?
async fn refused(target: &impl CommandTarget, error: ClientError) -> anyhow::Result<Outcome> {
    let code = match &error {
        ClientError::CommandNotFound(_) => NOT_FOUND_EXIT_CODE,
        ClientError::CommandNotExecutable(_) => NOT_EXECUTABLE_EXIT_CODE,
        _ => FAILURE_EXIT_CODE,
    };
    if let Some(end) = target.end_reason(Duration::ZERO).await {
        return Ok(Outcome::failed(FAILURE_EXIT_CODE, end));
    }
    Ok(Outcome::failed(code, error.to_string()))
}

/// Destination of output: our own streams, or the report.
enum OutputSink {
    Through(Output),
    Keep(outcome::CapturedOutput),
}

impl OutputSink {
    fn new(keep: bool, through: impl FnOnce() -> Output) -> Self {
        if keep {
            Self::Keep(outcome::CapturedOutput::default())
        } else {
            Self::Through(through())
        }
    }

    async fn write(&mut self, chunk: &[u8]) -> io::Result<()> {
        match self {
            Self::Through(output) => output.write(chunk.to_vec()).await,
            Self::Keep(captured) => {
                captured.push(chunk);
                Ok(())
            }
        }
    }

    async fn finish(self) -> io::Result<outcome::CapturedOutput> {
        match self {
            Self::Through(output) => output.finish().await.map(|()| Default::default()),
            Self::Keep(captured) => Ok(captured),
        }
    }
}

struct Session<'a, P> {
    args: &'a ExecArgs,
    target: &'a P,
    process: Process,
    stdout: OutputSink,
    stderr: OutputSink,
    interrupts: u32,
}

enum SessionEvent {
    Event(Result<Option<ProcessEvent>, ClientError>),
    Signal(i32),
    Resized,
    TimedOut,
}

impl<P: CommandTarget> Session<'_, P> {
    async fn follow(&mut self, signals: &mut Signals) -> anyhow::Result<Outcome> {
        let mut resized: Signal = signal(SignalKind::window_change())?;
        let with_input = self.args.interactive || self.args.tty;
        let client = self.process.client().clone();
        let chunks = with_input.then(streams::input);
        let input = pump(client, self.process.pid(), self.args.tty, chunks);
        tokio::pin!(input);
        let mut fed = false;
        let deadline = self
            .args
            .timeout
            .map(|limit| tokio::time::Instant::now() + limit + AGENT_KILL_TIMEOUT);
        loop {
            let happening = tokio::select! {
                event = self.process.next_event() => SessionEvent::Event(event),
                number = signals.next() => SessionEvent::Signal(number),
                _ = resized.recv(), if self.args.tty => SessionEvent::Resized,
                () = until(deadline) => SessionEvent::TimedOut,
                () = &mut input, if !fed => {
                    fed = true;
                    continue;
                }
            };
            if let Some(outcome) = self.on(happening).await {
                return Ok(outcome);
            }
        }
    }

    async fn on(&mut self, happening: SessionEvent) -> Option<Outcome> {
        match happening {
            SessionEvent::Event(Ok(Some(event))) => self.on_event(event).await,
            SessionEvent::Event(Err(ClientError::Rpc {
                code: RpcCode::DeadlineExceeded,
                message,
            })) => Some(Outcome {
                finished: true,
                ..self.timed_out(&message)
            }),
            SessionEvent::Event(end) => Some(self.lost(end.err()).await),
            SessionEvent::Signal(number) => self.on_signal(number).await,
            SessionEvent::Resized => {
                let size = terminal::size();
                let size = PtySize {
                    cols: size.cols,
                    rows: size.rows,
                };
                // A process that has just ended has no terminal any more.
                let _ = self.process.client().resize(self.process.pid(), size).await;
                None
            }
            SessionEvent::TimedOut => {
                Some(self.timed_out("the agent does not answer, so the command may go on"))
            }
        }
    }

    async fn on_event(&mut self, event: ProcessEvent) -> Option<Outcome> {
        let written = match event {
            ProcessEvent::Stdout(chunk) | ProcessEvent::Pty(chunk) => {
                self.stdout.write(&chunk).await
            }
            ProcessEvent::Stderr(chunk) => self.stderr.write(&chunk).await,
            ProcessEvent::End(status) => return Some(self.ended(&status)),
            ProcessEvent::Started { .. } | ProcessEvent::KeepAlive => Ok(()),
        };
        let error = written.err()?;
        self.hang_up().await;
        Some(unwritable(&error))
    }

    /// Sends a signal to the command and all in its process group. A command that has just ended is
    /// no error: its stream says how.
    async fn signal(&self, number: i32) -> Result<(), String> {
        let (client, pid) = (self.process.client(), self.process.pid());
        match tokio::time::timeout(SIGNAL_TIMEOUT, client.signal(pid, number)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) if e.is_not_found() => Ok(()),
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err("the agent does not answer".to_owned()),
        }
    }

    /// Tells a command whose sandbox stays that its output has no reader, as a pipe or a terminal
    /// would: it goes on without end otherwise, and its output goes nowhere.
    async fn hang_up(&self) {
        if !self.target.ends_with_client() {
            for number in [libc::SIGPIPE, libc::SIGHUP] {
                let _ = self.signal(number).await;
            }
        }
    }

    /// Passes the first signal on to the command; a second one, or one that cannot be delivered,
    /// ends everything.
    async fn on_signal(&mut self, number: i32) -> Option<Outcome> {
        self.interrupts += 1;
        if self.interrupts > 1 {
            return Some(self.end(number).await);
        }
        let error = self.signal(number).await.err()?;
        Some(self.interrupted(number, &error))
    }

    /// Outcome of an interrupt that the command did not get.
    fn interrupted(&self, number: i32, error: &str) -> Outcome {
        let outcome = Outcome::interrupted(number);
        if self.target.ends_with_client() {
            return outcome;
        }
        let pid = self.process.pid();
        Outcome {
            message: Some(format!(
                "interrupted, and the command may go on as process {pid} of the sandbox: {error}"
            )),
            ..outcome
        }
    }

    /// Ends the command: with its sandbox, or by SIGKILL where that stays.
    async fn end(&mut self, number: i32) -> Outcome {
        if self.target.ends_with_client() {
            return Outcome::interrupted(number);
        }
        if let Err(error) = self.signal(libc::SIGKILL).await {
            return self.interrupted(number, &error);
        }
        let ended = async {
            loop {
                match self.process.next_event().await {
                    Ok(Some(ProcessEvent::End(_))) => return true,
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => return false,
                }
            }
        };
        match tokio::time::timeout(KILL_TIMEOUT, ended).await {
            Ok(true) => Outcome::interrupted(number),
            _ => self.interrupted(number, "it was sent SIGKILL, and has not ended yet"),
        }
    }

    /// `how` is what became of the command.
    fn timed_out(&self, how: &str) -> Outcome {
        let limit = self.args.timeout.unwrap_or_default().as_secs_f64();
        Outcome::failed(
            TIMEOUT_EXIT_CODE,
            format!("timed out after {limit} s: {how}"),
        )
    }

    fn ended(&self, status: &ExitStatus) -> Outcome {
        let code = u8::try_from(status.exit_code).unwrap_or(u8::MAX);
        if status.oom_killed {
            let mib = self.target.memory_mib();
            let why = format!(
                "the command was killed: the guest ran out of memory ({mib} MiB); give it more with --memory"
            );
            return Outcome {
                finished: true,
                ..Outcome::failed(code, why)
            };
        }
        Outcome {
            code,
            finished: true,
            ..Outcome::default()
        }
    }

    /// The connection broke. If the whole guest is gone, that is the news.
    async fn lost(&self, error: Option<ClientError>) -> Outcome {
        if let Some(end) = self.target.end_reason(Duration::from_secs(2)).await {
            return Outcome::failed(FAILURE_EXIT_CODE, end);
        }
        let why = error.map_or_else(
            || "the agent closed the stream before the command ended".to_owned(),
            |e| e.to_string(),
        );
        Outcome::failed(
            FAILURE_EXIT_CODE,
            format!("lost the connection to the guest agent: {why}"),
        )
    }
}

/// Our own output cannot be written: a reader that went away ends us as a signal would.
fn unwritable(error: &io::Error) -> Outcome {
    if error.kind() == io::ErrorKind::BrokenPipe {
        return Outcome {
            code: signalled(libc::SIGPIPE),
            ..Outcome::default()
        };
    }
    Outcome::failed(
        FAILURE_EXIT_CODE,
        format!("cannot write the command's output: {error}"),
    )
}

async fn until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Passes our input on until it ends or the process takes no more.
async fn pump(client: AgentClient, pid: u32, pty: bool, chunks: Option<mpsc::Receiver<Vec<u8>>>) {
    let Some(mut chunks) = chunks else { return };
    let Ok(mut stdin) = StdinStream::open(&client, pid, pty).await else {
        return;
    };
    while let Some(chunk) = chunks.recv().await {
        if stdin.write(&chunk).await.is_err() {
            return;
        }
    }
    // Only when everything has arrived may the end follow. A terminal has no end: its program
    // decides.
    if stdin.finish().await.is_ok() && !pty {
        let _ = client.close_stdin(pid).await;
    }
}
