//! Netlink requests that are sent in batches, and dumps of the kernel's objects.
//!
//! The kernel processes these requests before `send` returns. Its answers are then already in the
//! socket, and reading does not block.

use crate::NetError;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NlasIterator,
};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    setsockopt, socket, sockopt,
};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Sizes in bytes of `nlmsghdr` and of the error number after it.
const HEADER_BYTES: usize = 16;
const CODE_BYTES: usize = 4;
/// Maximum size in bytes of a datagram: the kernel fills the datagrams of dumps up to this size
/// (af_netlink.c).
const MAX_DATAGRAM_BYTES: usize = 32 * 1024;
/// Maximum size in bytes of a dump.
const MAX_DUMP_BYTES: usize = 4 << 20;
/// Requested receive buffer size in bytes. The kernel doubles it.
const RECEIVE_BUFFER_BYTES: usize = 256 * 1024;
/// Flag of an answer: the dump changed while it was read (linux/netlink.h, as the following
/// flags).
const DUMP_INTERRUPTED: u16 = 0x10;
/// Flag of an answer: it repeats only the header of the request.
const CAPPED: u16 = 0x100;
/// Flag of an answer: attributes with a message follow.
const EXTENDED: u16 = 0x200;
/// Attribute with an error message.
const MESSAGE: u16 = 1;

/// Requests that are sent in one datagram.
#[derive(Debug, Default)]
pub(crate) struct NetlinkBatch {
    /// Encoded requests.
    bytes: Vec<u8>,
    /// Description of each request, and whether it must be acknowledged.
    requests: Vec<(String, bool)>,
}

impl NetlinkBatch {
    /// Adds a request. `what` describes the operation in errors. With [`NLM_F_ACK`] in `flags`, a
    /// missing acknowledgement is an error.
    pub fn push(&mut self, what: impl Into<String>, kind: u16, flags: u16, body: &[u8]) {
        // The sequence number is the index of the request, which identifies it in the answers. A
        // batch has far fewer than 2^32 requests.
        let sequence = u32::try_from(self.requests.len()).unwrap_or(u32::MAX);
        let request = request(kind, flags, sequence, body);
        self.bytes.extend(request);
        self.requests.push((what.into(), flags & NLM_F_ACK != 0));
    }

    /// Sends the requests in the network namespace of this thread. Returns the error of the first
    /// failed request. Later requests may have succeeded.
    pub fn send(&self, protocol: SockProtocol) -> Result<(), NetError> {
        let failed = || NetError::host("changing a network by netlink");
        let socket = open(protocol).map_err(failed())?;
        send(socket.as_raw_fd(), &self.bytes, MsgFlags::empty()).map_err(|e| failed()(e.into()))?;
        let answers = answers(&socket).map_err(failed())?;
        let mut faults = answers.iter().filter(|(_, answer)| answer.code != 0);
        if let Some((sequence, answer)) = faults.by_ref().min_by_key(|(sequence, _)| *sequence) {
            let index = usize::try_from(*sequence).ok();
            let request = index.and_then(|at| self.requests.get(at));
            let what = request.map_or("changing a network by netlink", |(what, _)| what.as_str());
            return Err(NetError::host(what)(answer.error()));
        }
        let requests = self.requests.iter().zip(0_u32..);
        let mut unanswered =
            requests.filter(|((_, needed), at)| *needed && !answers.contains_key(at));
        match unanswered.next() {
            None => Ok(()),
            Some(((what, _), _)) => Err(NetError::host(what)(io::Error::other(
                "the kernel did not answer",
            ))),
        }
    }
}

/// Encodes one message of netlink: the header, then the body, padded to 4 bytes.
fn request(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
    let length = HEADER_BYTES + body.len();
    let mut bytes = u32::try_from(length)
        .unwrap_or(u32::MAX)
        .to_ne_bytes()
        .to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    // Field `nlmsg_pid`, the port id of the sender. It may be 0: the kernel answers to the socket.
    bytes.extend([0; 4]);
    bytes.extend(body);
    bytes.resize(length.next_multiple_of(4), 0);
    bytes
}

/// Answer of the kernel to a request.
#[derive(Debug)]
struct Answer {
    /// Error number, or 0 on success.
    code: i32,
    /// Error message of the kernel.
    message: Option<String>,
}

impl Answer {
    /// Parses the kernel's answer to one message. `None` if the payload is too short.
    fn parse(flags: u16, payload: &[u8]) -> Option<Self> {
        let code = payload.get(..CODE_BYTES)?.try_into().ok();
        let code = code.map(i32::from_ne_bytes)?.saturating_neg();
        let message = (flags & EXTENDED != 0)
            .then(|| error_message(flags, payload))
            .flatten();
        Some(Self { code, message })
    }

    /// Converts the answer to an error, with the message of the kernel if there is one.
    fn error(&self) -> io::Error {
        let error = io::Error::from_raw_os_error(self.code);
        match &self.message {
            None => error,
            Some(message) => io::Error::new(error.kind(), format!("{error} ({message})")),
        }
    }
}

/// Returns the message in the attributes after the repeated request or its header.
fn error_message(flags: u16, payload: &[u8]) -> Option<String> {
    let repeated = match flags & CAPPED {
        0 => {
            let length = payload.get(CODE_BYTES..CODE_BYTES + 4)?.try_into().ok();
            usize::try_from(length.map(u32::from_ne_bytes)?).ok()?
        }
        _ => HEADER_BYTES,
    };
    let start = CODE_BYTES.checked_add(repeated.checked_next_multiple_of(4)?)?;
    let mut attributes = NlasIterator::new(payload.get(start..)?).map_while(Result::ok);
    let message = attributes.find(|attribute| attribute.kind() == MESSAGE)?;
    let text = String::from_utf8_lossy(message.value());
    Some(text.trim_end_matches('\0').to_owned())
}

/// Opens a netlink socket whose error messages contain a reason.
fn open(protocol: SockProtocol) -> io::Result<OwnedFd> {
    let kind = SockType::Raw;
    let socket = socket(
        AddressFamily::Netlink,
        kind,
        SockFlag::SOCK_CLOEXEC,
        protocol,
    )?;
    setsockopt(&socket, sockopt::RcvBuf, &RECEIVE_BUFFER_BYTES)?;
    // Without these options, errors have no message and repeat the whole request. A kernel without
    // support still reports the error numbers, so failures are ignored.
    for option in [libc::NETLINK_EXT_ACK, libc::NETLINK_CAP_ACK] {
        let on: libc::c_int = 1;
        // SAFETY: the kernel reads one `int` of the given length at `on` and retains no pointer.
        unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_NETLINK,
                option,
                (&raw const on).cast(),
                size_of_val(&on) as libc::socklen_t,
            );
        }
    }
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    Ok(socket)
}

/// Reads an available datagram into `buffer`. Passes type, flags, sequence number and payload of
/// each message to `each`. Returns false if no datagram is available.
fn read(
    socket: &OwnedFd,
    buffer: &mut [u8],
    mut each: impl FnMut(u16, u16, u32, &[u8]),
) -> io::Result<bool> {
    let length = match recv(socket.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
        Err(Errno::EAGAIN) => return Ok(false),
        length => length?,
    };
    let mut rest: &[u8] = buffer.get(..length).unwrap_or_default();
    while let Ok(message) = NetlinkBuffer::new_checked(rest) {
        each(
            message.message_type(),
            message.flags(),
            message.sequence_number(),
            message.payload(),
        );
        let length = usize::try_from(message.length()).unwrap_or(usize::MAX);
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(true)
}

/// Returns the available answers by sequence number. If a request has several answers, the first
/// error is retained.
fn answers(socket: &OwnedFd) -> io::Result<HashMap<u32, Answer>> {
    let mut answers: HashMap<u32, Answer> = HashMap::new();
    let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
    while read(socket, &mut buffer, |kind, flags, sequence, payload| {
        if kind == NLMSG_ERROR
            && let Some(answer) = Answer::parse(flags, payload)
            && answers.get(&sequence).is_none_or(|before| before.code == 0)
        {
            answers.insert(sequence, answer);
        }
    })? {}
    Ok(answers)
}

/// Requests a dump in the network namespace of this thread. Passes type and payload of each message
/// to `each`.
pub(crate) fn dump(
    protocol: SockProtocol,
    kind: u16,
    body: &[u8],
    mut each: impl FnMut(u16, &[u8]),
) -> io::Result<()> {
    let socket = open(protocol)?;
    let request = request(kind, NLM_F_DUMP, 0, body);
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    let (mut end, mut bytes, mut changed) = (None, 0, false);
    let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
    while end.is_none() {
        let more = read(&socket, &mut buffer, |kind, flags, _, payload| {
            changed |= flags & DUMP_INTERRUPTED != 0;
            bytes += payload.len();
            match kind {
                NLMSG_DONE | NLMSG_ERROR => {
                    end = Some(Answer::parse(flags, payload).map_or(0, |answer| answer.code));
                }
                kind if bytes <= MAX_DUMP_BYTES => each(kind, payload),
                _ => {}
            }
        })?;
        // All answers of a dump are available without waiting, so an empty socket means a lost
        // answer.
        if !more && end.is_none() {
            return Err(io::Error::other("the kernel's dump is incomplete"));
        }
    }
    match end {
        Some(code) if code != 0 => Err(io::Error::from_raw_os_error(code)),
        _ if changed => Err(io::Error::other("the dump changed while it was read")),
        _ if bytes > MAX_DUMP_BYTES => Err(io::Error::other("the dump is too long")),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "netlink_batch_tests.rs"]
mod tests;
