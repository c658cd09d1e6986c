//! `GET /changes`: lists the files that this sandbox created, changed or deleted compared with its
//! template. Their content is not included. `details=true` adds type, size, permissions and owner
//! of each file, at present and in the template.
//!
//! The root is an overlay, so the changes are the entries of its upper directory.

mod file_state;

use super::archive::is_excluded;
use super::error::RestError;
use super::file_query::parameter;
use crate::body::{ReplyBody, json};
use crate::boot::root;
use crate::state::Agent;
use crate::sys;
use crate::workers::{CallClass, Progress};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use file_state::{FileState, total_size};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Maximum number of changes in a response.
const MAX_CHANGES: usize = 100_000;
/// Default maximum number of changes in a response.
const DEFAULT_CHANGES: usize = 10_000;
/// Maximum depth of directories that are searched.
const MAX_DEPTH: usize = 512;
/// Attribute of a directory that hides its entries in lower layers (overlayfs).
const OPAQUE_XATTR: &CStr = c"trusted.overlay.opaque";
/// Attribute of a renamed directory. The value is its path in the template.
const REDIRECT_XATTR: &CStr = c"trusted.overlay.redirect";

/// Kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
enum ChangeKind {
    /// The file is new.
    A,
    /// The file differs.
    C,
    /// The file was deleted.
    D,
}

/// A file that differs from the template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct FileChange {
    path: String,
    /// Bytes of a path that is not UTF-8, in base64. Only with `details`.
    #[serde(skip_serializing_if = "Option::is_none")]
    path_bytes: Option<String>,
    kind: ChangeKind,
    /// Present state. Absent for a deleted file, and without `details`.
    #[serde(skip_serializing_if = "Option::is_none")]
    now: Option<FileState>,
    /// State in the template. Absent for a new file, and without `details`.
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<FileState>,
    /// Set for a directory that hides the template's directory of the same path: it has no files
    /// except the listed ones.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    complete: bool,
}

/// Response of `/changes`.
#[derive(Debug, Default, Serialize)]
struct FileChanges {
    changes: Vec<FileChange>,
    /// Set if changes are missing, because of the limit of the request or of [`MAX_DEPTH`].
    more: bool,
}

/// Returns the changes.
pub async fn answer(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = |name: &str| parameter(request.uri(), name);
    super::only_root(agent, query("username").as_deref(), "changes are").await?;
    let limit = match query("limit") {
        None => DEFAULT_CHANGES,
        Some(text) => text
            .parse()
            .ok()
            .filter(|n| (1..=MAX_CHANGES).contains(n))
            .ok_or_else(|| RestError::bad(format!("`limit` must be 1 to {MAX_CHANGES}")))?,
    };
    let detailed = query("details").as_deref() == Some("true");
    let Some((written, images)) = root::upper_directory().zip(root::lower_directories()) else {
        return Err(RestError::new(
            StatusCode::NOT_FOUND,
            "changes are unknown: this agent did not mount its root",
        ));
    };
    let upper = path_of(written);
    let lowers = images.iter().map(path_of).collect();
    let what = "cannot list the changes of this sandbox";
    let work = move |progress: &Progress| {
        let mut found = FileChanges::default();
        let mut walk = ChangeWalk {
            limit,
            detailed,
            step: &|| progress.advance(),
            merged: Path::new("/"),
            out: &mut found,
        };
        walk.directory(&upper, lowers, Path::new(""), WalkLevel::default())
            .map(|()| found)
            .map_err(|e| RestError::io(what, &e))
    };
    let call = agent.workers.attempt(CallClass::Archive, what, work);
    Ok(json(&call.await?))
}

/// Returns a path to an open directory. The path is valid even if a mount hides the directory.
fn path_of(directory: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()))
}

/// Comparison of the overlay's upper directory with its lower directories.
struct ChangeWalk<'a> {
    /// Maximum number of changes to record.
    limit: usize,
    /// True if the states of the files are recorded.
    detailed: bool,
    /// Called for each directory.
    step: &'a dyn Fn(),
    /// Root of the overlay.
    merged: &'a Path,
    out: &'a mut FileChanges,
}

/// Position of a [`ChangeWalk`].
#[derive(Clone, Copy, Default)]
struct WalkLevel {
    /// Number of directories above.
    depth: usize,
    /// True below an opaque directory, where all entries of the template are hidden.
    hidden: bool,
}

impl ChangeWalk<'_> {
    /// Records the differences between the directory `upper` and the directories `lowers`, which
    /// the overlay stacks below `upper` (uppermost first). Entries that are removed meanwhile are
    /// skipped.
    fn directory(
        &mut self,
        upper: &Path,
        lowers: Vec<PathBuf>,
        path: &Path,
        level: WalkLevel,
    ) -> io::Result<()> {
        let depth = level.depth;
        (self.step)();
        // The recursion is limited, because a program determines the depth of the tree.
        if depth > MAX_DEPTH {
            self.out.more = true;
            return Ok(());
        }
        let names = match names(upper) {
            Err(e) if depth > 0 && e.kind() == io::ErrorKind::NotFound => return Ok(()),
            names => names?,
        };
        // An opaque directory hides the template's directory of the same name completely. New
        // directories in it have no mark of their own.
        let hidden = level.hidden || depth > 0 && is_opaque(upper);
        let below_level = WalkLevel {
            depth: depth + 1,
            hidden,
        };
        if hidden {
            for name in names_below(&lowers)?.difference(&names) {
                let (before, below) = look_up(&lowers, name);
                let before = self.state_before(before.as_ref(), &below);
                self.note(&path.join(name), ChangeKind::D, None, before);
            }
        }
        for name in &names {
            let path = path.join(name);
            // Files of the boot and of the identity are not changes by programs of the sandbox.
            if is_excluded(path.as_os_str().as_bytes()) {
                continue;
            }
            let own = upper.join(name);
            let Ok(found) = fs::symlink_metadata(&own) else {
                continue;
            };
            let (before, below) = look_up(&lowers, name);
            match (is_whiteout(&found), &before) {
                (true, Some(before)) => {
                    let before = self.state_before(Some(before), &below);
                    self.note(&path, ChangeKind::D, None, before);
                }
                // The file was created and deleted.
                (true, None) => continue,
                (false, Some(before)) => {
                    let before = self.detailed.then(|| FileState::of(before));
                    self.note(&path, ChangeKind::C, Some(&found), before);
                }
                (false, None) => self.note(&path, ChangeKind::A, Some(&found), None),
            }
            if self.out.more {
                return Ok(());
            }
            // The entries of a renamed directory are in the template under another path, so they
            // are read through the overlay.
            if found.is_dir() && has_xattr(&own, REDIRECT_XATTR, None) {
                self.mark_complete();
                self.renamed(&below, &path, depth + 1)?;
            } else if found.is_dir() {
                self.directory(&own, below, &path, below_level)?;
            }
        }
        Ok(())
    }

    /// Records the content of a renamed directory. Its files are new at `path`. The files that the
    /// template has at `path` (in `lowers`) are replaced or deleted.
    fn renamed(&mut self, lowers: &[PathBuf], path: &Path, depth: usize) -> io::Result<()> {
        let root = self.merged.join(path);
        // Directories are read through the overlay, where other file systems may be mounted.
        let device = fs::symlink_metadata(&root)?.dev();
        let before = names_below(lowers)?;
        let now = names(&root)?;
        for name in before.difference(&now) {
            let (state, below) = look_up(lowers, name);
            let state = self.state_before(state.as_ref(), &below);
            self.note(&path.join(name), ChangeKind::D, None, state);
        }
        let top = depth;
        let mut waiting = vec![(path.to_path_buf(), depth)];
        while let Some((path, depth)) = waiting.pop() {
            (self.step)();
            for name in names(&self.merged.join(&path))? {
                let path = path.join(&name);
                let Ok(found) = fs::symlink_metadata(self.merged.join(&path)) else {
                    continue;
                };
                if depth == top && before.contains(&name) {
                    let (state, below) = look_up(lowers, &name);
                    let state = self.state_before(state.as_ref(), &below);
                    self.note(&path, ChangeKind::C, Some(&found), state);
                } else {
                    self.note(&path, ChangeKind::A, Some(&found), None);
                }
                if found.is_dir() {
                    self.mark_complete();
                }
                if self.out.more {
                    return Ok(());
                }
                // A file system that is mounted below the directory is not part of the changes.
                if found.is_dir() && found.dev() == device {
                    if depth < MAX_DEPTH {
                        waiting.push((path, depth + 1))
                    } else {
                        self.out.more = true
                    }
                }
            }
        }
        Ok(())
    }

    /// Records a change. `now` is the present file.
    fn note(
        &mut self,
        path: &Path,
        kind: ChangeKind,
        now: Option<&Metadata>,
        before: Option<FileState>,
    ) {
        if self.out.changes.len() >= self.limit {
            self.out.more = true;
            return;
        }
        let text = path.to_string_lossy();
        let is_lossy = self.detailed && matches!(text, Cow::Owned(_));
        let bytes = is_lossy.then(|| [b"/", path.as_os_str().as_bytes()].concat());
        self.out.changes.push(FileChange {
            path: format!("/{text}"),
            path_bytes: bytes.map(|bytes| STANDARD.encode(bytes)),
            kind,
            now: now.filter(|_| self.detailed).map(FileState::of),
            before,
            complete: false,
        });
    }

    /// Marks the directory that was recorded last as complete.
    fn mark_complete(&mut self) {
        if let Some(last) = self.out.changes.last_mut().filter(|_| self.detailed) {
            last.complete = true;
        }
    }

    /// Returns the state that a file or directory has in the template. `before` is its metadata
    /// there. For a directory, `below` lists the directories of the overlay's lower layers that
    /// form it, and the returned size is the total size of its files. `None` without details.
    fn state_before(&self, before: Option<&Metadata>, below: &[PathBuf]) -> Option<FileState> {
        let before = before.filter(|_| self.detailed)?;
        let mut state = FileState::of(before);
        if before.is_dir() {
            state.size = total_size(below, self.step);
        }
        Some(state)
    }
}

/// Returns the names of the entries in a directory.
fn names(directory: &Path) -> io::Result<BTreeSet<OsString>> {
    let entries = fs::read_dir(directory)?;
    Ok(entries.flatten().map(|entry| entry.file_name()).collect())
}

/// Returns the names of the entries in stacked directories, uppermost first. A whiteout hides the
/// name in all directories below.
fn names_below(lowers: &[PathBuf]) -> io::Result<BTreeSet<OsString>> {
    let mut all = BTreeSet::new();
    let mut deleted = BTreeSet::new();
    for lower in lowers {
        for name in names(lower)? {
            match fs::symlink_metadata(lower.join(&name)) {
                Ok(found) if is_whiteout(&found) => drop(deleted.insert(name)),
                _ if !deleted.contains(&name) => drop(all.insert(name)),
                _ => {}
            }
        }
    }
    Ok(all)
}

/// Returns the file `name` of the stacked directories `lowers`, if it exists. If it is a directory,
/// also returns the directories that form it.
fn look_up(lowers: &[PathBuf], name: &OsStr) -> (Option<Metadata>, Vec<PathBuf>) {
    let mut top = None;
    let mut directories = Vec::new();
    for lower in lowers {
        let path = lower.join(name);
        match fs::symlink_metadata(&path) {
            Err(_) => continue,
            Ok(found) if is_whiteout(&found) => break,
            Ok(found) => {
                let is_directory = found.is_dir();
                let first = top.is_none();
                top.get_or_insert(found);
                if !is_directory {
                    // A file hides the entries of this name in lower layers. If a higher layer has
                    // a directory of this name, the directory hides the file.
                    break;
                }
                debug_assert!(first || !directories.is_empty());
                // An opaque directory hides the directories below it, but not itself.
                let last = is_opaque(&path);
                directories.push(path);
                if last {
                    break;
                }
            }
        }
    }
    (top, directories)
}

/// Returns whether the file is overlayfs's mark of a deleted file.
fn is_whiteout(found: &Metadata) -> bool {
    found.file_type().is_char_device() && found.rdev() == 0
}

/// Returns whether a directory hides the entries of its path in lower layers.
fn is_opaque(directory: &Path) -> bool {
    has_xattr(directory, OPAQUE_XATTR, Some(b"y"))
}

/// Returns whether a file has the attribute `name`, with the value `expected` if given.
fn has_xattr(path: &Path, name: &CStr, expected: Option<&[u8]>) -> bool {
    let Ok(path) = sys::cpath(path) else {
        return false;
    };
    let mut value = [0_u8; libc::PATH_MAX as usize];
    // SAFETY: the strings are zero-terminated, and the buffer has the given length.
    let length = unsafe {
        libc::lgetxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    let Ok(length) = usize::try_from(length) else {
        return false;
    };
    expected.is_none_or(|expected| &value[..length] == expected)
}

#[cfg(test)]
mod tests;
