//! virtio-rng (virtio 1.2 section 5.4): host entropy, written directly into guest buffers.

use super::device::RingState;
use super::device::chain::{DeferredKick, GuestBuffers, check_queue, drain};
use super::{Activation, DeviceError, Interrupt, VirtioDevice};
use crate::GuestMemory;
use nix::sys::epoll::EpollFlags;
use std::sync::Arc;
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use virtio_queue::Queue;

/// Maximum number of bytes per request. A driver that offers a larger buffer receives this number
/// of bytes and can send another request.
const MAX_REQUEST_BYTES: usize = 64 << 10;
/// Maximum number of bytes offered before control returns to the event loop.
const BUDGET_BYTES: usize = 1 << 20;
/// Size of the only queue, for requests.
const QUEUE_SIZES: [u16; 1] = [64];

/// State after the driver has activated the device.
struct ActiveRng {
    memory: GuestMemory,
    queue: Queue,
    interrupt: Arc<dyn Interrupt>,
}

/// Entropy device.
pub struct Rng {
    active: Option<ActiveRng>,
    deferred_kick: DeferredKick,
}

impl Rng {
    /// Creates the device. Fails only if the host has no free descriptors.
    pub fn new() -> Result<Self, DeviceError> {
        Ok(Self {
            active: None,
            deferred_kick: DeferredKick::new()?,
        })
    }
}

/// Fills all of `buffers` from getrandom(2).
fn fill(buffers: &GuestBuffers<'_>) -> Result<(), DeviceError> {
    for slice in buffers.slices() {
        // The kernel returns at most 32 MiB per call, and less after a signal.
        let mut rest = *slice;
        while !rest.is_empty() {
            let guard = rest.ptr_guard_mut();
            // SAFETY: the slice is guest memory of this length, mapped while it is borrowed. The
            // kernel writes plain bytes. Concurrent accesses of the guest are equivalent to
            // accesses during a device's DMA.
            let got = unsafe { libc::getrandom(guard.as_ptr().cast(), rest.len(), 0) };
            match usize::try_from(got) {
                Ok(got) => {
                    rest = rest
                        .offset(got)
                        .map_err(|e| DeviceError::Host(e.to_string()))?
                }
                Err(_) => {
                    let error = std::io::Error::last_os_error();
                    if error.kind() != std::io::ErrorKind::Interrupted {
                        return Err(DeviceError::Host(format!("getrandom: {error}")));
                    }
                }
            }
        }
    }
    Ok(())
}

impl VirtioDevice for Rng {
    fn device_id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn name(&self) -> &str {
        "rng"
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let queue = activation
            .queues
            .into_iter()
            .next()
            .ok_or_else(|| DeviceError::Host("no queue".into()))?;
        check_queue(&queue, &activation.memory)?;
        self.deferred_kick.start(activation.poller)?;
        self.active = Some(ActiveRng {
            memory: activation.memory,
            queue,
            interrupt: activation.interrupt,
        });
        Ok(())
    }

    fn rings(&self) -> Vec<RingState> {
        self.active
            .iter()
            .map(|a| RingState::of(&a.queue))
            .collect()
    }

    fn reset(&mut self) {
        self.active = None;
        self.deferred_kick.stop();
    }

    fn queue_event(&mut self, index: usize) -> Result<(), DeviceError> {
        // The device has one queue.
        let (0, Some(active)) = (index, &mut self.active) else {
            return Ok(());
        };
        let has_more = drain(
            &mut active.queue,
            &active.memory,
            active.interrupt.as_ref(),
            BUDGET_BYTES,
            |mut chain| {
                let bytes = chain.writable.len().min(MAX_REQUEST_BYTES);
                if bytes == 0 || !chain.readable.is_empty() {
                    return Err(DeviceError::Guest(
                        "entropy request that is not writable (5.4.6.1)".into(),
                    ));
                }
                if let Some(front) = chain.writable.take(bytes) {
                    fill(&front)?;
                }
                Ok(u32::try_from(bytes).unwrap_or(u32::MAX))
            },
        )?;
        if has_more {
            self.deferred_kick.schedule(0)?;
        }
        Ok(())
    }

    fn host_event(&mut self, token: u32, _flags: EpollFlags) -> Result<(), DeviceError> {
        if token == DeferredKick::TOKEN && self.deferred_kick.take() != 0 {
            return self.queue_event(0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::testing::{DeviceHarness, Ring, memory, readable, writable};
    use vm_memory::{Bytes, GuestAddress};

    fn start(size: u16) -> (Rng, Ring, DeviceHarness) {
        let harness = DeviceHarness::new(memory(1 << 20));
        let ring = Ring::new(&harness.memory, 0x1000, size);
        let mut rng = Rng::new().unwrap();
        rng.activate(harness.activation(vec![ring.queue(true)], 0))
            .unwrap();
        (rng, ring, harness)
    }

    #[test]
    fn a_request_is_filled_completely_and_not_exceeded() {
        let (mut rng, mut ring, harness) = start(64);
        ring.add(&[writable(0x4000, 100), writable(0x8000, 28)]);
        rng.queue_event(0).unwrap();
        assert_eq!(ring.used(), [(0, 128)]);
        let mut bytes = [0; 101];
        harness
            .memory
            .read_slice(&mut bytes, GuestAddress(0x4000))
            .unwrap();
        assert!(bytes[..100].iter().any(|&b| b != 0));
        assert_eq!(bytes[100], 0);
        assert_eq!(harness.interrupt.queue_count(), 1);
    }

    #[test]
    fn a_huge_request_receives_a_bounded_number_of_bytes() {
        let (mut rng, mut ring, _around) = start(64);
        ring.add(&[writable(0x10000, 0x80000)]);
        rng.queue_event(0).unwrap();
        assert_eq!(ring.used(), [(0, 65536)]);
    }

    #[test]
    fn more_work_than_the_budget_is_finished_by_the_event_loop() {
        let (mut rng, mut ring, harness) = start(64);
        for _ in 0..20 {
            ring.add(&[writable(0x10000, 0x20000)]);
        }
        rng.queue_event(0).unwrap();
        // The budget of 1 MiB is spent after 8 requests. Each has 128 KiB, of which only a part is
        // filled.
        assert_eq!(ring.used().len(), 8);
        let mut rest = 0;
        while let [ready] = harness.ready(0)[..] {
            rng.host_event(ready.token, ready.flags).unwrap();
            rest += ring.used().len();
        }
        assert_eq!(rest, 12);
    }

    #[test]
    fn a_request_without_writable_buffers_is_rejected() {
        for buffers in [
            vec![readable(0x4000, 16)],
            vec![writable(0x4000, 0)],
            vec![readable(0x4000, 16), writable(0x5000, 16)],
        ] {
            let (mut rng, mut ring, _around) = start(64);
            ring.add(&buffers);
            let outcome = rng.queue_event(0);
            assert!(matches!(outcome, Err(DeviceError::Guest(_))), "{outcome:?}");
            // Calls that never occur in a VMM must still be harmless.
            let _ = rng.queue_event(0);
            rng.queue_event(7).unwrap();
        }
    }

    #[test]
    fn a_reset_device_works_again() {
        let (mut rng, mut ring, harness) = start(64);
        ring.add(&[readable(0x4000, 16)]);
        rng.queue_event(0).unwrap_err();
        rng.reset();
        rng.queue_event(0).unwrap();
        let mut ring = Ring::new(&harness.memory, 0x1000, 16);
        rng.activate(harness.activation(vec![ring.queue(false)], 0))
            .unwrap();
        ring.add(&[writable(0x4000, 16)]);
        rng.queue_event(0).unwrap();
        assert_eq!(ring.used(), [(0, 16)]);
    }
}
