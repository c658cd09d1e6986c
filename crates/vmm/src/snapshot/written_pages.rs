//! Pages that a guest has written since its restore. Later restores copy these pages in advance.
//!
//! A *private* page belongs to this process alone. All other pages are mapped from the layers of a
//! snapshot, which are files.
//!
//! Memory that no layer contains is allocated in huge pages. A whole huge page is private as soon
//! as the guest writes to a part of it. If all of its pages counted as written, they would be
//! copied in advance for every later guest.

use super::linear_memory::{CHUNK_SIZE, LinearMemory};
use super::pagemap_scan::{PageFilter, scan_pages};
use crate::memory::HUGE_PAGE_BYTES;
use jiffy_proto::layer::{LayerIndex, MEMORY_PAGE, UnitSet};
use nix::errno::Errno;
use std::fs::File;
use std::io;

const PAGE: u64 = MEMORY_PAGE as u64;
const PAGES_PER_HUGE_PAGE: u64 = HUGE_PAGE_BYTES as u64 / PAGE;

/// Writes the index of the written pages to `file`. `pagemap` is this process's
/// `/proc/PID/pagemap`.
pub fn write(file: &File, pagemap: &File, linear: &LinearMemory) -> io::Result<()> {
    let set = LayerIndex {
        stored: written_pages(pagemap, linear)?,
        ..LayerIndex::empty(MEMORY_PAGE, linear.bytes())
    };
    set.write(file)
}

/// Returns the private pages. If a whole huge page is private, its pages that contain only zeroes
/// are excluded.
fn written_pages(pagemap: &File, linear: &LinearMemory) -> Result<UnitSet, Errno> {
    let mut pages = scan_pages(pagemap, linear, PageFilter::Private)?;
    let mut start = 0;
    // Pages that remain after the last whole huge page cannot form a huge page.
    while start + PAGES_PER_HUGE_PAGE <= pages.units() {
        let huge_page = start..start + PAGES_PER_HUGE_PAGE;
        // Assume a huge page if all of its pages are private.
        if huge_page.clone().all(|page| pages.contains(page)) {
            for page in huge_page {
                if is_zero(linear, page) {
                    pages.remove(page);
                }
            }
        }
        start += PAGES_PER_HUGE_PAGE;
    }
    Ok(pages)
}

/// True if a page contains only zeroes.
fn is_zero(linear: &LinearMemory, page: u64) -> bool {
    let at = page * PAGE;
    // A page without an address counts as written, which only causes an unnecessary copy.
    let Some(chunk) = linear.chunk(at / CHUNK_SIZE) else {
        return false;
    };
    let words = chunk.wrapping_add((at % CHUNK_SIZE) as usize).cast::<u64>();
    (0..MEMORY_PAGE as usize / size_of::<u64>()).all(|word| {
        // SAFETY: the word is inside a chunk of guest memory, which is aligned to its size. The
        // guest may write to it concurrently.
        unsafe { words.add(word).read_volatile() == 0 }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory;
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn zero_pages_of_a_private_huge_page_do_not_count_as_written() {
        let memory = memory::allocate(128).unwrap();
        let linear = LinearMemory::new(&memory).unwrap();
        // Write zeroes to all pages, so that the whole huge page is private. Then write other bytes
        // to two of them.
        let start = 4 * HUGE_PAGE_BYTES as u64;
        for page in 0..PAGES_PER_HUGE_PAGE {
            let address = GuestAddress(start + page * PAGE);
            memory.write_obj(0u8, address).unwrap();
        }
        for page in [3, 511] {
            let address = GuestAddress(start + page * PAGE + 4095);
            memory.write_obj(1u8, address).unwrap();
        }
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let first = 4 * PAGES_PER_HUGE_PAGE;
        let private = scan_pages(&pagemap, &linear, PageFilter::Private).unwrap();
        assert!((first..first + PAGES_PER_HUGE_PAGE).all(|page| private.contains(page)));
        let written = written_pages(&pagemap, &linear).unwrap();
        assert_eq!(written.iter().collect::<Vec<_>>(), [first + 3, first + 511]);
    }

    #[test]
    fn a_zeroed_page_next_to_untouched_pages_counts_as_written() {
        let memory = memory::allocate(128).unwrap();
        let linear = LinearMemory::new(&memory).unwrap();
        // SAFETY: advice for memory of this test that was never written.
        let result = unsafe {
            let at = linear.chunk(0).unwrap().cast();
            libc::madvise(at, 128 << 20, libc::MADV_NOHUGEPAGE)
        };
        assert_eq!(result, 0);
        memory.write_obj(0u8, GuestAddress(700 * PAGE)).unwrap();
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let written = written_pages(&pagemap, &linear).unwrap();
        assert_eq!(written.iter().collect::<Vec<_>>(), [700]);
    }
}
