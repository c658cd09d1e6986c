//! Access to the files of a volume by the daemon: a client of the volume's server.
//!
//! The client sends the same FUSE requests (Linux `include/uapi/linux/fuse.h`) as the kernel of a
//! guest. A *node* is a file, directory or link, identified by a number.

mod tree;

use crate::path::absolute;
use crate::{Entry, FileError, VolumePath};
use jiffy_volume_server::abi::{
    Fields, FieldsMut, REPLY_HEADER, begin_request, finish, opcode, set,
};
use jiffy_volume_server::{Attributes, MAX_MESSAGE, MAX_WRITE, ROOT};
use nix::errno::Errno;
use nix::libc;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Owner and permissions that a client sets. `None` selects the default, or leaves the present
/// value.
#[derive(Debug, Clone, Copy, Default)]
pub struct NewAttributes {
    /// User.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Permissions.
    pub mode: Option<u32>,
}

/// Session of the daemon with the server of a volume. All methods block.
#[derive(Debug)]
pub struct VolumeFiles {
    stream: UnixStream,
    /// Buffer for requests.
    request: Vec<u8>,
    /// Buffer for replies.
    reply: Vec<u8>,
    /// Id of the next request.
    next: u64,
}

/// File that is being written. It appears under its name when it is complete.
#[derive(Debug)]
pub struct Upload {
    files: VolumeFiles,
    node: u64,
    /// Number of written bytes.
    offset: u64,
    path: VolumePath,
    /// Node of the directory in which the file will appear.
    directory: u64,
    new: NewAttributes,
}

type Reply<T> = Result<T, Errno>;

impl VolumeFiles {
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        Ok(Self {
            stream,
            request: Vec::new(),
            reply: Vec::new(),
            next: 1,
        })
    }

    /// Makes a request and returns the body of its reply.
    fn call(
        &mut self,
        opcode: u32,
        node: u64,
        body: impl FnOnce(&mut Vec<u8>),
    ) -> io::Result<Reply<&[u8]>> {
        self.request.clear();
        // Steps of two leave room for interrupts, which the kernel sends with odd ids.
        let id = self.next;
        self.next += 2;
        // New files belong to user 0 and group 0, unless the caller changes them.
        begin_request(&mut self.request, opcode, id, node, (0, 0));
        body(&mut self.request);
        finish(&mut self.request);
        self.stream.write_all(&self.request)?;
        let mut header = [0; REPLY_HEADER];
        self.stream.read_exact(&mut header)?;
        let mut fields = Fields(&header);
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidData);
        let length = fields.u32().map_err(invalid)? as usize;
        let error = fields.u32().map_err(invalid)?.cast_signed();
        let replied = fields.u64().map_err(invalid)?;
        if !(REPLY_HEADER..=MAX_MESSAGE).contains(&length) || replied != id {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.reply.resize(length - REPLY_HEADER, 0);
        self.stream.read_exact(&mut self.reply)?;
        match error {
            0 => Ok(Ok(&self.reply)),
            error => Ok(Err(Errno::from_raw(error.saturating_neg()))),
        }
    }

    /// Makes a request whose reply begins with an entry.
    fn call_entry(
        &mut self,
        opcode: u32,
        node: u64,
        body: impl FnOnce(&mut Vec<u8>),
    ) -> io::Result<Reply<Attributes>> {
        let reply = self.call(opcode, node, body)?;
        Ok(reply.and_then(|reply| Fields(reply).entry()))
    }

    fn lookup(&mut self, node: u64, name: &str) -> io::Result<Reply<Attributes>> {
        let body = |body: &mut Vec<u8>| body.put_name(name.as_bytes());
        self.call_entry(opcode::LOOKUP, node, body)
    }

    fn node_attributes(&mut self, node: u64) -> io::Result<Reply<Attributes>> {
        let reply = self.call(opcode::GETATTR, node, |body| {
            // `struct fuse_getattr_in`.
            body.put_u64(0); // getattr_flags, padding
            body.put_u64(0); // fh
        })?;
        Ok(reply.and_then(|reply| {
            let mut fields = Fields(reply);
            // Time of validity, padding.
            fields.bytes(16)?;
            fields.attributes()
        }))
    }

    /// Returns the attributes of the node at `parts`. Links are not followed.
    fn resolve(&mut self, parts: &[String]) -> Result<Attributes, FileError> {
        let mut found = at(&[], self.node_attributes(ROOT)?)?;
        for (index, part) in parts.iter().enumerate() {
            let until = parts.get(..=index).unwrap_or(parts);
            found = at(until, self.lookup(found.node, part)?)?;
        }
        Ok(found)
    }

    /// Returns the entry with these attributes. Reads the target of a symbolic link.
    fn entry(&mut self, parts: &[String], attributes: Attributes) -> Result<Entry, FileError> {
        let target = if attributes.kind() == libc::S_IFLNK {
            let target = self.call(opcode::READLINK, attributes.node, |_| {})?;
            let target = at(parts, target)?;
            Some(String::from_utf8_lossy(target).into_owned())
        } else {
            None
        };
        Ok(Entry {
            path: absolute(parts),
            attributes,
            target,
        })
    }

    /// Returns the entry at a path.
    pub fn stat(&mut self, path: &VolumePath) -> Result<Entry, FileError> {
        let found = self.resolve(path.parts())?;
        self.entry(path.parts(), found)
    }

    /// Changes owner and permissions.
    pub fn set(&mut self, path: &VolumePath, new: NewAttributes) -> Result<Entry, FileError> {
        let found = self.resolve(path.parts())?;
        let changed = at(path.parts(), self.set_node(found.node, new)?)?;
        self.entry(path.parts(), changed)
    }

    /// Changes the mode and the owner of a node.
    fn set_node(&mut self, node: u64, new: NewAttributes) -> io::Result<Reply<Attributes>> {
        let mut valid = 0;
        for (flag, value) in [
            (set::MODE, new.mode),
            (set::UID, new.uid),
            (set::GID, new.gid),
        ] {
            valid |= if value.is_some() { flag } else { 0 };
        }
        let reply = self.call(opcode::SETATTR, node, |body| {
            // `struct fuse_setattr_in`.
            body.put_u32(valid);
            // Padding (4), file handle, size, owner of a lock (8 each), three times (12 each).
            let start = body.len();
            body.resize(start + 64, 0);
            body.put_u32(new.mode.unwrap_or_default());
            body.put_u32(0); // unused
            body.put_u32(new.uid.unwrap_or_default());
            body.put_u32(new.gid.unwrap_or_default());
            body.put_u32(0); // unused
        })?;
        Ok(reply.and_then(|reply| {
            let mut fields = Fields(reply);
            // Time of validity, padding.
            fields.bytes(16)?;
            fields.attributes()
        }))
    }

    /// Returns the directory at `parts`. Creates missing directories if `creates`.
    fn directory(&mut self, parts: &[String], creates: bool) -> Result<Attributes, FileError> {
        let mut found = at(&[], self.node_attributes(ROOT)?)?;
        for (index, part) in parts.iter().enumerate() {
            let until = parts.get(..=index).unwrap_or(parts);
            let next = match self.lookup(found.node, part)? {
                Err(Errno::ENOENT) if creates => {
                    match self.make(found.node, part, NewAttributes::default())? {
                        // Another client created the directory.
                        Err(Errno::EEXIST) => self.lookup(found.node, part)?,
                        other => other,
                    }
                }
                other => other,
            };
            found = at(until, next)?;
            if !found.is_directory() {
                return at(until, Err(Errno::ENOTDIR));
            }
        }
        Ok(found)
    }

    /// Creates a directory.
    fn make(
        &mut self,
        parent: u64,
        name: &str,
        new: NewAttributes,
    ) -> io::Result<Reply<Attributes>> {
        let made = self.call_entry(opcode::MKDIR, parent, |body| {
            body.put_u32(new.mode.unwrap_or(0o755));
            body.put_u32(0); // umask
            body.put_name(name.as_bytes());
        })?;
        match made {
            Ok(made) if new.uid.is_some() || new.gid.is_some() => self.set_node(made.node, new),
            other => Ok(other),
        }
    }

    /// Creates a directory. With `force`, creates missing parents, and succeeds if the directory
    /// exists.
    pub fn make_directory(
        &mut self,
        path: &VolumePath,
        new: NewAttributes,
        force: bool,
    ) -> Result<Entry, FileError> {
        let Some((directory, name)) = path.split() else {
            return if force {
                self.stat(path)
            } else {
                at(&[], Err(Errno::EEXIST))
            };
        };
        let parent = self.directory(directory, force)?;
        let made = match self.make(parent.node, name, new)? {
            Err(Errno::EEXIST) if force => {
                let found = at(path.parts(), self.lookup(parent.node, name)?)?;
                if !found.is_directory() {
                    return at(path.parts(), Err(Errno::EEXIST));
                }
                found
            }
            other => at(path.parts(), other)?,
        };
        self.entry(path.parts(), made)
    }

    /// Returns the entry of a regular file, whose content [`Self::read`] returns.
    pub fn open(&mut self, path: &VolumePath) -> Result<Attributes, FileError> {
        let found = self.resolve(path.parts())?;
        match (found.is_file(), found.is_directory()) {
            (true, _) => Ok(found),
            (_, true) => at(path.parts(), Err(Errno::EISDIR)),
            _ => at(path.parts(), Err(Errno::EINVAL)),
        }
    }

    /// Returns the next part of a file's content. Empty at the end.
    pub fn read(&mut self, path: &VolumePath, node: u64, offset: u64) -> Result<&[u8], FileError> {
        let reply = self.call(opcode::READ, node, |body| {
            // `struct fuse_read_in`: the server opens no files, so that the handle is 0.
            body.put_u64(0); // fh
            body.put_u64(offset);
            body.put_u32(MAX_WRITE); // size
            body.put_u32(0); // read_flags
            body.put_u64(0); // lock_owner
            body.put_u64(0); // flags, padding
        })?;
        at(path.parts(), reply)
    }

    /// Starts to write a file. With `force`, creates missing directories.
    pub fn upload(
        mut self,
        path: &VolumePath,
        new: NewAttributes,
        force: bool,
    ) -> Result<Upload, FileError> {
        let (directory, name) = path.split().ok_or(FileError::Root)?;
        let parent = self.directory(directory, force)?;
        // A file that is replaced passes on its owner and permissions.
        let mut new = new;
        match self.lookup(parent.node, name)? {
            Ok(old) if old.is_directory() => return at(path.parts(), Err(Errno::EISDIR)),
            Ok(old) if old.is_file() => {
                new.uid = new.uid.or(Some(old.uid));
                new.gid = new.gid.or(Some(old.gid));
                new.mode = new.mode.or(Some(old.mode & 0o7777));
            }
            Ok(_) | Err(Errno::ENOENT) => {}
            Err(e) => return at(path.parts(), Err(e)),
        }
        let made = self.call_entry(opcode::TMPFILE, parent.node, |body| {
            // `struct fuse_create_in`.
            body.put_u32(0); // flags
            body.put_u32(new.mode.unwrap_or(0o644));
            body.put_u64(0); // umask, open_flags
        })?;
        Ok(Upload {
            node: at(path.parts(), made)?.node,
            files: self,
            offset: 0,
            path: path.clone(),
            directory: parent.node,
            new,
        })
    }
}

impl Upload {
    /// Appends data.
    pub fn write(&mut self, data: &[u8]) -> Result<(), FileError> {
        for part in data.chunks(MAX_WRITE as usize) {
            let offset = self.offset;
            let length = u32::try_from(part.len()).unwrap_or(MAX_WRITE);
            let written = self.files.call(opcode::WRITE, self.node, |body| {
                // `struct fuse_write_in`.
                body.put_u64(0); // fh
                body.put_u64(offset);
                body.put_u32(length);
                body.put_u32(0); // write_flags
                body.put_u64(0); // lock_owner
                body.put_u64(0); // flags, padding
                body.extend_from_slice(part);
            })?;
            at(self.path.parts(), written)?;
            self.offset += part.len() as u64;
        }
        Ok(())
    }

    /// Gives the file its name. Replaces a file that has the name.
    pub fn finish(mut self) -> Result<Entry, FileError> {
        let parts = self.path.parts();
        if self.new.uid.is_some() || self.new.gid.is_some() {
            at(parts, self.files.set_node(self.node, self.new)?)?;
        }
        // The content is on the disk before the name refers to it.
        let synced = self.files.call(opcode::FSYNC, self.node, |body| {
            body.put_u64(0); // fh
        })?;
        at(parts, synced.map(|_| ()))?;
        let (_, name) = self.path.split().ok_or(FileError::Root)?;
        let node = self.node;
        let made = self
            .files
            .call_entry(opcode::REPLACE, self.directory, |body| {
                body.put_u64(node);
                body.put_name(name.as_bytes());
            })?;
        let made = at(parts, made)?;
        self.files.entry(parts, made)
    }
}

/// Adds the path to an error.
fn at<T>(parts: &[String], reply: Reply<T>) -> Result<T, FileError> {
    reply.map_err(|errno| FileError::Failed {
        path: absolute(parts),
        errno,
    })
}
