//! The thread that serves a VM's disks, so that a slow disk of the host holds up neither the guest's network
//! and streams nor the control socket.

use super::Link;
use crate::error::VmmError;
use crate::machine::bus::lock;
use crate::machine::{Machine, Slot, report};
use crate::poll::Ready;
use crate::seccomp;
use nix::sys::epoll::EpollTimeout;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Builder;

const STACK_BYTES: usize = 256 << 10;

/// Keeps the thread from beginning anything while the machine is read.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    closed: bool,
    serving: bool,
}

impl Gate {
    fn enter(&self) {
        let state = self
            .changed
            .wait_while(lock(&self.state), |state| state.closed);
        state.unwrap_or_else(PoisonError::into_inner).serving = true;
    }

    fn leave(&self) {
        let mut state = lock(&self.state);
        state.serving = false;
        if state.closed {
            self.changed.notify_all();
        }
    }

    /// Closes first and waits then: a thread that always has work would not let anybody else in.
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

/// A VM's disks at work.
pub(super) struct Disks(Arc<Gate>);

/// No request of a disk is under way, and none begins, as long as this lives.
pub(super) struct Quiet(Arc<Gate>);

impl Drop for Quiet {
    fn drop(&mut self) {
        self.0.open();
    }
}

impl Disks {
    /// Starts the confined thread.
    pub fn start(machine: &Machine, link: Link) -> Result<Self, VmmError> {
        let gate = Arc::new(Gate::default());
        let poller = machine.disk_poller.clone();
        let (devices, bus) = (machine.devices.clone(), machine.bus.clone());
        let at_work = gate.clone();
        let serve = move |ready: Ready| {
            let (Slot::Queue(device) | Slot::Host(device)) = Slot::of(ready.slot) else {
                return;
            };
            let Some(shared) = devices.get(device) else {
                return;
            };
            at_work.enter();
            match Slot::of(ready.slot) {
                Slot::Queue(_) => {
                    lock(shared).queue_event(usize::try_from(ready.token).unwrap_or(usize::MAX));
                }
                _ => lock(shared).host_event(ready.token, ready.flags),
            }
            at_work.leave();
            report(shared, &bus, |event| {
                link.send(event, &[]);
            });
        };
        let main = move || {
            if seccomp::confine_disks().is_err() {
                // Unconfined it serves nothing, which a guest notices at once.
                return;
            }
            // Only a descriptor that is no epoll set could fail.
            while poller.wait(EpollTimeout::NONE, &serve).is_ok() {}
        };
        Builder::new()
            .name("disks".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(main)
            .map_err(|e| VmmError::host("starting the disks' thread", e))?;
        Ok(Self(gate))
    }

    /// Waits for what is under way and lets nothing begin.
    pub fn quiet(&self) -> Quiet {
        self.0.close();
        Quiet(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::thread;

    #[test]
    fn nothing_is_under_way_and_nothing_begins_while_disks_are_quiet() {
        let disks = Disks(Arc::new(Gate::default()));
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
            for _ in 0..1000 {
                let quiet = disks.quiet();
                let before = count.load(Ordering::Acquire);
                assert!(!inside.load(Ordering::Acquire));
                thread::yield_now();
                assert_eq!(count.load(Ordering::Acquire), before);
                drop(quiet);
            }
            end.store(true, Ordering::Release);
        });
        assert!(count.load(Ordering::Acquire) > 0);
    }
}
