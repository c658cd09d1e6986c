//! Rules of a host about registries.

use crate::cancel::Cancel;
use crate::destination::Destination;
use crate::puller::Program;
use jiffy_net::Network;
use tokio::runtime::Handle;

/// Rules of a host about registries, and the network that pullers have.
#[derive(Debug, Clone, Default)]
pub struct Registries {
    /// Registries (`host` or `host:port`) that are spoken to without TLS.
    pub plain_http: Vec<String>,
    /// Registries of the host's own network that may be reached.
    pub allowed: Vec<Destination>,
    /// The network whose slots pullers get, and the event loop that serves it; none: there are no slots.
    pub network: Option<(Network, Handle)>,
    /// Program that pullers run.
    pub program: Program,
}

impl Registries {
    /// One import's way to them.
    pub fn pull(&self, by_key: bool, cancel: &Cancel) -> Pull {
        Pull {
            registries: self.clone(),
            by_key,
            cancel: cancel.clone(),
        }
    }
}

/// One import's way to registries.
#[derive(Debug, Clone)]
pub struct Pull {
    /// Rules of the host.
    pub registries: Registries,
    /// An API key asks, not the host's owner.
    pub by_key: bool,
    /// Cancels the import.
    pub cancel: Cancel,
}
