//! Written pages of slots, known without a scan.
//!
//! A scan finds every page of a slot that is the process's own, since each of them may have been
//! written, and they stay after the reset. Their set grows by page faults only: a page that is
//! absent, of zeros or of a file cannot be written without one. If the thread that ran a request
//! has had no fault since, the set is that of the slot's last scan, and the kernel need not be
//! asked, which costs more than many a request:
//!
//! - Windows ([`within_windows`]) span the polls of a request, each on its thread, from its
//!   instance's beginning to its end. Between polls nothing touches its memory. A request that is
//!   dropped while it waits is scanned for.
//! - The kernel counts all faults of a thread, also those of its own accesses on its behalf.
//! - Huge pages would appear without a fault, as the kernel collapses small ones in the background:
//!   the process has none (`PR_SET_THP_DISABLE`), or nothing is known ([`enable`]).
//! - Memories only: Wasmtime sets small tables to zero without a scan, which brings pages. A table
//!   keeps fewer than [`MIN_MEMORY_PAGES`], no memory has fewer.
//!
//! Pages that the kernel swaps out or migrates, and slots that get another image, leave the set as
//! it is, or smaller.
//!
//! Wasmtime has room for 32 regions, and gives back everything behind the last: a program that
//! writes here and there would have most of its pages brought anew in each request. The answer is
//! therefore put elsewhere, where there is more room: Wasmtime reads it where the scan's argument
//! says.

use jiffy_proto::page_scan::PageScan;
use nix::sys::prctl;
use nix::sys::resource::{UsageWho, getrusage};
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

/// Pages that a scan of a memory may keep at least, one page of WebAssembly.
pub(crate) const MIN_MEMORY_PAGES: u64 = 16;
/// Room for regions.
const MAX_REGIONS: usize = 2048;

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
    /// Faults of the thread at the last reading.
    faults: Option<i64>,
}

thread_local! {
    static WINDOW: Cell<WindowState> = const {
        Cell::new(WindowState {
            is_open: false,
            faults: None,
        })
    };
    static FOUND: RefCell<Vec<Region>> = const { RefCell::new(Vec::new()) };
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

/// Window of a request on this thread. Only one may be open on a thread.
struct RequestWindow(());

impl RequestWindow {
    fn open() -> Self {
        if ENABLED.load(Ordering::Relaxed) {
            let before = WINDOW.get();
            WINDOW.set(WindowState {
                is_open: true,
                // The reading at the end of an earlier request does: faults since then count, too.
                faults: before.faults.or_else(faults),
            });
        }
        Self(())
    }

    /// Returns true if the thread had a fault since, or may have had one.
    fn had_fault(&self) -> bool {
        let state = WINDOW.get();
        let now = faults();
        WINDOW.set(WindowState {
            faults: now,
            ..state
        });
        !state.is_open || now.is_none() || state.faults != now
    }
}

impl Drop for RequestWindow {
    fn drop(&mut self) {
        let state = WINDOW.get();
        WINDOW.set(WindowState {
            is_open: false,
            ..state
        });
    }
}

/// Guest whose polls are windows as long as it has no fault. It must not have begun.
pub(crate) struct WindowedGuest<'a, F> {
    guest: Pin<&'a mut F>,
    had_fault: bool,
}

/// Opens windows for a guest that makes its instance when it is polled.
pub(crate) fn within_windows<F>(guest: Pin<&mut F>) -> WindowedGuest<'_, F> {
    WindowedGuest {
        guest,
        had_fault: false,
    }
}

impl<F: Future> Future for WindowedGuest<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let window = (!self.had_fault).then(RequestWindow::open);
        let polled = self.guest.as_mut().poll(context);
        if let (Some(window), Poll::Pending) = (window, &polled) {
            self.had_fault = window.had_fault();
        }
        polled
    }
}

/// Answers a scan from what is known, or with what the kernel answers to `ask`. The regions lie in
/// memory of this thread until its next scan.
pub(crate) fn scan(scan: &mut PageScan, ask: impl FnOnce(&mut PageScan) -> c_int) -> c_int {
    let is_memory = scan.max_pages >= MIN_MEMORY_PAGES;
    // A thread that ends has no memory of its own any more.
    let has_room = FOUND.try_with(|_| ()).is_ok();
    if !is_memory || !has_room || !ENABLED.load(Ordering::Relaxed) {
        return ask(scan);
    }
    FOUND.with_borrow_mut(|regions| {
        regions.resize(MAX_REGIONS, Region::default());
        scan.vec = regions.as_mut_ptr().expose_provenance() as u64;
        scan.vec_len = MAX_REGIONS as u64;
        if let Some(found) = known_answer(scan, regions) {
            return found;
        }
        // Until the answer is there, and if it is a failure, nothing is known.
        let mut kept = KEPT.lock();
        let former = kept.remove(&scan.start);
        drop(kept);
        let answer = ask(scan);
        // A full list, or an end before that of the memory, may leave pages out.
        let found = usize::try_from(answer).ok();
        let found = found.filter(|found| *found < MAX_REGIONS && scan.walk_end == scan.end);
        if let Some(found) = found.and_then(|found| regions.get(..found)) {
            let mut known = former.map_or_else(Vec::new, |former| former.regions);
            known.clear();
            known.extend_from_slice(found);
            let known = KeptPages {
                end: scan.end,
                max_pages: scan.max_pages,
                regions: known,
            };
            let mut kept = KEPT.lock();
            kept.insert(scan.start, known);
        }
        answer
    })
}

fn known_answer(scan: &mut PageScan, into: &mut [Region]) -> Option<c_int> {
    let state = WINDOW.try_with(Cell::get).ok()?;
    if !state.is_open {
        return None;
    }
    let now = faults()?;
    let had_fault = state.faults != Some(now);
    WINDOW.set(WindowState {
        // Another memory of the request may be the one that it was in.
        is_open: !had_fault,
        faults: Some(now),
    });
    if had_fault {
        return None;
    }
    let kept = KEPT.lock();
    let known = kept.get(&scan.start)?;
    if known.end != scan.end || known.max_pages != scan.max_pages {
        return None;
    }
    into.get_mut(..known.regions.len())?
        .copy_from_slice(&known.regions);
    scan.walk_end = scan.end;
    ANSWERS.fetch_add(1, Ordering::Relaxed);
    c_int::try_from(known.regions.len()).ok()
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
    use wasmtime::{Engine, Instance, Module, Store};

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
                    let answer = std::pin::pin!(function.call(&engine, state, &message, 100));
                    let answer = within_windows(answer).await.unwrap().unwrap();
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

    /// Makes two instances, each with a memory, and writes to a page of one of them. Returns the
    /// pages that were not of zeros before.
    fn write_page(engine: &Engine, module: &Module, memory: usize, page: usize) -> Vec<usize> {
        let mut store = Store::new(engine, ());
        let memories = [(); 2].map(|()| {
            let instance = Instance::new(&mut store, module, &[]).unwrap();
            instance.get_memory(&mut store, "memory").unwrap()
        });
        let mut dirty = Vec::new();
        for memory in memories {
            for (page, bytes) in memory.data(&store).chunks(4096).enumerate() {
                if bytes.first() != Some(&0) {
                    dirty.push(page);
                }
            }
        }
        let written = memories[memory].data_mut(&mut store);
        written[page * 4096] = 1;
        dirty
    }

    #[tokio::test]
    async fn a_fault_in_one_of_two_memories_or_before_a_wait_is_one_of_the_request() {
        // Room for the two memories of a request, and no others.
        let engine = engine(1);
        assert!(ENABLED.load(Ordering::Relaxed), "huge pages cannot be off");
        let binary = wat::parse_str(r#"(module (memory (export "memory") 4))"#).unwrap();
        let code = Module::new(&engine::compiling().unwrap(), binary).unwrap();
        let code = code.serialize().unwrap();
        // SAFETY: it was compiled on the line above.
        let module = unsafe { Module::deserialize(&engine, code) }.unwrap();
        for waits in [false, true] {
            let before = answers();
            for number in 0..400usize {
                // Most requests write where others did; every eighth to a page of its own.
                let page = match number % 8 {
                    7 => 8 + number / 8,
                    _ => 1,
                };
                let (engine, module) = (&engine, &module);
                let request = std::pin::pin!(async move {
                    let mut store = Store::new(engine, ());
                    if waits {
                        let memory = Instance::new(&mut store, module, &[]).unwrap();
                        let memory = memory.get_memory(&mut store, "memory").unwrap();
                        assert!(memory.data(&store).iter().all(|byte| *byte == 0));
                        memory.data_mut(&mut store)[page * 4096] = 1;
                        tokio::task::yield_now().await;
                        return Vec::new();
                    }
                    write_page(engine, module, number / 8 % 2, page)
                });
                let dirty = within_windows(request).await;
                assert_eq!(dirty, Vec::<usize>::new(), "request {number}");
            }
            let answered = answers() - before;
            assert!(answered > 100, "{answered}, waits: {waits}");
        }
    }

    #[tokio::test]
    async fn a_memory_with_more_written_regions_than_a_scan_has_room_for_is_reset() {
        let engine = engine(1);
        let binary = wat::parse_str(r#"(module (memory (export "memory") 64))"#).unwrap();
        let code = Module::new(&engine::compiling().unwrap(), binary).unwrap();
        let code = code.serialize().unwrap();
        // SAFETY: it was compiled on the line above.
        let module = unsafe { Module::deserialize(&engine, code) }.unwrap();
        let before = answers();
        for number in 0..100u8 {
            let request = std::pin::pin!(async {
                let mut store = Store::new(&engine, ());
                let instance = Instance::new(&mut store, &module, &[]).unwrap();
                let memory = instance.get_memory(&mut store, "memory").unwrap();
                assert!(
                    memory.data(&store).iter().all(|byte| *byte == 0),
                    "request {number}"
                );
                // 200 regions, with gaps of 1 to 7 pages.
                let mut page = 0;
                for region in 0..200 {
                    memory.data_mut(&mut store)[page * 4096 + usize::from(number)] = 1;
                    page += 2 + region % 7;
                }
            });
            within_windows(request).await;
        }
        let answered = answers() - before;
        assert!(answered > 50, "{answered} of 100");
    }
}
