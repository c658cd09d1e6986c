//! userfaultfd: page faults on missing memory (include/uapi/linux/userfaultfd.h).
//!
//! The userfaultfd is created from a descriptor of `/dev/userfaultfd` that was opened before the
//! jail was entered. Unlike the system call, this device also permits an unprivileged process to
//! handle faults of the kernel, including KVM.

use nix::errno::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Requests that create a userfaultfd, and that enable its features.
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `UFFDIO_WAKE` is an `_IOR` request of type 0xaa, the others are `_IOWR`. The filters in
/// `seccomp::ioctl` allow these requests by number.
pub(crate) const UFFDIO_REGISTER: u32 = 0xc020_aa00;
pub(crate) const UFFDIO_WAKE: u32 = 0x8010_aa02;
pub(crate) const UFFDIO_COPY: u32 = 0xc028_aa03;
pub(crate) const UFFDIO_ZEROPAGE: u32 = 0xc020_aa04;
/// Version of the interface.
const UFFD_API: u64 = 0xaa;
/// Kinds of faults for which a range is registered: on missing and on protected pages.
const REGISTER_MODE_MISSING: u64 = 1;
const REGISTER_MODE_WRITE_PROTECT: u64 = 1 << 1;
/// `UFFD_FEATURE_WP_ASYNC`: the kernel resolves writes to protected pages by itself.
const FEATURE_ASYNC_WRITE_PROTECT: u64 = 1 << 15;
/// `UFFD_USER_MODE_ONLY`: faults of the kernel are never delivered.
const USER_MODE_ONLY: libc::c_int = 1;
/// `UFFD_EVENT_PAGEFAULT`: the message reports a page fault.
const EVENT_PAGEFAULT: u8 = 0x12;
/// Size of `struct uffd_msg`, in bytes.
const MESSAGE_BYTES: usize = 32;
/// Maximum number of faults that one read returns.
const FAULTS_PER_READ: usize = 64;
const PAGE_BYTES: u64 = 4096;

/// Argument of `UFFDIO_API` (`uffdio_api`).
#[repr(C)]
struct ApiArg {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// Argument of `UFFDIO_REGISTER` (`uffdio_register`).
#[repr(C)]
struct RegisterArg {
    start: u64,
    bytes: u64,
    mode: u64,
    ioctls: u64,
}

/// Argument of `UFFDIO_COPY` (`uffdio_copy`).
#[repr(C)]
struct CopyArg {
    to: u64,
    from: u64,
    bytes: u64,
    mode: u64,
    copied: i64,
}

/// Argument of `UFFDIO_ZEROPAGE` (`uffdio_zeropage`).
#[repr(C)]
struct ZeroArg {
    start: u64,
    bytes: u64,
    mode: u64,
    zeroed: i64,
}

/// Argument of `UFFDIO_WAKE` (`uffdio_range`).
#[repr(C)]
struct WakeArg {
    start: u64,
    bytes: u64,
}

/// userfaultfd of this process. A forked process does not inherit the registrations: missing memory
/// reads as zero there.
#[derive(Debug)]
pub struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// Creates a userfaultfd from an open `/dev/userfaultfd`.
    pub fn new(device: BorrowedFd<'_>) -> Result<Self, Errno> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: this request takes flags and creates a descriptor.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
        let fd = Errno::result(fd)?;
        // SAFETY: the kernel has just created this descriptor for this process.
        let userfaultfd = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        userfaultfd.enable(0)?;
        Ok(userfaultfd)
    }

    /// Creates a userfaultfd that only tracks writes ([`super::write_tracker`]). The process needs
    /// no privilege.
    pub fn tracking_writes() -> Result<Self, Errno> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
        // SAFETY: this system call takes flags and creates a descriptor.
        let fd = Errno::result(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) })?;
        let fd = libc::c_int::try_from(fd).map_err(|_| Errno::EOVERFLOW)?;
        // SAFETY: the kernel has just created this descriptor for this process.
        let userfaultfd = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        userfaultfd.enable(FEATURE_ASYNC_WRITE_PROTECT)?;
        Ok(userfaultfd)
    }

    /// Enables features. The kernel requires this request before all others.
    fn enable(&self, features: u64) -> Result<(), Errno> {
        let mut api = ApiArg {
            api: UFFD_API,
            features,
            ioctls: 0,
        };
        self.request(UFFDIO_API, &mut api)
    }

    /// Makes a request with its argument.
    fn request<T>(&self, request: libc::c_ulong, argument: &mut T) -> Result<(), Errno> {
        let argument: *mut T = argument;
        // SAFETY: every caller passes the struct of its request. The requests modify only missing
        // pages.
        Errno::result(unsafe { libc::ioctl(self.0.as_raw_fd(), request, argument) }).map(drop)
    }

    /// Makes accesses to missing pages of a range wait for [`Self::copy`] or [`Self::zero`].
    pub fn register(&self, start: u64, bytes: u64) -> Result<(), Errno> {
        self.register_mode(start, bytes, REGISTER_MODE_MISSING)
    }

    /// Permits the pages of a range to be protected, so that their writes are tracked. Requires
    /// [`Self::tracking_writes`].
    pub fn register_write_tracking(&self, start: u64, bytes: u64) -> Result<(), Errno> {
        self.register_mode(start, bytes, REGISTER_MODE_WRITE_PROTECT)
    }

    fn register_mode(&self, start: u64, bytes: u64, mode: u64) -> Result<(), Errno> {
        let mut register = RegisterArg {
            start,
            bytes,
            mode,
            ioctls: 0,
        };
        self.request(UFFDIO_REGISTER.into(), &mut register)
    }

    /// Fills the missing pages starting at `to` with `bytes`, which must be whole pages, and wakes
    /// waiting threads. Present pages retain their content.
    pub fn copy(&self, to: u64, bytes: &[u8]) -> Result<(), Errno> {
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            let skipped = u64::try_from(done).map_err(|_| Errno::EOVERFLOW)?;
            let mut copy = CopyArg {
                to: to + skipped,
                from: u64::try_from(rest.as_ptr().addr()).map_err(|_| Errno::EOVERFLOW)?,
                bytes: u64::try_from(rest.len()).map_err(|_| Errno::EOVERFLOW)?,
                mode: 0,
                copied: 0,
            };
            let result = self.request(UFFDIO_COPY.into(), &mut copy);
            // The kernel reports the number of copied bytes, or an error as a negative number.
            match (result, usize::try_from(copy.copied)) {
                (Ok(()), _) => break,
                // Only a part was copied, or the memory is being remapped.
                (Err(Errno::EAGAIN), Ok(copied)) => done += copied,
                (Err(Errno::EAGAIN), Err(_)) => {}
                // The page is present: skip it, because its content is newer. Threads may still
                // wait for it.
                (Err(Errno::EEXIST), _) => {
                    self.wake(copy.to, PAGE_BYTES)?;
                    done += usize::try_from(PAGE_BYTES).map_err(|_| Errno::EOVERFLOW)?;
                }
                (Err(e), _) => return Err(e),
            }
        }
        Ok(())
    }

    /// Makes the page at `start` zero if it is missing, and wakes waiting threads.
    pub fn zero(&self, start: u64) -> Result<(), Errno> {
        loop {
            let mut zero = ZeroArg {
                start,
                bytes: PAGE_BYTES,
                mode: 0,
                zeroed: 0,
            };
            match self.request(UFFDIO_ZEROPAGE.into(), &mut zero) {
                Err(Errno::EAGAIN) => {}
                Err(Errno::EEXIST) => return self.wake(start, PAGE_BYTES),
                other => return other,
            }
        }
    }

    /// Wakes threads that wait for a range, so that they repeat their access.
    pub fn wake(&self, start: u64, bytes: u64) -> Result<(), Errno> {
        self.request(UFFDIO_WAKE.into(), &mut WakeArg { start, bytes })
    }

    /// Returns the addresses of pending faults without waiting.
    pub fn faults(&self) -> Result<Vec<u64>, Errno> {
        let mut messages = [0; MESSAGE_BYTES * FAULTS_PER_READ];
        // `EAGAIN`: another thread has read the messages, or there are none.
        let length = match nix::unistd::read(&self.0, &mut messages) {
            Err(Errno::EAGAIN | Errno::EINTR) => 0,
            other => other?,
        };
        let messages = messages.get(..length).unwrap_or_default();
        let faults = messages.as_chunks::<MESSAGE_BYTES>().0.iter();
        let faults = faults.filter(|message| message.first() == Some(&EVENT_PAGEFAULT));
        // The address follows event (1 byte), 7 reserved bytes and flags (8 bytes).
        let address = |message: &[u8; MESSAGE_BYTES]| {
            let field = message.get(16..24)?.first_chunk()?;
            Some(u64::from_le_bytes(*field))
        };
        Ok(faults.filter_map(address).collect())
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
