//! Interposed `ioctl`, which corrects the page scans of Wasmtime.
//!
//! A *slot* is address space for the memory of one instance, which requests use one after the
//! other. The *reset* cleans a slot after a request.
//!
//! Wasmtime scans for pages that are written *and* present. A page that the kernel swaps out or
//! migrates during the scan is not present, so that Wasmtime would leave the bytes of the request
//! in it. The linker redirects `ioctl` to this module (`build.rs`; rustix calls `ioctl` of libc
//! because of its feature `use-libc`), which requests pages that are written, and present or
//! swapped. The kernel reports a page under migration as swapped. No uncorrected scan reaches the
//! kernel:
//!
//! - A scan with an unknown mask fails. Wasmtime then cleans all pages of the slot, as the reset
//!   `strict` does: it sets them to their initial content or releases them to the kernel.
//! - An engine whose own check of the kernel did not call this module is rejected
//!   ([`super::engine`]).
//! - The seccomp filter of a tenant's process allows only scans with [`MARKER`], which is set here.

use super::retained_pages;
use jiffy_proto::page_scan::{FILE, PAGEMAP_SCAN, PFNZERO, PRESENT, PageScan, SWAPPED, WRITTEN};
use std::ffi::{c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// Fourth argument of a corrected scan. The kernel ignores this argument; the seccomp filter checks
/// its value.
pub(crate) const MARKER: u32 = 0x4a69_6666;

/// Number of scans that called this module.
static SCANS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of scans that have called this module.
pub(crate) fn count() -> u64 {
    SCANS.load(Ordering::SeqCst)
}

/// Corrects the mask of a scan. Returns false if the scan is not one of Wasmtime's.
fn correct(scan: &mut PageScan) -> bool {
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

/// Replacement of libc's `ioctl`. Requests other than `PAGEMAP_SCAN` are passed to the kernel
/// unchanged.
///
/// # Safety
///
/// The caller must meet the requirements of `ioctl`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_ioctl(
    descriptor: c_int,
    request: c_ulong,
    argument: *mut c_void,
) -> c_int {
    let call_kernel = |argument: *mut c_void, marker: u32| {
        // SAFETY: the caller meets the requirements of this request.
        let result = unsafe {
            libc::syscall(
                libc::SYS_ioctl,
                descriptor,
                request,
                argument,
                c_ulong::from(marker),
            )
        };
        // A result of `ioctl` fits into an `int`.
        c_int::try_from(result).unwrap_or(-1)
    };
    if request != PAGEMAP_SCAN {
        return call_kernel(argument, 0);
    }
    // SAFETY: the argument of this request points to a structure of this type, whose size is part
    // of the request's number.
    let scan = unsafe { argument.cast::<PageScan>().as_mut() };
    // After this error, Wasmtime cleans all pages of the slot: no data of the request remains.
    let Some(scan) = scan.and_then(|scan| correct(scan).then_some(scan)) else {
        // SAFETY: this is the address of the thread's own errno.
        unsafe { *libc::__errno_location() = libc::EINVAL };
        return -1;
    };
    SCANS.fetch_add(1, Ordering::SeqCst);
    // If the request caused no page fault, the slot's last result is still valid, and this call
    // returns it. Otherwise this call scans by means of the kernel.
    retained_pages::scan(scan, |scan| call_kernel((&raw mut *scan).cast(), MARKER))
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
    fn known_scan_is_corrected_and_others_are_rejected() {
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
