//! Events of a directory and the directories below it, read from an inotify instance.

use super::entry::{self, base64_unless_text};
use super::message::FilesystemEvent;
use crate::rpc::{RpcCode, RpcError};
use crate::sys;
use crate::users::Users;
use crate::workers::Progress;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Events that the kernel reports for each watched directory.
const MASK: u32 = libc::IN_CREATE
    | libc::IN_MODIFY
    | libc::IN_DELETE
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_ATTRIB
    | libc::IN_ONLYDIR;
/// Size of an event without its name, in bytes.
const HEADER: usize = size_of::<libc::inotify_event>();

/// Descriptor of an inotify instance. It is readable if there are events.
#[derive(Clone)]
pub struct WatchDescriptor(Arc<OwnedFd>);

impl AsRawFd for WatchDescriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for WatchDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A watched directory.
pub struct DirectoryWatch {
    inotify: WatchDescriptor,
    /// Path of the watched directory.
    root: PathBuf,
    /// True if all directories below the root are watched.
    recursive: bool,
    /// True if events contain the properties of the changed file.
    include_entry: bool,
    /// Watch descriptors, with paths relative to the root.
    directories: HashMap<i32, PathBuf>,
    /// Buffer for events of the kernel.
    buffer: Vec<u8>,
    /// Reason for missing events since the last report.
    loss: Option<String>,
}

impl DirectoryWatch {
    /// Watches a directory. With `recursive`, also watches all directories below.
    ///
    /// # Errors
    /// A directory cannot be watched, for example because the user has reached the kernel's limit
    /// of watches.
    pub fn new(
        root: &Path,
        recursive: bool,
        include_entry: bool,
        progress: &Progress,
    ) -> Result<Self, RpcError> {
        let failed = |e: &io::Error| RpcError::io(&format!("cannot watch '{}'", root.display()), e);
        // SAFETY: no pointers.
        let inotify =
            sys::owned(unsafe { libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC) })
                .map_err(|e| failed(&e))?;
        let mut watch = Self {
            inotify: WatchDescriptor(Arc::new(inotify)),
            root: root.to_path_buf(),
            recursive,
            include_entry,
            directories: HashMap::new(),
            // Much longer than one event with the longest name (16 + 256 bytes), so that a read
            // returns at least one event.
            buffer: vec![0; 8 * 1024],
            loss: None,
        };
        watch.add(Path::new("")).map_err(|e| failed(&e))?;
        if recursive {
            watch.add_below(Path::new(""), None, progress);
        }
        match watch.take_loss() {
            Some(loss) => Err(RpcError::new(RpcCode::ResourceExhausted, loss)),
            None => Ok(watch),
        }
    }

    /// Returns the descriptor to wait on.
    pub fn descriptor(&self) -> WatchDescriptor {
        self.inotify.clone()
    }

    /// Adds a directory below the root to the inotify instance.
    fn add(&mut self, relative: &Path) -> io::Result<()> {
        let path = sys::cpath(&self.root.join(relative))?;
        // A move below the root is reported by the event of the parent directory.
        let mask = if relative.as_os_str().is_empty() {
            MASK | libc::IN_MOVE_SELF
        } else {
            MASK
        };
        // SAFETY: the string is zero-terminated.
        let id = sys::check(unsafe {
            libc::inotify_add_watch(self.inotify.as_raw_fd(), path.as_ptr(), mask)
        })?;
        self.directories.insert(id, relative.to_path_buf());
        Ok(())
    }

    /// Watches a directory below the root as [`Self::add`] does. Returns whether it is watched.
    fn add_or_note(&mut self, relative: &Path) -> bool {
        match self.add(relative) {
            Ok(()) => true,
            Err(e) => {
                // A directory that was removed or replaced meanwhile needs no watch.
                if !matches!(
                    e.raw_os_error(),
                    Some(libc::ENOENT | libc::ENOTDIR | libc::ESRCH)
                ) {
                    let path = self.root.join(relative);
                    self.loss.get_or_insert(format!(
                        "cannot watch '{}': {e}; its events are missing",
                        path.display()
                    ));
                }
                false
            }
        }
    }

    /// Watches all directories below `top`. Adds all entries below `top` to `found`, because an
    /// entry that is older than the watch of its directory causes no event.
    fn add_below(&mut self, top: &Path, mut found: Option<&mut Vec<PathBuf>>, progress: &Progress) {
        let mut waiting = vec![top.to_path_buf()];
        while let Some(relative) = waiting.pop() {
            // Ignore the error: a directory that was removed meanwhile has no entries.
            let Ok(entries) = std::fs::read_dir(self.root.join(&relative)) else {
                continue;
            };
            for child in entries.flatten() {
                progress.advance();
                let path = relative.join(child.file_name());
                let is_directory = child.file_type().is_ok_and(|kind| kind.is_dir());
                if let Some(found) = &mut found {
                    found.push(path.clone());
                }
                if is_directory && self.add_or_note(&path) {
                    waiting.push(path);
                }
            }
        }
    }

    /// Stops watching a directory and all directories below. The directory was moved, and its
    /// events would have an outdated name. If it is still below the root, it is watched again when
    /// the event with its new name is read.
    fn remove_below(&mut self, top: &Path) {
        let inotify = self.inotify.as_raw_fd();
        self.directories.retain(|id, path| {
            let is_below = path.starts_with(top);
            if is_below {
                // SAFETY: the call takes no pointers. It fails if the directory was removed
                // meanwhile.
                unsafe { libc::inotify_rm_watch(inotify, *id) };
            }
            !is_below
        });
    }

    /// Reads the queued events. Returns the error `WouldBlock` if there are none.
    pub fn read(&mut self, progress: &Progress) -> io::Result<Vec<FilesystemEvent>> {
        let n = sys::read(self.inotify.as_raw_fd(), &mut self.buffer)?;
        let bytes = self.buffer[..n].to_vec();
        let mut events = Vec::new();
        let mut rest = &bytes[..];
        while rest.len() >= HEADER {
            progress.advance();
            // SAFETY: the kernel wrote a complete event header here. It may be unaligned.
            let event = unsafe { rest.as_ptr().cast::<libc::inotify_event>().read_unaligned() };
            // The kernel returns complete events, so `min` only prevents a panic on a faulty
            // kernel.
            let end = (HEADER + event.len as usize).min(rest.len());
            let name = rest[HEADER..end].split(|b| *b == 0).next().unwrap_or(b"");
            self.translate(event.wd, event.mask, name, &mut events, progress);
            rest = &rest[end..];
        }
        Ok(events)
    }

    /// Returns the reason for missing events, once per loss.
    pub fn take_loss(&mut self) -> Option<String> {
        self.loss.take()
    }

    /// Converts one inotify event to events for clients. Adds watches for new directories, and
    /// removes the watches of moved ones. A loss of events is recorded in `self.loss`.
    fn translate(
        &mut self,
        id: i32,
        mask: u32,
        name: &[u8],
        events: &mut Vec<FilesystemEvent>,
        progress: &Progress,
    ) {
        if mask & libc::IN_Q_OVERFLOW != 0 {
            self.loss.get_or_insert(format!(
                "events below '{}' were lost: the kernel's queue was full; list the directory",
                self.root.display()
            ));
            return;
        }
        // The watch no longer exists: the directory was deleted, its file system was unmounted, or
        // `remove_below` removed the watch.
        if mask & libc::IN_IGNORED != 0 {
            self.directories.remove(&id);
            return;
        }
        if mask & libc::IN_MOVE_SELF != 0 {
            self.remove_below(Path::new(""));
            self.loss.get_or_insert(format!(
                "'{}' was moved and is no longer watched; watch its new path",
                self.root.display()
            ));
            return;
        }
        let kind = if mask & (libc::IN_CREATE | libc::IN_MOVED_TO) != 0 {
            "EVENT_TYPE_CREATE"
        } else if mask & libc::IN_MODIFY != 0 {
            "EVENT_TYPE_WRITE"
        } else if mask & libc::IN_DELETE != 0 {
            "EVENT_TYPE_REMOVE"
        } else if mask & libc::IN_MOVED_FROM != 0 {
            "EVENT_TYPE_RENAME"
        } else if mask & libc::IN_ATTRIB != 0 {
            "EVENT_TYPE_CHMOD"
        } else {
            return;
        };
        // The event was queued before its watch was removed.
        let Some(directory) = self.directories.get(&id) else {
            return;
        };
        // Changes of the attributes of the watched directory itself are reported by its parent, if
        // the parent is watched.
        if name.is_empty() {
            return;
        }
        let path = directory.join(OsStr::from_bytes(name));
        events.push(self.event(&path, kind));
        if !self.recursive || mask & libc::IN_ISDIR == 0 {
            return;
        }
        if kind == "EVENT_TYPE_RENAME" {
            self.remove_below(&path);
        } else if kind == "EVENT_TYPE_CREATE" && self.add_or_note(&path) {
            // The new directory is already watched when it is listed. An entry that is created in
            // between is reported twice, but never missed.
            let mut found = Vec::new();
            self.add_below(&path, Some(&mut found), progress);
            for path in found {
                events.push(self.event(&path, "EVENT_TYPE_CREATE"));
            }
        }
    }

    /// Returns an event about `path`, which is relative to the watched root.
    fn event(&self, path: &Path, kind: &'static str) -> FilesystemEvent {
        let entry = self
            .include_entry
            .then(|| entry::describe(&self.root.join(path), &Users::load()).ok())
            .flatten();
        FilesystemEvent {
            name: path.to_string_lossy().into_owned(),
            name_bytes: base64_unless_text(path),
            kind,
            entry,
        }
    }
}
