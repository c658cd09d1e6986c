//! The thread that makes slots in advance and removes released ones, when that holds up no request.
//!
//! The kernel makes and removes devices under one lock of the host, which opening a slot takes as
//! well; and a request that is answered meanwhile shares its processors with that work. So the
//! thread works in pauses between requests, one slot or one batch of removals at a time. It has the
//! usual priority: one with a lower priority would keep that lock while others run.

use crate::NetError;
use crate::claim::RangeClaims;
use crate::connections::{self, ConnectionRecorder};
use crate::device;
use crate::host;
use crate::namespace;
use crate::network_state::NetworkState;
use crate::slot::{self, Slot};
use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Time without a use of the network after which its slots are worked on.
const QUIET_TIME: Duration = Duration::from_millis(40);
/// Longest time that this work is deferred.
const MAX_DEFERRAL: Duration = Duration::from_secs(1);
/// Most slots that are removed at once.
const MAX_REMOVALS_AT_ONCE: usize = 64;
/// Part of the usual slots below which they are made without deferral.
const LOW_WATER_DIVISOR: usize = 4;

/// A slot whose guest is gone, or that has none.
pub(crate) struct ReleasedSlot {
    pub number: u32,
    /// Completed before the slot is removed.
    pub record: Option<Arc<ConnectionRecorder>>,
    /// The daemon's descriptor of the tap. Closing the last one waits for the removal of the
    /// device: if that were a VMM's, it would end later.
    pub tap: Option<File>,
}

impl ReleasedSlot {
    /// One without a record.
    pub fn new(number: u32) -> Self {
        Self {
            number,
            record: None,
            tap: None,
        }
    }
}

/// Moment at which work is due that was asked for then, after that last use of the network.
fn due(asked: Instant, last_use: Option<Instant>) -> Instant {
    last_use.map_or(asked, |used| (used + QUIET_TIME).min(asked + MAX_DEFERRAL))
}

impl NetworkState {
    /// Notes a use of the network: work on slots is deferred.
    pub fn note_use(&self) {
        *self.last_use.lock() = Some(Instant::now());
    }

    /// Has slots made, if some are missing.
    pub fn wake(&self) {
        if let Some(wake) = &*self.wake.lock() {
            // Without a thread the network is closed.
            let _ = wake.send(());
        }
    }

    /// Has a slot removed, at a quiet time.
    pub fn release(&self, slot: ReleasedSlot) {
        self.note_use();
        let left = match &*self.wake.lock() {
            Some(wake) => {
                self.released.lock().push_back(slot);
                wake.send(())
                    .err()
                    .and_then(|_| self.released.lock().pop_back())
            }
            None => Some(slot),
        };
        // A guest may outlive the open network for a moment.
        if let Some(slot) = left {
            // Errors are ignored: remains do no harm.
            let _ = namespace::outside(|| {
                self.remove(vec![slot], false);
                self.tear_down_if_unused();
                Ok(())
            });
        }
    }

    /// Makes and removes slots, until the network is closed and all is removed.
    pub fn work(&self, inbox: &Receiver<()>) {
        let mut asked: Option<Instant> = None;
        let mut is_able = true;
        loop {
            let remembered = self.bursts.lock().remembered_for(Instant::now());
            let woken = match (asked, remembered) {
                (None, None) => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                (None, Some(rest)) => inbox.recv_timeout(rest),
                (Some(asked), _) => {
                    let due = due(asked, *self.last_use.lock());
                    inbox.recv_timeout(due.saturating_duration_since(Instant::now()))
                }
            };
            let wanted = self.bursts.lock().target(Instant::now());
            match woken {
                Err(RecvTimeoutError::Disconnected) => break,
                Ok(()) => {
                    inbox.try_iter().for_each(drop);
                    asked.get_or_insert_with(Instant::now);
                    is_able = true;
                    let low_water = self.bursts.lock().usual().div_ceil(LOW_WATER_DIVISOR);
                    while is_able && self.ready.lock().len() < low_water {
                        is_able = self.make_in_advance();
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    if is_able && self.ready.lock().len() < wanted {
                        is_able = self.make_in_advance();
                    // The opening of the network makes one, also where none is wanted.
                    } else if !self.remove_surplus(wanted.max(1)) && !self.remove_released() {
                        asked = None;
                    }
                }
            }
        }
        while self.remove_released() {}
        self.remove_surplus(0);
        self.tear_down_if_unused();
    }

    /// Removes slots that were made for a burst which is forgotten, all but `wanted`. Returns true
    /// if there were any.
    fn remove_surplus(&self, wanted: usize) -> bool {
        let surplus: Vec<Slot> = {
            let mut ready = self.ready.lock();
            let kept = wanted.min(ready.len());
            ready.drain(kept..).collect()
        };
        let any = !surplus.is_empty();
        let surplus = surplus.into_iter().map(|slot| ReleasedSlot {
            tap: slot.tap,
            ..ReleasedSlot::new(slot.number)
        });
        self.remove(surplus.collect(), true);
        any
    }

    /// Makes one slot in advance. Returns true if that succeeded.
    fn make_in_advance(&self) -> bool {
        if self.wake.lock().is_none() {
            return false;
        }
        match self.make(self.nic) {
            Ok(slot) => {
                self.ready.lock().push_back(slot);
                true
            }
            // The caller that needs a slot gets the error.
            Err(NetError::Full(_)) => false,
            Err(e) => {
                tracing::warn!("a network slot could not be made in advance: {e}");
                false
            }
        }
    }

    /// Removes some of the released slots, after removals that are under way. Returns true if there
    /// were any.
    pub fn remove_released(&self) -> bool {
        let _one = self.removal.lock();
        let released: Vec<ReleasedSlot> = {
            let mut released = self.released.lock();
            let count = released.len().min(MAX_REMOVALS_AT_ONCE);
            released.drain(..count).collect()
        };
        let any = !released.is_empty();
        self.remove(released, false);
        any
    }

    /// Removes slots, whose guests are gone, or that had none.
    fn remove(&self, slots: Vec<ReleasedSlot>, unused: bool) {
        if slots.is_empty() {
            return;
        }
        let records = slots.iter().filter_map(|slot| slot.record.as_ref());
        records.for_each(|record| record.close());
        let numbers: Vec<u32> = slots.iter().map(|slot| slot.number).collect();
        // Unused slots have no connections; each removal costs a walk through the table.
        let used: &[u32] = if unused { &[] } else { &numbers };
        let addresses = self.config.used_addresses(used);
        slot::destroy(&self.config, &numbers);
        let taps = slots.into_iter().filter_map(|slot| slot.tap);
        taps.for_each(device::leave_to_namespace);
        if let Err(e) = connections::delete(&addresses) {
            tracing::warn!("connections of sandboxes that are gone stay in the host's table: {e}");
        }
        let mut own = self.numbers.lock();
        numbers.iter().for_each(|&number| own.give_back(number));
    }

    /// Removes the host's rules if no slot is left.
    pub fn tear_down_if_unused(&self) {
        if self.numbers.lock().in_use() > 0 {
            return;
        }
        match RangeClaims::lock() {
            Ok(claims) => host::tear_down(&claims, &self.config.tag),
            Err(e) => tracing::warn!(
                "the network of {} could not be removed: {e}",
                self.claim.display()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_waits_for_a_pause_but_not_for_long() {
        let asked = Instant::now();
        assert_eq!(due(asked, None), asked);
        assert_eq!(due(asked, Some(asked)), asked + QUIET_TIME);
        let long_after = asked + Duration::from_millis(500);
        assert_eq!(due(asked, Some(long_after)), long_after + QUIET_TIME);
        let later = asked + Duration::from_secs(5);
        assert_eq!(due(asked, Some(later)), asked + MAX_DEFERRAL);
    }
}
