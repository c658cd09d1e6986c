//! Reset `fast`: after a request, restores the pages that the request wrote, and retains them in
//! the slot instead of releasing them to the kernel.
//!
//! A *slot* is address space for the memory of one instance, which requests use one after the
//! other. The *reset* cleans a slot after a request.
//!
//! Wasmtime finds the written pages with the ioctl `PAGEMAP_SCAN`. Wasmtime 48 has two defects
//! here: its mask misses pages that are swapped out or migrated during the scan, and its result has
//! room for 32 regions. Both are corrected in an interposed `ioctl` ([`page_scan`]), where a scan
//! is also answered without the kernel if the request caused no page fault ([`retained_pages`]).
//! SECURITY.md states the permitted effects of the interposition and its failure modes.

mod page_scan;
mod retained_pages;

pub(crate) use retained_pages::within_windows;

use jiffy_confinement::{AllowedCalls, equals, equals_unsigned};
use jiffy_proto::function::MAX_RETAINED_BYTES;
use jiffy_proto::page_scan::PAGEMAP_SCAN;
use std::io;
use wasmtime::{Enabled, Engine, PoolingAllocationConfig};

/// Bytes of a table that stay resident. The limit is below [`retained_pages::MIN_MEMORY_PAGES`],
/// which distinguishes scans of tables from scans of memories.
const TABLE_BYTES: usize = (retained_pages::MIN_MEMORY_PAGES as usize - 1) * 4096;

/// Creates an engine with this reset. `create` builds the engine from the pool's configuration.
///
/// # Errors
///
/// Fails if the kernel has no page scan (before Linux 6.7), and in a program that was linked
/// without this package's `build.rs`, whose scans would not be corrected.
pub(crate) fn engine(
    mut pool: PoolingAllocationConfig,
    create: impl FnOnce(PoolingAllocationConfig) -> wasmtime::Result<Engine>,
) -> wasmtime::Result<Engine> {
    pool.linear_memory_keep_resident(usize::try_from(MAX_RETAINED_BYTES).unwrap_or(usize::MAX))
        .table_keep_resident(TABLE_BYTES)
        .pagemap_scan(Enabled::Yes);
    // Enable this before the engine maps memory, which could consist of huge pages.
    retained_pages::enable();
    // Wasmtime checks that the kernel supports page scans while it creates the engine.
    let scans_before = page_scan::count();
    let engine = create(pool)?;
    if page_scan::count() == scans_before {
        return Err(wasmtime::Error::msg(
            "the reset `fast` is not available: this program was linked without the corrected \
             page scan",
        ));
    }
    Ok(engine)
}

/// Allows the system calls of this reset: corrected page scans, and reading the page faults of the
/// calling thread.
pub(crate) fn allow_calls(calls: &mut AllowedCalls) -> io::Result<()> {
    let corrected_scan = vec![
        equals_unsigned(1, PAGEMAP_SCAN),
        equals_unsigned(3, page_scan::MARKER.into()),
    ];
    calls.allow_if(libc::SYS_ioctl, [corrected_scan])?;
    let own_thread = equals(0, libc::RUSAGE_THREAD);
    calls.allow_if(libc::SYS_getrusage, [vec![own_thread]])
}
