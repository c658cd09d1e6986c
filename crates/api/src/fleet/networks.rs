//! Private networks in a fleet: all sandboxes of a network are on one host.
//!
//! The *coordinator* is the member (host) of the fleet that selects the hosts of new sandboxes and
//! declares silent members dead. A *row* is the entry of a sandbox or of a name in the directory of
//! the fleet.
//!
//! A network has a row in the fleet's directory as long as its host has sandboxes of it. A create
//! is placed on this host. The host that executes a create reserves the row first, so that two
//! hosts cannot create the same network: the coordinator decides, and the other host rejects the
//! create.

use super::{Fleet, host_lost};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::short;
use jiffy_fleet_core::MemberId;

impl Fleet {
    /// Restricts the hosts of a create to the host of its private network, if the network exists.
    /// `volume_host` is the host of the volumes of the sandbox.
    ///
    /// # Errors
    /// Fails if the host of the network is lost, or the volumes are on another host.
    pub(super) async fn restrict_to_network(
        &self,
        owner: Option<&str>,
        network: &str,
        volume_host: Option<MemberId>,
        allowed: &mut Vec<MemberId>,
    ) -> Result<(), ApiError> {
        let hash = self.network_hash(owner, network);
        // The remembered place may be outdated: the network may have ended, and may have been
        // created again on another host.
        self.node.forget(hash);
        let Some(place) = self.node.locate(hash).await? else {
            return Ok(());
        };
        if !place.is_live {
            let network = short(network);
            let why = format!("all sandboxes of the private network `{network}` are on it");
            return Err(host_lost(place.member, &why));
        }
        if let Some(host) = volume_host.filter(|host| *host != place.member) {
            return Err(ApiError::host_busy(format!(
                "no host can run the sandbox: its private network `{}` is on host {}, but its volumes \
                 are on host {host}",
                short(network),
                place.member
            )));
        }
        // The host may lack the template or snapshot. It then reports this itself.
        *allowed = vec![place.member];
        Ok(())
    }
}

impl App {
    /// Reserves a private network for a new sandbox of this host. Does nothing without a fleet.
    ///
    /// # Errors
    /// Fails if the network is on another host, or if no coordinator can decide. The host that
    /// received the create then tries another host.
    pub(crate) async fn reserve_network(
        &self,
        caller: &Caller,
        network: &str,
    ) -> Result<(), ApiError> {
        let Some(fleet) = &self.fleet else {
            return Ok(());
        };
        let hash = fleet.network_hash(caller.owner_id().as_deref(), network);
        match fleet.reserve(hash).await? {
            None => Ok(()),
            Some(member) => Err(ApiError::host_busy(format!(
                "the private network `{}` is on the host {member}: retry",
                short(network)
            ))),
        }
    }
}
