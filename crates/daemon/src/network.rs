//! Opens the network of the sandboxes at the start of the daemon, and closes it at shutdown.

use crate::{FeatureMode, NetworkOptions};
use anyhow::Context;
use jiffy_network::{EgressConnector, HeaderInjector, Network, NetworkConfig, NicKind};
use jiffy_proto::internal::ControlPlaneConnector;
use std::path::Path;
use std::sync::Arc;

/// Opens the network of the data directory `home`. `nic` is the kind of network interface of new
/// sandboxes. `connector` connects sandboxes to the API if their rules permit this. `injector` adds
/// headers to requests of sandboxes. `egress_connector` connects through the proxies of sandboxes.
pub fn open(
    options: &NetworkOptions,
    home: &Path,
    nic: NicKind,
    connector: Option<Arc<dyn ControlPlaneConnector>>,
    injector: Option<Arc<dyn HeaderInjector>>,
    egress_connector: Option<Arc<dyn EgressConnector>>,
) -> anyhow::Result<Option<Network>> {
    if options.mode == FeatureMode::Off {
        tracing::info!("network disabled");
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
        header_injector: injector,
        egress_connector,
        ..NetworkConfig::new(home)
    };
    match Network::open(&config) {
        Ok(network) => {
            tracing::info!(network = %network.description(), "network enabled");
            Ok(Some(network))
        }
        Err(e) if options.mode == FeatureMode::Auto => {
            tracing::info!(reason = %e, "network disabled");
            Ok(None)
        }
        Err(e) => Err(e).context("cannot create a network for sandboxes on this host"),
    }
}

/// Closes the network and removes its unused parts.
pub async fn close(network: Option<Network>) {
    if let Some(network) = network {
        // `close` blocks while it runs programs.
        let _ = tokio::task::spawn_blocking(move || network.close()).await;
    }
}
