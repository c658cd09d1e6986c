//! Converts processed bytes of an import to percentages.

use super::ProgressSink;
use crate::progress::{Phase, Progress};

/// Progress of one part of an import, in percent of the whole import.
pub(super) struct ByteProgress<'a, 'b> {
    on_progress: &'a mut ProgressSink<'b>,
    /// Bytes of this part.
    total: u64,
    /// Percentage at the start of this part.
    from: u64,
    /// Percentage points of this part.
    share: u64,
    /// Bytes of the files that are complete.
    before: u64,
    /// Percentage that was reported last.
    reported_percent: u64,
}

impl<'a, 'b> ByteProgress<'a, 'b> {
    /// Returns the progress of a part that starts at 0 percent and ends at `end` percent.
    pub(super) fn new(
        phase: Phase,
        total: u64,
        end: u64,
        on_progress: &'a mut ProgressSink<'b>,
    ) -> Self {
        Self::after(phase, total, 0, end, on_progress)
    }

    /// Returns the progress of a part that starts at `from` percent and ends at `end` percent.
    pub(super) fn after(
        phase: Phase,
        total: u64,
        from: u64,
        end: u64,
        on_progress: &'a mut ProgressSink<'b>,
    ) -> Self {
        on_progress(Progress::Phase(phase));
        Self {
            on_progress,
            total,
            from,
            share: end - from,
            before: 0,
            reported_percent: from,
        }
    }

    /// Sets the number of bytes of the current file that were processed.
    pub(super) fn at(&mut self, bytes: u64) {
        // 128 bits: the product of a file size and a percentage may exceed 64 bits.
        let done = u128::from(self.before.saturating_add(bytes)) * u128::from(self.share);
        let percent = done.checked_div(u128::from(self.total)).unwrap_or(0);
        let percent = self.from + u64::try_from(percent).unwrap_or(0).min(self.share);
        if percent > self.reported_percent {
            self.reported_percent = percent;
            (self.on_progress)(Progress::Percent(u8::try_from(percent).unwrap_or(100)));
        }
    }

    /// Completes the current file, which had `bytes` bytes.
    pub(super) fn done(&mut self, bytes: u64) {
        self.at(bytes);
        self.before = self.before.saturating_add(bytes);
    }
}
