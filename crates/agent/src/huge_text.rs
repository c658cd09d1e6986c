//! Huge pages for the code and the constants of this program.
//!
//! In a restored guest without nested page tables, the first access to each page causes an exit to
//! the host. Most of the user pages that a new sandbox touches belong to this program. With huge
//! pages, there is one exit per 2 MiB.

use crate::sys;
use std::fs;
use std::io;
use std::ops::Range;
use std::ptr;

/// Size of a huge page in bytes.
const HUGE_PAGE: usize = 2 << 20;
/// Setting that selects the processes whose memory may consist of huge pages. By default no process
/// is selected: the kernel's command line enables only pages of 64 KiB (`thp_anon`).
const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled";
/// Byte of the breakpoint instruction. Zeroes are unsuitable: snapshots do not store zero pages,
/// and the host maps a huge page only if the snapshot stores all of it.
const FILLER: u8 = 0xcc;

/// Moves the read-only part of this program to huge pages at the same addresses. Returns false if
/// the layout of the program does not permit this. Must be called before a second thread exists.
pub fn enable() -> io::Result<bool> {
    let before = fs::read_to_string(SETTING)?;
    fs::write(SETTING, "madvise")?;
    let moved = move_text();
    // A permanent setting would make the kernel search for memory to merge every 10 s.
    fs::write(SETTING, active_value(&before))?;
    moved
}

/// Returns the active value of a setting, which is in brackets.
fn active_value(setting: &str) -> &str {
    let inner = setting
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    inner.map_or("never", |(word, _)| word)
}

/// Replaces the program's code by a copy in huge pages, at the same addresses. Returns whether
/// the code was replaced. The code that runs this function is replaced as well, by equal bytes.
fn move_text() -> io::Result<bool> {
    // A program that is not linked for huge pages, for example in tests, runs without them.
    let Some(text) = read_only_range(&program_headers()) else {
        return Ok(false);
    };
    let length = text.len().next_multiple_of(HUGE_PAGE);
    let copy = reserve(length)?;
    let old = ptr::with_exposed_provenance::<u8>(text.start);
    // SAFETY: the copy has `length` writable bytes that no other code uses. The text is mapped
    // readable as a whole, as its program headers state. The call that moves the copy to the
    // address of the text leaves the same bytes at the same addresses. No other mapping lies within
    // `length` bytes (`read_only_range`).
    unsafe {
        // Ignore the error: the copy is also correct without huge pages.
        let _ = libc::madvise(copy.cast(), length, libc::MADV_HUGEPAGE);
        ptr::copy_nonoverlapping(old, copy, text.len());
        ptr::write_bytes(copy.add(text.len()), FILLER, length - text.len());
        let rights = libc::PROT_READ | libc::PROT_EXEC;
        sys::check(libc::mprotect(copy.cast(), length, rights))?;
        let place = ptr::with_exposed_provenance_mut::<libc::c_void>(text.start);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let moved = libc::mremap(copy.cast(), length, length, flags, place);
        if moved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(true)
}

/// Reserves `length` bytes of new memory, aligned to a huge page.
fn reserve(length: usize) -> io::Result<*mut u8> {
    let around = length + HUGE_PAGE;
    // SAFETY: this is a new mapping. The parts before and after the aligned range are unmapped.
    unsafe {
        let (rights, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        let start = libc::mmap(ptr::null_mut(), around, rights, kind, -1, 0);
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // `align_offset` is less than HUGE_PAGE, so the mapping contains `length` aligned bytes.
        let before = start.align_offset(HUGE_PAGE);
        if before > 0 {
            sys::check(libc::munmap(start, before))?;
        }
        let aligned = start.byte_add(before);
        sys::check(libc::munmap(aligned.byte_add(length), HUGE_PAGE - before))?;
        Ok(aligned.cast())
    }
}

/// Part of the program that is loaded into memory.
#[derive(Debug, Clone, Copy)]
struct Segment {
    start: usize,
    end: usize,
    /// True for a segment that may be written. Only read-only segments use huge pages.
    writable: bool,
}

/// Returns the loaded segments of this program.
fn program_headers() -> Vec<Segment> {
    // SAFETY: the kernel passes the address and number of the program headers, which remain mapped.
    let headers: &[libc::Elf64_Phdr] = unsafe {
        let first = libc::getauxval(libc::AT_PHDR) as usize;
        let count = libc::getauxval(libc::AT_PHNUM) as usize;
        if first == 0 {
            return Vec::new();
        }
        std::slice::from_raw_parts(ptr::with_exposed_provenance(first), count)
    };
    let of = |kind| headers.iter().find(move |header| header.p_type == kind);
    let Some(own) = of(libc::PT_PHDR) else {
        return Vec::new();
    };
    // Distance between the load address and the link address of the program.
    let bias = headers.as_ptr().addr().wrapping_sub(own.p_vaddr as usize);
    let loaded = headers.iter().filter(|h| h.p_type == libc::PT_LOAD);
    loaded
        .map(|header| {
            let start = bias.wrapping_add(header.p_vaddr as usize);
            Segment {
                start,
                end: start.saturating_add(header.p_memsz as usize),
                writable: header.p_flags & libc::PF_W != 0,
            }
        })
        .collect()
}

/// Returns the first segment if it is read-only and aligned to a huge page, and if no other segment
/// begins in its last huge page.
fn read_only_range(segments: &[Segment]) -> Option<Range<usize>> {
    let first = segments.first().filter(|segment| !segment.writable)?;
    let end = first.end.checked_next_multiple_of(HUGE_PAGE)?;
    let is_apart = |segment: &Segment| segment.start >= end;
    let fits = first.start.is_multiple_of(HUGE_PAGE)
        && first.start < first.end
        && segments.iter().skip(1).all(is_apart);
    fits.then_some(first.start..first.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a segment. `writable` is true for data, and false for text.
    fn segment(start: usize, end: usize, writable: bool) -> Segment {
        Segment {
            start,
            end,
            writable,
        }
    }

    #[test]
    fn only_a_first_segment_that_shares_no_huge_page_is_moved() {
        let text = segment(HUGE_PAGE, 2 * HUGE_PAGE + 5, false);
        let data = segment(3 * HUGE_PAGE, 3 * HUGE_PAGE + 1, true);
        assert_eq!(read_only_range(&[text, data]), Some(text.start..text.end));
        assert_eq!(read_only_range(&[text]), Some(text.start..text.end));
        // First segments that are not moved: writable, not aligned to a huge page, with data in the
        // same huge page, and empty.
        let writable = Segment {
            writable: true,
            ..text
        };
        let unaligned = segment(HUGE_PAGE + 4096, 2 * HUGE_PAGE, false);
        let near = segment(3 * HUGE_PAGE - 4096, 3 * HUGE_PAGE, true);
        let empty = segment(HUGE_PAGE, HUGE_PAGE, false);
        let rejected: [&[Segment]; 5] = [
            &[],
            &[writable, data],
            &[unaligned, data],
            &[text, near],
            &[empty],
        ];
        for segments in rejected {
            assert_eq!(read_only_range(segments), None, "{segments:?}");
        }
    }

    #[test]
    fn the_segments_of_this_program_contain_its_code() {
        let code = enable as fn() -> io::Result<bool> as usize;
        let contains_code = |segment: &Segment| (segment.start..segment.end).contains(&code);
        let segments = program_headers();
        let found = segments
            .iter()
            .find(|segment| contains_code(segment))
            .unwrap();
        assert!(!found.writable);
    }

    #[test]
    fn the_active_value_is_in_brackets() {
        assert_eq!(active_value("always inherit [madvise] never\n"), "madvise");
        assert_eq!(active_value(""), "never");
    }

    #[test]
    fn reserved_memory_begins_with_a_huge_page_and_is_writable() {
        let start = reserve(HUGE_PAGE).unwrap();
        assert!(start.addr().is_multiple_of(HUGE_PAGE));
        // SAFETY: `reserve` returned this many bytes, which no other code uses.
        unsafe {
            start.write_bytes(7, HUGE_PAGE);
            assert_eq!(start.add(HUGE_PAGE - 1).read(), 7);
            libc::munmap(start.cast(), HUGE_PAGE);
        }
    }
}
