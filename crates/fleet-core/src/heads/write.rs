//! Conditional write of a head, repeated with equal content until its outcome is known. The
//! operations on heads share this code.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox.

use super::HeadWrite;
use crate::effect::WriteOutcome;
use crate::ids::{Millis, Version, WriteId};
use crate::record::Head;

/// Delay before a write is repeated.
const REPEAT_MS: u64 = 500;

/// Writes of one operation, of which at most one is in flight.
#[derive(Debug, Default)]
pub(super) struct Writer {
    /// Write whose outcome is unknown. `None` if there is none.
    current: Option<HeadWrite>,
    /// Time of the next attempt. `None` if no attempt is planned.
    repeat_at: Option<Millis>,
    /// True if an earlier attempt of the current write may still arrive at the store.
    is_uncertain: bool,
    /// Number of writes so far.
    count: u64,
}

/// State of a write after an answer of the store.
#[derive(Debug)]
pub(super) enum Known {
    /// The head was written.
    Done(Box<Head>, Version),
    /// The head has another version.
    Lost(Option<Box<(Head, Version)>>),
    /// The write was rejected, and no attempt of it will arrive.
    Rejected(HeadWrite),
    /// The outcome is not known: the write will be repeated.
    Unknown,
}

impl Writer {
    /// Starts a write.
    pub fn start(&mut self, head: Head, expected: Option<Version>) -> HeadWrite {
        self.count += 1;
        let write = HeadWrite {
            write: WriteId(self.count),
            head: Box::new(head),
            expected,
        };
        self.current = Some(write.clone());
        self.repeat_at = None;
        self.is_uncertain = false;
        write
    }

    /// Repeats the current write later as a new write, because the former one was rejected.
    pub fn start_later(&mut self, now: Millis, head: Head, expected: Option<Version>) {
        self.start(head, expected);
        self.repeat_at = Some(now.plus(REPEAT_MS));
    }

    /// Processes an outcome. `None` if it is not of the current write.
    pub fn outcome(
        &mut self,
        now: Millis,
        write: WriteId,
        outcome: WriteOutcome<Head>,
    ) -> Option<Known> {
        let current = self.current.take_if(|current| current.write == write)?;
        Some(match outcome {
            WriteOutcome::Done(version) => Known::Done(current.head, version),
            WriteOutcome::Lost(head) => Known::Lost(head),
            WriteOutcome::Rejected if !self.is_uncertain => Known::Rejected(current),
            // A rejection may concern a repetition: an earlier attempt can still arrive.
            WriteOutcome::Rejected | WriteOutcome::Unknown => {
                self.is_uncertain = true;
                self.current = Some(current);
                self.repeat_at = Some(now.plus(REPEAT_MS));
                Known::Unknown
            }
        })
    }

    /// Returns the write that must be sent again now.
    pub fn due(&mut self, now: Millis) -> Option<HeadWrite> {
        self.repeat_at.take_if(|at| *at <= now)?;
        self.current.clone()
    }

    /// Returns the time at which [`Self::due`] must be called.
    pub fn wake_at(&self) -> Option<Millis> {
        self.repeat_at
    }
}
