//! Network of the daemon's sandboxes.

use crate::{FeatureMode, NetworkOptions};
use anyhow::Context;
use jiffy_network::{Network, NetworkConfig, NicKind};
use jiffy_proto::internal::ControlPlaneConnector;
use std::path::Path;
use std::sync::Arc;

/// Opens the network for the data directory `home`. `nic`: network interface of new sandboxes;
/// `connector`: connects those whose rules name it to the control plane.
pub fn open(
    options: &NetworkOptions,
    home: &Path,
    nic: NicKind,
    connector: Option<Arc<dyn ControlPlaneConnector>>,
) -> anyhow::Result<Option<Network>> {
    if options.mode == FeatureMode::Off {
        tracing::info!("network: off; sandboxes reach nothing");
        return Ok(None);
    }
    let config = NetworkConfig {
        range: options.range,
        slots: options.slots,
        granted: options.allow_private.clone(),
        nic,
        connections: options.connections,
        connections_total: options.connections_total,
        control_plane: connector,
        ..NetworkConfig::new(home)
    };
    match Network::open(&config) {
        Ok(network) => {
            tracing::info!("network: on; {}", network.description());
            Ok(Some(network))
        }
        Err(e) if options.mode == FeatureMode::Auto => {
            tracing::info!("network: off, sandboxes reach nothing: {e}");
            Ok(None)
        }
        Err(e) => Err(e).context("sandboxes cannot have a network on this host"),
    }
}

/// Removes what nobody uses any more.
pub async fn close(network: Option<Network>) {
    if let Some(network) = network {
        // It waits for a thread that runs programs.
        let _ = tokio::task::spawn_blocking(move || network.close()).await;
    }
}
