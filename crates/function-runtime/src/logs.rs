//! Log of a function: output of its guests and failures of its requests, in a ring buffer of
//! bounded size. The daemon reads new entries by sequence number.

use hyper::header::HeaderValue;
use jiffy_proto::function::{LogEntry, LogStream};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Maximum size of a function's log in bytes: texts, request ids and overhead of all entries.
const MAX_LOG_BYTES: usize = 256 << 10;
/// Bytes that count for an entry in addition to its text.
const ENTRY_OVERHEAD_BYTES: usize = 128;
/// Maximum text length of an entry in bytes. Longer texts are truncated.
const MAX_TEXT_BYTES: usize = 4 << 10;
/// Maximum number of output bytes that a request may log. Further output is discarded.
const MAX_REQUEST_BYTES: usize = 64 << 10;

/// Latest entries of a log.
#[derive(Debug, Default)]
struct LogRing {
    /// Sequence number of the next entry.
    next: u64,
    /// Bytes of all entries, including their overhead.
    bytes: usize,
    entries: VecDeque<LogEntry>,
}

/// Log of one function.
#[derive(Debug, Default)]
pub struct FunctionLog(Mutex<LogRing>);

impl FunctionLog {
    /// Appends an entry, and removes the oldest entries beyond the limit.
    pub fn append(&self, request_id: &str, stream: LogStream, text: &[u8]) {
        // The limit may divide a character. The incomplete character is then replaced.
        let cut = text.get(..MAX_TEXT_BYTES).unwrap_or(text);
        let text = String::from_utf8_lossy(cut).into_owned();
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        // A clock before 1970 yields the time 0.
        let unix_ms = since.map_or(0, |t| u64::try_from(t.as_millis()).unwrap_or(0));
        let mut ring = self.0.lock();
        let sequence = ring.next;
        ring.next += 1;
        ring.bytes += text.len() + request_id.len() + ENTRY_OVERHEAD_BYTES;
        let request_id = request_id.to_owned();
        ring.entries.push_back(LogEntry {
            sequence,
            unix_ms,
            request_id,
            stream,
            text,
        });
        while ring.bytes > MAX_LOG_BYTES {
            let Some(old) = ring.entries.pop_front() else {
                break;
            };
            ring.bytes -= old.text.len() + old.request_id.len() + ENTRY_OVERHEAD_BYTES;
        }
    }

    /// Returns the entries from `sequence` on, as many as fit in `max_bytes` of JSON. Returns at
    /// least one entry if any exists.
    pub fn read(&self, sequence: u64, max_bytes: usize) -> Vec<LogEntry> {
        let ring = self.0.lock();
        let mut bytes = 0;
        let from = ring
            .entries
            .iter()
            .filter(|entry| entry.sequence >= sequence);
        let within = from.take_while(|entry| {
            let first = bytes == 0;
            // A byte of text occupies at most six bytes of JSON (`\u0001`).
            bytes += entry.text.len() * 6 + entry.request_id.len() * 6 + ENTRY_OVERHEAD_BYTES;
            first || bytes <= max_bytes
        });
        within.cloned().collect()
    }
}

/// Writer of one request's output.
#[derive(Debug)]
pub(crate) struct RequestLog {
    log: Arc<FunctionLog>,
    request_id: HeaderValue,
    /// Number of output bytes that the request may still log.
    remaining: Mutex<usize>,
}

impl RequestLog {
    pub(crate) fn new(log: Arc<FunctionLog>, request_id: HeaderValue) -> Self {
        Self {
            log,
            request_id,
            remaining: Mutex::new(MAX_REQUEST_BYTES),
        }
    }

    fn id(&self) -> &str {
        self.request_id.to_str().unwrap_or_default()
    }

    /// Appends output until the request has reached its limit.
    pub(crate) fn write(&self, stream: LogStream, output: &[u8]) {
        let allowed = {
            let mut remaining = self.remaining.lock();
            let allowed = output.len().min(*remaining);
            *remaining -= allowed;
            allowed
        };
        let output = output.get(..allowed).unwrap_or_default();
        for part in output.chunks(MAX_TEXT_BYTES) {
            self.log.append(self.id(), stream, part);
        }
    }

    /// Appends the cause of a failure.
    pub(crate) fn fault(&self, text: &str) {
        self.log
            .append(self.id(), LogStream::Fault, text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_bounded_and_its_sequence_numbers_continue() {
        let log = Arc::new(FunctionLog::default());
        for _ in 0..1000 {
            let request = RequestLog::new(log.clone(), HeaderValue::from_static("r"));
            request.write(LogStream::Stdout, &[b'x'; 2 * MAX_REQUEST_BYTES]);
        }
        let kept = log.read(0, usize::MAX);
        let bytes: usize = kept.iter().map(|entry| entry.text.len()).sum();
        assert!(
            bytes <= MAX_LOG_BYTES && bytes > MAX_LOG_BYTES / 2,
            "{bytes}"
        );
        // Each request logs `MAX_REQUEST_BYTES` in 16 entries of `MAX_TEXT_BYTES`.
        assert_eq!(kept.last().unwrap().sequence, 1000 * 16 - 1);
        assert_eq!(log.read(kept[3].sequence, 1).len(), 1);
    }
}
