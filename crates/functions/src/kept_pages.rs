//! Written pages of slots, known without a scan.
//!
//! A scan finds every page of a slot that is the process's own, since each of them may have been
//! written, and they stay after the reset. Their set grows by page faults only: a page that is
//! absent, of zeros or of a file cannot be written without one. If the thread that ran a request
//! has had no fault since, the set is that of the slot's last scan, and the kernel need not be
//! asked, which costs more than many a request:
//!
//! - [`RequestWindow`] spans a request that runs on one thread from its instance's beginning to its
//!   end. Others are scanned for, and their scans replace what was known.
//! - The kernel counts all faults of a thread, also those of its own accesses on its behalf.
//! - Huge pages would appear without a fault, as the kernel collapses small ones in the background:
//!   the process has none (`PR_SET_THP_DISABLE`), or nothing is known ([`enable`]).
//! - Memories only: Wasmtime sets small tables to zero without a scan, which brings pages.
//!
//! Pages that the kernel swaps out or migrates, and slots that get another image, leave the set as
//! it is, or smaller.

use crate::page_scan::PageScan;
use nix::sys::prctl;
use nix::sys::resource::{UsageWho, getrusage};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Region of a scan's answer, `struct page_region`: start, end, categories.
type Region = [u64; 3];

/// Answer of a slot's last scan.
struct KeptPages {
    end: u64,
    max_pages: u64,
    regions: Vec<Region>,
}

/// By first address of a memory.
static KEPT: Mutex<BTreeMap<u64, KeptPages>> = Mutex::new(BTreeMap::new());
static ENABLED: AtomicBool = AtomicBool::new(false);
/// Scans that were answered here.
static ANSWERS: AtomicU64 = AtomicU64::new(0);

#[derive(Clone, Copy)]
struct WindowState {
    is_open: bool,
    /// Address of the request's memory, 0 before it is known.
    memory: u64,
    /// Faults of the thread at the last reading.
    faults: Option<i64>,
}

thread_local! {
    static WINDOW: Cell<WindowState> = const {
        Cell::new(WindowState {
            is_open: false,
            memory: 0,
            faults: None,
        })
    };
}

/// Turns huge pages off for this process, and uses this module if they are.
pub(crate) fn enable() {
    let off = prctl::set_thp_disable(true).is_ok() && prctl::get_thp_disable() == Ok(true);
    ENABLED.store(off, Ordering::Relaxed);
}

/// Number of scans that the kernel was not asked for.
#[must_use]
pub fn answers() -> u64 {
    ANSWERS.load(Ordering::Relaxed)
}

/// Page faults of this thread so far.
fn faults() -> Option<i64> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).ok()?;
    usage
        .minor_page_faults()
        .checked_add(usage.major_page_faults())
}

/// Request on this thread, from before its instance is made until after it is gone.
pub(crate) struct RequestWindow(());

impl RequestWindow {
    /// Opens the window. Only one may be open on a thread.
    pub(crate) fn open() -> Self {
        if ENABLED.load(Ordering::Relaxed) {
            let before = WINDOW.get();
            WINDOW.set(WindowState {
                is_open: true,
                memory: 0,
                // The reading at the end of an earlier request does: faults since then count, too.
                faults: before.faults.or_else(faults),
            });
        }
        Self(())
    }

    /// Notes the address of the request's memory.
    pub(crate) fn of_memory(&self, start: *const u8) {
        let state = WINDOW.get();
        WINDOW.set(WindowState {
            memory: start.addr() as u64,
            ..state
        });
    }
}

impl Drop for RequestWindow {
    fn drop(&mut self) {
        let state = WINDOW.get();
        WINDOW.set(WindowState {
            is_open: false,
            memory: 0,
            ..state
        });
    }
}

/// Answers a scan as the kernel would; None if it has to be asked.
pub(crate) fn answer(scan: &mut PageScan) -> Option<usize> {
    let state = WINDOW.try_with(Cell::get).ok()?;
    if !state.is_open || state.memory == 0 || scan.start != state.memory {
        return None;
    }
    let now = faults()?;
    WINDOW.set(WindowState {
        faults: Some(now),
        ..state
    });
    if state.faults != Some(now) {
        return None;
    }
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let known = kept.get(&scan.start)?;
    let room = usize::try_from(scan.vec_len).unwrap_or(0);
    if known.end != scan.end || known.max_pages != scan.max_pages || known.regions.len() > room {
        return None;
    }
    let into = scan.regions();
    // SAFETY: the caller of a scan has room for `vec_len` regions there.
    unsafe { into.copy_from_nonoverlapping(known.regions.as_ptr(), known.regions.len()) };
    scan.walk_end = scan.end;
    ANSWERS.fetch_add(1, Ordering::Relaxed);
    Some(known.regions.len())
}

/// Notes what the kernel answered, None for a failure.
pub(crate) fn note(scan: &PageScan, found: Option<usize>) {
    if !ENABLED.load(Ordering::Relaxed) {
        return;
    }
    let is_memory = WINDOW
        .try_with(Cell::get)
        .is_ok_and(|state| state.is_open && state.memory != 0 && state.memory == scan.start);
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let room = usize::try_from(scan.vec_len).unwrap_or(0);
    // A full list, or an end before that of the memory, may leave pages out.
    let complete = found.filter(|found| *found < room && scan.walk_end == scan.end);
    let Some(found) = complete.filter(|_| is_memory || kept.contains_key(&scan.start)) else {
        kept.remove(&scan.start);
        return;
    };
    let known = kept.entry(scan.start).or_insert(KeptPages {
        end: 0,
        max_pages: 0,
        regions: Vec::new(),
    });
    known.end = scan.end;
    known.max_pages = scan.max_pages;
    known.regions.clear();
    // SAFETY: the kernel has written so many regions there.
    let regions = unsafe { std::slice::from_raw_parts(scan.regions(), found) };
    known.regions.extend_from_slice(regions);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core_wasi::CoreState;
    use crate::core_world;
    use crate::cpu_meter::RequestUsage;
    use crate::engine;
    use crate::memory_limiter::{MemoryBudget, MemoryLimiter};
    use jiffy_proto::function::{SlotReset, TenantLimits};
    use std::sync::Arc;
    use wasmtime::{Engine, Module};

    /// Looks for a mark at the beginning of each page but the first, then leaves one in the page
    /// that the request names.
    const MARKER: &str = r#"(module
        (memory (export "memory") 16)
        (global $out (mut i32) (i32.const 16))
        (data (i32.const 16) "200\n\nclean")
        (data (i32.const 32) "200\n\ndirty")
        (func (export "jiffy_buf") (param i32) (result i32) (i32.const 1024))
        (func (export "jiffy_handle") (param $at i32) (param i32) (result i32)
          (local $i i32)
          (local.set $i (i32.const 4096))
          (loop $next
            (if (i32.load (local.get $i)) (then (global.set $out (i32.const 32))))
            (local.set $i (i32.add (local.get $i) (i32.const 4096)))
            (br_if $next (i32.lt_u (local.get $i) (i32.const 1048576))))
          (i32.store (i32.mul (i32.load (local.get $at)) (i32.const 4096)) (i32.const 1))
          (i32.const 10))
        (func (export "jiffy_out") (result i32) (global.get $out)))"#;

    fn engine(slots: u32) -> Engine {
        let limits = TenantLimits {
            slots,
            reset: SlotReset::Fast,
            ..TenantLimits::default()
        };
        engine::running(&limits).unwrap()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn no_mark_stays_where_the_kernel_is_not_asked() {
        // Fewer slots than tasks would be refused; as many are shared by all threads.
        let engine = engine(4);
        assert!(ENABLED.load(Ordering::Relaxed), "huge pages cannot be off");
        let binary = wat::parse_str(MARKER).unwrap();
        let code = Module::new(&engine::compiling().unwrap(), binary).unwrap();
        let code = code.serialize().unwrap();
        // SAFETY: it was compiled on the line above.
        let module = unsafe { Module::deserialize(&engine, code) }.unwrap();
        let function = Arc::new(core_world::prepare(&module).unwrap());
        let before = answers();
        let tasks = (0..4u32).map(|task| {
            let (engine, function) = (engine.clone(), function.clone());
            tokio::spawn(async move {
                let budget = Arc::new(MemoryBudget::new(1 << 30));
                let mut seed = task + 1;
                for number in 0..3000u32 {
                    // Few pages at first, so that they are all there, and later others.
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let page = 1 + (seed >> 8) % (4 + number / 16);
                    let state = || {
                        let usage = Arc::new(RequestUsage::default());
                        CoreState::new(MemoryLimiter::new(&budget, usage, 1 << 30), None)
                    };
                    let message = page.to_le_bytes();
                    let answer = function.call(&engine, state, &message, 100);
                    let answer = answer.await.unwrap().unwrap();
                    assert_eq!(answer.body(), "clean", "request {number}");
                    tokio::task::yield_now().await;
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        let answered = answers() - before;
        assert!(answered > 6000, "{answered} of 12,000");
    }
}
