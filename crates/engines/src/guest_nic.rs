//! Network cards of guests: what the engine asks of the network, and what it says where there is
//! none.

use jiffy_engine_api::{ConnectionLog, EngineError, GuestStream, NetworkRules};
use jiffy_microvm_engine::NetSpec;
use jiffy_network::{Network, NicKind, SlotLease, guest};
use parking_lot::Mutex;
use std::sync::Arc;

/// The card of a running guest, in its slot.
pub(crate) struct GuestNic {
    /// None: there is no card, or its guest is gone.
    lease: Mutex<Option<Arc<SlotLease>>>,
    /// None: there was no card.
    connections: Option<Arc<dyn ConnectionLog>>,
}

impl GuestNic {
    pub fn new(lease: Option<SlotLease>) -> Self {
        Self {
            connections: lease.as_ref().map(SlotLease::connections),
            lease: Mutex::new(lease.map(Arc::new)),
        }
    }

    fn lease(&self) -> Option<Arc<SlotLease>> {
        let lease = self.lease.lock();
        lease.clone()
    }

    /// From now on the slot outlives this process, as its guest does. Its number.
    pub fn keep(&self) -> Option<u32> {
        let lease = self.lease()?;
        lease.keep();
        Some(lease.number())
    }

    pub async fn set_rules(&self, rules: &NetworkRules) -> Result<(), EngineError> {
        match self.lease() {
            Some(lease) => lease.replace(rules).await.map_err(EngineError::failed),
            None => Ok(()),
        }
    }

    /// True if there is a card whose slot is known.
    pub fn is_connected(&self) -> bool {
        self.lease().is_some()
    }

    /// Connects to TCP `port` of the guest. None: there is no card, or nothing takes connections
    /// there in time.
    pub async fn connect(&self, port: u16) -> Option<GuestStream> {
        self.lease()?.connect(port).await
    }

    /// Ends the daemon's connections to the guest, which runs no more.
    pub fn end_connections(&self) {
        if let Some(lease) = self.lease() {
            lease.end_connections();
        }
    }

    /// Forgets the guest's connections, which it has gone back from, and ends those to it. A
    /// failure is logged: what is left counts against its limit until it times out.
    pub async fn forget_connections(&self) {
        let Some(lease) = self.lease() else { return };
        lease.end_connections();
        if let Err(e) = lease.forget_connections().await {
            tracing::warn!("connections that a sandbox went back from stay in a table: {e}");
        }
    }

    /// Bytes that the guest sent and received.
    pub fn traffic(&self) -> Option<(u64, u64)> {
        self.lease()?.traffic()
    }

    /// Record of the guest's connections; readable after the guest has ended.
    pub fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        self.connections.clone()
    }

    /// The guest is gone: so is the slot, kept or not.
    pub fn give_up(&self) {
        let mut lease = self.lease.lock();
        if let Some(lease) = lease.take() {
            lease.end_connections();
            lease.release();
        }
    }
}

/// The card of whoever has this slot; once.
pub(crate) fn spec(lease: &mut SlotLease) -> Option<NetSpec> {
    Some(NetSpec {
        tap: lease.take_tap()?,
        mac: guest::MAC,
        mtu: guest::MTU,
    })
}

/// A slot for a guest of snapshot `id`, which has a card.
pub(crate) async fn needed(
    network: Option<&Network>,
    card: NicKind,
    id: &str,
) -> Result<SlotLease, EngineError> {
    let Some(network) = network else {
        return Err(EngineError::Failed {
            reason: format!(
                "snapshot {id} has a network card, and this daemon has no network: start it with `jiffy serve --network on`, which says what is missing"
            ),
        });
    };
    network.take(card).await.map_err(EngineError::failed)
}

/// Checks that this host can enforce the rules. Without a network nothing is reached, whatever they
/// say.
pub(crate) fn check(network: Option<&Network>, rules: &NetworkRules) -> Result<(), String> {
    match network {
        Some(network) => network.check(rules).map(drop).map_err(|e| e.to_string()),
        None => Ok(()),
    }
}

/// Describes the network in a few words.
pub(crate) fn describe(network: Option<&Network>) -> String {
    match network {
        Some(network) => {
            let (used, most) = network.slots();
            let description = network.description();
            format!("on, {used} of {most} slots made, {description}")
        }
        None => "off".to_owned(),
    }
}

/// The slot of a guest that ran on. Without it the guest is as it was, but cut off.
pub(crate) async fn adopted(
    network: Option<&Network>,
    slot: Option<u32>,
    rules: &NetworkRules,
) -> Option<SlotLease> {
    let (network, number) = (network?, slot?);
    match network.adopt(number, rules).await {
        Ok(lease) => Some(lease),
        Err(e) => {
            tracing::warn!(number, "a sandbox that ran on has lost its network: {e}");
            None
        }
    }
}
