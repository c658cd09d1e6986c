//! What a build says while it goes on.

use super::records::{BuildRecords, LogLevel, MAX_LOG_LINES};
use jiffy_image::Progress;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Longest unfinished line of a program that is kept, in bytes.
const MAX_PARTIAL_LINE_BYTES: usize = 64 * 1024;

/// How far something is that takes a while.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildProgress {
    /// What goes on.
    pub text: String,
    /// How much of it is done, 0 to 100.
    pub percent: u8,
}

/// The log of one build.
pub struct BuildLog {
    records: Arc<BuildRecords>,
    build: String,
    next: AtomicU64,
    progress: Mutex<Option<BuildProgress>>,
}

impl BuildLog {
    /// The log of a build that has said nothing yet.
    pub fn new(records: Arc<BuildRecords>, build: &str) -> Self {
        Self {
            records,
            build: build.to_owned(),
            next: AtomicU64::new(0),
            progress: Mutex::default(),
        }
    }

    /// Says a line, or several.
    pub fn say(&self, level: LogLevel, step: Option<&str>, message: &str) {
        for line in message.lines() {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let said = match number {
                n if n < MAX_LOG_LINES => self.records.say(&self.build, n, level, step, line),
                MAX_LOG_LINES => {
                    let last = "it says more than is kept: the rest of its output is left out";
                    (self.records).say(&self.build, number, LogLevel::Warn, step, last)
                }
                // Why it failed is in the build's record.
                _ => Ok(()),
            };
            if let Err(e) = said {
                tracing::warn!(build = self.build, "a line of its log is lost: {e}");
            }
        }
    }

    /// What goes on just now and takes a while, if anything does.
    pub fn progress(&self) -> Option<BuildProgress> {
        lock(&self.progress).clone()
    }

    /// Takes a sign of life of what belongs to `step`.
    pub fn on_progress(&self, step: &str, progress: &Progress<'_>) {
        match progress {
            Progress::Line(line) => self.say(LogLevel::Debug, Some(step), line),
            Progress::Phase(phase) => {
                let text = phase.to_string();
                self.say(LogLevel::Debug, Some(step), &text);
                let mut now = lock(&self.progress);
                let percent = now.as_ref().map_or(0, |before| before.percent);
                *now = Some(BuildProgress { text, percent });
            }
            Progress::Percent(percent) => {
                if let Some(now) = lock(&self.progress).as_mut() {
                    now.percent = *percent;
                }
            }
        }
    }

    /// It is done, or will not be.
    pub fn end_progress(&self) {
        *lock(&self.progress) = None;
    }

    /// Says something that happens.
    pub fn info(&self, step: Option<&str>, message: &str) {
        self.say(LogLevel::Info, step, message);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lines out of what a program writes, in whichever pieces.
#[derive(Default)]
pub struct LineSplitter(Vec<u8>);

impl LineSplitter {
    /// Takes what was written and gives the lines that are whole.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.0.extend_from_slice(bytes);
        let mut lines = Vec::new();
        while let Some(end) = self.0.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.0.drain(..=end).collect();
            lines.push(shown(&line));
        }
        if self.0.len() > MAX_PARTIAL_LINE_BYTES {
            lines.push(shown(&std::mem::take(&mut self.0)));
        }
        lines
    }

    /// What is left at the end.
    pub fn rest(&mut self) -> Option<String> {
        let rest = std::mem::take(&mut self.0);
        (!rest.is_empty()).then(|| shown(&rest))
    }
}

/// A line as a terminal would leave it: what was written over is gone.
fn shown(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let text = text.trim_end_matches(['\r', '\n']);
    text.rsplit('\r').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_whatever_the_pieces() {
        let mut cutter = LineSplitter::default();
        assert!(cutter.push(b"on").is_empty());
        assert_eq!(
            cutter.push(b"e\ntwo\r\n10%\r100%\nth"),
            ["one", "two", "100%"]
        );
        assert_eq!(cutter.rest().as_deref(), Some("th"));
        assert_eq!(cutter.rest(), None);
        let long = vec![b'x'; MAX_PARTIAL_LINE_BYTES + 1];
        assert_eq!(cutter.push(&long).len(), 1, "memory is bounded");
    }
}
