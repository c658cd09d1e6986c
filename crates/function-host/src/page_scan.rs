//! Page scans of the kernel, which the reset `fast` of functions needs.

use jiffy_proto::function::SlotReset;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Pages of this process, which answers scans from Linux 6.7 on.
const PAGEMAP: &str = "/proc/self/pagemap";
/// `PAGEMAP_SCAN` of `linux/fs.h`: read-write, `f` 16, 96 bytes.
const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
/// Words of its argument, `struct pm_scan_arg`: size, flags, start, end, walk_end, vec, vec_len,
/// max_pages, and four masks of categories.
const WORDS: usize = 12;
/// Categories that the reset asks for: written, of a file, present, swapped, zero.
const CATEGORIES: u64 = 0b11_1110;

/// Reset that this host's kernel cannot do.
#[derive(Debug, thiserror::Error)]
#[error(
    "the reset `fast` of functions needs page scans (PAGEMAP_SCAN, Linux 6.7 and later), which \
     this kernel does not have: {0}; start with `--functions-reset strict`, or update the kernel"
)]
pub struct PageScanUnavailable(#[source] io::Error);

/// Checks that this host can reset slots in this way.
pub fn check_reset(reset: SlotReset) -> Result<(), PageScanUnavailable> {
    match reset {
        SlotReset::Strict => Ok(()),
        SlotReset::Fast => scan(Path::new(PAGEMAP)).map_err(PageScanUnavailable),
    }
}

/// Asks for a scan of no pages, as Wasmtime does.
fn scan(pagemap: &Path) -> io::Result<()> {
    let file = File::open(pagemap)?;
    let mut scan = [0_u64; WORDS];
    scan[0] = u64::try_from(size_of_val(&scan)).unwrap_or(u64::MAX);
    scan[9] = CATEGORIES;
    // SAFETY: an argument of the size that the request's number demands, which lives until the call
    // returns; there are no addresses in it.
    match unsafe { libc::ioctl(file.as_raw_fd(), PAGEMAP_SCAN, scan.as_mut_ptr()) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_page_scans_is_told_with_what_to_do() {
        // The answer of a kernel to a request that it does not know.
        let old = scan(Path::new("/dev/null")).unwrap_err();
        assert_eq!(old.raw_os_error(), Some(libc::ENOTTY));
        let refused = PageScanUnavailable(old).to_string();
        assert!(
            refused.contains("Linux 6.7") && refused.contains("--functions-reset strict"),
            "{refused}"
        );
        assert!(scan(Path::new("/proc/self/no-pagemap")).is_err());
        check_reset(SlotReset::Strict).unwrap();
    }
}
