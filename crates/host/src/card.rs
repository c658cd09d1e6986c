//! Network cards of guests: what the engine asks of the network, and what it says where there is none.

use jiffy_engine::{EngineError, NetworkRules};
use jiffy_microvm::NetSpec;
use jiffy_net::{Lease, Network, guest};

/// The card of whoever has this slot; once.
pub(crate) fn spec(lease: &mut Lease) -> Option<NetSpec> {
    Some(NetSpec {
        tap: lease.take_tap()?,
        mac: guest::MAC,
        mtu: guest::MTU,
    })
}

/// A slot for a guest of snapshot `id`, which has a card.
pub(crate) async fn needed(network: Option<&Network>, id: &str) -> Result<Lease, EngineError> {
    let Some(network) = network else {
        return Err(EngineError::Failed {
            reason: format!(
                "snapshot {id} has a network card, and this daemon has no network: start it with `jiffy serve --network on`, which says what is missing"
            ),
        });
    };
    network.take().await.map_err(EngineError::failed)
}

/// Whether this host can keep the rules. Without network nothing is reached, whatever they say.
pub(crate) fn check(network: Option<&Network>, rules: &NetworkRules) -> Result<(), String> {
    match network {
        Some(network) => network.check(rules).map(drop).map_err(|e| e.to_string()),
        None => Ok(()),
    }
}

/// Which network there is, in a few words.
pub(crate) fn words(network: Option<&Network>) -> String {
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
) -> Option<Lease> {
    let (network, number) = (network?, slot?);
    match network.adopt(number, rules).await {
        Ok(lease) => Some(lease),
        Err(e) => {
            tracing::warn!(number, "a sandbox that ran on has lost its network: {e}");
            None
        }
    }
}
