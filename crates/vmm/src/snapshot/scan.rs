//! Which chunks of guest memory may differ from the layers below: those with a page of their own.

use super::linear::{CHUNK, CHUNK_BYTES, Linear};
use jiffy_proto::layer::UnitSet;
use nix::errno::Errno;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// `PAGEMAP_SCAN` of Linux 6.7 (include/uapi/linux/fs.h).
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
/// Bits of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const ENTRY_FILE: u64 = 1 << 61;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_PRESENT: u64 = 1 << 63;
const PAGE: usize = 4096;
/// Ranges taken from the kernel at once.
const BATCH: usize = 1024;

#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// What to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// Pages that are not those of a layer: written, or copied from it.
    Private,
    /// Pages that are there at all, and so were touched.
    Present,
}

/// Chunks with at least one such page, as `pagemap` of this process tells.
pub fn scan(pagemap: &File, linear: &Linear, pages: Pages) -> Result<UnitSet, Errno> {
    let mut found = UnitSet::empty(linear.chunks());
    for (first, chunks, host) in linear.pieces(0..linear.chunks()) {
        let part = Part {
            first,
            start: u64::try_from(host.addr()).map_err(|_| Errno::EOVERFLOW)?,
            bytes: chunks * CHUNK,
        };
        match by_ioctl(pagemap, &part, pages, &mut found) {
            // Kernels before 6.7.
            Err(Errno::ENOTTY | Errno::EINVAL) => by_entries(pagemap, &part, pages, &mut found)?,
            other => other?,
        }
    }
    Ok(found)
}

struct Part {
    first: u64,
    start: u64,
    bytes: u64,
}

impl Part {
    fn mark(&self, found: &mut UnitSet, start: u64, end: u64) {
        let from = (start - self.start) / CHUNK;
        let to = (end - self.start).div_ceil(CHUNK);
        found.insert_range(self.first + from..self.first + to);
    }
}

fn by_ioctl(pagemap: &File, part: &Part, pages: Pages, found: &mut UnitSet) -> Result<(), Errno> {
    let mut regions = vec![PageRegion::default(); BATCH];
    let unwanted = match pages {
        Pages::Private => PAGE_IS_FILE | PAGE_IS_PFNZERO,
        Pages::Present => PAGE_IS_PFNZERO,
    };
    let mut arg = ScanArg {
        size: 96,
        end: part.start + part.bytes,
        walk_end: part.start,
        vec: u64::try_from(regions.as_mut_ptr().addr()).map_err(|_| Errno::EOVERFLOW)?,
        vec_len: u64::try_from(BATCH).map_err(|_| Errno::EOVERFLOW)?,
        category_inverted: unwanted,
        category_mask: unwanted,
        category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        return_mask: PAGE_IS_PRESENT,
        ..Default::default()
    };
    while arg.walk_end < arg.end {
        arg.start = arg.walk_end;
        // SAFETY: `arg` is of the size it says and names `regions`, which is as long as it says; the kernel writes to both.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
        let count = usize::try_from(count).map_err(|_| Errno::last())?;
        for region in regions.iter().take(count) {
            part.mark(found, region.start, region.end);
        }
        if arg.walk_end <= arg.start {
            break;
        }
    }
    Ok(())
}

fn by_entries(pagemap: &File, part: &Part, pages: Pages, found: &mut UnitSet) -> Result<(), Errno> {
    let io = |e: std::io::Error| Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO));
    let page = u64::try_from(PAGE).map_err(|_| Errno::EOVERFLOW)?;
    let mut buffer = vec![0; CHUNK_BYTES];
    let batch = u64::try_from(buffer.len() / 8).map_err(|_| Errno::EOVERFLOW)? * page;
    let mut at = part.start;
    let end = part.start + part.bytes;
    while at < end {
        let bytes = batch.min(end - at);
        let length = usize::try_from(bytes / page * 8).map_err(|_| Errno::EOVERFLOW)?;
        let entries = &mut buffer[..length];
        pagemap.read_exact_at(entries, at / page * 8).map_err(io)?;
        for (number, entry) in (0u64..).zip(entries.as_chunks().0) {
            let entry = u64::from_le_bytes(*entry);
            let there = entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0;
            if there && (pages == Pages::Present || entry & ENTRY_FILE == 0) {
                let start = at + number * page;
                part.mark(found, start, start + page);
            }
        }
        at += bytes;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::layers::{Layer, Layers};
    use super::super::place::{MAX_MAPPINGS, place, plan};
    use super::*;
    use crate::memory;
    use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::tempfile::TempFile;

    #[test]
    fn only_written_pages_make_a_chunk_private_and_touched_ones_present() {
        let memory = memory::allocate(128).unwrap();
        let linear = Linear::new(&memory).unwrap();
        let file = TempFile::new().unwrap().into_file();
        file.set_len(linear.bytes()).unwrap();
        let mut index = LayerIndex::empty(MEMORY_CHUNK, linear.bytes());
        index.stored.insert_range(0..64);
        let layers = Layers::new(vec![Layer::new(file, index)], linear.bytes()).unwrap();
        let plan = plan(layers.runs(linear.chunks()), None, MAX_MAPPINGS);
        place(&plan, &layers, &linear).unwrap();
        memory.write_obj(1u8, GuestAddress(5 * CHUNK)).unwrap();
        memory.write_obj(1u8, GuestAddress(1000 * CHUNK)).unwrap();
        let _: u8 = memory.read_obj(GuestAddress(40 * CHUNK)).unwrap();

        let pagemap = File::open("/proc/self/pagemap").unwrap();
        type Scan = fn(&File, &Part, Pages, &mut UnitSet) -> Result<(), Errno>;
        for scan in [by_ioctl as Scan, by_entries as Scan] {
            let find = |pages| {
                let mut found = UnitSet::empty(linear.chunks());
                let (first, _, host) = linear.pieces(0..linear.chunks()).next().unwrap();
                let part = Part {
                    first,
                    start: u64::try_from(host.addr()).unwrap(),
                    bytes: linear.bytes(),
                };
                match scan(&pagemap, &part, pages, &mut found) {
                    // The kernel of this machine knows only the other way.
                    Err(Errno::ENOTTY) => None,
                    other => other.map(|()| Some(found)).unwrap(),
                }
            };
            if let (Some(private), Some(present)) = (find(Pages::Private), find(Pages::Present)) {
                assert!(private.contains(5) && private.contains(1000));
                assert!(!private.contains(40) && !private.contains(6));
                assert!(present.contains(40) && !present.contains(2000));
            }
        }
        assert!(scan(&pagemap, &linear, Pages::Private).unwrap().contains(5));
    }
}
