//! Tests for pages that are swapped out when a request ends, and for pages that the reset `fast`
//! retains.
//!
//! A *slot* is address space for the memory of one instance, which requests use one after the
//! other. The *reset* cleans a slot after a request. The runtime *interposes* `ioctl`: it replaces
//! the function of libc, in order to correct the page scans of Wasmtime.
#![cfg(feature = "fast-reset")]
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::skip::skip;
use crate::swap::Swap;
use jiffy_function_runtime::engine;
use jiffy_proto::function::{SlotReset, TenantLimits};
use jiffy_proto::page_scan::{FILE, PAGEMAP_SCAN, PFNZERO, PRESENT, PageScan, SWAPPED, WRITTEN};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use wasmtime::{Engine, Instance, Linker, Module, Store};

/// Size of a page in bytes, and number of pages that the tests use.
const PAGE: usize = 4096;
const PAGES: usize = 64;
/// Timeout for swapping out pages. `MADV_PAGEOUT` skips busy pages, and is repeated.
const PAGE_OUT_TIMEOUT: Duration = Duration::from_secs(20);
/// Module with a memory of 4 pages of WebAssembly, which are 64 pages of 4 KiB, and a table of
/// 2,000 elements. The memory begins with `DATA`. `mark` sets an element of the table, and
/// `is_null` returns whether an element is null.
const MODULE: &str = r#"(module (memory (export "memory") 4)
    (table (export "table") 2000 funcref) (elem declare func $f) (func $f)
    (func (export "mark") (param i32) (table.set (local.get 0) (ref.func $f)))
    (func (export "is_null") (param i32) (result i32)
      (ref.is_null (table.get (local.get 0))))
    (data (i32.const 0) "DATA"))"#;

/// Scans memory with the kernel, without the interposed `ioctl`. Returns the number of pages that
/// have all categories in `mask`, and one of the categories in `any` unless it is 0. Pages of files
/// and the zero page do not count, since they contain no data of a request.
fn scan(address: usize, length: usize, mask: u64, any: u64) -> u64 {
    let mut regions = [[0u64; 3]; 64];
    let mut scan = PageScan {
        start: address as u64,
        end: (address + length) as u64,
        vec: regions.as_mut_ptr() as u64,
        vec_len: 64,
        category_inverted: PFNZERO | FILE,
        category_mask: mask | PFNZERO | FILE,
        category_anyof_mask: any,
        ..PageScan::default()
    };
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    // SAFETY: the structure and its pointers are valid until the call returns. `syscall` is used
    // because `ioctl` is interposed.
    let found = unsafe {
        libc::syscall(
            libc::SYS_ioctl,
            pagemap.as_raw_fd(),
            PAGEMAP_SCAN,
            &raw mut scan,
        )
    };
    let found = usize::try_from(found).unwrap();
    let bytes: u64 = regions[..found].iter().map(|[s, e, _]| e - s).sum();
    bytes / PAGE as u64
}

/// Swaps out all private mappings of this process, until the `pages` pages from `address` are
/// swapped out.
fn page_out(address: usize, pages: usize) {
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let start = Instant::now();
    loop {
        for line in fs::read_to_string("/proc/self/maps").unwrap().lines() {
            let mut words = line.split_whitespace();
            let (range, flags) = (words.next().unwrap(), words.next().unwrap());
            let (from, to) = range.split_once('-').unwrap();
            let [from, to] = [from, to].map(|a| usize::from_str_radix(a, 16).unwrap_or(0));
            let is_slot = flags == "rw-p" && to - from >= PAGE && !line.contains('[');
            if is_slot {
                // SAFETY: the call moves pages, but does not change their contents. It fails for
                // mappings without pages to swap.
                unsafe { libc::madvise(from as *mut _, to - from, libc::MADV_PAGEOUT) };
            }
        }
        let swapped = (0..pages).filter(|page| {
            let mut entry = [0; 8];
            let at = (address / PAGE + page) * 8;
            pagemap.read_exact_at(&mut entry, at as u64).unwrap();
            // Bit 63 means that the page is present, and bit 62 that it is swapped out.
            u64::from_le_bytes(entry) >> 62 == 1
        });
        if swapped.count() == pages {
            return;
        }
        assert!(start.elapsed() < PAGE_OUT_TIMEOUT, "pages remain in memory");
    }
}

fn instantiate(engine: &Engine, module: &Module) -> (Store<()>, Instance) {
    let mut store = Store::new(engine, ());
    store.set_epoch_deadline(1 << 40);
    let linker = Linker::new(engine);
    let created = linker.instantiate(&mut store, module);
    (store, created.unwrap())
}

/// Returns an engine with one slot and this reset, and the compiled module.
fn engine_with(reset: SlotReset) -> (Engine, Module) {
    let limits = TenantLimits {
        slots: 1,
        reset,
        ..TenantLimits::default()
    };
    let engine = engine::running(&limits).unwrap();
    let binary = wat::parse_str(MODULE).unwrap();
    let code = Module::new(&engine::compiling().unwrap(), binary).unwrap();
    // SAFETY: the line above compiled the code.
    let module = unsafe { Module::deserialize(&engine, code.serialize().unwrap()) };
    (engine, module.unwrap())
}

/// Writes to all pages and to the table. Returns the memory's address.
fn write(store: &mut Store<()>, instance: &Instance) -> usize {
    let memory = instance.get_memory(&mut *store, "memory").unwrap();
    memory.data_mut(&mut *store).fill(90);
    let mark = instance.get_typed_func::<u32, ()>(&mut *store, "mark");
    let mark = mark.unwrap();
    for element in 0..2000 {
        mark.call(&mut *store, element).unwrap();
    }
    memory.data_ptr(&*store) as usize
}

/// Checks that the next instance in the slot has only the initial content of the module.
fn assert_clean(engine: &Engine, module: &Module, address: usize) {
    let (mut store, instance) = instantiate(engine, module);
    let memory = instance.get_memory(&mut store, "memory").unwrap();
    assert_eq!(
        memory.data_ptr(&store) as usize,
        address,
        "the memory is in another slot"
    );
    let (head, rest) = memory.data(&store).split_at(4);
    assert_eq!(head, b"DATA");
    let dirty = rest.iter().position(|byte| *byte != 0);
    assert_eq!(dirty, None, "a byte of the previous request remains");
    let is_null = instance
        .get_typed_func::<u32, u32>(&mut store, "is_null")
        .unwrap();
    for element in 0..2000 {
        assert_eq!(
            is_null.call(&mut store, element).unwrap(),
            1,
            "element {element}"
        );
    }
}

#[test]
fn a_slot_that_is_swapped_out_when_its_request_ends_is_clean_for_the_next() {
    let _swap = match Swap::on() {
        Ok(swap) => swap,
        Err(error) => {
            return skip(
                "a_slot_that_is_swapped_out_when_its_request_ends_is_clean_for_the_next",
                &format!("cannot enable swap space: {error}"),
            );
        }
    };
    for reset in [SlotReset::Fast, SlotReset::Strict] {
        let (engine, module) = engine_with(reset);
        for _ in 0..3 {
            let (mut store, instance) = instantiate(&engine, &module);
            let address = write(&mut store, &instance);
            page_out(address, PAGES);
            let length = PAGES * PAGE;
            let stock = scan(address, length, WRITTEN | PRESENT, 0);
            let corrected = scan(address, length, WRITTEN, PRESENT | SWAPPED);
            // Wasmtime's own scan (`stock`) finds no page that is swapped out, so that `fast` would
            // reset none. The corrected scan finds all pages.
            assert_eq!((stock, corrected), (0, PAGES as u64));
            drop(store);
            assert_clean(&engine, &module, address);
        }
    }
}

#[test]
fn a_slot_in_memory_is_clean_for_the_next_request_and_keeps_its_pages() {
    let (engine, module) = engine_with(SlotReset::Fast);
    for _ in 0..3 {
        let (mut store, instance) = instantiate(&engine, &module);
        let address = write(&mut store, &instance);
        drop(store);
        let retained = scan(address, PAGES * PAGE, WRITTEN, PRESENT | SWAPPED);
        assert_eq!(retained, PAGES as u64);
        assert_clean(&engine, &module, address);
    }
}
