//! Worker thread of a network. It creates slots in advance and removes released slots while no
//! requests are waiting.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. A *burst* is a series of uses in quick succession, for example by
//! the children of a fork. After a burst, more slots are created in advance for some minutes
//! ([`jiffy_engine_api::BurstMemory`]).
//!
//! The kernel creates and removes devices under a host-wide lock, which opening a slot needs as
//! well. The work would also compete with requests for processors. Therefore the thread works in
//! pauses between requests, one slot or one batch of removals at a time. The thread has normal
//! priority: with a lower one, it would hold the lock while other threads run.

use crate::NetError;
use crate::claim::RangeClaims;
use crate::connections::{self, ConnectionRecorder};
use crate::device;
use crate::host;
use crate::namespace;
use crate::network_state::NetworkState;
use crate::private_network::{self, NetworkId};
use crate::slot::{self, Slot};
use std::fs::File;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Time since the last use of the network after which the thread starts to work.
const QUIET_TIME: Duration = Duration::from_millis(40);
/// Maximum time for which the work is deferred.
const MAX_DEFERRAL: Duration = Duration::from_secs(1);
/// Maximum number of slots removed together.
const MAX_REMOVALS_AT_ONCE: usize = 64;
/// Divisor of the usual number of ready slots. If fewer slots than the quotient are ready, slots
/// are created without deferral.
const LOW_WATER_DIVISOR: usize = 4;

/// Slot to be removed.
pub(crate) struct ReleasedSlot {
    pub number: u32,
    /// Record that is completed before the slot is removed.
    pub record: Option<Arc<ConnectionRecorder>>,
    /// Private network of the guest, and the guest's address in it.
    pub network: Option<(NetworkId, Ipv4Addr)>,
    /// The daemon's descriptor of the tap. Closing the last descriptor waits for the removal of the
    /// device: if the VMM held the last one, its exit would be delayed.
    pub tap: Option<File>,
}

impl ReleasedSlot {
    /// Creates a value without record, network and tap.
    pub fn new(number: u32) -> Self {
        Self {
            number,
            record: None,
            network: None,
            tap: None,
        }
    }
}

/// Returns the time at which work requested at `requested` is due, given the last use of the
/// network.
fn due(requested: Instant, last_use: Option<Instant>) -> Instant {
    last_use.map_or(requested, |used| {
        (used + QUIET_TIME).min(requested + MAX_DEFERRAL)
    })
}

impl NetworkState {
    /// Records a use of the network, which defers work on slots.
    pub fn note_use(&self) {
        *self.last_use.lock() = Some(Instant::now());
    }

    /// Wakes the thread, which creates missing slots.
    pub fn wake(&self) {
        if let Some(wake) = &*self.wake.lock() {
            // If the thread has exited, the network is closed.
            let _ = wake.send(());
        }
    }

    /// Queues a slot for removal.
    pub fn release(&self, slot: ReleasedSlot) {
        self.note_use();
        let unqueued = match &*self.wake.lock() {
            Some(wake) => {
                // Queue the slot before waking the worker. If the worker has exited, take the slot
                // back: no other caller of `release` runs while `wake` is locked.
                self.released.lock().push_back(slot);
                wake.send(())
                    .err()
                    .and_then(|_| self.released.lock().pop_back())
            }
            None => Some(slot),
        };
        // The network is closed, but a guest may briefly outlive it: remove its slot here.
        if let Some(slot) = unqueued {
            // Ignore errors: remains are harmless. A guest has used the slot (`unused` is false).
            let _ = namespace::outside(|| {
                self.remove(vec![slot], false);
                self.tear_down_if_unused();
                Ok(())
            });
        }
    }

    /// Thread function: creates and removes slots until the network is closed and all slots are
    /// removed.
    pub fn work(&self, inbox: &Receiver<()>) {
        let mut requested: Option<Instant> = None;
        let mut is_able = true;
        loop {
            let burst_memory = self.bursts.lock().remembered_for(Instant::now());
            // Without a request, wait for one. After a burst, wait at most until the target falls,
            // to remove surplus slots.
            let woken = match (requested, burst_memory) {
                (None, None) => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                (None, Some(rest)) => inbox.recv_timeout(rest),
                (Some(requested), _) => {
                    let due = due(requested, *self.last_use.lock());
                    inbox.recv_timeout(due.saturating_duration_since(Instant::now()))
                }
            };
            let target = self.bursts.lock().target(Instant::now());
            match woken {
                Err(RecvTimeoutError::Disconnected) => break,
                Ok(()) => {
                    // One pass serves all wake-ups that are pending.
                    inbox.try_iter().for_each(drop);
                    // The time of the first request limits the deferral.
                    requested.get_or_insert_with(Instant::now);
                    // A failed creation is repeated at the next wake-up only.
                    is_able = true;
                    let low_water = self.bursts.lock().usual().div_ceil(LOW_WATER_DIVISOR);
                    // Few slots are ready: create slots at once, although requests are waiting.
                    while is_able && self.ready.lock().len() < low_water {
                        is_able = self.create_in_advance();
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    // Each pass takes one step, so that a request that arrives meanwhile waits for
                    // one step at most. Creation precedes removal.
                    if is_able && self.ready.lock().len() < target {
                        is_able = self.create_in_advance();
                    // The opening of the network creates one slot, even if the target is 0.
                    } else if !self.remove_surplus(target.max(1)) && !self.remove_released() {
                        requested = None;
                    }
                }
            }
        }
        // The network is closed: remove everything without waiting for pauses.
        while self.remove_released() {}
        self.remove_surplus(0);
        self.tear_down_if_unused();
    }

    /// Removes all but `target` ready slots, for example after a burst. Returns true if slots were
    /// removed.
    fn remove_surplus(&self, target: usize) -> bool {
        let surplus: Vec<Slot> = {
            let mut ready = self.ready.lock();
            let retained = target.min(ready.len());
            ready.drain(retained..).collect()
        };
        let any = !surplus.is_empty();
        let surplus = surplus.into_iter().map(|slot| ReleasedSlot {
            tap: slot.tap,
            ..ReleasedSlot::new(slot.number)
        });
        self.remove(surplus.collect(), true);
        any
    }

    /// Creates one slot in advance. Returns true on success.
    fn create_in_advance(&self) -> bool {
        if self.wake.lock().is_none() {
            return false;
        }
        match self.create_slot(self.nic) {
            Ok(slot) => {
                self.ready.lock().push_back(slot);
                true
            }
            // The error is not logged: a caller that needs a slot receives the same error.
            Err(NetError::Full(_)) => false,
            Err(e) => {
                tracing::warn!(error = %e, "cannot create a network slot in advance");
                false
            }
        }
    }

    /// Removes a batch of released slots, after removals in progress. Returns true if slots were
    /// removed.
    pub fn remove_released(&self) -> bool {
        let _one = self.removal.lock();
        // Release the queue's lock before the removal, which takes milliseconds.
        let released: Vec<ReleasedSlot> = {
            let mut released = self.released.lock();
            let count = released.len().min(MAX_REMOVALS_AT_ONCE);
            released.drain(..count).collect()
        };
        let any = !released.is_empty();
        self.remove(released, false);
        any
    }

    /// Removes slots of terminated guests, or unused slots. `unused` states that no guest has used
    /// them.
    fn remove(&self, slots: Vec<ReleasedSlot>, unused: bool) {
        if slots.is_empty() {
            return;
        }
        // Complete the records while the namespaces exist: `close` reads their open connections.
        let records = slots.iter().filter_map(|slot| slot.record.as_ref());
        records.for_each(|record| record.close());
        slots.iter().for_each(|slot| self.leave_network(slot));
        let numbers: Vec<u32> = slots.iter().map(|slot| slot.number).collect();
        // Unused slots have no connections: avoid walking the connection tracking table.
        let used: &[u32] = if unused { &[] } else { &numbers };
        // Call this before the namespaces are removed: `used_addresses` reads their counters.
        let addresses = self.config.used_addresses(used);
        slot::destroy(&self.config, &numbers);
        let taps = slots.into_iter().filter_map(|slot| slot.tap);
        taps.for_each(device::close_with_namespace);
        // Delete the host's entries last, because a living slot could create new ones.
        if let Err(e) = connections::delete(&addresses) {
            tracing::warn!(slots = ?numbers, error = %e, "cannot remove connections of terminated sandboxes");
        }
        self.networks
            .clean(|network| private_network::remove_if_empty(&self.config, network));
        // Only now may the numbers, and thus the addresses, be used again.
        let mut own = self.numbers.lock();
        numbers.iter().for_each(|&number| own.give_back(number));
    }

    /// Removes the link of a slot to its private network. The kernel would remove it with the
    /// namespace of the slot, but later.
    fn leave_network(&self, slot: &ReleasedSlot) {
        let networks = &self.networks;
        let leave = |network: &NetworkId, address| {
            let _changes = networks.changes.lock();
            let successor = networks.slot(network, address);
            let left = (network, address);
            private_network::leave(&self.config, slot.number, left, successor);
        };
        match &slot.network {
            Some((network, address)) => leave(network, *address),
            // Only after the start of a daemon, a slot can have an unknown network.
            None => {
                for network in networks.unchecked() {
                    leave(&network, Ipv4Addr::UNSPECIFIED);
                }
            }
        }
    }

    /// Removes the host's rules if no slots remain.
    pub fn tear_down_if_unused(&self) {
        if self.numbers.lock().in_use() > 0 {
            return;
        }
        match RangeClaims::lock() {
            Ok(claims) => host::tear_down(&claims, &self.config.tag),
            Err(e) => tracing::warn!(
                path = %self.home.display(),
                error = %e,
                "cannot remove the network of a data directory",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_deferred_to_a_pause_but_not_indefinitely() {
        let requested = Instant::now();
        assert_eq!(due(requested, None), requested);
        assert_eq!(due(requested, Some(requested)), requested + QUIET_TIME);
        let long_after = requested + Duration::from_millis(500);
        assert_eq!(due(requested, Some(long_after)), long_after + QUIET_TIME);
        let later = requested + Duration::from_secs(5);
        assert_eq!(due(requested, Some(later)), requested + MAX_DEFERRAL);
    }
}
