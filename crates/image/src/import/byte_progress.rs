//! Progress of an import.

use super::ProgressSink;
use crate::progress::{Phase, Progress};

/// Converts bytes to percentages.
pub(super) struct ByteProgress<'a, 'b> {
    on_progress: &'a mut ProgressSink<'b>,
    total: u64,
    /// Percentages at the start and of this part.
    from: u64,
    share: u64,
    before: u64,
    told: u64,
}

impl<'a, 'b> ByteProgress<'a, 'b> {
    pub(super) fn new(
        phase: Phase,
        total: u64,
        share: u64,
        on_progress: &'a mut ProgressSink<'b>,
    ) -> Self {
        Self::after(phase, total, 0, share, on_progress)
    }

    /// Progress of a part that starts at `from` percent and ends at `share`.
    pub(super) fn after(
        phase: Phase,
        total: u64,
        from: u64,
        share: u64,
        on_progress: &'a mut ProgressSink<'b>,
    ) -> Self {
        on_progress(Progress::Phase(phase));
        Self {
            on_progress,
            total,
            from,
            share: share - from,
            before: 0,
            told: from,
        }
    }

    /// Sets the bytes of the current file.
    pub(super) fn at(&mut self, bytes: u64) {
        let done = u128::from(self.before.saturating_add(bytes)) * u128::from(self.share);
        let percent = done.checked_div(u128::from(self.total)).unwrap_or(0);
        let percent = self.from + u64::try_from(percent).unwrap_or(0).min(self.share);
        if percent > self.told {
            self.told = percent;
            (self.on_progress)(Progress::Percent(u8::try_from(percent).unwrap_or(100)));
        }
    }

    /// Ends the current file.
    pub(super) fn done(&mut self, bytes: u64) {
        self.at(bytes);
        self.before = self.before.saturating_add(bytes);
    }
}
