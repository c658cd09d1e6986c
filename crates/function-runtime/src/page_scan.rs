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
use jiffy_proto::page_scan::{FILE, PAGEMAP_SCAN, PFNZERO, PRESENT, PageScan, SWAPPED, WRITTEN};
use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// Fourth argument of a corrected scan. The kernel ignores it, filters see it.
pub(crate) const MARKER: u32 = 0x4a69_6666;
/// Calls of `PAGEMAP_SCAN` that came through here.
static SCANS: AtomicU64 = AtomicU64::new(0);

/// Corrects the mask of a scan of Wasmtime. Returns false for an unknown scan.
pub fn correct(scan: &mut PageScan) -> bool {
    if scan.start == scan.end {
        // Wasmtime checks the kernel with an empty range.
        return true;
    }
    let is_known = scan.flags == 0
        && scan.category_inverted == PFNZERO | FILE
        && scan.category_mask == WRITTEN | PRESENT | PFNZERO | FILE
        && scan.category_anyof_mask == 0;
    if is_known {
        scan.category_mask = WRITTEN | PFNZERO | FILE;
        scan.category_anyof_mask = PRESENT | SWAPPED;
    }
    is_known
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
    let Some(scan) = scan.and_then(|scan| correct(scan).then_some(scan)) else {
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
        size: size_of::<PageScan>() as u64,
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
        assert!(correct(&mut scan));
        assert_eq!(scan.category_mask & PRESENT, 0);
        assert_eq!(scan.category_anyof_mask, PRESENT | SWAPPED);
        for change in [WRITTEN, PRESENT, 1 << 7] {
            let mut scan = KNOWN;
            scan.category_mask ^= change;
            assert!(!correct(&mut scan), "{scan:?}");
        }
        let mut scan = KNOWN;
        scan.flags = 1;
        assert!(!correct(&mut scan));
    }
}
