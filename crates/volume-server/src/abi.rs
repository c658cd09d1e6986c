//! Messages of the FUSE protocol (`include/uapi/linux/fuse.h`), version 7.31 and later.
//!
//! The server of a volume is a process of the host. It has several clients: the daemon, and one
//! guest kernel per sandbox that has mounted the volume. Each client has a connection of its own.
//! The agent of a guest passes the messages between `/dev/fuse` and the connection.

use crate::attributes::{Attributes, Time};
use nix::errno::Errno;

/// Length of the header of a request.
pub const REQUEST_HEADER: usize = 40;
/// Length of the header of a reply.
pub const REPLY_HEADER: usize = 16;
/// Major version of the protocol.
pub const MAJOR: u32 = 7;
/// Minor version of the protocol that the server uses.
pub const MINOR: u32 = 31;

/// Numbers of requests.
pub mod opcode {
    #![allow(missing_docs, reason = "named as in fuse.h")]
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const NOTIFY_REPLY: u32 = 41;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const SYNCFS: u32 = 50;
    pub const TMPFILE: u32 = 51;
    /// Not a part of FUSE: links an unnamed file, and replaces a file that has the name. The body
    /// is the same as of `LINK`.
    pub const REPLACE: u32 = 0x1000;
}

/// Flags of `INIT`, named as in fuse.h.
mod init_flag {
    /// The kernel may send several reads of a file at the same time.
    pub const ASYNC_READ: u32 = 1 << 0;
    /// The server manages the locks of `fcntl`.
    pub const POSIX_LOCKS: u32 = 1 << 1;
    /// Writes may exceed 4 KiB.
    pub const BIG_WRITES: u32 = 1 << 5;
    /// The server manages the locks of `flock`.
    pub const FLOCK_LOCKS: u32 = 1 << 10;
    /// The kernel drops cached pages of a file whose time of modification or length has changed.
    pub const AUTO_INVAL_DATA: u32 = 1 << 12;
    /// READDIRPLUS returns the attributes of the entries.
    pub const DO_READDIRPLUS: u32 = 1 << 13;
    /// The kernel chooses between READDIR and READDIRPLUS.
    pub const READDIRPLUS_AUTO: u32 = 1 << 14;
    /// The kernel omits OPEN after the server has replied ENOSYS once.
    pub const NO_OPEN_SUPPORT: u32 = 1 << 17;
    /// Lookups and listings of one directory may be sent at the same time.
    pub const PARALLEL_DIROPS: u32 = 1 << 18;
    /// The reply to INIT contains the maximum number of pages of a request.
    pub const MAX_PAGES: u32 = 1 << 22;
    /// The kernel caches the targets of symbolic links.
    pub const CACHE_SYMLINKS: u32 = 1 << 23;
    /// The kernel omits OPENDIR after the server has replied ENOSYS once.
    pub const NO_OPENDIR_SUPPORT: u32 = 1 << 24;
}

/// Flags of `INIT` that the server accepts from every client.
pub const INIT_FLAGS: u32 = init_flag::ASYNC_READ
    | init_flag::BIG_WRITES
    | init_flag::AUTO_INVAL_DATA
    | init_flag::DO_READDIRPLUS
    | init_flag::READDIRPLUS_AUTO
    | init_flag::NO_OPEN_SUPPORT
    | init_flag::PARALLEL_DIROPS
    | init_flag::MAX_PAGES
    | init_flag::CACHE_SYMLINKS
    | init_flag::NO_OPENDIR_SUPPORT;

/// Flags of `INIT` with which the server manages locks, so that a lock of one client excludes the
/// other clients. Without these flags, each guest kernel manages its locks alone.
///
/// A lock ends with the connection of its client. The server therefore offers the flags only to a
/// client that requests its locks again after a loss of the connection.
pub const LOCK_FLAGS: u32 = init_flag::POSIX_LOCKS | init_flag::FLOCK_LOCKS;

/// Bits of `valid` in SETATTR.
pub mod set {
    #![allow(missing_docs, reason = "named as in fuse.h")]
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// Time in seconds for which a client may cache names and attributes.
pub const CACHE_SECONDS: u64 = 1;

/// Header of a request.
#[derive(Debug, Clone, Copy)]
pub struct RequestHeader {
    /// Length of the request with its header.
    pub length: u32,
    /// Number of the operation.
    pub opcode: u32,
    /// Id, which the reply repeats.
    pub id: u64,
    /// Number of the node (file, directory or link) of the request.
    pub node: u64,
    /// User of the process that made the request.
    pub uid: u32,
    /// Group of the process.
    pub gid: u32,
}

/// Reader of the fields of a message.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    /// Returns the next `length` bytes.
    pub fn bytes(&mut self, length: usize) -> Result<&'a [u8], Errno> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Errno::EINVAL)?;
        self.0 = rest;
        Ok(taken)
    }

    /// Returns the next number of 32 bits.
    pub fn u32(&mut self) -> Result<u32, Errno> {
        let bytes = self.bytes(4)?.try_into().map_err(|_| Errno::EINVAL)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Returns the next number of 64 bits.
    pub fn u64(&mut self) -> Result<u64, Errno> {
        let bytes = self.bytes(8)?.try_into().map_err(|_| Errno::EINVAL)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Returns the next name, which ends with a zero byte.
    pub fn name(&mut self) -> Result<&'a [u8], Errno> {
        let end = self.0.iter().position(|byte| *byte == 0);
        let name = self.bytes(end.ok_or(Errno::EINVAL)?)?;
        self.bytes(1)?;
        Ok(name)
    }

    /// Returns the header of a request.
    pub fn request_header(&mut self) -> Result<RequestHeader, Errno> {
        let header = RequestHeader {
            length: self.u32()?,
            opcode: self.u32()?,
            id: self.u64()?,
            node: self.u64()?,
            uid: self.u32()?,
            gid: self.u32()?,
        };
        // Process id, length of extensions, padding.
        self.bytes(8)?;
        Ok(header)
    }

    /// Returns the attributes of a reply.
    pub fn attributes(&mut self) -> Result<Attributes, Errno> {
        let (node, size, blocks) = (self.u64()?, self.u64()?, self.u64()?);
        let seconds = [self.u64()?, self.u64()?, self.u64()?];
        let nanoseconds = [self.u32()?, self.u32()?, self.u32()?];
        let time = |at: usize| {
            let seconds = seconds.get(at).copied().unwrap_or_default().cast_signed();
            Time::new(
                seconds,
                i64::from(nanoseconds.get(at).copied().unwrap_or_default()),
            )
        };
        let found = Attributes {
            node,
            size,
            blocks,
            accessed: time(0),
            modified: time(1),
            changed: time(2),
            mode: self.u32()?,
            links: self.u32()?,
            uid: self.u32()?,
            gid: self.u32()?,
            device: self.u32()?,
        };
        // Block size and flags.
        self.bytes(8)?;
        Ok(found)
    }

    /// Returns the node and the attributes of the reply to a LOOKUP.
    pub fn entry(&mut self) -> Result<Attributes, Errno> {
        // Node, generation and times for which they are valid.
        self.bytes(40)?;
        self.attributes()
    }
}

/// Writer of the fields of a message.
pub trait FieldsMut {
    /// Appends a number of 16 bits.
    fn put_u16(&mut self, value: u16);
    /// Appends a number of 32 bits.
    fn put_u32(&mut self, value: u32);
    /// Appends a number of 64 bits.
    fn put_u64(&mut self, value: u64);
    /// Appends a name and a zero byte.
    fn put_name(&mut self, name: &[u8]);
    /// Appends attributes.
    fn put_attributes(&mut self, found: &Attributes);
    /// Appends the reply to a LOOKUP.
    fn put_entry(&mut self, found: &Attributes);
}

impl FieldsMut for Vec<u8> {
    fn put_u16(&mut self, value: u16) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_name(&mut self, name: &[u8]) {
        self.extend_from_slice(name);
        self.push(0);
    }

    fn put_attributes(&mut self, found: &Attributes) {
        self.put_u64(found.node);
        self.put_u64(found.size);
        self.put_u64(found.blocks);
        let times = [found.accessed, found.modified, found.changed].map(Time::parts);
        for (seconds, _) in times {
            self.put_u64(seconds.cast_unsigned());
        }
        for (_, nanoseconds) in times {
            self.put_u32(nanoseconds);
        }
        for value in [found.mode, found.links, found.uid, found.gid, found.device] {
            self.put_u32(value);
        }
        self.put_u32(4096); // blksize
        self.put_u32(0); // flags
    }

    fn put_entry(&mut self, found: &Attributes) {
        self.put_u64(found.node);
        // The generation is constant: numbers of nodes are never reused.
        self.put_u64(0);
        self.put_u64(CACHE_SECONDS); // entry_valid
        self.put_u64(CACHE_SECONDS); // attr_valid
        self.put_u64(0); // entry_valid_nsec, attr_valid_nsec
        self.put_attributes(found);
    }
}

/// Appends a request without its body. [`finish`] sets its length. `owner` are the user and the
/// group of the process that makes the request.
pub fn begin_request(message: &mut Vec<u8>, opcode: u32, id: u64, node: u64, owner: (u32, u32)) {
    message.put_u32(0); // length, set by `finish`
    message.put_u32(opcode);
    message.put_u64(id);
    message.put_u64(node);
    message.put_u32(owner.0);
    message.put_u32(owner.1);
    message.put_u64(0); // process id, length of extensions, padding
}

/// Sets the length of the message that starts at the beginning of `message`.
pub fn finish(message: &mut [u8]) {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    if let Some(field) = message.first_chunk_mut() {
        *field = length.to_le_bytes();
    }
}
