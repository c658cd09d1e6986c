//! Tests of *lazy* memory, whose missing chunks are downloaded when the guest accesses them: filled
//! chunks, pages that the guest returns, and forked processes.
//!
//! A *chunk* is 64 KiB of memory. The *fetcher* is the process that downloads missing chunks into
//! the layers of a snapshot.

use super::super::map_layers::{MAX_MAPPINGS, map_layers, plan_lazy_mappings};
use super::super::memory_layers::MemoryLayer;
use super::super::pagemap_scan::{PageFilter, scan_pagemap};
use super::*;
use crate::GuestMemory;
use crate::memory;
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
use std::fs::File;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::tempfile::TempFile;

/// Size of the memory in MiB.
const MIB: u32 = 128;
/// Content of each missing chunk.
static CONTENT: [u8; CHUNK_BYTES] = [7; CHUNK_BYTES];

/// Returns memory in which chunks 32 to 63 are stored, which includes a whole huge page. The chunks
/// from 40 on are missing. `None` if this host has no userfaultfd.
fn lazy_memory() -> Option<(GuestMemory, Arc<LazyMemory>)> {
    let device = File::open("/dev/userfaultfd").ok()?;
    let userfaultfd = Userfaultfd::new(device.as_fd()).unwrap();
    let memory = memory::allocate(MIB).unwrap();
    let linear = LinearMemory::new(&memory).unwrap();
    let file = TempFile::new().unwrap().into_file();
    file.set_len(linear.bytes()).unwrap();
    let mut index = LayerIndex::empty(MEMORY_CHUNK, linear.bytes());
    index.stored.insert_range(32..64);
    let layers = MemoryLayers::new(vec![MemoryLayer::new(file, index)], linear.bytes()).unwrap();
    let mut eager = UnitSet::empty(linear.chunks());
    eager.insert_range(0..40);
    let runs = layers.runs(linear.chunks());
    let plan = plan_lazy_mappings(runs, Some(&eager), |_, chunk| chunk >= 40, MAX_MAPPINGS);
    let source = LazyLayers {
        layers: &layers,
        userfaultfd: &userfaultfd,
    };
    map_layers(&plan, &source, &linear).unwrap();
    let lazy = LazyMemory::new(userfaultfd, linear, &plan);
    Some((memory, Arc::new(lazy)))
}

/// Serves faults on another thread with `CONTENT`.
fn serve(lazy: &Arc<LazyMemory>) {
    let lazy = lazy.clone();
    std::thread::spawn(move || {
        loop {
            let mut ready = libc::pollfd {
                fd: std::os::fd::AsRawFd::as_raw_fd(&lazy.as_fd()),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one pollfd, which exists during the call.
            unsafe { libc::poll(&raw mut ready, 1, -1) };
            for address in lazy.faults().unwrap() {
                let chunk = lazy.chunk_of(address).unwrap();
                if lazy.is_missing(chunk) {
                    lazy.fill(chunk, &CONTENT).unwrap()
                } else {
                    lazy.zero(address).unwrap()
                }
            }
        }
    });
}

/// Returns the first byte of a page.
fn byte(memory: &GuestMemory, page: u64) -> u8 {
    memory.read_obj(GuestAddress(page * PAGE)).unwrap()
}

/// Returns pages to the host, as a balloon does.
fn discard(memory: &GuestMemory, lazy: &LazyMemory, pages: std::ops::Range<u64>) {
    let start = GuestAddress(pages.start * PAGE);
    let host = vm_memory::GuestMemoryBackend::get_host_address(memory, start).unwrap();
    let bytes = usize::try_from((pages.end - pages.start) * PAGE).unwrap();
    lazy.discard(host, bytes).unwrap();
}

#[test]
fn an_accessed_chunk_is_filled_completely_and_its_neighbours_remain_missing() {
    let Some((memory, lazy)) = lazy_memory() else {
        return;
    };
    assert_eq!(
        lazy.missing().iter().collect::<Vec<_>>(),
        (40..64).collect::<Vec<_>>()
    );
    serve(&lazy);
    assert_eq!(byte(&memory, 50 * CHUNK_PAGES + 3), 7);
    // 23 of the 24 missing chunks remain.
    assert_eq!(lazy.missing().count(), 23);
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let present = scan_pagemap(&pagemap, &lazy.linear, PageFilter::Present).unwrap();
    // Chunks that are read at first share a huge page with missing chunks.
    assert!((32..40).all(|chunk| present.contains(chunk)));
    assert_eq!(present.iter_range(40..64).collect::<Vec<_>>(), [50]);
    // Memory without a layer is not registered.
    assert_eq!(byte(&memory, 1000 * CHUNK_PAGES), 0);
}

#[test]
fn a_second_fill_does_not_overwrite_written_pages() {
    let Some((memory, lazy)) = lazy_memory() else {
        return;
    };
    serve(&lazy);
    let at = GuestAddress(41 * CHUNK_SIZE);
    memory.write_obj(9u8, at).unwrap();
    lazy.fill(41, &CONTENT).unwrap();
    assert_eq!(memory.read_obj::<u8>(at).unwrap(), 9);
    assert_eq!(byte(&memory, 41 * CHUNK_PAGES + 1), 7);
}

#[test]
fn returned_pages_are_zero_before_and_after_their_chunk_is_filled() {
    let Some((memory, lazy)) = lazy_memory() else {
        return;
    };
    serve(&lazy);
    let first = 45 * CHUNK_PAGES;
    discard(&memory, &lazy, first + 1..first + 3);
    assert!(lazy.is_missing(45));
    assert_eq!(byte(&memory, first + 2), 0);
    assert_eq!(
        [0, 1, 3, 15].map(|n| byte(&memory, first + n)),
        [7, 0, 7, 7]
    );
    // Return the last page of this chunk, all pages of the missing chunk 46, and the first page of
    // the missing chunk 47.
    discard(&memory, &lazy, first + 15..first + 33);
    assert_eq!(
        [14, 15, 16, 31, 32, 33].map(|n| byte(&memory, first + n)),
        [7, 0, 0, 0, 0, 7]
    );
    memory
        .write_obj(5u8, GuestAddress((first + 15) * PAGE))
        .unwrap();
    assert_eq!(byte(&memory, first + 15), 5);
}

#[test]
fn a_forked_process_reads_missing_memory_as_zero() {
    let Some((memory, lazy)) = lazy_memory() else {
        return;
    };
    // The child stands for the process that writes a snapshot. It reads missing chunks as zero
    // instead of waiting for them, so they must not be stored in a snapshot: they are not private
    // (checked below).
    //
    // SAFETY: the child only reads memory and exits.
    let child = unsafe { nix::unistd::fork() }.unwrap();
    match child {
        nix::unistd::ForkResult::Child => {
            let host = lazy.linear.chunk(60).unwrap();
            // SAFETY: reads a chunk of mapped memory, then exits the child.
            unsafe { libc::_exit(host.read_volatile().into()) }
        }
        nix::unistd::ForkResult::Parent { child } => {
            let status = nix::sys::wait::waitpid(child, None).unwrap();
            assert_eq!(status, nix::sys::wait::WaitStatus::Exited(child, 0));
        }
    }
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let private = scan_pagemap(&pagemap, &lazy.linear, PageFilter::Private).unwrap();
    assert!(lazy.missing().iter().all(|chunk| !private.contains(chunk)));
    serve(&lazy);
    assert_eq!(byte(&memory, 60 * CHUNK_PAGES), 7);
}
