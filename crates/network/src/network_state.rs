//! Shared state of a network, and the making of its slots.

use crate::NetError;
use crate::conntrack::ConntrackWatcher;
use crate::host_addresses::AddressFollower;
use crate::policy::HostReachability;
use crate::slot::{self, NicKind, Slot, SlotConfig};
use crate::slot_numbers::SlotNumbers;
use crate::slot_worker::ReleasedSlot;
use crate::upstream::Upstreams;
use jiffy_engine_api::BurstMemory;
use jiffy_proto::internal::ControlPlaneConnector;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Instant;

/// State that the clones of a network, and its leases, share.
pub(crate) struct NetworkState {
    pub config: SlotConfig,
    pub claim: PathBuf,
    pub reach: HostReachability,
    pub bursts: Mutex<BurstMemory>,
    pub nic: NicKind,
    pub ready: Mutex<VecDeque<Slot>>,
    pub numbers: Mutex<SlotNumbers>,
    /// Slots to be removed.
    pub released: Mutex<VecDeque<ReleasedSlot>>,
    /// Held while slots are removed.
    pub removal: Mutex<()>,
    /// Last use of the network; none: there was none.
    pub last_use: Mutex<Option<Instant>>,
    /// Wakes the thread that makes and removes slots; none: the network is closed.
    pub wake: Mutex<Option<Sender<()>>>,
    pub upstreams: Arc<Upstreams>,
    /// Way to the control plane, for sandboxes whose rules name it.
    pub control_plane: Option<Arc<dyn ControlPlaneConnector>>,
    /// Limits the sandboxes' share of the host's table of connections.
    pub watcher: Mutex<Option<ConntrackWatcher>>,
    /// Keeps the host's own addresses from sandboxes if the host is beyond a router.
    pub follower: Mutex<Option<AddressFollower>>,
    pub worker: Mutex<Option<thread::JoinHandle<()>>>,
}

/// Runs blocking work, such as programs and changes of namespaces.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, NetError> + Send + 'static,
) -> Result<T, NetError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(e) => Err(NetError::Unable(e.to_string())),
    }
}

impl NetworkState {
    /// Takes a slot that was made in advance. Returns it with the number of those that are left.
    /// Slots whose namespaces another program has removed are replaced.
    pub fn take_ready(&self, nic: NicKind) -> (Option<Slot>, Option<usize>) {
        loop {
            let (slot, left) = {
                let mut ready = self.ready.lock();
                let at = ready.iter().position(|slot| slot.nic() == nic);
                let slot = at.and_then(|at| ready.remove(at));
                (slot, ready.len())
            };
            let Some(slot) = slot else {
                return (None, None);
            };
            if slot.is_complete(&self.config) {
                return (Some(slot), Some(left));
            }
            let name = self.config.name(slot.number);
            tracing::warn!(
                slot = name,
                "replaced a network slot whose namespace is gone"
            );
            self.release(ReleasedSlot {
                tap: slot.tap,
                ..ReleasedSlot::new(slot.number)
            });
        }
    }

    pub fn make(&self, nic: NicKind) -> Result<Slot, NetError> {
        let number = self.number()?;
        slot::make(&self.config, number, nic).inspect_err(|_| self.numbers.lock().give_back(number))
    }

    /// Returns a free number, if need be that of a slot whose removal is deferred.
    fn free_number(&self) -> Result<u32, NetError> {
        loop {
            let free = self.numbers.lock().take();
            if let Some(number) = free {
                return Ok(number);
            }
            // Also waits for a removal that is under way.
            if !self.remove_released() {
                let mut numbers = self.numbers.lock();
                let most = numbers.most();
                return numbers.take().ok_or(NetError::Full(most));
            }
        }
    }

    /// Returns a free number: remains of a crash are removed, and numbers whose remains cannot be
    /// removed are skipped.
    fn number(&self) -> Result<u32, NetError> {
        loop {
            let number = self.free_number()?;
            match slot::clear(&self.config, number) {
                Ok(()) => return Ok(number),
                Err(what) => {
                    tracing::warn!("network slot {number} is left out: {what} cannot be removed");
                    self.numbers.lock().block(number);
                }
            }
        }
    }
}
