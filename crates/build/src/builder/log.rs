//! What a build says while it goes on.

use super::records::{Level, MAX_LINES, Records};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest unfinished line of a program that is kept, in bytes.
const MAX_UNFINISHED: usize = 64 * 1024;

/// The log of one build.
pub struct Log {
    records: Arc<Records>,
    build: String,
    next: AtomicU64,
}

impl Log {
    /// The log of a build that has said nothing yet.
    pub fn new(records: Arc<Records>, build: &str) -> Self {
        Self {
            records,
            build: build.to_owned(),
            next: AtomicU64::new(0),
        }
    }

    /// Says a line, or several.
    pub fn say(&self, level: Level, step: Option<&str>, message: &str) {
        for line in message.lines() {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let said = match number {
                n if n < MAX_LINES => self.records.say(&self.build, n, level, step, line),
                MAX_LINES => {
                    let last = "it says more than is kept: the rest of its output is left out";
                    (self.records).say(&self.build, number, Level::Warn, step, last)
                }
                // Why it failed is in the build's record.
                _ => Ok(()),
            };
            if let Err(e) = said {
                tracing::warn!(build = self.build, "a line of its log is lost: {e}");
            }
        }
    }

    /// Says something that happens.
    pub fn info(&self, step: Option<&str>, message: &str) {
        self.say(Level::Info, step, message);
    }
}

/// Lines out of what a program writes, in whichever pieces.
#[derive(Default)]
pub struct LineCutter(Vec<u8>);

impl LineCutter {
    /// Takes what was written and gives the lines that are whole.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.0.extend_from_slice(bytes);
        let mut lines = Vec::new();
        while let Some(end) = self.0.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.0.drain(..=end).collect();
            lines.push(shown(&line));
        }
        if self.0.len() > MAX_UNFINISHED {
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
        let mut cutter = LineCutter::default();
        assert!(cutter.push(b"on").is_empty());
        assert_eq!(
            cutter.push(b"e\ntwo\r\n10%\r100%\nth"),
            ["one", "two", "100%"]
        );
        assert_eq!(cutter.rest().as_deref(), Some("th"));
        assert_eq!(cutter.rest(), None);
        let long = vec![b'x'; MAX_UNFINISHED + 1];
        assert_eq!(cutter.push(&long).len(), 1, "memory is bounded");
    }
}
