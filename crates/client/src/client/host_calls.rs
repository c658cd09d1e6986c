//! Requests for the state of hosts and for the usage of a key.

use super::Client;
use hyper::Method;
use jiffy_api_types::{Budget, FleetNode, FleetNodes, Host};

impl Client {
    /// Returns the state of the host. Requires scope `admin` or `read`.
    pub async fn host(&self) -> anyhow::Result<Host> {
        self.call(Method::GET, "/host", &()).await
    }

    /// Returns the hosts of the fleet. Requires scope `admin`. Fails without a fleet.
    pub async fn fleet_nodes(&self) -> anyhow::Result<Vec<FleetNode>> {
        let nodes: FleetNodes = self.call(Method::GET, "/fleet/nodes", &()).await?;
        Ok(nodes.nodes)
    }

    /// Returns the limits and the usage of the caller's key.
    pub async fn limits(&self) -> anyhow::Result<Budget> {
        self.call(Method::GET, "/limits", &()).await
    }
}
