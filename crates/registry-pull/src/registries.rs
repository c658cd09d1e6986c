//! Rules of a host for registries, and the settings of one pull.
//!
//! The *puller* is the confined process that downloads images from registries. A *slot* is a
//! network namespace with its devices and rules.

use crate::cancel::Cancel;
use crate::puller::PullerProgram;
use crate::registry_address::RegistryAddress;
use crate::registry_mirror::RegistryMirror;
use jiffy_network::Network;
use std::sync::Arc;
use tokio::runtime::Handle;

/// Registry rules of a host, and the network of pullers.
#[derive(Debug, Clone, Default)]
pub struct Registries {
    /// Registries (`host` or `host:port`) with plain HTTP.
    pub plain_http: Vec<String>,
    /// Registries that may be reached although they are in a private network.
    pub allowed: Vec<RegistryAddress>,
    /// Mirrors, in the order in which they are used.
    pub mirrors: Arc<Vec<RegistryMirror>>,
    /// Network with slots for pullers, and its event loop. `None` if network slots are unavailable.
    pub network: Option<(Network, Handle)>,
    /// Program that pullers run.
    pub program: PullerProgram,
}

impl Registries {
    /// Returns the settings of one import's pull. `by_key` states that an API key imports the
    /// image, and not the host's owner.
    pub fn pull(&self, by_key: bool, cancel: &Cancel) -> PullSettings {
        PullSettings {
            registries: self.clone(),
            by_key,
            cancel: cancel.clone(),
        }
    }
}

/// Settings of one import's pull.
#[derive(Debug, Clone)]
pub struct PullSettings {
    /// Rules of the host.
    pub registries: Registries,
    /// True if an API key requested the pull, false if the host's owner did.
    pub by_key: bool,
    /// Cancels the import.
    pub cancel: Cancel,
}
