//! How much one layer may cost.

use super::LayerError;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Bounds on what is unpacked from one archive. Whoever packed it is not trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of all files together; a hole counts as what it stands for, because the image holds it written out.
    pub bytes: u64,
    /// Entries of the archive.
    pub entries: u64,
    /// Unpacked bytes per packed byte, once [`Limits::RATIO_SLACK`] has been unpacked.
    pub ratio: u64,
    /// Bytes of one path, and of one symbolic link's target.
    pub path: usize,
    /// Names of one path. Removing a tree holds one descriptor for each.
    pub depth: usize,
    /// Bytes of an entry's extended headers together, and of its map of holes.
    pub headers: u64,
    /// Bytes of names that are remembered until the end (those of directories).
    pub names: u64,
    /// How long it may take.
    pub time: Duration,
}

impl Limits {
    /// What may be unpacked before the ratio counts: small archives of zeros are harmless.
    pub const RATIO_SLACK: u64 = 256 << 20;
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 32 << 30,
            entries: 4_000_000,
            ratio: 500,
            path: 4095,
            depth: 256,
            headers: 4 << 20,
            names: 256 << 20,
            time: Duration::from_secs(3600),
        }
    }
}

/// What is left of the bounds while one layer is unpacked.
pub(super) struct Budget {
    pub limits: Limits,
    bytes: u64,
    entries: u64,
    names: u64,
    deadline: Instant,
}

impl Budget {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            bytes: limits.bytes,
            entries: limits.entries,
            names: limits.names,
            deadline: Instant::now() + limits.time,
        }
    }

    /// Counts one header of the archive: also those that only say something about the next one take time.
    pub(super) fn entry(&mut self) -> Result<(), LayerError> {
        self.in_time()?;
        self.entries = (self.entries.checked_sub(1))
            .ok_or_else(|| too_much("entries", self.limits.entries.to_string()))?;
        Ok(())
    }

    /// Counts a file before its first byte is written.
    pub(super) fn file(&mut self, bytes: u64) -> Result<(), LayerError> {
        self.bytes = (self.bytes.checked_sub(bytes))
            .ok_or_else(|| too_much("bytes", format!("{} MiB", self.limits.bytes >> 20)))?;
        Ok(())
    }

    /// Counts a name that is remembered.
    pub(super) fn name(&mut self, name: &[u8]) -> Result<(), LayerError> {
        // What a vector, its time and the allocator add.
        const OVERHEAD: u64 = 64;
        self.names = (self.names.checked_sub(name.len() as u64 + OVERHEAD))
            .ok_or_else(|| too_much("names of directories", "their limit".to_owned()))?;
        Ok(())
    }

    pub(super) fn in_time(&self) -> Result<(), LayerError> {
        if Instant::now() > self.deadline {
            let seconds = self.limits.time.as_secs();
            return Err(too_much("time", format!("{seconds} s")));
        }
        Ok(())
    }
}

pub(super) fn too_much(what: &'static str, limit: String) -> LayerError {
    LayerError::TooMuch { what, limit }
}
