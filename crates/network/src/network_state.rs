//! [`NetworkState`]: state that a network shares with the leases of its slots and with its worker
//! thread. Also creates slots.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

pub(crate) mod slot_worker;

use crate::NetError;
use crate::conntrack::ConntrackWatcher;
use crate::egress_connector::EgressConnector;
use crate::header_connection::HeaderInjector;
use crate::host_addresses::AddressFollower;
use crate::network_state::slot_worker::ReleasedSlot;
use crate::policy::HostReachability;
use crate::private_networks::PrivateNetworks;
use crate::slot::{self, NicKind, Slot, SlotConfig};
use crate::slot_numbers::SlotNumbers;
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

/// State shared by the clones of a network and its leases.
///
/// Lock order: `removal` or `wake` before `released`, and `removal` before the locks of `networks`.
/// A thread that takes any other lock must hold no lock except `removal`.
pub(crate) struct NetworkState {
    pub config: SlotConfig,
    /// Data directory, for messages.
    pub home: PathBuf,
    /// Reachability from the host, by which rules are validated.
    pub reach: HostReachability,
    /// Recent bursts, which determine how many slots are created in advance.
    pub bursts: Mutex<BurstMemory>,
    /// Kind of network interface of the slots created in advance.
    pub nic: NicKind,
    /// Slots created in advance.
    pub ready: Mutex<VecDeque<Slot>>,
    /// Allocated slot numbers.
    pub numbers: Mutex<SlotNumbers>,
    /// Slots to be removed.
    pub released: Mutex<VecDeque<ReleasedSlot>>,
    /// Held while slots of `released` are being removed. A caller that needs a free number waits
    /// for this lock.
    pub removal: Mutex<()>,
    /// Last use of the network. `None` if it was not used yet.
    pub last_use: Mutex<Option<Instant>>,
    /// Wakes the worker thread, which creates and removes slots. `None` if the network is closed.
    pub wake: Mutex<Option<Sender<()>>>,
    /// Name servers of the host.
    pub upstreams: Arc<Upstreams>,
    /// Private networks with running members.
    pub networks: Arc<PrivateNetworks>,
    /// Connector to the control plane, for sandboxes whose rules name it.
    pub control_plane: Option<Arc<dyn ControlPlaneConnector>>,
    /// Proxy that adds headers to requests.
    pub header_injector: Option<Arc<dyn HeaderInjector>>,
    /// Client of egress proxies.
    pub egress_connector: Option<Arc<dyn EgressConnector>>,
    /// Thread that limits the sandboxes' share of the host's connection tracking table.
    pub watcher: Mutex<Option<ConntrackWatcher>>,
    /// Thread that blocks the host's own addresses in rootless mode.
    pub follower: Mutex<Option<AddressFollower>>,
    /// Worker thread, see [`slot_worker`].
    pub worker: Mutex<Option<thread::JoinHandle<()>>>,
}

/// Runs blocking work, such as programs and changes of namespaces, on a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, NetError> + Send + 'static,
) -> Result<T, NetError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(e) => Err(NetError::Unable(e.to_string())),
    }
}

impl NetworkState {
    /// Takes a slot that was created in advance. Returns the slot and the number of ready slots
    /// that remain, of both kinds. Both values are `None` if no slot of this kind is ready. Slots
    /// whose namespaces were removed by another program are released and skipped.
    pub fn take_ready(&self, nic: NicKind) -> (Option<Slot>, Option<usize>) {
        loop {
            // The lock is released before the checks below, which make system calls.
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
                "replaced a network slot whose namespace was removed"
            );
            self.release(ReleasedSlot {
                tap: slot.tap,
                ..ReleasedSlot::new(slot.number)
            });
        }
    }

    /// Creates a slot.
    pub fn create_slot(&self, nic: NicKind) -> Result<Slot, NetError> {
        let number = self.number()?;
        slot::create(&self.config, number, nic)
            .inspect_err(|_| self.numbers.lock().give_back(number))
    }

    /// Returns a free number, if necessary by completing the removal of released slots.
    fn free_number(&self) -> Result<u32, NetError> {
        loop {
            let free = self.numbers.lock().take();
            if let Some(number) = free {
                return Ok(number);
            }
            // `remove_released` also waits for a removal in progress on another thread.
            if !self.remove_released() {
                let mut numbers = self.numbers.lock();
                let limit = numbers.limit();
                // Another thread may have released a number meanwhile.
                return numbers.take().ok_or(NetError::Full(limit));
            }
        }
    }

    /// Returns a free number. Remains of a crash are removed first. Numbers whose remains cannot be
    /// removed are skipped.
    fn number(&self) -> Result<u32, NetError> {
        loop {
            let number = self.free_number()?;
            match slot::remove_remains(&self.config, number) {
                Ok(()) => return Ok(number),
                Err(what) => {
                    tracing::warn!(number, remains = %what, "skipped a network slot: cannot remove its remains");
                    self.numbers.lock().block(number);
                }
            }
        }
    }
}
