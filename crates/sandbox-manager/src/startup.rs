//! Runs the start command of a template through the agent of a booted guest, and checks its
//! readiness. The section `[ready]` of the template's recipe describes the check.

use jiffy_agent_client::{AgentClient, ClientError, Process, ProcessEvent, ProcessSpec};
use jiffy_engine_api::{ReadinessProbe, Startup};
use jiffy_proto::agent::{ENVD_PORT, TCP_OK, TCP_PORT};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

/// Interval between two checks of readiness.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Time limit for one check of a port or page.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of lines of a start command's output that are retained for an error message.
const TAIL_LINES: usize = 20;
/// Maximum size of this output, in bytes.
const TAIL_BYTES: usize = 4 * 1024;

/// Reason why a template did not become ready.
#[derive(Debug, thiserror::Error)]
pub enum StartupError {
    /// The recipe's `[ready]` is invalid. Templates built by this program have been checked.
    #[error("the template's [ready] is not valid: {0}")]
    Recipe(String),
    /// The agent failed to run a command.
    #[error("cannot run its command `{command}`: {source}")]
    Run {
        /// Command.
        command: String,
        /// Error of the agent.
        source: ClientError,
    },
    /// The start command failed.
    #[error(
        "its start command `{command}` failed ({status}){}",
        output_excerpt(output)
    )]
    Ended {
        /// Command.
        command: String,
        /// Exit status, in words.
        status: String,
        /// Last lines of the output.
        output: String,
    },
    /// The template was not ready within the time limit.
    #[error(
        "it was not ready after {seconds} s: {last}{}; fix its start command, or increase the timeout in [ready]",
        output_excerpt(output)
    )]
    NotReady {
        /// Time limit in seconds.
        seconds: u32,
        /// Result of the last check.
        last: String,
        /// Last lines of the start command's output.
        output: String,
    },
}

/// Describes the end of an output in an error message.
fn output_excerpt(output: &str) -> String {
    match output {
        "" => "; it had no output".to_owned(),
        output => format!("; the end of its output:\n{output}\n"),
    }
}

/// Runs the start command of a template, and returns when the guest is ready. `connect` opens a
/// stream to a vsock port of the guest. `token` is the access token of its agent.
pub async fn start_up<F, Fut>(
    startup: &Startup,
    token: Option<String>,
    connect: F,
) -> Result<(), StartupError>
where
    F: Fn(u32) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = io::Result<UnixStream>> + Send + 'static,
{
    let ready = startup.ready.as_ref();
    let probe = ready.map(|r| r.probe().map_err(StartupError::Recipe));
    // An invalid probe is reported before the command is started.
    let probe = probe.transpose()?;
    let connector = connect.clone();
    let agent = AgentClient::new(move || connector(ENVD_PORT));
    let agent = match token {
        Some(token) => agent.with_token(token),
        None => agent,
    };
    let tail = Tail::default();
    let process = match &startup.start {
        Some(start) => {
            let mut spec = match &start.args {
                Some(args) => ProcessSpec::new(&start.command, args),
                // A command without arguments is a shell command.
                None => ProcessSpec::new("/bin/sh", ["-c", &start.command]),
            };
            spec.user.clone_from(&start.user);
            spec.cwd.clone_from(&start.workdir);
            spec.is_service = true;
            let started = agent.start(&spec).await;
            Some(started.map_err(|source| StartupError::Run {
                command: start.command.clone(),
                source,
            })?)
        }
        None => None,
    };
    // Without `[ready]`, a template is ready once the command is started. Dropping `process` does
    // not terminate the command.
    let Some((ready, probe)) = ready.zip(probe) else {
        return Ok(());
    };
    // Result of the last check, for the error message after the timeout.
    let last = Mutex::new("nothing answered".to_owned());
    let command = startup.start.as_ref().map_or("", |s| s.command.as_str());
    let limit = Duration::from_secs(u64::from(ready.timeout_s));
    tokio::select! {
        // A command that fails ends the wait before the timeout.
        failed = follow(process, command, &tail) => Err(failed),
        waited = timeout(limit, until_ready(&agent, &connect, probe, &last)) => {
            waited.map_err(|_| StartupError::NotReady {
                seconds: ready.timeout_s,
                last: last.lock().clone(),
                output: tail.text(),
            })
        }
    }
}

/// Reads the output of the start command into `tail`. Returns only if the command fails: a command
/// that succeeds may have started a background service.
async fn follow(process: Option<Process>, command: &str, tail: &Tail) -> StartupError {
    if let Some(mut process) = process {
        while let Ok(Some(event)) = process.next_event().await {
            match event {
                ProcessEvent::Stdout(bytes) | ProcessEvent::Stderr(bytes) => tail.push(&bytes),
                ProcessEvent::End(end) if end.exit_code != 0 => {
                    return StartupError::Ended {
                        command: command.to_owned(),
                        status: end.status,
                        output: tail.text(),
                    };
                }
                _ => {}
            }
        }
    }
    // Readiness or the timeout decides.
    std::future::pending().await
}

/// Repeats the check until it succeeds. Stores the latest error in `last`.
async fn until_ready<F, Fut>(
    agent: &AgentClient,
    connect: &F,
    probe: ReadinessProbe<'_>,
    last: &Mutex<String>,
) where
    F: Fn(u32) -> Fut,
    Fut: Future<Output = io::Result<UnixStream>>,
{
    loop {
        let result = match probe {
            ReadinessProbe::Port(port) => in_time(open(connect, port)).await.map(drop),
            ReadinessProbe::Page(port, path) => in_time(page(connect, port, path)).await,
            ReadinessProbe::Command(command) => run(agent, command).await,
        };
        match result {
            Ok(()) => return,
            Err(reason) => *last.lock() = reason,
        }
        sleep(RETRY_INTERVAL).await;
    }
}

/// Limits one check to [`PROBE_TIMEOUT`].
async fn in_time<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    match timeout(PROBE_TIMEOUT, work).await {
        Ok(done) => done,
        Err(_) => Err(format!("no answer within {} s", PROBE_TIMEOUT.as_secs())),
    }
}

/// Connects to a TCP port of the guest through the agent, which answers with one line.
async fn open<F, Fut>(connect: &F, port: u16) -> Result<UnixStream, String>
where
    F: Fn(u32) -> Fut,
    Fut: Future<Output = io::Result<UnixStream>>,
{
    let joining = async {
        let mut stream = connect(TCP_PORT).await?;
        stream.write_all(format!("{port}\n").as_bytes()).await?;
        let mut answer = Vec::new();
        // Byte by byte, since bytes after the line belong to the server. The line is short,
        // and the limit of 256 bytes stops a guest that sends no end of line.
        while !answer.ends_with(b"\n") && answer.len() < 256 {
            match stream.read_u8().await {
                Ok(byte) => answer.push(byte),
                Err(_) => break,
            }
        }
        Ok::<_, io::Error>((stream, answer))
    };
    let (stream, answer) = joining.await.map_err(|e| e.to_string())?;
    if answer == TCP_OK.as_bytes() {
        return Ok(stream);
    }
    let text = String::from_utf8_lossy(&answer);
    Err(match text.trim() {
        "" => format!("port {port} is not reachable"),
        text => text.trim_start_matches("ERR ").to_owned(),
    })
}

/// Requests a page and checks the status.
async fn page<F, Fut>(connect: &F, port: u16, path: &str) -> Result<(), String>
where
    F: Fn(u32) -> Fut,
    Fut: Future<Output = io::Result<UnixStream>>,
{
    let mut stream = open(connect, port).await?;
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n");
    let sent = stream.write_all(request.as_bytes()).await;
    sent.map_err(|e| format!("port {port}: {e}"))?;
    // Length of `HTTP/1.1 200`.
    let mut status = [0; 12];
    let read = stream.read_exact(&mut status).await;
    read.map_err(|_| format!("port {port} closes the connection without an answer"))?;
    let text = String::from_utf8_lossy(&status);
    match text.strip_prefix("HTTP/1.").and_then(|t| t.get(2..)) {
        Some(code) if code.starts_with('2') => Ok(()),
        Some(code) => Err(format!("port {port} answers {path} with status {code}")),
        None => Err(format!("port {port} does not speak HTTP")),
    }
}

/// Runs a command in the guest. An error contains the end of its output.
async fn run(agent: &AgentClient, command: &str) -> Result<(), String> {
    let spec = ProcessSpec::new("/bin/sh", ["-c", command]);
    let process = agent.start(&spec).await.map_err(|e| e.to_string())?;
    // Bounds the memory for the output of a command that writes without end.
    let output = process.output(64 * 1024).await;
    let (end, stdout, stderr) = output.map_err(|e| format!("`{command}`: {e}"))?;
    if end.exit_code == 0 {
        return Ok(());
    }
    let tail = Tail::default();
    tail.push(&stdout);
    tail.push(&stderr);
    Err(format!("`{command}`: {} {}", end.status, tail.text()))
}

/// End of an output. The guest wrote it, so its size is limited and control characters are removed.
#[derive(Default)]
struct Tail(Mutex<VecDeque<u8>>);

impl Tail {
    fn push(&self, bytes: &[u8]) {
        let mut output = self.0.lock();
        output.extend(bytes);
        let surplus = output.len().saturating_sub(TAIL_BYTES);
        // The latest output is the most useful part.
        output.drain(..surplus);
    }

    fn text(&self) -> String {
        let bytes: Vec<u8> = self.0.lock().iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<String> = text
            .lines()
            .map(|line| line.chars().filter(|c| !c.is_control()).collect())
            .collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_output_lines_are_retained_without_control_characters() {
        let tail = Tail::default();
        for n in 0..10_000 {
            tail.push(format!("\x1b[31mline {n}\n").as_bytes());
        }
        let text = tail.text();
        assert_eq!(text.lines().count(), TAIL_LINES);
        assert!(text.ends_with("[31mline 9999"), "{text}");
    }
}
