//! Forwards the standard error of child processes to the daemon's log.
//!
//! Each child writes to a pipe. If it wrote to the log file directly, it could truncate the file or
//! forge lines of the daemon. A command line tool has no log: its children share its terminal.

use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::net::unix::pipe;
use tokio::runtime::Handle;

/// Maximum length of a line in the log, in bytes. Longer lines are split.
const MAX_LINE_BYTES: usize = 1000;
/// Maximum number of lines of one process per [`PERIOD`]. Further lines are dropped.
const MAX_LINES: u32 = 200;
/// Period in which the number of lines is limited.
const PERIOD: Duration = Duration::from_secs(60);
/// Maximum number of bytes that are read from a pipe at once.
const BUFFER_BYTES: usize = 4096;

/// Pipe for the messages of a process that will be started.
#[derive(Debug)]
pub struct ChildMessages(
    /// `None` if this process has no log.
    Option<(PipeReader, PipeWriter)>,
);

impl ChildMessages {
    /// Creates the pipe.
    pub fn new() -> io::Result<Self> {
        let has_log = tracing::dispatcher::has_been_set();
        Ok(Self(has_log.then(io::pipe).transpose()?))
    }

    /// Returns the standard error for the process.
    pub fn stderr(&self) -> io::Result<Stdio> {
        match &self.0 {
            Some((_, write)) => Ok(write.try_clone()?.into()),
            None => Ok(Stdio::inherit()),
        }
    }

    /// Logs the messages of the started process `pid` until it closes the pipe.
    pub fn forward(self, program: &'static str, pid: u32) {
        let Some((mut read, write)) = self.0 else {
            return;
        };
        // This process must not hold the write end, or the pipe would never end.
        drop(write);
        let mut lines = Lines::new(Instant::now(), move |line: &str| {
            tracing::warn!(program, pid, line, "message of a child process");
        });
        // In the daemon, a task reads the pipe. Other programs have no event loop and need a
        // thread.
        if let Ok(runtime) = Handle::try_current() {
            let _inside = runtime.enter();
            match pipe::Receiver::from_owned_fd(OwnedFd::from(read)) {
                Ok(receiver) => drop(runtime.spawn(forward(receiver, lines))),
                Err(e) => {
                    tracing::warn!(program, pid, error = %e, "cannot read the messages of a child process")
                }
            }
            return;
        }
        std::thread::spawn(move || {
            let mut buffer = [0; BUFFER_BYTES];
            while let Ok(length @ 1..) = read.read(&mut buffer) {
                lines.add(buffer.get(..length).unwrap_or_default(), Instant::now());
            }
            lines.end();
        });
    }
}

/// Reads the pipe until all its writers have closed it.
async fn forward<F: FnMut(&str)>(receiver: pipe::Receiver, mut lines: Lines<F>) {
    let mut buffer = [0; BUFFER_BYTES];
    while receiver.readable().await.is_ok() {
        match receiver.try_read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => lines.add(buffer.get(..length).unwrap_or_default(), Instant::now()),
            // The readiness was outdated, so the loop waits again.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    lines.end();
}

/// Lines of one process, bounded in length and number.
struct Lines<F> {
    /// Receives each complete line.
    log: F,
    /// Beginning of the current line.
    line: Vec<u8>,
    /// Number of lines since `since`.
    count: u32,
    /// Start of the current period.
    since: Instant,
    /// Number of lines that were dropped since the last report.
    dropped: u64,
}

impl<F: FnMut(&str)> Lines<F> {
    fn new(since: Instant, log: F) -> Self {
        Self {
            log,
            line: Vec::new(),
            count: 0,
            since,
            dropped: 0,
        }
    }

    /// Adds output of the process.
    fn add(&mut self, bytes: &[u8], now: Instant) {
        for &byte in bytes {
            match byte {
                b'\n' => self.flush(now),
                _ => self.line.push(byte),
            }
            // A process that never ends its line would otherwise fill the memory.
            if self.line.len() >= MAX_LINE_BYTES {
                self.flush(now);
            }
        }
    }

    /// Ends the current line.
    fn flush(&mut self, now: Instant) {
        // A new period begins with the first line after the end of the previous period.
        if now.duration_since(self.since) >= PERIOD {
            self.report_dropped();
            (self.count, self.since) = (0, now);
        }
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            return;
        }
        self.count += 1;
        if self.count > MAX_LINES {
            self.dropped += 1;
            // The flood is reported when the period ends. A report per line would be a flood
            // itself.
            return;
        }
        // The child may be compromised: control characters could change the terminal that shows the
        // log.
        let text = String::from_utf8_lossy(&line);
        let printed: String = text
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        (self.log)(&printed);
    }

    fn report_dropped(&mut self) {
        if self.dropped > 0 {
            (self.log)(&format!("{} further lines were dropped", self.dropped));
            self.dropped = 0;
        }
    }

    fn end(&mut self) {
        // Pass the start of the period as the time, so that the last line belongs to this period.
        let now = self.since;
        self.flush(now);
        self.report_dropped();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::sync::mpsc;

    #[test]
    fn lines_are_bounded_in_length_and_number_and_printable() {
        let start = Instant::now();
        let (send, received) = mpsc::channel();
        let mut lines = Lines::new(start, move |line: &str| send.send(line.to_owned()).unwrap());
        lines.add(b"one\n\ntw\x1b[2Jo\n", start);
        lines.add(&[b'x'; 2500], start);
        lines.add(b"\n", start);
        lines.add(&b"flood\n".repeat(300), start);
        lines.add(b"later\n", start + PERIOD);
        lines.add(b"unfinished", start + PERIOD);
        lines.end();
        let found: Vec<String> = received.try_iter().collect();
        assert_eq!(found[..2], ["one", "tw [2Jo"]);
        assert_eq!(
            found[2..5].iter().map(String::len).collect::<Vec<_>>(),
            [1000, 1000, 500]
        );
        // The first period has 200 lines and the number of dropped ones. Two more lines follow.
        assert_eq!(found.len(), 200 + 3, "{found:?}");
        let last = found[found.len() - 3..].to_vec();
        assert!(last[0].contains("further lines were dropped"), "{last:?}");
        assert_eq!(last[1..], ["later", "unfinished"]);
    }

    #[test]
    fn a_process_gets_a_pipe_instead_of_the_log() {
        let messages = ChildMessages(Some(io::pipe().unwrap()));
        let mut command = Command::new("sh");
        command
            .args(["-c", "readlink /proc/self/fd/2 >&2"])
            .stderr(messages.stderr().unwrap());
        let mut child = command.spawn().unwrap();
        drop(command);
        let (mut read, write) = messages.0.unwrap();
        drop(write);
        let mut said = String::new();
        read.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("pipe:["), "{said}");
        assert!(child.wait().unwrap().success());
    }
}
