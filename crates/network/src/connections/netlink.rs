//! Encoder, parser and socket for netlink messages of netfilter. The parser checks every length,
//! because the contents derive from packets of a guest.
//!
//! The existing netlink crates lack counters and times of connections and build a tree for each
//! message. This module extracts a few fields of very many messages.

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// Flag of every request. This number and the following ones are defined in linux/netlink.h.
const REQUEST: u16 = 1;
/// Flag of a request that the kernel acknowledges.
const ACKNOWLEDGE: u16 = 4;
/// Flag for a dump of a table.
const DUMP: u16 = 0x300;
/// Type of the message with the result of a request. The error number is 0 on success.
const ERROR: u16 = 2;
/// Type of the message at the end of a dump.
const DONE: u16 = 3;
/// Lengths of the two headers (`nlmsghdr`, `nfgenmsg`).
const NLMSG_HEADER_BYTES: usize = 16;
const NFGEN_HEADER_BYTES: usize = 4;
/// Mask for attribute types, without their two flag bits.
const TYPE_BITS: u16 = 0x3fff;
/// Maximum size in bytes of a datagram: the kernel fills the datagrams of dumps up to this size
/// (af_netlink.c).
const MAX_DATAGRAM_BYTES: usize = 32 * 1024;
/// Requested receive buffer size in bytes. The kernel doubles it.
const RECEIVE_BUFFER_BYTES: usize = 128 * 1024;

/// Message in a datagram.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NetlinkMessage<'a> {
    /// Netfilter message: subsystem, message type, resource id and attributes.
    Data(u8, u8, u16, &'a [u8]),
    /// End of a dump or result of a request: 0 or a negative error number.
    End(i32),
}

/// Returns the two bytes at offset `at`.
fn two_bytes(bytes: &[u8], at: usize) -> Option<[u8; 2]> {
    bytes.get(at..at + 2)?.try_into().ok()
}

/// Iterates over the messages of a datagram. Stops at a truncated message.
pub(super) fn messages(datagram: &[u8]) -> impl Iterator<Item = NetlinkMessage<'_>> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let length = rest.get(..4)?.try_into().ok().map(u32::from_ne_bytes)?;
        // A length below the header length would make no progress.
        let length = usize::try_from(length)
            .ok()
            .filter(|l| *l >= NLMSG_HEADER_BYTES)?;
        let message = rest.get(..length)?;
        // Messages are aligned to four bytes. The last one may lack its padding.
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        let body = message.get(NLMSG_HEADER_BYTES..)?;
        match u16::from_ne_bytes(two_bytes(message, 4)?) {
            ERROR => {
                let code = body.get(..4)?.try_into().ok().map(i32::from_ne_bytes)?;
                Some(NetlinkMessage::End(code))
            }
            DONE => Some(NetlinkMessage::End(0)),
            kind => {
                let [subsystem, message_type] = kind.to_be_bytes();
                let resource = u16::from_be_bytes(two_bytes(body, 2)?);
                Some(NetlinkMessage::Data(
                    subsystem,
                    message_type,
                    resource,
                    body.get(NFGEN_HEADER_BYTES..)?,
                ))
            }
        }
    })
}

/// Iterates over types and values of attributes. Stops at a truncated attribute.
pub(super) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(two_bytes(rest, 0)?));
        let kind = u16::from_ne_bytes(two_bytes(rest, 2)?) & TYPE_BITS;
        // A length below the four bytes of the header gives no valid range and ends the iteration.
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Returns the value of the attribute of type `kind` in `bytes`.
pub(super) fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(k, _)| *k == kind).map(|(_, v)| v)
}

/// Decodes eight bytes in network byte order.
pub(super) fn be_u64(value: &[u8]) -> Option<u64> {
    value.try_into().ok().map(u64::from_be_bytes)
}

/// Decodes four bytes in network byte order.
pub(super) fn be_u32(value: &[u8]) -> Option<u32> {
    value.try_into().ok().map(u32::from_be_bytes)
}

/// Encodes an attribute.
pub(super) fn encode(kind: u16, value: &[u8]) -> Vec<u8> {
    // The length fits: values are constants or copies of received attributes.
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Address family of requests for all families.
const ANY_FAMILY: u8 = libc::AF_UNSPEC as u8;

/// Returns a netlink request of the nfnetlink subsystem `subsystem`.
fn request(
    family: u8,
    subsystem: u8,
    request_type: u8,
    flags: u16,
    resource: u16,
    attributes: &[u8],
) -> Vec<u8> {
    let length = u32::try_from(NLMSG_HEADER_BYTES + NFGEN_HEADER_BYTES + attributes.len())
        .unwrap_or(u32::MAX);
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(u16::from_be_bytes([subsystem, request_type]).to_ne_bytes());
    bytes.extend((REQUEST | flags).to_ne_bytes());
    // Each socket has at most one request in flight, so replies need no sequence number or port id
    // to be matched.
    bytes.extend([0; 8]);
    bytes.extend([family, 0]);
    bytes.extend(resource.to_be_bytes());
    bytes.extend(attributes);
    bytes
}

/// Netfilter socket of one network namespace.
#[derive(Debug)]
pub(super) struct NetlinkSocket(pub Arc<OwnedFd>);

impl NetlinkSocket {
    /// Opens a socket in the network namespace of this thread and joins the multicast groups of the
    /// bits in `groups`.
    pub fn open(groups: u32) -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkNetFilter,
        )?;
        setsockopt(&fd, sockopt::RcvBuf, &RECEIVE_BUFFER_BYTES)?;
        // The kernel answers immediately or, if it has no memory for the answer, never. The timeout
        // prevents a caller from blocking forever in the second case.
        setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::seconds(2))?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        Ok(Self(Arc::new(fd)))
    }

    /// Sends a request and waits for its result. Passes the attributes of each message with the
    /// type of the request, such as an answer before the result, to `each`.
    pub fn command(
        &self,
        subsystem: u8,
        request_type: u8,
        resource: u16,
        attributes: &[u8],
        each: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        self.command_for(
            ANY_FAMILY,
            subsystem,
            request_type,
            resource,
            attributes,
            each,
        )
    }

    /// Like [`Self::command`], for a single address family.
    pub fn command_for(
        &self,
        family: u8,
        subsystem: u8,
        request_type: u8,
        resource: u16,
        attributes: &[u8],
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let request = request(
            family,
            subsystem,
            request_type,
            ACKNOWLEDGE,
            resource,
            attributes,
        );
        send(self.0.as_raw_fd(), &request, MsgFlags::empty())?;
        self.receive_until_end(|message| {
            if let NetlinkMessage::Data(from, message_type, _, attributes) = message
                && (*from, *message_type) == (subsystem, request_type)
            {
                each(attributes);
            }
            true
        })
    }

    /// Passes all entries of a table to `each` until `each` returns false. After such an early
    /// stop, the rest of the dump remains unread, and the socket must not be used again.
    pub fn list(
        &self,
        subsystem: u8,
        request_type: u8,
        each: impl FnMut(&[u8]) -> bool,
    ) -> io::Result<()> {
        self.list_for(ANY_FAMILY, subsystem, request_type, each)
    }

    /// Like [`Self::list`], for a single address family.
    pub fn list_for(
        &self,
        family: u8,
        subsystem: u8,
        request_type: u8,
        mut each: impl FnMut(&[u8]) -> bool,
    ) -> io::Result<()> {
        let request = request(family, subsystem, request_type, DUMP, 0, &[]);
        send(self.0.as_raw_fd(), &request, MsgFlags::empty())?;
        self.receive_until_end(|message| match message {
            NetlinkMessage::Data(from, _, _, attributes) if *from == subsystem => each(attributes),
            _ => true,
        })
    }

    /// Passes received messages to `each` until the answer ends or `each` returns false.
    fn receive_until_end(
        &self,
        mut each: impl FnMut(&NetlinkMessage<'_>) -> bool,
    ) -> io::Result<()> {
        let mut end = None;
        while end.is_none() {
            self.receive(MsgFlags::empty(), |message| match message {
                NetlinkMessage::End(code) => end = Some(code),
                message if end.is_none() && !each(&message) => end = Some(0),
                NetlinkMessage::Data(..) => {}
            })?;
        }
        match end {
            // The kernel reports negative error numbers.
            None | Some(0) => Ok(()),
            Some(code) => Err(Errno::from_raw(code.saturating_neg()).into()),
        }
    }

    /// Reads at most `max_datagrams` available datagrams. Returns true if more may be available.
    pub fn drain(&self, max_datagrams: usize, mut each: impl FnMut(NetlinkMessage<'_>)) -> bool {
        for _ in 0..max_datagrams {
            match self.receive(MsgFlags::MSG_DONTWAIT, &mut each) {
                Ok(()) => {}
                // Datagrams were lost, which [`Self::lost`] counts.
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => {}
                // Usually EAGAIN: all available datagrams were read.
                Err(_) => return false,
            }
        }
        true
    }

    /// Receives one datagram and passes its messages to `each`.
    fn receive(&self, flags: MsgFlags, each: impl FnMut(NetlinkMessage<'_>)) -> io::Result<()> {
        let mut buffer = [0; MAX_DATAGRAM_BYTES];
        let length = recv(self.0.as_raw_fd(), &mut buffer, flags)?;
        messages(buffer.get(..length).unwrap_or_default()).for_each(each);
        Ok(())
    }

    /// Returns the number of datagrams lost because they were not read in time.
    pub fn lost(&self) -> u64 {
        // The last of nine numbers counts dropped datagrams (linux/sock_diag.h, SK_MEMINFO_DROPS).
        let mut numbers = [0_u32; 9];
        let mut length = size_of_val(&numbers) as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes, the size of `numbers`, to `numbers`,
        // and the actual length to `length`.
        let result = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MEMINFO,
                numbers.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let whole = result == 0 && usize::try_from(length).ok() == Some(size_of_val(&numbers));
        if whole { u64::from(numbers[8]) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_messages_can_be_parsed() {
        let body = [encode(1, &[9]), encode(7, &[1, 2, 3, 4])].concat();
        let sent = request(ANY_FAMILY, 4, 1, ACKNOWLEDGE, 5, &body);
        assert_eq!(sent.len(), NLMSG_HEADER_BYTES + NFGEN_HEADER_BYTES + 8 + 8);
        let read: Vec<NetlinkMessage<'_>> = messages(&sent).collect();
        assert_eq!(read, [NetlinkMessage::Data(4, 1, 5, &body)]);
        assert_eq!(attribute(&body, 7).and_then(be_u32), Some(0x0102_0304));
        assert_eq!(attribute(&body, 1), Some(&[9][..]));
        assert_eq!(attribute(&body, 2), None);
    }

    #[test]
    fn truncated_and_invalid_messages_end_the_parsing() {
        let body = [encode(1, &[9]), encode(7, &[1, 2, 3, 4])].concat();
        let mut sent = request(ANY_FAMILY, 4, 1, 0, 5, &body);
        sent.extend(request(ANY_FAMILY, 4, 0, 0, 5, &body));
        for length in 0..sent.len() {
            let count = messages(&sent[..length]).count();
            assert!(count <= 2 && (length < 36 || count >= 1), "{length}");
        }
        for length in 0..body.len() {
            assert!(attributes(&body[..length]).count() <= 1);
        }
        for lie in [0_u32, 1, 15, 17, 1 << 20, u32::MAX] {
            let mut sent = request(ANY_FAMILY, 4, 1, 0, 5, &body);
            sent[..4].copy_from_slice(&lie.to_ne_bytes());
            assert_eq!(messages(&sent).count(), 0, "{lie}");
        }
        for lie in [0_u16, 3, 200, u16::MAX] {
            let mut body = body.clone();
            body[..2].copy_from_slice(&lie.to_ne_bytes());
            assert_eq!(attributes(&body).count(), 0, "{lie}");
        }
        // Test changes of every byte.
        for at in 0..sent.len() {
            for value in [0, 1, 4, 0x7f, 0xff] {
                let mut sent = sent.clone();
                sent[at] = value;
                for message in messages(&sent) {
                    if let NetlinkMessage::Data(_, _, _, body) = message {
                        attributes(body).for_each(drop);
                    }
                }
            }
        }
    }
}
