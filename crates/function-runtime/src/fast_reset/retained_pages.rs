//! Set of pages that a slot retains between requests. A slot is memory that the instances of
//! requests use one after another. The module remembers the set, so that most resets need no page
//! scan by the kernel.
//!
//! After a request, Wasmtime requests the written pages of the slot from the kernel with the ioctl
//! `PAGEMAP_SCAN`. The linker redirects the calls of `ioctl` to [`super::page_scan`], which passes
//! each scan to [`scan`]. A scan by the kernel takes longer than many requests.
//!
//! The result of a scan is the set of pages of which the process has a private copy. A request may
//! have written any of them. The reset restores their initial content and retains them, so that
//! they are in the next result as well.
//!
//! The set grows only by page faults. A write causes a page fault if the page is absent, a zero
//! page or a page of a file. If the thread that ran a request had no page fault, the set is
//! unchanged since the last scan of the slot. [`scan`] then returns the last result again.
//!
//! - A [`Window`] spans one poll of a request on its thread; the polls span the instance's lifetime
//!   ([`within_windows`]). Between polls no code accesses the memory. If a request is dropped
//!   between polls, no window is open, and the kernel scans.
//! - The kernel counts all page faults of a thread, including page faults of the kernel's own
//!   accesses to user memory.
//! - Huge pages would appear without a page fault, because the kernel collapses small pages in the
//!   background. The process disables huge pages (`PR_SET_THP_DISABLE`). If that fails, the kernel
//!   scans after each request ([`enable`]).
//! - Results are reused for memories only, not for tables: Wasmtime clears small tables without a
//!   scan, and clearing adds pages. The page limit in the argument of a scan distinguishes them.
//!   The parent module configures tables so that their limit is below [`MIN_MEMORY_PAGES`].
//!
//! Swapping, migration and a new image for the slot leave the set unchanged or make it smaller. A
//! smaller set is harmless: the reset then also restores pages that the kernel would not have
//! reported, and these pages have their initial content afterwards like all others.
//!
//! Wasmtime's buffer has room for 32 regions, and Wasmtime releases all pages after the last region
//! of a full buffer. A program that writes in many places would then fault in most of its pages
//! again at each request. [`scan`] therefore replaces the address and the length of the buffer in
//! the scan's argument by a larger buffer. Wasmtime reads the result at this address.

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

/// Minimum page limit of a scan of a memory: one page of WebAssembly.
pub(crate) const MIN_MEMORY_PAGES: u64 = 16;
/// Maximum number of regions in a result.
const MAX_REGIONS: usize = 2048;

/// Region of a scan's result, `struct page_region`: start, end, categories.
type Region = [u64; 3];

/// Result of the last scan of a slot's memory.
struct LastScan {
    /// End of the scanned memory, and maximum number of pages of the scan. A repeated scan has the
    /// same values.
    end: u64,
    max_pages: u64,
    regions: Vec<Region>,
}

/// Last scans by first address of a memory.
static LAST_SCANS: Mutex<BTreeMap<u64, LastScan>> = Mutex::new(BTreeMap::new());
// True if huge pages are disabled, so that scans may be reused. Set once before the engine exists,
// so that `Relaxed` accesses suffice.
static ENABLED: AtomicBool = AtomicBool::new(false);
/// Number of scans that were answered without the kernel.
static REUSED_SCANS: AtomicU64 = AtomicU64::new(0);

/// State of this thread's measurement of page faults.
#[derive(Clone, Copy)]
struct WindowState {
    /// True during a request.
    is_open: bool,
    /// Page faults of the thread at the last reading.
    faults: Option<i64>,
}

thread_local! {
    static WINDOW: Cell<WindowState> = const {
        Cell::new(WindowState {
            is_open: false,
            faults: None,
        })
    };
    /// Buffer for the result of a scan, read by Wasmtime before the thread's next scan.
    static RESULT: RefCell<Vec<Region>> = const { RefCell::new(Vec::new()) };
}

/// Disables huge pages in this process, and enables this module if that succeeds.
pub(crate) fn enable() {
    let is_disabled = prctl::set_thp_disable(true).is_ok() && prctl::get_thp_disable() == Ok(true);
    ENABLED.store(is_disabled, Ordering::Relaxed);
}

/// Returns the number of page faults of this thread so far.
fn thread_faults() -> Option<i64> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).ok()?;
    usage
        .minor_page_faults()
        .checked_add(usage.major_page_faults())
}

/// Open window of a request on this thread. A thread has at most one.
struct Window(());

impl Window {
    /// Starts to observe page faults of this thread, for one request.
    fn open() -> Self {
        if ENABLED.load(Ordering::Relaxed) {
            let state = WINDOW.get();
            WINDOW.set(WindowState {
                is_open: true,
                // A reading from the end of an earlier request suffices: page faults since then
                // are counted as well.
                faults: state.faults.or_else(thread_faults),
            });
        }
        Self(())
    }

    /// Returns whether the thread may have had a page fault since the last reading, and records a
    /// new reading.
    fn had_fault(&self) -> bool {
        let state = WINDOW.get();
        let faults = thread_faults();
        WINDOW.set(WindowState { faults, ..state });
        !state.is_open || faults.is_none() || state.faults != faults
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let state = WINDOW.get();
        WINDOW.set(WindowState {
            is_open: false,
            ..state
        });
    }
}

/// Future of a request whose polls are windows until one of them has a page fault.
pub(crate) struct WindowedRequest<'a, F> {
    request: Pin<&'a mut F>,
    had_fault: bool,
}

/// Opens a window in each poll of `request`, which must create its instance when it is polled.
pub(crate) fn within_windows<F>(request: Pin<&mut F>) -> WindowedRequest<'_, F> {
    WindowedRequest {
        request,
        had_fault: false,
    }
}

impl<F: Future> Future for WindowedRequest<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let window = (!self.had_fault).then(Window::open);
        let polled = self.request.as_mut().poll(context);
        if let (Some(window), Poll::Pending) = (window, &polled) {
            self.had_fault = window.had_fault();
        }
        polled
    }
}

/// Answers a scan of Wasmtime: from the slot's last scan if no page fault has occurred, otherwise
/// by `call_kernel`. The interposed `ioctl` calls this function ([`super::page_scan`]). The regions
/// are in a buffer of this thread until the next scan of the thread.
pub(crate) fn scan(scan: &mut PageScan, call_kernel: impl FnOnce(&mut PageScan) -> c_int) -> c_int {
    let is_memory = scan.max_pages >= MIN_MEMORY_PAGES;
    // A thread that exits has already dropped its buffer.
    let has_buffer = RESULT.try_with(|_| ()).is_ok();
    if !is_memory || !has_buffer || !ENABLED.load(Ordering::Relaxed) {
        return call_kernel(scan);
    }
    RESULT.with_borrow_mut(|buffer| {
        buffer.resize(MAX_REGIONS, Region::default());
        // Kernel and Wasmtime access the buffer through this address.
        scan.vec = buffer.as_mut_ptr().expose_provenance() as u64;
        scan.vec_len = MAX_REGIONS as u64;
        reuse_last_scan(scan, buffer).unwrap_or_else(|| scan_and_record(scan, buffer, call_kernel))
    })
}

/// Copies the result of the slot's last scan into the buffer. Returns the number of regions, or
/// `None` if the kernel must scan.
fn reuse_last_scan(scan: &mut PageScan, buffer: &mut [Region]) -> Option<c_int> {
    let state = WINDOW.try_with(Cell::get).ok()?;
    if !state.is_open {
        return None;
    }
    let faults = thread_faults()?;
    let had_fault = state.faults != Some(faults);
    WINDOW.set(WindowState {
        // The page fault may have been in another memory of the request: the window stays closed.
        is_open: !had_fault,
        faults: Some(faults),
    });
    if had_fault {
        return None;
    }
    let last_scans = LAST_SCANS.lock();
    let last = last_scans.get(&scan.start)?;
    if last.end != scan.end || last.max_pages != scan.max_pages {
        return None;
    }
    buffer
        .get_mut(..last.regions.len())?
        .copy_from_slice(&last.regions);
    // The value after a scan that reached its end.
    scan.walk_end = scan.end;
    REUSED_SCANS.fetch_add(1, Ordering::Relaxed);
    c_int::try_from(last.regions.len()).ok()
}

/// Scans the slot, and records the result if it is complete.
fn scan_and_record(
    scan: &mut PageScan,
    buffer: &[Region],
    call_kernel: impl FnOnce(&mut PageScan) -> c_int,
) -> c_int {
    // No result is recorded for the slot during the scan, nor if the scan fails.
    let previous = LAST_SCANS.lock().remove(&scan.start);
    let result = call_kernel(scan);
    // A full buffer, or an end before the end of the memory, may leave pages out.
    let count = usize::try_from(result).ok();
    let count = count.filter(|count| *count < MAX_REGIONS && scan.walk_end == scan.end);
    if let Some(scanned) = count.and_then(|count| buffer.get(..count)) {
        let mut regions = previous.map_or_else(Vec::new, |previous| previous.regions);
        regions.clear();
        regions.extend_from_slice(scanned);
        let last = LastScan {
            end: scan.end,
            max_pages: scan.max_pages,
            regions,
        };
        LAST_SCANS.lock().insert(scan.start, last);
    }
    result
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

    /// Checks the beginning of each page but the first for a mark, then writes a mark to the page
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
    async fn reused_scans_leave_no_data_of_earlier_requests() {
        // One slot per task: requests are rejected if there are fewer. All threads share the slots.
        let engine = engine(4);
        assert!(ENABLED.load(Ordering::Relaxed), "cannot disable huge pages");
        let binary = wat::parse_str(MARKER).unwrap();
        let code = Module::new(&engine::compiling().unwrap(), binary).unwrap();
        let code = code.serialize().unwrap();
        // SAFETY: the line above compiled the code.
        let module = unsafe { Module::deserialize(&engine, code) }.unwrap();
        let function = Arc::new(core_world::prepare(&module).unwrap());
        let before = REUSED_SCANS.load(Ordering::Relaxed);
        let tasks = (0..4u32).map(|task| {
            let (engine, function) = (engine.clone(), function.clone());
            tokio::spawn(async move {
                let budget = Arc::new(MemoryBudget::new(1 << 30));
                // Linear congruential generator with a fixed seed, so that a failure can be
                // reproduced.
                let mut seed = task + 1;
                for number in 0..3000u32 {
                    // Few pages at first, so that all of them are resident, and other pages later.
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
        let reused = REUSED_SCANS.load(Ordering::Relaxed) - before;
        // Requests that write to a page for the first time have a page fault, and are scanned.
        assert!(reused > 6000, "{reused} of 12,000");
    }

    /// Creates two instances, each with a memory, and writes to the first byte of a page of one of
    /// them. Returns the pages whose first byte was not zero before the write.
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
    async fn page_faults_in_any_memory_and_before_a_wait_are_detected() {
        // One slot has room for the two memories of a request, and no others.
        let engine = engine(1);
        assert!(ENABLED.load(Ordering::Relaxed), "cannot disable huge pages");
        let binary = wat::parse_str(r#"(module (memory (export "memory") 4))"#).unwrap();
        let code = Module::new(&engine::compiling().unwrap(), binary).unwrap();
        let code = code.serialize().unwrap();
        // SAFETY: the line above compiled the code.
        let module = unsafe { Module::deserialize(&engine, code) }.unwrap();
        for waits in [false, true] {
            let before = REUSED_SCANS.load(Ordering::Relaxed);
            for number in 0..400usize {
                // Seven of eight requests write to the same pages, every eighth to a page of its
                // own.
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
            let reused = REUSED_SCANS.load(Ordering::Relaxed) - before;
            assert!(reused > 100, "{reused}, waits: {waits}");
        }
    }

    #[tokio::test]
    async fn a_memory_whose_written_regions_exceed_one_scan_is_reset() {
        let engine = engine(1);
        let binary = wat::parse_str(r#"(module (memory (export "memory") 64))"#).unwrap();
        let code = Module::new(&engine::compiling().unwrap(), binary).unwrap();
        let code = code.serialize().unwrap();
        // SAFETY: the line above compiled the code.
        let module = unsafe { Module::deserialize(&engine, code) }.unwrap();
        let before = REUSED_SCANS.load(Ordering::Relaxed);
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
        let reused = REUSED_SCANS.load(Ordering::Relaxed) - before;
        assert!(reused > 50, "{reused} of 100");
    }
}
