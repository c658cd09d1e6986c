//! Host side of the interface: the tap device, which reads and writes one frame per call.

use super::header::HEADER_BYTES;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Offloads that the reader of a tap supports (Linux `if_tun.h`).
const TUN_F_CSUM: libc::c_ulong = 1;
const TUN_F_TSO4: libc::c_ulong = 2;
const TUN_F_TSO6: libc::c_ulong = 4;

/// Receive offloads that the driver supports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TapOffloads {
    /// Frames without a complete checksum.
    pub csum: bool,
    /// TCP over IPv4 in segments of up to 64 KiB. Requires `csum`.
    pub tso4: bool,
    /// TCP over IPv6 in segments of up to 64 KiB. Requires `csum`.
    pub tso6: bool,
}

/// `TUNGETIFF` and `TUNSETVNETHDRSZ`.
mod ioctls {
    nix::ioctl_read_bad!(
        get_iff,
        nix::request_code_read!(b'T', 210, size_of::<libc::c_uint>()),
        libc::ifreq
    );
    nix::ioctl_write_ptr_bad!(
        set_vnet_hdr_sz,
        nix::request_code_write!(b'T', 216, size_of::<libc::c_int>()),
        libc::c_int
    );
}
/// `TUNSETOFFLOAD`, which takes its argument by value.
const TUNSETOFFLOAD: libc::c_ulong = nix::request_code_write!(b'T', 208, size_of::<libc::c_uint>());

/// Tap device, or a datagram socket in tests.
#[derive(Debug)]
pub struct Tap {
    file: File,
    /// False for a socket of a test.
    is_tap: bool,
}

impl Tap {
    /// Wraps a tap opened with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR` and makes it non-blocking.
    pub fn new(file: File) -> io::Result<Self> {
        // A read must not block the event loop.
        nonblocking(&file)?;
        // SAFETY: an all-zero `ifreq` is valid because it contains only integers and a union of
        // integers.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // SAFETY: TUNGETIFF writes one `ifreq`, which `request` is.
        unsafe { ioctls::get_iff(file.as_raw_fd(), &mut request) }?;
        // SAFETY: TUNGETIFF has set the flags, and every bit pattern is a valid value of that
        // field.
        let flags = i32::from(unsafe { request.ifr_ifru.ifru_flags });
        let wanted = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if flags & wanted != wanted {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "tap was not opened with IFF_TAP | IFF_NO_PI | IFF_VNET_HDR",
            ));
        }
        // The kernel's default is 10 bytes, without `num_buffers`.
        let size = libc::c_int::try_from(HEADER_BYTES).unwrap_or(0);
        // SAFETY: TUNSETVNETHDRSZ reads one int, which `size` is.
        unsafe { ioctls::set_vnet_hdr_sz(file.as_raw_fd(), &size) }?;
        Ok(Self { file, is_tap: true })
    }

    /// Wraps a socket. Every datagram is a frame with its header.
    #[cfg(any(test, feature = "testing"))]
    pub fn datagrams(file: File) -> io::Result<Self> {
        nonblocking(&file)?;
        Ok(Self {
            file,
            is_tap: false,
        })
    }

    /// Sets the offloads that the driver supports for received frames.
    pub fn set_offloads(&self, offloads: TapOffloads) -> io::Result<()> {
        if !self.is_tap {
            return Ok(());
        }
        let TapOffloads { csum, tso4, tso6 } = offloads;
        let flag = |on: bool, flag| if on { flag } else { 0 };
        // Segmentation requires checksum offload.
        let flags = flag(csum, TUN_F_CSUM)
            | flag(csum && tso4, TUN_F_TSO4)
            | flag(csum && tso6, TUN_F_TSO6);
        // SAFETY: TUNSETOFFLOAD takes its argument by value and accesses no memory of this process.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), TUNSETOFFLOAD, flags) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Reads one frame with its header.
    pub fn read(&self, frame: &mut [u8]) -> io::Result<usize> {
        Ok(nix::unistd::read(&self.file, frame)?)
    }

    /// Writes one frame with its header.
    pub fn write(&self, iovecs: &[libc::iovec]) -> io::Result<()> {
        let count = libc::c_int::try_from(iovecs.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: `iovecs` has `count` vectors (the kernel rejects more than 1024). Each refers to
        // guest memory, which is mapped while it is borrowed, or to a buffer of the caller. The
        // memory is only read.
        let written = unsafe { libc::writev(self.file.as_raw_fd(), iovecs.as_ptr(), count) };
        if written < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Makes reads and writes of a file return instead of waiting.
fn nonblocking(file: &File) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    fcntl(file, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}
