//! [`LineRing`]: the newest lines (records of connections) of one category, bounded in number.

use jiffy_engine_api::ConnectionRecord;
use std::collections::VecDeque;

/// Newest lines of one category, with a count of the dropped ones.
#[derive(Debug)]
pub(super) struct LineRing {
    /// Lines, with the kernel's id if the line has one.
    lines: VecDeque<(Option<u32>, ConnectionRecord)>,
    /// Maximum number of lines.
    capacity: usize,
    /// Number of dropped lines.
    pub dropped: u64,
}

impl LineRing {
    /// Creates an empty list of at most `capacity` lines.
    pub fn new(capacity: usize) -> Self {
        Self {
            lines: VecDeque::new(),
            capacity,
            dropped: 0,
        }
    }

    /// Adds a line without merging it with equal lines.
    pub fn push(&mut self, id: Option<u32>, line: ConnectionRecord) {
        if self.lines.len() >= self.capacity
            && let Some((_, old)) = self.lines.pop_front()
        {
            self.dropped = self.dropped.saturating_add(old.times);
        }
        self.lines.push_back((id, line));
    }

    /// Adds a line at the end. An equal line is removed, and its count is added to the count of the
    /// new line.
    pub fn count(&mut self, mut line: ConnectionRecord) {
        let alike = |(_, old): &(_, ConnectionRecord)| {
            old.address == line.address
                && old.port == line.port
                && old.protocol == line.protocol
                && old.refused == line.refused
                && old.host == line.host
                && old.question == line.question
                && old.header_use == line.header_use
        };
        // Search from the end: recent lines are most likely to match. The search is short, because
        // a list has at most 500 lines.
        if let Some(at) = self.lines.iter().rposition(alike)
            && let Some((_, old)) = self.lines.remove(at)
        {
            line.times = line.times.saturating_add(old.times);
        }
        self.push(None, line);
    }

    /// Returns true if the list contains the connection with this id and start time.
    pub fn contains(&self, id: u32, at_ms: u64) -> bool {
        let mut lines = self.lines.iter().rev();
        lines.any(|(own, line)| *own == Some(id) && line.at_ms == at_ms)
    }

    /// Returns the lines, the oldest first.
    pub fn lines(&self) -> impl Iterator<Item = ConnectionRecord> {
        self.lines.iter().map(|(_, line)| line.clone())
    }
}
