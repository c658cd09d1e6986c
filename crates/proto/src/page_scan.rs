//! Definitions of the kernel's page scan (`PAGEMAP_SCAN` of `linux/fs.h`, Linux 6.7 and later),
//! with which written pages of a process are found.

use libc::c_ulong;

/// Request number: read and write, type `f`, number 16, 96 bytes.
pub const PAGEMAP_SCAN: c_ulong = 0xC060_6610;

/// Category: the page was written since it was write-protected.
pub const WRITTEN: u64 = 1 << 1;
/// Category: the page belongs to a file and was not copied.
pub const FILE: u64 = 1 << 2;
/// Category: the page is in memory.
pub const PRESENT: u64 = 1 << 3;
/// Category: the page is swapped out or being migrated.
pub const SWAPPED: u64 = 1 << 4;
/// Category: the page is the shared zero page.
pub const PFNZERO: u64 = 1 << 5;

/// Category: the page is part of a huge page.
pub const HUGE: u64 = 1 << 6;

/// Flag: write-protects the pages that match.
pub const PROTECT_MATCHING: u64 = 1;

/// Argument, `struct pm_scan_arg`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct PageScan {
    /// Size of this structure in bytes.
    pub size: u64,
    /// Flags.
    pub flags: u64,
    /// First address.
    pub start: u64,
    /// End address (exclusive).
    pub end: u64,
    /// Address at which the scan ended.
    pub walk_end: u64,
    /// Address of an array of [`PageRegion`].
    pub vec: u64,
    /// Length of the array in regions.
    pub vec_len: u64,
    /// Maximum number of reported pages. 0 means no limit.
    pub max_pages: u64,
    /// Categories whose absence counts as a match in the masks.
    pub category_inverted: u64,
    /// Categories that a page must have.
    pub category_mask: u64,
    /// Categories of which a page must have at least one.
    pub category_anyof_mask: u64,
    /// Categories that are reported.
    pub return_mask: u64,
}

impl Default for PageScan {
    /// Returns a scan of an empty range.
    fn default() -> Self {
        Self {
            size: size_of::<Self>() as u64,
            flags: 0,
            start: 0,
            end: 0,
            walk_end: 0,
            vec: 0,
            vec_len: 0,
            max_pages: 0,
            category_inverted: 0,
            category_mask: 0,
            category_anyof_mask: 0,
            return_mask: 0,
        }
    }
}

/// Result, `struct page_region`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PageRegion {
    /// First address.
    pub start: u64,
    /// End address (exclusive).
    pub end: u64,
    /// Reported categories.
    pub categories: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_and_request_number_match_the_kernel() {
        assert_eq!(size_of::<PageScan>(), 96);
        assert_eq!(size_of::<PageRegion>(), 24);
        assert_eq!(PAGEMAP_SCAN, libc::_IOWR::<PageScan>(u32::from(b'f'), 16));
    }
}
