//! Messages of netfilter over netlink: read with every length checked, since what a guest sends decides what is in them.
//!
//! The crates for netlink know neither counters nor times of connections, and make a tree of every message; here few fields of very many
//! messages are needed.

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// A message to the kernel, or one that ends a list or tells an error (linux/netlink.h).
const REQUEST: u16 = 1;
const ACKNOWLEDGE: u16 = 4;
/// Every entry of a table.
const DUMP: u16 = 0x300;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// Lengths of the two headers (`nlmsghdr`, `nfgenmsg`).
const HEADER: usize = 16;
const FAMILY: usize = 4;
/// Types of attributes carry two flags.
const TYPE_BITS: u16 = 0x3fff;
/// Most bytes of one datagram: the kernel makes those of lists as long as there is room for, up to this (af_netlink.c).
const LONGEST: usize = 32 * 1024;
/// What may wait to be read, in bytes of the kernel's memory; it doubles the number.
const WAITING: usize = 128 * 1024;

/// One message of a datagram.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Message<'a> {
    /// Subsystem and what it is there, the resource that is meant, and attributes.
    Of(u8, u8, u16, &'a [u8]),
    /// The end of a list, or the answer to a request: none, or a number of an error.
    End(i32),
}

fn number(bytes: &[u8], at: usize) -> Option<[u8; 2]> {
    bytes.get(at..at + 2)?.try_into().ok()
}

/// The messages of a datagram; what is cut off is left out.
pub(super) fn messages(datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let length = rest.get(..4)?.try_into().ok().map(u32::from_ne_bytes)?;
        let length = usize::try_from(length).ok().filter(|l| *l >= HEADER)?;
        let message = rest.get(..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        let body = message.get(HEADER..)?;
        match u16::from_ne_bytes(number(message, 4)?) {
            ERROR => {
                let code = body.get(..4)?.try_into().ok().map(i32::from_ne_bytes)?;
                Some(Message::End(code))
            }
            DONE => Some(Message::End(0)),
            kind => {
                let [subsystem, what] = kind.to_be_bytes();
                let resource = u16::from_be_bytes(number(body, 2)?);
                Some(Message::Of(subsystem, what, resource, body.get(FAMILY..)?))
            }
        }
    })
}

/// Types and values of attributes; what is cut off is left out.
pub(super) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(number(rest, 0)?));
        let kind = u16::from_ne_bytes(number(rest, 2)?) & TYPE_BITS;
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The value of the attribute of type `kind` among `bytes`.
pub(super) fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(k, _)| *k == kind).map(|(_, v)| v)
}

/// A number of eight bytes in network order.
pub(super) fn long(value: &[u8]) -> Option<u64> {
    value.try_into().ok().map(u64::from_be_bytes)
}

/// A number of four bytes in network order.
pub(super) fn word(value: &[u8]) -> Option<u32> {
    value.try_into().ok().map(u32::from_be_bytes)
}

/// An attribute as it is sent.
pub(super) fn encode(kind: u16, value: &[u8]) -> Vec<u8> {
    // Ours have a few bytes.
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Of every family.
const ANY_FAMILY: u8 = libc::AF_UNSPEC as u8;

fn request(subsystem: u8, what: u8, flags: u16, resource: u16, attributes: &[u8]) -> Vec<u8> {
    request_for(ANY_FAMILY, subsystem, what, flags, resource, attributes)
}

fn request_for(
    family: u8,
    subsystem: u8,
    what: u8,
    flags: u16,
    resource: u16,
    attributes: &[u8],
) -> Vec<u8> {
    let length = u32::try_from(HEADER + FAMILY + attributes.len()).unwrap_or(u32::MAX);
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(u16::from_be_bytes([subsystem, what]).to_ne_bytes());
    bytes.extend((REQUEST | flags).to_ne_bytes());
    // Neither a number nor a sender is needed where one asks at a time.
    bytes.extend([0; 8]);
    bytes.extend([family, 0]);
    bytes.extend(resource.to_be_bytes());
    bytes.extend(attributes);
    bytes
}

/// A socket to the netfilter of one network namespace.
#[derive(Debug)]
pub(super) struct Socket(pub Arc<OwnedFd>);

impl Socket {
    /// In the network namespace of this thread; it hears of what `groups` names, one bit each.
    pub fn open(groups: u32) -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkNetFilter,
        )?;
        setsockopt(&fd, sockopt::RcvBuf, &WAITING)?;
        // The kernel answers at once or, if there was no room for the answer, never.
        setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::seconds(2))?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        Ok(Self(Arc::new(fd)))
    }

    /// Asks for something and waits until it is done; what the kernel says to it is shown to `each`.
    pub fn command(
        &self,
        subsystem: u8,
        what: u8,
        resource: u16,
        attributes: &[u8],
        each: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        self.command_for(ANY_FAMILY, subsystem, what, resource, attributes, each)
    }

    /// The same about one family of addresses.
    pub fn command_for(
        &self,
        family: u8,
        subsystem: u8,
        what: u8,
        resource: u16,
        attributes: &[u8],
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let request = request_for(family, subsystem, what, ACKNOWLEDGE, resource, attributes);
        send(self.0.as_raw_fd(), &request, MsgFlags::empty())?;
        self.answer(|message| {
            if let Message::Of(from, told, _, attributes) = message
                && (*from, *told) == (subsystem, what)
            {
                each(attributes);
            }
            true
        })
    }

    /// Shows all entries of a table to `each`, until that returns false.
    pub fn list(
        &self,
        subsystem: u8,
        what: u8,
        mut each: impl FnMut(&[u8]) -> bool,
    ) -> io::Result<()> {
        let request = request(subsystem, what, DUMP, 0, &[]);
        send(self.0.as_raw_fd(), &request, MsgFlags::empty())?;
        self.answer(|message| match message {
            Message::Of(from, _, _, attributes) if *from == subsystem => each(attributes),
            _ => true,
        })
    }

    /// Shows what is heard to `each`, until the kernel has said all, or `each` returns false.
    fn answer(&self, mut each: impl FnMut(&Message<'_>) -> bool) -> io::Result<()> {
        let mut end = None;
        while end.is_none() {
            self.receive(MsgFlags::empty(), |message| match message {
                Message::End(code) => end = Some(code),
                message if end.is_none() && !each(&message) => end = Some(0),
                Message::Of(..) => {}
            })?;
        }
        match end {
            None | Some(0) => Ok(()),
            Some(code) => Err(Errno::from_raw(code.saturating_neg()).into()),
        }
    }

    /// Reads at most `most` datagrams that are there; whether there may be more.
    pub fn drain(&self, most: usize, mut each: impl FnMut(Message<'_>)) -> bool {
        for _ in 0..most {
            match self.receive(MsgFlags::MSG_DONTWAIT, &mut each) {
                Ok(()) => {}
                // Some were lost, which is counted elsewhere.
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => {}
                Err(_) => return false,
            }
        }
        true
    }

    fn receive(&self, flags: MsgFlags, each: impl FnMut(Message<'_>)) -> io::Result<()> {
        let mut buffer = [0; LONGEST];
        let length = recv(self.0.as_raw_fd(), &mut buffer, flags)?;
        messages(buffer.get(..length).unwrap_or_default()).for_each(each);
        Ok(())
    }

    /// How many datagrams were lost since it was opened, because nobody read fast enough.
    pub fn lost(&self) -> u64 {
        // The last of nine numbers is that of datagrams (linux/sock_diag.h, SK_MEMINFO_DROPS).
        let mut numbers = [0_u32; 9];
        let mut length = size_of_val(&numbers) as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes to `numbers`, which has as many, and the length to `length`.
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
    fn what_is_sent_can_be_read() {
        let body = [encode(1, &[9]), encode(7, &[1, 2, 3, 4])].concat();
        let sent = request(4, 1, ACKNOWLEDGE, 5, &body);
        assert_eq!(sent.len(), HEADER + FAMILY + 8 + 8);
        let read: Vec<Message<'_>> = messages(&sent).collect();
        assert_eq!(read, [Message::Of(4, 1, 5, &body)]);
        assert_eq!(attribute(&body, 7).and_then(word), Some(0x0102_0304));
        assert_eq!(attribute(&body, 1), Some(&[9][..]));
        assert_eq!(attribute(&body, 2), None);
    }

    #[test]
    fn whatever_is_cut_off_or_lies_about_its_length_ends_the_reading() {
        let body = [encode(1, &[9]), encode(7, &[1, 2, 3, 4])].concat();
        let mut sent = request(4, 1, 0, 5, &body);
        sent.extend(request(4, 0, 0, 5, &body));
        for length in 0..sent.len() {
            let count = messages(&sent[..length]).count();
            assert!(count <= 2 && (length < 36 || count >= 1), "{length}");
        }
        for length in 0..body.len() {
            assert!(attributes(&body[..length]).count() <= 1);
        }
        for lie in [0_u32, 1, 15, 17, 1 << 20, u32::MAX] {
            let mut sent = request(4, 1, 0, 5, &body);
            sent[..4].copy_from_slice(&lie.to_ne_bytes());
            assert_eq!(messages(&sent).count(), 0, "{lie}");
        }
        for lie in [0_u16, 3, 200, u16::MAX] {
            let mut body = body.clone();
            body[..2].copy_from_slice(&lie.to_ne_bytes());
            assert_eq!(attributes(&body).count(), 0, "{lie}");
        }
        // One byte after the other, whatever it is.
        for at in 0..sent.len() {
            for value in [0, 1, 4, 0x7f, 0xff] {
                let mut sent = sent.clone();
                sent[at] = value;
                for message in messages(&sent) {
                    if let Message::Of(_, _, _, body) = message {
                        attributes(body).for_each(drop);
                    }
                }
            }
        }
    }
}
