//! Check whether the host's kernel supports page scans, which the reset `fast` of functions
//! requires. A *reset* cleans the memory of an instance of a WebAssembly module after a request, so
//! that the next instance can use it. This reset scans for the pages that a request wrote, and
//! restores them.

use jiffy_proto::function::SlotReset;
use jiffy_proto::page_scan::{FILE, PAGEMAP_SCAN, PFNZERO, PRESENT, PageScan, SWAPPED, WRITTEN};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Page map of this process, which supports scans since Linux 6.7.
const PAGEMAP: &str = "/proc/self/pagemap";
/// Page categories that the reset `fast` requests.
const CATEGORIES: u64 = WRITTEN | FILE | PRESENT | SWAPPED | PFNZERO;

/// Error: the host's kernel does not support the reset.
#[derive(Debug, thiserror::Error)]
#[error(
    "the reset `fast` of functions needs page scans (PAGEMAP_SCAN, Linux 6.7 and later), which \
     this kernel does not have: {0}; start with `--functions-reset strict`, or update the kernel"
)]
pub struct PageScanUnavailable(#[source] io::Error);

/// Checks whether this host supports a reset.
pub fn check_reset(reset: SlotReset) -> Result<(), PageScanUnavailable> {
    match reset {
        SlotReset::Strict => Ok(()),
        SlotReset::Fast => scan(Path::new(PAGEMAP)).map_err(PageScanUnavailable),
    }
}

/// Requests a scan of an empty range. Wasmtime checks the kernel in the same way.
fn scan(pagemap: &Path) -> io::Result<()> {
    let file = File::open(pagemap)?;
    let mut scan = PageScan {
        category_mask: CATEGORIES,
        ..PageScan::default()
    };
    // SAFETY: the argument has the type of the request, lives until the call returns, and contains
    // no address.
    match unsafe { libc::ioctl(file.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_kernel_without_page_scans_names_the_remedies() {
        // `/dev/null` rejects the request with the same error as a kernel without page scans.
        let old = scan(Path::new("/dev/null")).unwrap_err();
        assert_eq!(old.raw_os_error(), Some(libc::ENOTTY));
        let error = PageScanUnavailable(old).to_string();
        assert!(
            error.contains("Linux 6.7") && error.contains("--functions-reset strict"),
            "{error}"
        );
        assert!(scan(Path::new("/proc/self/no-pagemap")).is_err());
        check_reset(SlotReset::Strict).unwrap();
    }
}
