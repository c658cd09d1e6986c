//! Fields of messages of the FUSE protocol.
//!
//! The guest's kernel sends these messages for files of a mounted volume. The agent passes them to
//! the host.

/// Length of the header of a request, and of the header of a reply.
pub(super) const REQUEST_HEADER: usize = 40;
pub(super) const REPLY_HEADER: usize = 16;

/// Opcodes of requests without replies.
const WITHOUT_REPLY: [u32; 3] = [
    2,  // FORGET
    36, // INTERRUPT
    42, // BATCH_FORGET
];
/// Opcodes of requests that must not be executed twice. If the stream to the host breaks before the
/// reply arrives, the host may have executed the request.
const ONCE: [u32; 10] = [
    6,  // SYMLINK
    8,  // MKNOD
    9,  // MKDIR
    10, // UNLINK
    11, // RMDIR
    12, // RENAME
    13, // LINK
    35, // CREATE
    45, // RENAME2
    51, // TMPFILE
];
/// WRITE, which must not be executed twice at the end of a file.
const WRITE: u32 = 16;
/// Id of a message to the kernel that is a notification, and not a reply to a request.
const NO_REQUEST: u64 = 0;
/// `FUSE_NOTIFY_INVAL_INODE`: type of a notification, which stands in the field of the error.
const NOTIFY_INVAL_INODE: i32 = 2;

/// Returns the bytes of a number.
pub(super) fn number<const N: usize>(message: &[u8], at: usize) -> Option<[u8; N]> {
    message.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Returns the operation of a request.
pub(super) fn opcode(request: &[u8]) -> u32 {
    number(request, 4).map_or(0, u32::from_le_bytes)
}

/// Returns the id of a request or reply.
pub(super) fn id(message: &[u8]) -> u64 {
    number(message, 8).map_or(0, u64::from_le_bytes)
}

/// Returns the error of a reply, which is negative. 0 if the request succeeded.
pub(super) fn error(reply: &[u8]) -> i32 {
    number(reply, 4).map_or(0, i32::from_le_bytes)
}

/// Returns whether the kernel expects a reply to a request.
pub(super) fn expects_reply(request: &[u8]) -> bool {
    !WITHOUT_REPLY.contains(&opcode(request))
}

/// Returns whether a request may be executed twice.
pub(super) fn is_repeatable(request: &[u8]) -> bool {
    // The flags of the open file follow the header, handle, offset, size, flags and lock owner.
    let is_append = || {
        let flags = number(request, REQUEST_HEADER + 32).map_or(0, i32::from_le_bytes);
        flags & libc::O_APPEND != 0
    };
    match opcode(request) {
        WRITE => !is_append(),
        other => !ONCE.contains(&other),
    }
}

/// Returns a reply.
pub(super) fn reply(id: u64, error: i32, body: &[u8]) -> Vec<u8> {
    let length = REPLY_HEADER + body.len();
    let mut reply = Vec::with_capacity(length);
    reply.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    reply.extend_from_slice(&error.to_le_bytes());
    reply.extend_from_slice(&id.to_le_bytes());
    reply.extend_from_slice(body);
    reply
}

/// Returns the notification with which the kernel drops cached content and attributes of a node.
pub(super) fn drop_content(node: u64) -> Vec<u8> {
    // Node, offset and length. Offset and length 0 mean the whole file.
    let mut body = [0; 24];
    let (start, _) = body.split_at_mut(8);
    start.copy_from_slice(&node.to_le_bytes());
    reply(NO_REQUEST, NOTIFY_INVAL_INODE, &body)
}
