//! virtio-balloon (virtio 1.2 section 5.5). The guest returns memory to the host on request
//! (inflate), or as soon as the memory becomes free (free page reporting). The device drops
//! returned pages with `MADV_DONTNEED`, so that they take no memory on the host until the guest
//! touches them again. A dropped page then contains zeroes, or the content of the snapshot below.
//! If guest memory is fetched lazily, a page that is dropped before it was fetched becomes zero.

use super::device::RingState;
use super::device::chain::{DeferredKick, GuestBuffers, check_queue, drain};
use super::{Activation, DeviceError, Interrupt, VirtioDevice};
use crate::GuestMemory;
use crate::snapshot::lazy_memory::LazyMemory;
use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;
use std::ops::Range;
use std::sync::Arc;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use virtio_queue::Queue;
use vm_memory::{GuestAddress, GuestMemoryBackend, VolatileSlice};

/// Feature bits, virtio 1.2 section 5.5.3.
const F_DEFLATE_ON_OOM: u64 = 1 << 2;
const F_REPORTING: u64 = 1 << 5;

/// Queues with the pages that enter and leave the balloon.
const INFLATE_QUEUE: usize = 0;
const DEFLATE_QUEUE: usize = 1;
/// Queue number 4 in the specification. Linux and this device count only queues whose features were
/// negotiated. Without statistics and free page hints, the number is 2.
const REPORTING_QUEUE: usize = 2;
/// Sizes of the inflate, deflate and reporting queues.
const QUEUE_SIZES: [u16; 3] = [128, 128, 128];

/// Balloon pages are 4 KiB, independent of the guest's page size.
const PAGE_SHIFT: u32 = 12;
const PAGES_PER_MIB: u32 = 1 << (20 - PAGE_SHIFT);
/// Maximum number of page numbers in one request. Linux sends at most 256.
const MAX_PFNS: usize = 4096;
/// Maximum number of bytes of page numbers served before control returns to the event loop.
const BUDGET_BYTES: usize = 16 << 10;

/// State after the driver has activated the device.
struct ActiveBalloon {
    memory: GuestMemory,
    queues: Vec<Queue>,
    interrupt: Arc<dyn Interrupt>,
}

/// The memory balloon.
pub struct Balloon {
    // Both numbers are in pages of 4 KiB, as in the configuration space.
    target_pages: u32,
    actual_pages: u32,
    active: Option<ActiveBalloon>,
    deferred_kick: DeferredKick,
    /// Lazily fetched guest memory. `None` if all memory is stored on this host.
    lazy: Option<Arc<LazyMemory>>,
}

impl Balloon {
    /// Creates an empty balloon. Fails only if the host has no free descriptors.
    pub fn new() -> Result<Self, DeviceError> {
        Ok(Self {
            target_pages: 0,
            actual_pages: 0,
            active: None,
            deferred_kick: DeferredKick::new()?,
            lazy: None,
        })
    }

    /// Notifies `lazy` of pages that the guest returns.
    pub fn with_lazy_memory(mut self, lazy: Option<Arc<LazyMemory>>) -> Self {
        self.lazy = lazy;
        self
    }

    /// Requests the guest to return `mib` MiB in total. 0 gives all memory back to the guest.
    pub fn set_target(&mut self, mib: u32) {
        let pages = mib.saturating_mul(PAGES_PER_MIB);
        if pages != self.target_pages {
            self.target_pages = pages;
            // An inactive driver reads the target when it starts.
            if let Some(active) = &self.active {
                active.interrupt.config();
            }
        }
    }

    /// Returns the memory in the balloon in MiB, as reported by the guest.
    pub fn actual_mib(&self) -> u32 {
        self.actual_pages / PAGES_PER_MIB
    }

    /// `struct virtio_balloon_config` without the fields of features that are not offered:
    /// `num_pages`, `actual`.
    fn config(&self) -> [u8; 8] {
        let mut config = [0; 8];
        config[..4].copy_from_slice(&self.target_pages.to_le_bytes());
        config[4..].copy_from_slice(&self.actual_pages.to_le_bytes());
        config
    }
}

/// Returns the page numbers of an inflate or deflate request as ascending runs without overlap.
fn page_runs(buffers: &GuestBuffers<'_>) -> Result<Vec<Range<u64>>, DeviceError> {
    if buffers.is_empty() || !buffers.len().is_multiple_of(4) || buffers.len() > MAX_PFNS * 4 {
        return Err(DeviceError::Guest(format!(
            "{} bytes of page numbers",
            buffers.len()
        )));
    }
    let mut bytes = vec![0; buffers.len()];
    buffers.copy_to(&mut bytes);
    let (numbers, _) = bytes.as_chunks();
    let mut pfns: Vec<u32> = numbers.iter().map(|&n| u32::from_le_bytes(n)).collect();
    // Guests return pages in any order. Sorted runs need fewer calls.
    pfns.sort_unstable();
    let mut page_runs: Vec<Range<u64>> = Vec::new();
    for pfn in pfns.into_iter().map(u64::from) {
        match page_runs.last_mut() {
            Some(run) if pfn <= run.end => run.end = run.end.max(pfn + 1),
            _ => page_runs.push(pfn..pfn + 1),
        }
    }
    Ok(page_runs)
}

/// Drops the whole host pages inside `slice`.
fn drop_pages(slice: &VolatileSlice<'_>, lazy: Option<&LazyMemory>) -> Result<(), DeviceError> {
    let page = 1 << PAGE_SHIFT;
    let guard = slice.ptr_guard_mut();
    // A slice may start or end inside a page. Only whole pages can be dropped.
    let skip = guard.as_ptr().align_offset(page);
    let Some(bytes) = slice.len().checked_sub(skip).map(|n| n / page * page) else {
        return Ok(());
    };
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: `skip` is below the length of the slice.
    let start = unsafe { guard.as_ptr().add(skip) };
    let dropped = match lazy {
        Some(lazy) => lazy.discard(start, bytes),
        // SAFETY: `bytes` bytes at `start` are inside the slice, which is guest memory that is
        // mapped while it is borrowed. Guest memory is only accessed through volatile accesses and
        // system calls, so its content may change at any time.
        None => Errno::result(unsafe { libc::madvise(start.cast(), bytes, libc::MADV_DONTNEED) })
            .map(drop),
    };
    dropped.map_err(|e| DeviceError::Host(format!("madvise: {e}")))
}

/// Returns the pages that the guest has put into the balloon to the host.
fn inflate(
    memory: &GuestMemory,
    buffers: &GuestBuffers<'_>,
    lazy: Option<&LazyMemory>,
) -> Result<(), DeviceError> {
    for run in page_runs(buffers)? {
        let pages = usize::try_from(run.end - run.start).unwrap_or(usize::MAX);
        let start = GuestAddress(run.start << PAGE_SHIFT);
        let slices = memory
            .get_slices(start, pages.saturating_mul(1 << PAGE_SHIFT))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| DeviceError::Guest(format!("page outside memory: {e}")))?;
        for slice in &slices {
            drop_pages(slice, lazy)?;
        }
    }
    Ok(())
}

/// Checks that a request has only buffers of the `wanted` direction.
fn check_direction(wanted: &GuestBuffers<'_>, other: &GuestBuffers<'_>) -> Result<(), DeviceError> {
    if !other.is_empty() || wanted.is_empty() {
        return Err(DeviceError::Guest("buffers of the wrong direction".into()));
    }
    Ok(())
}

impl VirtioDevice for Balloon {
    fn device_id(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn name(&self) -> &str {
        "balloon"
    }

    fn features(&self) -> u64 {
        F_DEFLATE_ON_OOM | F_REPORTING
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn quiet_interrupts(&self) -> bool {
        // The driver reads the status register to notice a changed target.
        false
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = self.config();
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        for (to, from) in data.iter_mut().zip(config.iter().skip(offset)) {
            *to = *from;
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let mut config = self.config();
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        // Only `actual` is writable: `config` is a copy, of which a changed target is ignored.
        for (to, from) in config.iter_mut().skip(offset).zip(data) {
            *to = *from;
        }
        let [_, _, _, _, actual @ ..] = config;
        self.actual_pages = u32::from_le_bytes(actual);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        for queue in &activation.queues {
            check_queue(queue, &activation.memory)?;
        }
        self.deferred_kick.start(activation.poller)?;
        self.active = Some(ActiveBalloon {
            memory: activation.memory,
            queues: activation.queues,
            interrupt: activation.interrupt,
        });
        Ok(())
    }

    fn rings(&self) -> Vec<RingState> {
        let active = self.active.iter();
        active
            .flat_map(|a| a.queues.iter().map(RingState::of))
            .collect()
    }

    fn save(&self) -> Vec<u8> {
        self.config().to_vec()
    }

    fn restore(&mut self, saved: &[u8]) -> Result<(), DeviceError> {
        let [t0, t1, t2, t3, actual @ ..] = <[u8; 8]>::try_from(saved)
            .map_err(|_| DeviceError::Host("balloon state of another size".into()))?;
        self.target_pages = u32::from_le_bytes([t0, t1, t2, t3]);
        self.actual_pages = u32::from_le_bytes(actual);
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
        // The host sets the target, so the target survives a reset by the guest.
        self.actual_pages = 0;
        self.deferred_kick.stop();
    }

    fn queue_event(&mut self, index: usize) -> Result<(), DeviceError> {
        let lazy = self.lazy.as_deref();
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let (memory, interrupt) = (&active.memory, active.interrupt.as_ref());
        let Some(queue) = active.queues.get_mut(index) else {
            return Ok(());
        };
        let has_more = match index {
            INFLATE_QUEUE => drain(queue, memory, interrupt, BUDGET_BYTES, |chain| {
                check_direction(&chain.readable, &chain.writable)?;
                inflate(memory, &chain.readable, lazy)?;
                Ok(0)
            }),
            // Pages are allocated again when the guest touches them.
            DEFLATE_QUEUE => drain(queue, memory, interrupt, BUDGET_BYTES, |chain| {
                check_direction(&chain.readable, &chain.writable)?;
                Ok(0)
            }),
            // The buffers themselves are the free memory. Work is bounded by the number of buffers.
            // The content of reported pages need not be preserved.
            REPORTING_QUEUE => drain(queue, memory, interrupt, usize::MAX, |chain| {
                check_direction(&chain.writable, &chain.readable)?;
                for slice in chain.writable.slices() {
                    drop_pages(slice, lazy)?;
                }
                Ok(0)
            }),
            _ => Ok(false),
        }?;
        if has_more {
            self.deferred_kick.schedule(index)?;
        }
        Ok(())
    }

    fn host_event(&mut self, token: u32, _flags: EpollFlags) -> Result<(), DeviceError> {
        if token == DeferredKick::TOKEN {
            let queues = self.deferred_kick.take();
            for index in (0..QUEUE_SIZES.len()).filter(|i| queues >> i & 1 == 1) {
                self.queue_event(index)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
