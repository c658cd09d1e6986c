//! Bounded list of the lines of one sort.

use jiffy_engine_api::ConnectionRecord;
use std::collections::VecDeque;

/// The newest lines of one sort. Dropped ones are counted.
#[derive(Debug)]
pub(super) struct LineRing {
    /// Lines, with the kernel's id if it has one.
    lines: VecDeque<(Option<u32>, ConnectionRecord)>,
    most: usize,
    /// Number of dropped lines.
    pub gone: u64,
}

impl LineRing {
    pub fn new(most: usize) -> Self {
        Self {
            lines: VecDeque::new(),
            most,
            gone: 0,
        }
    }

    /// Adds a connection of its own.
    pub fn push(&mut self, id: Option<u32>, line: ConnectionRecord) {
        if self.lines.len() >= self.most
            && let Some((_, old)) = self.lines.pop_front()
        {
            self.gone = self.gone.saturating_add(old.times);
        }
        self.lines.push_back((id, line));
    }

    /// Adds a line, or counts it with an equal one.
    pub fn count(&mut self, mut line: ConnectionRecord) {
        let alike = |(_, old): &(_, ConnectionRecord)| {
            old.address == line.address
                && old.port == line.port
                && old.protocol == line.protocol
                && old.refused == line.refused
                && old.host == line.host
                && old.question == line.question
        };
        // The latest are the likeliest.
        if let Some(at) = self.lines.iter().rposition(alike)
            && let Some((_, old)) = self.lines.remove(at)
        {
            line.times = line.times.saturating_add(old.times);
        }
        self.push(None, line);
    }

    /// Returns true if it has the connection of that id and time.
    pub fn has(&self, id: u32, at_ms: u64) -> bool {
        let mut lines = self.lines.iter().rev();
        lines.any(|(own, line)| *own == Some(id) && line.at_ms == at_ms)
    }

    pub fn lines(&self) -> impl Iterator<Item = ConnectionRecord> {
        self.lines.iter().map(|(_, line)| line.clone())
    }
}
