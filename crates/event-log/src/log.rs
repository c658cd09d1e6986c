//! [`AppendLog`]: an append-only log in several files, of which the oldest are removed.

pub(crate) mod page;

use crate::id::EntryId;
use crate::segment::Segment;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum size of an entry. Larger entries are not recorded.
pub(crate) const MAX_ENTRY_BYTES: usize = 16 << 10;
/// Maximum size of a file.
const MAX_SEGMENT_BYTES: u64 = 4 << 20;
/// Minimum size of a file of a small log.
const MIN_SEGMENT_BYTES: u64 = 64 << 10;
/// Number of files of a log that has its maximum size.
const SEGMENTS: u64 = 64;
/// Number of files in the retention period.
const SEGMENTS_PER_AGE: u32 = 7;
/// Number of random bytes in the name of a host without a fleet.
const HOST_BYTES: usize = 6;

/// Limits of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Maximum size in bytes.
    pub max_bytes: u64,
    /// Entries are retained at least this long if the size permits it. They are removed when they
    /// are older by two sevenths at most, provided that entries are recorded then.
    pub max_age: Duration,
}

/// Removed entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dropped {
    /// Number of removed entries.
    pub count: u64,
    /// Time of the newest removed entry, in microseconds since 1970.
    pub until_us: u64,
}

/// A log cannot be opened or read.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the log in {}: {source}; check that the disk is readable and not full", path.display())]
pub struct LogError {
    path: PathBuf,
    source: io::Error,
}

/// Log in a directory.
#[derive(Debug)]
pub(crate) struct AppendLog {
    directory: PathBuf,
    host: Arc<str>,
    retention: Retention,
    state: Mutex<State>,
}

/// Open files of a log.
#[derive(Debug)]
struct State {
    /// Files, oldest first. Entries are appended to the last one.
    segments: VecDeque<Segment>,
    file: File,
    /// Number of entries that could not be written. They count as dropped.
    unwritten: u64,
    last_unwritten_us: u64,
}

impl AppendLog {
    /// Opens or creates the log in `directory`. `host` is the name of this host in a fleet. A host
    /// without a fleet has a random name, which the log retains.
    pub fn open(
        directory: &Path,
        host: Option<&str>,
        retention: Retention,
    ) -> Result<Self, LogError> {
        let failed = |source| LogError {
            path: directory.to_owned(),
            source,
        };
        let mut segments = open_segments(directory).map_err(failed)?;
        let newest = segments.back().map(|segment| segment.host.clone());
        let host: Arc<str> = match (host, &newest) {
            (Some(host), _) => host.into(),
            (None, Some(newest)) => newest.clone(),
            (None, None) => random_host().map_err(failed)?,
        };
        let file = match segments.back_mut() {
            Some(last) => {
                let file = last.reopen().map_err(failed)?;
                (last.host == host).then_some(file)
            }
            None => None,
        };
        let file = match file {
            Some(file) => file,
            None => {
                let next = next_position(&segments);
                let (segment, file) = Segment::create(directory, &host, next).map_err(failed)?;
                segments.push_back(segment);
                file
            }
        };
        let log = Self {
            directory: directory.to_owned(),
            host,
            retention,
            state: Mutex::new(State {
                segments,
                file,
                unwritten: 0,
                last_unwritten_us: 0,
            }),
        };
        log.remove_old(&mut log.state.lock());
        Ok(log)
    }

    /// Name of this host in ids.
    pub fn host(&self) -> &Arc<str> {
        &self.host
    }

    /// Appends the entry that `line` returns for its time, in microseconds since 1970. Returns the
    /// time. `None` if the entry could not be written: it counts as dropped.
    pub fn append(&self, line: impl FnOnce(u64) -> serde_json::Result<Vec<u8>>) -> Option<u64> {
        let mut state = self.state.lock();
        let last_us = state.segments.back().map_or(0, |segment| segment.last_us);
        let time_us = now_us().max(last_us + 1);
        let written = line(time_us).map_err(io::Error::from).and_then(|mut line| {
            if line.len() > MAX_ENTRY_BYTES {
                return Err(io::Error::other("the entry is too large"));
            }
            line.push(b'\n');
            self.write(&mut state, &line, time_us)
        });
        match written {
            Ok(()) => Some(time_us),
            Err(error) => {
                // The first failure is reported: a full disk must not fill the daemon's log.
                if state.unwritten == 0 {
                    tracing::error!(directory = %self.directory.display(), %error, "cannot record an entry");
                }
                state.unwritten += 1;
                state.last_unwritten_us = time_us;
                None
            }
        }
    }

    /// Appends a line to the newest file. Starts another file first if the newest one is too old or
    /// too large.
    fn write(&self, state: &mut State, line: &[u8], time_us: u64) -> io::Result<()> {
        let is_due = state.segments.back().is_none_or(|last| {
            let age = time_us.saturating_sub(last.created_us);
            let max_age = self.retention.max_age / SEGMENTS_PER_AGE;
            let is_old = u128::from(age) > max_age.as_micros() && last.entries > 0;
            is_old || last.bytes + line.len() as u64 > segment_bytes(self.retention)
        });
        if is_due {
            let next = next_position(&state.segments);
            // A log that cannot have a further file continues in the present one.
            match Segment::create(&self.directory, &self.host, next) {
                Ok((segment, file)) => {
                    state.segments.push_back(segment);
                    state.file = file;
                    self.remove_old(state);
                }
                Err(error) => {
                    let directory = self.directory.display();
                    tracing::debug!(%directory, %error, "cannot create a file of a log");
                }
            }
        }
        let State { segments, file, .. } = state;
        let Some(last) = segments.back_mut() else {
            return Err(io::Error::other("the log has no file"));
        };
        if let Err(e) = file.write_all(line) {
            // Remove the written part of the entry. If this fails too, readers skip the damaged
            // line.
            if file.set_len(last.bytes).is_err() {
                last.bytes = file.metadata().map_or(last.bytes, |data| data.len());
            }
            return Err(e);
        }
        last.bytes += line.len() as u64;
        last.entries += 1;
        last.last_us = time_us;
        Ok(())
    }

    /// Removes the oldest files beyond the limits.
    fn remove_old(&self, state: &mut State) {
        let max_age = u64::try_from(self.retention.max_age.as_micros()).unwrap_or(u64::MAX);
        let oldest_us = now_us().saturating_sub(max_age);
        while state.segments.len() > 1 {
            let bytes: u64 = state.segments.iter().map(|segment| segment.bytes).sum();
            let Some(first) = state.segments.front() else {
                return;
            };
            if bytes <= self.retention.max_bytes && first.last_us >= oldest_us {
                return;
            }
            if let Err(error) = fs::remove_file(&first.path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(file = %first.path.display(), %error, "cannot remove a file of a log");
                return;
            }
            state.segments.pop_front();
        }
    }

    /// Returns the removed entries. `None` if none were removed.
    pub fn dropped(&self) -> Option<Dropped> {
        let state = self.state.lock();
        let first = state.segments.front()?;
        let count = first.before + state.unwritten;
        (count > 0).then(|| Dropped {
            count,
            until_us: first.previous_us.max(state.last_unwritten_us),
        })
    }

    /// Returns the id of the newest entry, also if it was removed. `None` if there was none.
    pub fn newest(&self) -> Option<EntryId> {
        let state = self.state.lock();
        let last = state.segments.back()?;
        (last.last_us > 0).then(|| EntryId {
            time_us: last.last_us,
            host: last.host.clone(),
        })
    }

    /// Returns the files, oldest first. The sizes exclude entries that are written later.
    pub fn segments(&self) -> Vec<Segment> {
        self.state.lock().segments.iter().cloned().collect()
    }

    /// Returns the error of reading a file.
    pub fn failed(&self, source: io::Error) -> LogError {
        LogError {
            path: self.directory.clone(),
            source,
        }
    }
}

/// Returns the number of entries before the next file, the time of the last of them, and the time
/// of the file.
fn next_position(segments: &VecDeque<Segment>) -> (u64, u64, u64) {
    let Some(last) = segments.back() else {
        return (0, 0, now_us());
    };
    let created_us = now_us().max(last.created_us + 1);
    (last.before + last.entries, last.last_us, created_us)
}

/// Returns the files of a directory, oldest first. Creates the directory if it is missing.
fn open_segments(directory: &Path) -> io::Result<VecDeque<Segment>> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    let mut segments = Vec::new();
    for file in fs::read_dir(directory)? {
        let path = file?.path();
        match Segment::open(&path)? {
            Some(segment) => segments.push(segment),
            None => tracing::warn!(file = %path.display(), "ignoring an unknown file of a log"),
        }
    }
    segments.sort_by_key(|segment| segment.created_us);
    // The header of each file describes the file before.
    for at in 1..segments.len() {
        segments[at - 1].last_us = segments[at].previous_us;
    }
    Ok(segments.into())
}

fn segment_bytes(retention: Retention) -> u64 {
    (retention.max_bytes / SEGMENTS).clamp(MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES)
}

fn random_host() -> io::Result<Arc<str>> {
    let mut bytes = [0; HOST_BYTES];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
    Ok(digits.collect::<String>().into())
}

/// Returns the present time in microseconds since 1970.
pub(crate) fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
}
