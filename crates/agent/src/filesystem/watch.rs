//! Events of a directory, through inotify.

use super::entry;
use super::message::FilesystemEvent;
use crate::sys;
use crate::users::Users;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

const MASK: u32 = libc::IN_CREATE
    | libc::IN_MODIFY
    | libc::IN_DELETE
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_ATTRIB
    | libc::IN_ONLYDIR;
const HEADER: usize = size_of::<libc::inotify_event>();

/// A watched directory.
pub struct DirectoryWatch {
    inotify: OwnedFd,
    root: PathBuf,
    recursive: bool,
    include_entry: bool,
    /// Watch descriptor to path relative to the root.
    directories: HashMap<i32, PathBuf>,
    buffer: Vec<u8>,
    overflow: bool,
}

impl AsRawFd for DirectoryWatch {
    fn as_raw_fd(&self) -> RawFd {
        self.inotify.as_raw_fd()
    }
}

impl AsFd for DirectoryWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

impl DirectoryWatch {
    /// Watches a directory, and with `recursive` all below.
    pub fn new(root: &Path, recursive: bool, include_entry: bool) -> io::Result<Self> {
        // SAFETY: no pointers.
        let inotify =
            sys::owned(unsafe { libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC) })?;
        let mut watch = Self {
            inotify,
            root: root.to_path_buf(),
            recursive,
            include_entry,
            directories: HashMap::new(),
            buffer: vec![0; 8 * 1024],
            overflow: false,
        };
        watch.add(Path::new(""))?;
        if recursive {
            watch.add_below(Path::new(""), &mut Vec::new());
        }
        Ok(watch)
    }

    fn add(&mut self, relative: &Path) -> io::Result<()> {
        let path = sys::cpath(&self.root.join(relative))?;
        // SAFETY: a valid C string.
        let id = sys::check(unsafe {
            libc::inotify_add_watch(self.inotify.as_raw_fd(), path.as_ptr(), MASK)
        })?;
        self.directories.insert(id, relative.to_path_buf());
        Ok(())
    }

    /// Watches all directories below one. Their entries may be older than the watch: they are
    /// reported.
    fn add_below(&mut self, relative: &Path, found: &mut Vec<PathBuf>) {
        let Ok(reading) = std::fs::read_dir(self.root.join(relative)) else {
            return;
        };
        for child in reading.flatten() {
            let path = relative.join(child.file_name());
            found.push(path.clone());
            if child.file_type().is_ok_and(|t| t.is_dir()) && self.add(&path).is_ok() {
                self.add_below(&path, found);
            }
        }
    }

    /// The events that are there; `WouldBlock` when there are none.
    pub fn read(&mut self) -> io::Result<Vec<FilesystemEvent>> {
        let n = sys::read(self.inotify.as_raw_fd(), &mut self.buffer)?;
        let bytes = self.buffer[..n].to_vec();
        let mut events = Vec::new();
        let mut rest = &bytes[..];
        while rest.len() >= HEADER {
            // SAFETY: the kernel wrote a whole event header here; it may be unaligned.
            let event = unsafe { rest.as_ptr().cast::<libc::inotify_event>().read_unaligned() };
            let end = (HEADER + event.len as usize).min(rest.len());
            let name = rest[HEADER..end].split(|b| *b == 0).next().unwrap_or(b"");
            self.translate(event.wd, event.mask, name, &mut events);
            rest = &rest[end..];
        }
        Ok(events)
    }

    /// Says once whether the kernel dropped events because too many waited.
    pub fn take_overflow(&mut self) -> bool {
        std::mem::take(&mut self.overflow)
    }

    fn translate(&mut self, id: i32, mask: u32, name: &[u8], events: &mut Vec<FilesystemEvent>) {
        if mask & libc::IN_Q_OVERFLOW != 0 {
            self.overflow = true;
            return;
        }
        if mask & libc::IN_IGNORED != 0 {
            self.directories.remove(&id);
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
        let Some(directory) = self.directories.get(&id) else {
            return;
        };
        // Changes of attributes of the watched directory itself are reported by its parent, if that
        // is watched.
        if name.is_empty() {
            return;
        }
        let path =
            directory.join(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(name));
        events.push(self.event(&path, kind));
        let created_directory = kind == "EVENT_TYPE_CREATE" && mask & libc::IN_ISDIR != 0;
        if self.recursive && created_directory && self.add(&path).is_ok() {
            let mut found = Vec::new();
            self.add_below(&path, &mut found);
            for path in found {
                events.push(self.event(&path, "EVENT_TYPE_CREATE"));
            }
        }
    }

    fn event(&self, path: &Path, kind: &'static str) -> FilesystemEvent {
        let entry = self
            .include_entry
            .then(|| entry::describe(&self.root.join(path), &Users::load()).ok())
            .flatten();
        FilesystemEvent {
            name: path.to_string_lossy().into_owned(),
            kind,
            entry,
        }
    }
}
