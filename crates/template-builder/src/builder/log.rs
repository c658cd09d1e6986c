//! Log and progress of a running build, which its author reads while the build runs.

use super::records::{BuildRecords, LogLevel, MAX_LOG_LINES};
use jiffy_image::Progress;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum length of a partial line that is buffered, in bytes.
const MAX_PARTIAL_LINE_BYTES: usize = 64 * 1024;

/// Progress of a long operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildProgress {
    /// Description of the operation.
    pub text: String,
    /// Completed share in percent, 0 to 100.
    pub percent: u8,
}

/// The log of one build.
pub struct BuildLog {
    records: Arc<BuildRecords>,
    build: String,
    /// Number of the next line.
    next: AtomicU64,
    progress: Mutex<Option<BuildProgress>>,
}

impl BuildLog {
    /// Creates the log of a new build.
    pub fn new(records: Arc<BuildRecords>, build: &str) -> Self {
        Self {
            records,
            build: build.to_owned(),
            next: AtomicU64::new(0),
            progress: Mutex::default(),
        }
    }

    /// Writes the lines of `message`.
    pub fn write(&self, level: LogLevel, step: Option<&str>, message: &str) {
        for line in message.lines() {
            // Concurrent writers only need different numbers, so that `Relaxed` suffices.
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let stored = match number {
                n if n < MAX_LOG_LINES => {
                    self.records
                        .insert_log_line(&self.build, n, level, step, line)
                }
                MAX_LOG_LINES => {
                    // Store a notice in place of the first line that does not fit.
                    let last = "the log is full: further lines are dropped";
                    self.records
                        .insert_log_line(&self.build, number, LogLevel::Warn, step, last)
                }
                // Drop later lines. The cause of a failure is not lost, because the build's record
                // contains it.
                _ => Ok(()),
            };
            if let Err(e) = stored {
                tracing::warn!(build = self.build, error = %e, "cannot store a line of a build log");
            }
        }
    }

    /// Returns the progress of the current operation, if any.
    pub fn progress(&self) -> Option<BuildProgress> {
        self.progress.lock().clone()
    }

    /// Records progress of `step`.
    pub fn on_progress(&self, step: &str, progress: &Progress<'_>) {
        match progress {
            Progress::Line(line) => self.write(LogLevel::Debug, Some(step), line),
            Progress::Phase(phase) => {
                let text = phase.to_string();
                self.write(LogLevel::Debug, Some(step), &text);
                let mut now = self.progress.lock();
                // A new phase starts with the percentage of the previous phase, so that the
                // percentage does not fall back to 0.
                let percent = now.as_ref().map_or(0, |before| before.percent);
                *now = Some(BuildProgress { text, percent });
            }
            Progress::Percent(percent) => {
                if let Some(now) = self.progress.lock().as_mut() {
                    now.percent = *percent;
                }
            }
        }
    }

    /// Ends the current operation.
    pub fn end_progress(&self) {
        *self.progress.lock() = None;
    }

    /// Writes an informational message.
    pub fn info(&self, step: Option<&str>, message: &str) {
        self.write(LogLevel::Info, step, message);
    }
}

/// Splits the output of a program into lines. Contains the bytes of the last, incomplete line.
#[derive(Default)]
pub struct LineSplitter(Vec<u8>);

impl LineSplitter {
    /// Adds output and returns the complete lines.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.0.extend_from_slice(bytes);
        let mut lines = Vec::new();
        while let Some(end) = self.0.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.0.drain(..=end).collect();
            lines.push(visible_line(&line));
        }
        // Bounds the memory for programs that write no line breaks.
        if self.0.len() > MAX_PARTIAL_LINE_BYTES {
            lines.push(visible_line(&std::mem::take(&mut self.0)));
        }
        lines
    }

    /// Returns the unterminated last line.
    pub fn finish(&mut self) -> Option<String> {
        let rest = std::mem::take(&mut self.0);
        (!rest.is_empty()).then(|| visible_line(&rest))
    }
}

/// Returns the text of a line as a terminal shows it: after the last carriage return.
fn visible_line(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let text = text.trim_end_matches(['\r', '\n']);
    // A carriage return moves the cursor of a terminal to the start of the line.
    text.rsplit('\r').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_complete_however_output_is_chunked() {
        let mut cutter = LineSplitter::default();
        assert!(cutter.push(b"on").is_empty());
        assert_eq!(
            cutter.push(b"e\ntwo\r\n10%\r100%\nth"),
            ["one", "two", "100%"]
        );
        assert_eq!(cutter.finish().as_deref(), Some("th"));
        assert_eq!(cutter.finish(), None);
        let long = vec![b'x'; MAX_PARTIAL_LINE_BYTES + 1];
        assert_eq!(cutter.push(&long).len(), 1, "memory is bounded");
    }
}
