//! [`GuestNic`]: the network interface of a guest, as the engines use it. It wraps the lease of a
//! network slot, a network namespace prepared for one guest (crate `jiffy-network`).
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

use jiffy_engine_api::{ConnectionLog, EngineError, GuestStream, NetworkRules};
use jiffy_microvm_engine::NetSpec;
use jiffy_network::{Network, NicKind, SlotLease, guest};
use parking_lot::Mutex;
use std::sync::Arc;

/// Network interface of a running guest, with the slot that it uses.
pub(crate) struct GuestNic {
    /// `None` if the guest has no interface or has exited.
    lease: Mutex<Option<Arc<SlotLease>>>,
    /// `None` if the guest never had an interface.
    connections: Option<Arc<dyn ConnectionLog>>,
}

impl GuestNic {
    pub fn new(lease: Option<SlotLease>) -> Self {
        Self {
            // The connection record is stored separately, because it remains readable after the
            // lease has ended.
            connections: lease.as_ref().map(SlotLease::connections),
            lease: Mutex::new(lease.map(Arc::new)),
        }
    }

    fn lease(&self) -> Option<Arc<SlotLease>> {
        // Clone the lease, so that no caller holds the lock while it waits.
        let lease = self.lease.lock();
        lease.clone()
    }

    /// Marks the slot to outlive this process together with its guest. Returns the slot's number.
    pub fn detach(&self) -> Option<u32> {
        let lease = self.lease()?;
        lease.retain();
        Some(lease.number())
    }

    /// Replaces the egress rules of the guest.
    pub async fn set_rules(&self, rules: &NetworkRules) -> Result<(), EngineError> {
        match self.lease() {
            Some(lease) => lease.replace(rules).await.map_err(EngineError::failed),
            None => Ok(()),
        }
    }

    /// Returns whether the guest has an interface and its slot is known.
    pub fn is_connected(&self) -> bool {
        self.lease().is_some()
    }

    /// Connects to TCP `port` of the guest. `None` if the guest has no interface, or if no server
    /// accepts the connection in time.
    pub async fn connect(&self, port: u16) -> Option<GuestStream> {
        self.lease()?.connect(port).await
    }

    /// Closes the daemon's connections to the guest. Called when the guest no longer runs.
    pub fn end_connections(&self) {
        if let Some(lease) = self.lease() {
            lease.end_connections();
        }
    }

    /// Removes the connections of a guest that was rolled back from the connection table, and
    /// closes the daemon's connections to the guest. A failure is only logged: remaining entries
    /// count against the guest's limit until they time out.
    pub async fn forget_connections(&self) {
        let Some(lease) = self.lease() else { return };
        lease.end_connections();
        if let Err(e) = lease.forget_connections().await {
            tracing::warn!(error = %e, "cannot remove connections of a rolled-back sandbox from the table");
        }
    }

    /// Returns the number of bytes that the guest sent and received.
    pub fn traffic(&self) -> Option<(u64, u64)> {
        self.lease()?.traffic()
    }

    /// Returns the number of bytes that the guest sent.
    pub fn sent_bytes(&self) -> Option<u64> {
        self.lease()?.sent_bytes()
    }

    /// Returns the record of the guest's connections. The record remains readable after the guest
    /// exited.
    pub fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        self.connections.clone()
    }

    /// Releases the slot after the guest exited, even if [`Self::detach`] was called.
    pub fn release(&self) {
        let mut lease = self.lease.lock();
        // A second call finds no lease and does nothing.
        if let Some(lease) = lease.take() {
            lease.end_connections();
            lease.release();
        }
    }
}

/// Takes the interface of the slot `lease`. `None` if an earlier call has taken the interface.
pub(crate) fn spec(lease: &mut SlotLease) -> Option<NetSpec> {
    Some(NetSpec {
        // The descriptor moves to the VMM, so it can be taken only once.
        tap: lease.take_tap()?,
        mac: guest::MAC,
        mtu: guest::MTU,
    })
}

/// Returns a slot for a guest of snapshot `id`, which was taken with a network interface.
pub(crate) async fn required(
    network: Option<&Network>,
    kind: NicKind,
    id: &str,
) -> Result<SlotLease, EngineError> {
    let Some(network) = network else {
        return Err(EngineError::Failed {
            reason: format!(
                "snapshot {id} has a network interface, but this daemon has no network: start it with `jiffy serve --network on`, which reports missing requirements"
            ),
        });
    };
    network.take(kind).await.map_err(EngineError::failed)
}

/// Checks that this host can enforce the rules. Without a network, all rules but a membership in a
/// private network are valid, because guests then reach no address.
pub(crate) fn check(network: Option<&Network>, rules: &NetworkRules) -> Result<(), String> {
    match network {
        Some(network) => network.check(rules).map(drop).map_err(|e| e.to_string()),
        None if rules.membership.is_some() => Err(
            "`join`: this host has no network for sandboxes (see `jiffy daemon status`)".to_owned(),
        ),
        None => Ok(()),
    }
}

/// Describes the network for the operator, in a few words.
pub(crate) fn describe(network: Option<&Network>) -> String {
    match network {
        Some(network) => {
            let (used, max) = network.slots();
            let description = network.description();
            format!("on, {used} of {max} slots created, {description}")
        }
        None => "off".to_owned(),
    }
}

/// Returns the slot of an adopted guest. `None` if the slot cannot be adopted: the guest continues
/// to run without a network.
pub(crate) async fn adopted(
    network: Option<&Network>,
    slot: Option<u32>,
    rules: &NetworkRules,
) -> Option<SlotLease> {
    let (network, number) = (network?, slot?);
    match network.adopt(number, rules).await {
        Ok(lease) => Some(lease),
        Err(e) => {
            tracing::warn!(slot = number, error = %e, "adopted a sandbox without its network");
            None
        }
    }
}
