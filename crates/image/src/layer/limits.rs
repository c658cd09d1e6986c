//! Limits for unpacking an untrusted layer, and counters that enforce them.
//!
//! A hostile archive may contain more bytes, files or names than the host can store.

use super::LayerError;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Limits of unpacking one archive, which is not trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnpackLimits {
    /// Maximum number of bytes of all files. Holes count in full, since the image stores them.
    pub bytes: u64,
    /// Maximum number of entries.
    pub entries: u64,
    /// Maximum number of unpacked bytes per packed byte. Applies after the first
    /// [`UnpackLimits::RATIO_SLACK`] bytes.
    pub ratio: u64,
    /// Maximum length in bytes of a path, or of the target of a symbolic link.
    pub path: usize,
    /// Maximum number of components of a path. The removal of a tree holds one descriptor per
    /// component.
    pub depth: usize,
    /// Maximum number of bytes of an entry's extended headers and its map of holes.
    pub headers: u64,
    /// Maximum number of bytes of the directory names that the unpacker remembers until the end,
    /// for their times and overlayfs's opaque marks.
    pub names: u64,
    /// Time limit.
    pub time: Duration,
}

impl UnpackLimits {
    /// Number of bytes that are unpacked before the ratio applies, since small archives of zeros
    /// are harmless.
    pub const RATIO_SLACK: u64 = 256 << 20;
}

impl Default for UnpackLimits {
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

/// Counters of one unpacking: the part of each limit that is still free.
pub(super) struct UnpackBudget {
    pub limits: UnpackLimits,
    bytes: u64,
    entries: u64,
    names: u64,
    deadline: Instant,
}

impl UnpackBudget {
    pub(super) fn new(limits: UnpackLimits) -> Self {
        Self {
            limits,
            bytes: limits.bytes,
            entries: limits.entries,
            names: limits.names,
            deadline: Instant::now() + limits.time,
        }
    }

    /// Counts a header. Headers of extensions count as well, since each of them takes time.
    pub(super) fn entry(&mut self) -> Result<(), LayerError> {
        self.in_time()?;
        self.entries = (self.entries.checked_sub(1))
            .ok_or_else(|| too_much("entries", self.limits.entries.to_string()))?;
        Ok(())
    }

    /// Counts a file. The caller must call this before the first byte is written.
    pub(super) fn file(&mut self, bytes: u64) -> Result<(), LayerError> {
        self.bytes = (self.bytes.checked_sub(bytes))
            .ok_or_else(|| too_much("bytes", format!("{} MiB", self.limits.bytes >> 20)))?;
        Ok(())
    }

    /// Counts a remembered name.
    pub(super) fn name(&mut self, name: &[u8]) -> Result<(), LayerError> {
        // Overhead of the vector, the time stamp and the allocator.
        const OVERHEAD: u64 = 64;
        self.names = (self.names.checked_sub(name.len() as u64 + OVERHEAD))
            .ok_or_else(|| too_much("names of directories", "the limit".to_owned()))?;
        Ok(())
    }

    pub(super) fn in_time(&self) -> Result<(), LayerError> {
        // The deadline is checked per entry and per block of content, so a slow sender of bytes
        // cannot bypass it.
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
