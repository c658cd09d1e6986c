//! Requests for advisory locks.
//!
//! The client is the kernel of a guest, which sends the locks of its programs as FUSE requests.
//!
//! The session passes them to the lock table of the volume, `locks/table.rs`. A request that must
//! wait is answered later (a late reply). If the connection to the server was lost, the agents of
//! guests request their held locks again, with the flag [`RECLAIM`].

use super::requests::{Answer, Done};
use super::{LateReply, Session};
use crate::abi::{Fields, FieldsMut, REPLY_HEADER, RequestHeader, finish, opcode};
use crate::locks::{Family, LockRequest, Outcome, RequestRange};
use jiffy_proto::file_lock::{LockKind, RECLAIM};
use nix::errno::Errno;
use nix::libc;

/// Flag of a lock request for flock.
const FLOCK: u32 = 1 << 0;
/// Flag of a RELEASE that ends the flock of its owner.
const RELEASE_FLOCK: u32 = 1 << 1;

/// Operations that are executed in the order of their arrival: a lock must not overtake the unlock
/// of the same owner, and an interrupt must not overtake its request.
const ORDERED: [u32; 6] = [
    opcode::GETLK,
    opcode::SETLK,
    opcode::SETLKW,
    opcode::FLUSH,
    opcode::RELEASE,
    opcode::INTERRUPT,
];

/// Returns whether a request must be executed before later requests of its client. Such a request
/// does not wait.
pub(crate) fn is_ordered(request: &[u8]) -> bool {
    let opcode = request.get(4..8).and_then(|field| field.try_into().ok());
    opcode.is_some_and(|opcode| ORDERED.contains(&u32::from_le_bytes(opcode)))
}

/// Returns the message of a late reply.
pub(crate) fn late_message(late: LateReply) -> Vec<u8> {
    let mut message = Vec::with_capacity(REPLY_HEADER);
    message.put_u32(0);
    message.put_u32(late.error.saturating_neg().cast_unsigned());
    message.put_u64(late.id);
    finish(&mut message);
    message
}

impl Session {
    /// Executes SETLK or SETLKW. The latter waits for a conflicting lock, so its answer may be a
    /// late reply.
    pub(super) fn lock(&self, header: &RequestHeader, fields: Fields<'_>) -> Done {
        let request = parse(header, fields)?;
        if request.range.kind == Some(LockKind::Exclusive) && self.rights.is_read_only {
            return Err(Errno::EBADF);
        }
        if request.range.kind.is_some() {
            self.used(header.node)?;
        }
        Ok(match self.volume.locks().request(self.client, request)? {
            Outcome::Done => Answer::Reply,
            Outcome::Later => Answer::None,
        })
    }

    /// Handles `GETLK`: returns a lock that conflicts with the request, or the type `F_UNLCK`.
    pub(super) fn get_lock(
        &self,
        header: &RequestHeader,
        fields: Fields<'_>,
        reply: &mut Vec<u8>,
    ) -> Done {
        let request = parse(header, fields)?;
        let conflict = self.volume.locks().conflict(self.client, &request);
        let shown = conflict.unwrap_or(LockRequest {
            range: RequestRange {
                kind: None,
                ..request.range
            },
            ..request
        });
        let kind = match shown.range.kind {
            Some(LockKind::Shared) => libc::F_RDLCK,
            Some(LockKind::Exclusive) => libc::F_WRLCK,
            None => libc::F_UNLCK,
        };
        reply.put_u64(shown.range.start);
        reply.put_u64(shown.range.end);
        reply.put_u32(kind.cast_unsigned());
        reply.put_u32(shown.pid);
        Ok(Answer::Reply)
    }

    /// Executes FLUSH, which the kernel sends when a process closes a descriptor: the process loses
    /// its locks of ranges of the file.
    pub(super) fn flush(&self, node: u64, mut fields: Fields<'_>) -> Done {
        // Handle and padding.
        fields.bytes(16)?;
        let owner = fields.u64()?;
        let locks = self.volume.locks();
        locks.release(self.client, node, Family::Record, owner);
        Ok(Answer::Reply)
    }

    /// Executes RELEASE, which the kernel sends when the last descriptor of an open file is closed.
    pub(super) fn released(&self, node: u64, mut fields: Fields<'_>) -> Done {
        // Handle and flags of the open file.
        fields.bytes(12)?;
        let flags = fields.u32()?;
        let owner = fields.u64()?;
        if flags & RELEASE_FLOCK != 0 {
            let locks = self.volume.locks();
            locks.release(self.client, node, Family::Flock, owner);
        }
        Ok(Answer::Reply)
    }

    /// Executes INTERRUPT, which the kernel sends when a signal reaches a process whose request
    /// waits.
    pub(super) fn interrupt(&self, mut fields: Fields<'_>) -> Done {
        self.volume.locks().interrupt(self.client, fields.u64()?);
        Ok(Answer::None)
    }
}

/// Returns the request of a GETLK, SETLK or SETLKW.
fn parse(header: &RequestHeader, mut fields: Fields<'_>) -> Result<LockRequest, Errno> {
    // Handle of the file.
    fields.u64()?;
    let owner = fields.u64()?;
    let (start, end) = (fields.u64()?, fields.u64()?);
    let (kind, pid) = (fields.u32()?, fields.u32()?);
    let flags = fields.u32()?;
    let kind = match kind.cast_signed() {
        libc::F_RDLCK => Some(LockKind::Shared),
        libc::F_WRLCK => Some(LockKind::Exclusive),
        libc::F_UNLCK => None,
        _ => return Err(Errno::EINVAL),
    };
    if start > end {
        return Err(Errno::EINVAL);
    }
    let is_flock = flags & FLOCK != 0;
    Ok(LockRequest {
        id: header.id,
        node: header.node,
        family: if is_flock {
            Family::Flock
        } else {
            Family::Record
        },
        owner,
        range: RequestRange { start, end, kind },
        pid,
        waits: header.opcode == opcode::SETLKW,
        is_reclaim: flags & RECLAIM != 0,
    })
}
