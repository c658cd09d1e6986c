//! Thread that serves a VM's disks. Slow storage of the host then blocks neither the guest's
//! network and streams nor the control socket.
//!
//! A *gate* between this thread and the event loop ensures that no request is served while the
//! machine is paused.

use super::ControlLink;
use crate::confined_thread::ConfinedThread;
use crate::machine::bus::lock;
use crate::machine::{EventSlot, Machine, report_device};
use crate::poll::ReadyEvent;
use nix::sys::epoll::EpollTimeout;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Gate that prevents the disk thread from starting a request while the machine is paused.
#[derive(Default)]
struct DiskGate {
    state: Mutex<DiskGateState>,
    changed: Condvar,
}

/// State of the gate between the event loop and the disk thread.
#[derive(Default)]
struct DiskGateState {
    /// True while the machine is paused.
    closed: bool,
    /// True while the disk thread handles an event.
    serving: bool,
}

impl DiskGate {
    /// Waits until the gate is open, and enters it. From then on, [`Self::close`] waits for
    /// [`Self::leave`].
    fn enter(&self) {
        let state = self
            .changed
            .wait_while(lock(&self.state), |state| state.closed);
        state.unwrap_or_else(PoisonError::into_inner).serving = true;
    }

    /// Leaves the gate after a request.
    fn leave(&self) {
        let mut state = lock(&self.state);
        state.serving = false;
        // `close` sets `closed` before it waits. If `closed` is not set, no thread waits.
        if state.closed {
            self.changed.notify_all();
        }
    }

    /// Closes the gate and waits until the disk thread has left it. The gate is closed before the
    /// wait, because a thread with continuous work would enter again before the caller notices that
    /// it left.
    fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        drop(self.changed.wait_while(state, |state| state.serving));
    }

    fn open(&self) {
        lock(&self.state).closed = false;
        self.changed.notify_all();
    }
}

/// Handle of the disk thread.
pub(super) struct DiskThread(Arc<DiskGate>);

/// Guard. While it exists, no disk request is in flight or can start.
pub(super) struct DisksPaused(Arc<DiskGate>);

impl Drop for DisksPaused {
    fn drop(&mut self) {
        self.0.open();
    }
}

impl DiskThread {
    /// Serves the disks of `machine` on `thread`.
    pub fn start(machine: &Machine, thread: ConfinedThread, link: ControlLink) -> Self {
        let gate = Arc::new(DiskGate::default());
        let poller = machine.disk_poller.clone();
        let (devices, bus) = (machine.devices.clone(), machine.bus.clone());
        let gate_of_thread = gate.clone();
        let serve = move |ready: ReadyEvent| {
            let (EventSlot::Queue(device) | EventSlot::Host(device)) =
                EventSlot::decode(ready.slot)
            else {
                return;
            };
            let Some(shared) = devices.get(device) else {
                return;
            };
            // Enter the gate before taking the device's lock. Otherwise this thread could hold the
            // lock while it waits for the gate to open, and the thread that closed the gate takes
            // the same lock.
            gate_of_thread.enter();
            match EventSlot::decode(ready.slot) {
                EventSlot::Queue(_) => {
                    lock(shared).queue_event(usize::try_from(ready.token).unwrap_or(usize::MAX));
                }
                _ => lock(shared).host_event(ready.token, ready.flags),
            }
            gate_of_thread.leave();
            // Reports do not access the disks, so a pause need not wait for them.
            report_device(lock(shared), &bus, |event| {
                link.send(event, &[]);
            });
        };
        thread.run(move |confined| {
            if confined.is_err() {
                // An unconfined thread must not serve the disks. The guest's requests to them then
                // never complete.
                return;
            }
            // The wait fails only if the descriptor is not an epoll set.
            while poller.wait(EpollTimeout::NONE, &serve).is_ok() {}
        });
        Self(gate)
    }

    /// Waits for requests in flight and prevents further requests.
    pub fn pause(&self) -> DisksPaused {
        self.0.close();
        DisksPaused(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::thread;

    #[test]
    fn no_request_is_in_flight_or_starts_while_disks_are_paused() {
        let disks = DiskThread(Arc::new(DiskGate::default()));
        let (count, inside, end) = (
            AtomicU64::new(0),
            AtomicBool::new(false),
            AtomicBool::new(false),
        );
        thread::scope(|scope| {
            scope.spawn(|| {
                while !end.load(Ordering::Acquire) {
                    disks.0.enter();
                    inside.store(true, Ordering::Release);
                    count.fetch_add(1, Ordering::AcqRel);
                    inside.store(false, Ordering::Release);
                    disks.0.leave();
                }
            });
            // The thread may start late.
            while count.load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            for _ in 0..1000 {
                let paused_disks = disks.pause();
                let before = count.load(Ordering::Acquire);
                assert!(!inside.load(Ordering::Acquire));
                thread::yield_now();
                assert_eq!(count.load(Ordering::Acquire), before);
                drop(paused_disks);
            }
            end.store(true, Ordering::Release);
        });
    }
}
