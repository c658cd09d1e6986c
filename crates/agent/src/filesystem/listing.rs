//! `ListDir`: lists the entries of a directory. The entries are described and sent in slices.

use super::entry;
use crate::rpc::{RpcCode, RpcError};
use crate::users::Users;
use crate::workers::{ChunkSource, Progress};
use bytes::Bytes;
use std::io;
use std::path::{Path, PathBuf};

/// Maximum number of entries of one listing.
const MAX_ENTRIES: usize = 100_000;
/// Number of entries that one call of a worker describes.
const SLICE: usize = 512;
/// Size in bytes at which a slice is sent even if it has fewer entries.
const SLICE_BYTES: usize = 256 * 1024;

/// A listing, as the JSON object `{"entries":[...]}`.
pub struct Listing {
    /// Paths of the entries that were not described yet.
    paths: std::vec::IntoIter<PathBuf>,
    users: Users,
    /// Set after the first entry was written: a comma precedes the next entry.
    has_entries: bool,
    state: ListingState,
}

/// Progress of a listing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ListingState {
    /// No slice was produced yet.
    New,
    /// The first slice was produced.
    Begun,
    /// The last slice was produced.
    Ended,
}

impl Listing {
    /// Collects the paths below a directory down to `depth` levels, in sorted order.
    pub fn new(path: &Path, depth: u32, progress: &Progress) -> Result<Self, RpcError> {
        let what = format!("cannot list '{}'", path.display());
        let failed = |e: &io::Error| RpcError::io(&what, e);
        if !std::fs::metadata(path).map_err(|e| failed(&e))?.is_dir() {
            return Err(RpcError::new(
                RpcCode::InvalidArgument,
                format!("'{}' is not a directory", path.display()),
            ));
        }
        let mut paths = Vec::new();
        // A list replaces a recursion: the depth of a tree is not limited.
        let mut waiting = vec![(path.to_path_buf(), depth.max(1))];
        while let Some((directory, depth)) = waiting.pop() {
            let entries = match std::fs::read_dir(&directory) {
                Ok(entries) => entries,
                // Subdirectories may be removed meanwhile.
                Err(_) if directory != path => continue,
                Err(e) => return Err(failed(&e)),
            };
            for found in entries.flatten() {
                if paths.len() == MAX_ENTRIES {
                    return Err(RpcError::new(
                        RpcCode::ResourceExhausted,
                        format!("{what}: more than {MAX_ENTRIES} entries"),
                    ));
                }
                if depth > 1 && found.file_type().is_ok_and(|kind| kind.is_dir()) {
                    waiting.push((found.path(), depth - 1));
                }
                paths.push(found.path());
                progress.advance();
            }
        }
        // Sort by the bytes of the whole path. The order of `Path` would compare component by
        // component.
        paths.sort_unstable_by(|a, b| a.as_os_str().cmp(b.as_os_str()));
        Ok(Self {
            paths: paths.into_iter(),
            users: Users::load(),
            has_entries: false,
            state: ListingState::New,
        })
    }

    /// Returns whether the last slice was produced.
    pub fn is_ended(&self) -> bool {
        self.state == ListingState::Ended
    }
}

impl ChunkSource for Listing {
    fn next_chunk(&mut self, progress: &Progress) -> io::Result<Option<Bytes>> {
        // One call of a worker produces one slice, so that a long listing does not occupy a thread.
        let mut text = Vec::new();
        match self.state {
            ListingState::New => text.extend_from_slice(b"{\"entries\":["),
            ListingState::Begun => {}
            ListingState::Ended => return Ok(None),
        }
        self.state = ListingState::Begun;
        for path in self.paths.by_ref().take(SLICE) {
            progress.advance();
            // Entries may be removed meanwhile.
            let Ok(info) = entry::describe(&path, &self.users) else {
                continue;
            };
            if std::mem::replace(&mut self.has_entries, true) {
                text.push(b',');
            }
            serde_json::to_writer(&mut text, &info)?;
            if text.len() >= SLICE_BYTES {
                break;
            }
        }
        if self.paths.as_slice().is_empty() {
            text.extend_from_slice(b"]}");
            self.state = ListingState::Ended;
        }
        Ok(Some(text.into()))
    }
}
