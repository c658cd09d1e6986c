//! Execution of requests.
//!
//! Each function executes one FUSE request (Linux `include/uapi/linux/fuse.h`) of a guest or of the
//! daemon. A *node* is a file, directory or link.

use super::{MAX_WRITE, Session, put_open};
use crate::abi::{
    CACHE_SECONDS, Fields, FieldsMut, INIT_FLAGS, LOCK_FLAGS, MAJOR, MINOR, REPLY_HEADER,
    RequestHeader, opcode, set,
};
use crate::attributes::{Attributes, Change, Creation, Time};
use crate::directory_stream;
use crate::volume::{MAX_NAME, RenameMode};
use jiffy_proto::file_lock::LOCKS_MARK;
use nix::errno::Errno;
use nix::libc;

/// Kind of the answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Reply,
    None,
}

pub(super) type Done = Result<Answer, Errno>;

impl Session {
    /// Executes one FUSE request, and writes the body of its reply. The fields of each request are
    /// read in the order of its structure in `linux/fuse.h`. Fields that are read without a use are
    /// handles of files, owners of locks, padding, flags or the umask.
    pub(super) fn dispatch(
        &self,
        header: &RequestHeader,
        mut fields: Fields<'_>,
        reply: &mut Vec<u8>,
    ) -> Done {
        let node = header.node;
        match header.opcode {
            opcode::LOOKUP => {
                let found = self.volume.lookup(node, fields.name()?)?;
                self.entry(&found, reply)
            }
            opcode::FORGET => {
                self.forget(node, fields.u64()?);
                Ok(Answer::None)
            }
            opcode::BATCH_FORGET => {
                let count = fields.u32()?;
                fields.u32()?;
                for _ in 0..count {
                    let (node, lookups) = (fields.u64()?, fields.u64()?);
                    self.forget(node, lookups);
                }
                Ok(Answer::None)
            }
            opcode::INTERRUPT => self.interrupt(fields),
            opcode::NOTIFY_REPLY => Ok(Answer::None),
            opcode::SETLK | opcode::SETLKW => self.lock(header, fields),
            opcode::GETLK => self.get_lock(header, fields, reply),
            opcode::FLUSH => self.flush(node, fields),
            opcode::RELEASE => self.released(node, fields),
            opcode::GETATTR => attributes(&self.volume.attributes(node)?, reply),
            opcode::SETATTR => {
                self.used(node)?;
                attributes(&self.volume.change(node, &change(fields)?)?, reply)
            }
            opcode::READLINK => {
                reply.extend(self.volume.target(node)?);
                Ok(Answer::Reply)
            }
            opcode::SYMLINK => {
                let (name, target) = (fields.name()?, fields.name()?);
                let new = creation(header, libc::S_IFLNK | 0o777, 0);
                let made = self.volume.create(node, name, new, Some(target))?;
                self.entry(&made, reply)
            }
            opcode::MKNOD => {
                let (mode, device) = (fields.u32()?, fields.u32()?);
                // The kernel applied the umask.
                fields.bytes(8)?;
                let kind = if mode & libc::S_IFMT == 0 {
                    libc::S_IFREG
                } else {
                    0
                };
                let new = creation(header, mode | kind, device);
                let made = self.volume.create(node, fields.name()?, new, None)?;
                self.entry(&made, reply)
            }
            opcode::MKDIR => {
                let (mode, _umask) = (fields.u32()?, fields.u32()?);
                let mode = libc::S_IFDIR | (mode & !libc::S_IFMT);
                let new = creation(header, mode, 0);
                let made = self.volume.create(node, fields.name()?, new, None)?;
                self.entry(&made, reply)
            }
            opcode::CREATE => {
                let (_flags, mode) = (fields.u32()?, fields.u32()?);
                fields.bytes(8)?;
                let mode = libc::S_IFREG | (mode & !libc::S_IFMT);
                let new = creation(header, mode, 0);
                let made = self.volume.create(node, fields.name()?, new, None)?;
                self.entry(&made, reply)?;
                put_open(reply);
                Ok(Answer::Reply)
            }
            opcode::TMPFILE => {
                let (_flags, mode) = (fields.u32()?, fields.u32()?);
                let made = self.volume.create_unnamed(&creation(header, mode, 0))?;
                self.entry(&made, reply)?;
                put_open(reply);
                Ok(Answer::Reply)
            }
            opcode::UNLINK => {
                self.volume.unlink(node, fields.name()?)?;
                Ok(Answer::Reply)
            }
            opcode::RMDIR => {
                self.volume.remove_directory(node, fields.name()?)?;
                Ok(Answer::Reply)
            }
            opcode::RENAME => {
                let to = fields.u64()?;
                self.rename(node, to, fields, RenameMode::Replace)
            }
            opcode::RENAME2 => {
                let (to, flags) = (fields.u64()?, fields.u32()?);
                fields.u32()?;
                let mode = match flags {
                    0 => RenameMode::Replace,
                    libc::RENAME_NOREPLACE => RenameMode::NoReplace,
                    libc::RENAME_EXCHANGE => RenameMode::Exchange,
                    _ => return Err(Errno::EINVAL),
                };
                self.rename(node, to, fields, mode)
            }
            opcode::LINK => {
                let linked = fields.u64()?;
                let made = self.volume.link(linked, node, fields.name()?, false)?;
                self.entry(&made, reply)
            }
            opcode::REPLACE if self.rights.is_daemon => {
                let linked = fields.u64()?;
                let made = self.volume.link(linked, node, fields.name()?, true)?;
                self.entry(&made, reply)
            }
            opcode::READ => self.read(node, fields, reply),
            opcode::WRITE => self.write(node, fields, reply),
            opcode::STATFS => self.statfs(reply),
            opcode::FSYNC => {
                self.volume.sync(node)?;
                Ok(Answer::Reply)
            }
            opcode::FSYNCDIR | opcode::SYNCFS => {
                self.volume.sync_catalog()?;
                Ok(Answer::Reply)
            }
            opcode::READDIR => self.list(node, fields, reply, false),
            opcode::READDIRPLUS => self.list(node, fields, reply, true),
            opcode::FALLOCATE => self.allocate(node, fields),
            opcode::RELEASEDIR | opcode::DESTROY => Ok(Answer::Reply),
            opcode::INIT => init(fields, reply),
            // OPEN and OPENDIR receive this error as well. The client then omits both, and its
            // other requests identify open files by nodes instead of handles.
            _ => Err(Errno::ENOSYS),
        }
    }

    fn entry(&self, found: &Attributes, reply: &mut Vec<u8>) -> Done {
        self.found(found.node);
        reply.put_entry(found);
        Ok(Answer::Reply)
    }

    fn rename(&self, from: u64, to: u64, mut fields: Fields<'_>, mode: RenameMode) -> Done {
        let (old, new) = (fields.name()?, fields.name()?);
        self.volume.rename((from, old), (to, new), mode)?;
        Ok(Answer::Reply)
    }

    /// Answers READ. The first field, the file handle, is not used.
    fn read(&self, node: u64, mut fields: Fields<'_>, reply: &mut Vec<u8>) -> Done {
        fields.u64()?;
        let (offset, size) = (fields.u64()?, fields.u32()?.min(MAX_WRITE));
        self.used(node)?;
        reply.resize(REPLY_HEADER + size as usize, 0);
        let buffer = reply.get_mut(REPLY_HEADER..).ok_or(Errno::EINVAL)?;
        let length = self.volume.read(node, offset, buffer)?;
        reply.truncate(REPLY_HEADER + length);
        Ok(Answer::Reply)
    }

    /// Handles `FUSE_WRITE`.
    fn write(&self, node: u64, mut fields: Fields<'_>, reply: &mut Vec<u8>) -> Done {
        fields.u64()?;
        let (offset, size) = (fields.u64()?, fields.u32()?);
        let _write_flags = fields.u32()?;
        fields.u64()?;
        let flags = fields.u32()?;
        fields.u32()?;
        let data = fields.bytes(size as usize)?;
        self.used(node)?;
        // The end of the file is the end in the volume: several clients may append.
        let is_append = flags & libc::O_APPEND.cast_unsigned() != 0;
        let offset = (!is_append).then_some(offset);
        let written = self.volume.write(node, offset, data)?;
        reply.put_u32(u32::try_from(written).unwrap_or(size));
        reply.put_u32(0);
        Ok(Answer::Reply)
    }

    /// Handles `FUSE_READDIRPLUS` if `plus` is true, or `FUSE_READDIR`.
    fn list(&self, node: u64, mut fields: Fields<'_>, reply: &mut Vec<u8>, plus: bool) -> Done {
        fields.u64()?;
        let (offset, size) = (fields.u64()?, fields.u32()?.min(MAX_WRITE));
        let limit = REPLY_HEADER + size as usize;
        let returned = |node| self.found(node);
        directory_stream::list(&self.volume, node, offset, reply, limit, plus, returned)?;
        Ok(Answer::Reply)
    }

    /// Handles `FUSE_FALLOCATE`.
    fn allocate(&self, node: u64, mut fields: Fields<'_>) -> Done {
        fields.u64()?;
        let (offset, length, mode) = (fields.u64()?, fields.u64()?, fields.u32()?);
        self.used(node)?;
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        match mode.cast_signed() {
            0 => {
                let end = offset.checked_add(length).ok_or(Errno::EFBIG)?;
                self.volume.extend(node, end)?;
            }
            mode if mode == punch => self.volume.punch_hole(node, offset, length)?,
            _ => return Err(Errno::EOPNOTSUPP),
        }
        Ok(Answer::Reply)
    }

    /// Handles `FUSE_STATFS`.
    fn statfs(&self, reply: &mut Vec<u8>) -> Done {
        let space = self.volume.space();
        let (total, used) = (space.quota.bytes / 4096, space.bytes / 4096);
        let free = total.saturating_sub(used);
        let free_nodes = space.quota.nodes.saturating_sub(space.nodes);
        for value in [total, free, free, space.quota.nodes, free_nodes] {
            reply.put_u64(value);
        }
        reply.put_u32(4096);
        reply.put_u32(u32::try_from(MAX_NAME).unwrap_or(255));
        reply.put_u32(4096);
        // Padding and reserved fields.
        reply.resize(REPLY_HEADER + 80, 0);
        Ok(Answer::Reply)
    }
}

/// Returns the attributes of a new node. Its owner is the user of the request.
fn creation(header: &RequestHeader, mode: u32, device: u32) -> Creation {
    Creation {
        mode,
        uid: header.uid,
        gid: header.gid,
        device,
    }
}

fn attributes(found: &Attributes, reply: &mut Vec<u8>) -> Done {
    reply.put_u64(CACHE_SECONDS);
    reply.put_u64(0);
    reply.put_attributes(found);
    Ok(Answer::Reply)
}

/// Returns the changes of a SETATTR.
fn change(mut fields: Fields<'_>) -> Result<Change, Errno> {
    let valid = fields.u32()?;
    // Padding and file handle.
    fields.bytes(12)?;
    let size = fields.u64()?;
    // Owner of a lock.
    fields.u64()?;
    let (atime, mtime, _ctime) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let (atime_ns, mtime_ns, _ctime_ns) = (fields.u32()?, fields.u32()?, fields.u32()?);
    let mode = fields.u32()?;
    fields.u32()?;
    let (uid, gid) = (fields.u32()?, fields.u32()?);
    let time = |is_set: u32, is_now: u32, seconds: u64, nanoseconds: u32| {
        if valid & is_now != 0 {
            return Some(Time::now());
        }
        let time = Time::new(seconds.cast_signed(), i64::from(nanoseconds));
        (valid & is_set != 0).then_some(time)
    };
    Ok(Change {
        mode: (valid & set::MODE != 0).then_some(mode),
        uid: (valid & set::UID != 0).then_some(uid),
        gid: (valid & set::GID != 0).then_some(gid),
        size: (valid & set::SIZE != 0).then_some(size),
        accessed: time(set::ATIME, set::ATIME_NOW, atime, atime_ns),
        modified: time(set::MTIME, set::MTIME_NOW, mtime, mtime_ns),
    })
}

/// Handles `INIT`: negotiates the version, the flags and the limits of the protocol.
fn init(mut fields: Fields<'_>, reply: &mut Vec<u8>) -> Done {
    let (major, _minor) = (fields.u32()?, fields.u32()?);
    let (readahead, flags) = (fields.u32()?, fields.u32()?);
    if major != MAJOR {
        return Err(Errno::EPROTO);
    }
    // Further flags and reserved fields, which older kernels do not send. The agent writes
    // `LOCKS_MARK` to the last field if it requests locks again after a lost connection.
    let has_mark = fields
        .bytes(44)
        .and_then(|_| fields.u32())
        .is_ok_and(|last| last == LOCKS_MARK);
    let accepted = if has_mark {
        INIT_FLAGS | LOCK_FLAGS
    } else {
        INIT_FLAGS
    };
    reply.put_u32(MAJOR);
    reply.put_u32(MINOR);
    reply.put_u32(readahead.min(MAX_WRITE));
    reply.put_u32(flags & accepted);
    // Maximum number of background requests, and the number at which the client slows down. The
    // numbers are small, because the agent of a guest retains these requests in memory.
    reply.put_u16(16);
    reply.put_u16(12);
    reply.put_u32(MAX_WRITE);
    // Granularity of times in nanoseconds.
    reply.put_u32(1);
    reply.put_u16(u16::try_from(MAX_WRITE / 4096).unwrap_or(32));
    reply.resize(REPLY_HEADER + 64, 0);
    Ok(Answer::Reply)
}
