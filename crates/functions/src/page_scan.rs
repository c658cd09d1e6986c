//! Page scans of the reset `fast`, with a mask that misses no page.
//!
//! Wasmtime finds the pages that a request wrote with `PAGEMAP_SCAN`. It asks for pages that are
//! written *and* present; one that the kernel migrates or swaps out at that moment is not, and
//! keeps the bytes of the request. The linker sends `ioctl` here (`build.rs`; rustix calls libc's
//! by its feature `use-libc`), where a page may be present or swapped: a page that migrates counts
//! as swapped. Three things keep an uncorrected scan from the kernel:
//!
//! - a scan with another mask than the known one fails, upon which Wasmtime resets strictly;
//! - an engine whose own check of the kernel did not come through here is refused ([`observe`]);
//! - the filter of a tenant's process passes only scans with [`MARKER`], which is set here.

use crate::kept_pages;
use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// `PAGEMAP_SCAN` of `linux/fs.h`: read-write, `f` 16, 96 bytes.
pub(crate) const PAGEMAP_SCAN: c_ulong = 0xC060_6610;
/// Fourth argument of a corrected scan. The kernel ignores it, filters see it.
pub(crate) const MARKER: u32 = 0x4a69_6666;
/// Categories of pages in `linux/fs.h`.
pub const WRITTEN: u64 = 1 << 1;
/// Backed by a file: read only so far.
pub const FILE: u64 = 1 << 2;
/// In memory.
pub const PRESENT: u64 = 1 << 3;
/// Swapped out, or under migration.
pub const SWAPPED: u64 = 1 << 4;
/// The page of zeros: read only so far.
pub const PFNZERO: u64 = 1 << 5;

/// Argument of `PAGEMAP_SCAN`, `struct pm_scan_arg`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PageScan {
    /// Bytes of this structure.
    pub size: u64,
    /// Flags; none are used.
    pub flags: u64,
    /// First address.
    pub start: u64,
    /// End of the addresses.
    pub end: u64,
    /// Address at which the scan ended.
    pub walk_end: u64,
    /// Address of the regions that are found, of 24 bytes each.
    pub vec: u64,
    /// Number of regions that have room there.
    pub vec_len: u64,
    /// Most pages that are reported.
    pub max_pages: u64,
    /// Categories whose absence is meant.
    pub category_inverted: u64,
    /// Categories that a page must have.
    pub category_mask: u64,
    /// Categories of which a page must have one.
    pub category_anyof_mask: u64,
    /// Categories that are reported.
    pub return_mask: u64,
}

/// Calls of `PAGEMAP_SCAN` that came through here.
static SCANS: AtomicU64 = AtomicU64::new(0);

impl PageScan {
    /// Corrects the mask of Wasmtime's scan. False for a scan that is not known.
    pub fn correct(&mut self) -> bool {
        if self.start == self.end {
            // Wasmtime's check of the kernel, at an empty range.
            return true;
        }
        let known = self.flags == 0
            && self.category_inverted == PFNZERO | FILE
            && self.category_mask == WRITTEN | PRESENT | PFNZERO | FILE
            && self.category_anyof_mask == 0;
        if known {
            self.category_mask = WRITTEN | PFNZERO | FILE;
            self.category_anyof_mask = PRESENT | SWAPPED;
        }
        known
    }
}

/// Runs `make`, and returns true if it scanned pages through this module.
pub(crate) fn observe<T>(make: impl FnOnce() -> T) -> (T, bool) {
    let before = SCANS.load(Ordering::SeqCst);
    let made = make();
    (made, SCANS.load(Ordering::SeqCst) != before)
}

/// Function that the linker puts before libc's `ioctl`.
///
/// # Safety
///
/// As `ioctl`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_ioctl(
    descriptor: c_int,
    request: c_ulong,
    argument: *mut c_void,
) -> c_int {
    let pass = |argument: *mut c_void, marker: u32| {
        // SAFETY: the caller's request, which is libc's to pass on in the same way.
        let done: c_long = unsafe {
            libc::syscall(
                libc::SYS_ioctl,
                descriptor,
                request,
                argument,
                c_ulong::from(marker),
            )
        };
        c_int::try_from(done).unwrap_or(-1)
    };
    if request != PAGEMAP_SCAN {
        return pass(argument, 0);
    }
    // SAFETY: the caller of this request passes a structure of this shape, as the size that is part
    // of the request's number demands.
    let scan = unsafe { argument.cast::<PageScan>().as_mut() };
    let Some(scan) = scan.and_then(|scan| scan.correct().then_some(scan)) else {
        // SAFETY: the address of the thread's own errno.
        unsafe { *libc::__errno_location() = libc::EINVAL };
        return -1;
    };
    SCANS.fetch_add(1, Ordering::SeqCst);
    kept_pages::scan(scan, |scan| pass((&raw mut *scan).cast(), MARKER))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: PageScan = PageScan {
        size: 96,
        flags: 0,
        start: 4096,
        end: 8192,
        walk_end: 0,
        vec: 0,
        vec_len: 0,
        max_pages: 1,
        category_inverted: PFNZERO | FILE,
        category_mask: WRITTEN | PRESENT | PFNZERO | FILE,
        category_anyof_mask: 0,
        return_mask: 0,
    };

    #[test]
    fn the_known_scan_is_corrected_and_another_is_refused() {
        let mut scan = KNOWN;
        assert!(scan.correct());
        assert_eq!(scan.category_mask & PRESENT, 0);
        assert_eq!(scan.category_anyof_mask, PRESENT | SWAPPED);
        for change in [WRITTEN, PRESENT, 1 << 7] {
            let mut scan = KNOWN;
            scan.category_mask ^= change;
            assert!(!scan.correct(), "{scan:?}");
        }
        let mut scan = KNOWN;
        scan.flags = 1;
        assert!(!scan.correct());
    }

    #[test]
    fn the_structure_and_the_request_are_the_kernels() {
        assert_eq!(size_of::<PageScan>(), 96);
        assert_eq!(PAGEMAP_SCAN, libc::_IOWR::<PageScan>(u32::from(b'f'), 16));
    }
}
