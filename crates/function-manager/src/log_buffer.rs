//! [`LogBuffer`]: the log of one function, in the daemon's memory.
//!
//! The process of the owner numbers its entries from 0, and loses them when it exits. The daemon
//! reads new entries and gives them numbers of its own, so that a client sees one sequence.

use jiffy_engine_api::now_ms;
use jiffy_proto::function::{LogEntry, LogStream};
use std::collections::VecDeque;

/// Maximum size of the retained entries in bytes.
const MAX_LOG_BYTES: usize = 256 << 10;
/// Bytes that count for an entry in addition to its text.
const ENTRY_OVERHEAD_BYTES: usize = 128;

/// Log of a function.
#[derive(Debug, Default)]
pub(crate) struct LogBuffer {
    entries: VecDeque<LogEntry>,
    bytes: usize,
    /// Number of the next entry.
    next: u64,
    /// Number of the next entry to read from the running process, in the numbering of that process.
    process_next: u64,
}

/// Returns the bytes that an entry counts for.
fn cost(entry: &LogEntry) -> usize {
    entry.text.len() + entry.request_id.len() + ENTRY_OVERHEAD_BYTES
}

impl LogBuffer {
    /// Returns the number of the first entry to request from the process.
    pub(crate) fn process_next(&self) -> u64 {
        self.process_next
    }

    /// Returns the number of the next entry.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Appends entries of the running process. Known entries are skipped.
    pub(crate) fn append(&mut self, entries: Vec<LogEntry>) {
        for mut entry in entries {
            if entry.sequence < self.process_next {
                continue;
            }
            self.process_next = entry.sequence.saturating_add(1);
            entry.sequence = self.next;
            self.push(entry);
        }
    }

    /// Appends the failure of a request that did not reach a process.
    pub(crate) fn push_fault(&mut self, request_id: &str, code: &str) {
        self.push(LogEntry {
            sequence: self.next,
            unix_ms: now_ms(),
            request_id: request_id.to_owned(),
            stream: LogStream::Fault,
            text: code.to_owned(),
        });
    }

    /// Appends an entry, and removes the oldest entries above [`MAX_LOG_BYTES`].
    fn push(&mut self, entry: LogEntry) {
        self.next += 1;
        self.bytes += cost(&entry);
        self.entries.push_back(entry);
        while self.bytes > MAX_LOG_BYTES {
            let Some(oldest) = self.entries.pop_front() else {
                break;
            };
            self.bytes -= cost(&oldest);
        }
    }

    /// Handles the exit of the process: the sequence numbers of the next process start at 0.
    pub(crate) fn record_process_exit(&mut self) {
        self.process_next = 0;
    }

    /// Returns the entries from `after` on. A position beyond the last entry comes from an earlier
    /// daemon, and is treated as the beginning.
    pub(crate) fn read(&self, after: u64) -> Vec<LogEntry> {
        // Sequence numbers start at 0 in each daemon.
        let from = if after > self.next { 0 } else { after };
        let entries = self.entries.iter().filter(|entry| entry.sequence >= from);
        entries.cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an entry of a log.
    fn entry(sequence: u64, text: &str) -> LogEntry {
        LogEntry {
            sequence,
            unix_ms: 0,
            request_id: "r".to_owned(),
            stream: LogStream::Stdout,
            text: text.to_owned(),
        }
    }

    #[test]
    fn entries_of_several_processes_form_one_sequence_without_duplicates() {
        let mut log = LogBuffer::default();
        log.append(vec![entry(0, "a"), entry(1, "b")]);
        log.append(vec![entry(1, "b"), entry(2, "c")]);
        log.record_process_exit();
        log.append(vec![entry(0, "d")]);
        let text: String = log.read(1).iter().map(|e| e.text.as_str()).collect();
        assert_eq!((text.as_str(), log.next()), ("bcd", 4));
        assert!(log.read(4).is_empty());
        assert_eq!(log.read(1000).len(), 4);
    }

    #[test]
    fn a_log_is_bounded() {
        let mut log = LogBuffer::default();
        let text = "x".repeat(1000);
        log.append((0..1000).map(|n| entry(n, &text)).collect());
        let bytes: usize = log.read(0).iter().map(cost).sum();
        assert!(bytes <= MAX_LOG_BYTES && bytes > MAX_LOG_BYTES / 2);
    }
}
