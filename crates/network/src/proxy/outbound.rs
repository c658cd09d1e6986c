//! [`Outbound`]: opens connections to servers from a slot, directly or through the egress proxy of
//! the sandbox.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use super::connect_from;
use crate::egress_connector::{EgressConnector, EgressTarget};
use crate::happy_eyeballs;
use crate::header_connection::GuestStream;
use crate::policy::EgressPolicy;
use crate::upstream::{self, Upstreams};
use jiffy_engine_api::EgressProxy;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Opens connections to servers from a slot.
#[derive(Clone)]
pub(crate) struct Outbound {
    /// Namespace of the slot.
    pub slot: String,
    /// Name servers of the host.
    pub host: Arc<Upstreams>,
    /// Client of egress proxies. `None` if the host does not support egress proxies.
    pub connector: Option<Arc<dyn EgressConnector>>,
}

impl Outbound {
    /// Connects to an address that `policy` permits. `None` if the server or the proxy does not
    /// respond.
    pub async fn connect(
        &self,
        policy: &EgressPolicy,
        address: SocketAddr,
    ) -> Option<Box<dyn GuestStream>> {
        match policy.egress_proxy() {
            Some(proxy) => {
                let target = EgressTarget::Address(address);
                self.connect_through(policy, proxy, target).await
            }
            None => {
                let stream = connect_from(self.slot.clone(), address).await?;
                Some(Box::new(stream))
            }
        }
    }

    /// Connects to `target` through the proxy of `policy`. `None` if the proxy has no permitted
    /// address, does not respond, or does not connect.
    pub async fn connect_through(
        &self,
        policy: &EgressPolicy,
        proxy: &EgressProxy,
        target: EgressTarget<'_>,
    ) -> Option<Box<dyn GuestStream>> {
        let connector = self.connector.as_ref()?;
        let (host, port) = EgressProxy::split_address(&proxy.address)?;
        let resolved = match host.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => {
                let servers = policy.upstreams(&self.host);
                upstream::addresses(host, &servers, policy.ipv6()).await
            }
        };
        // The creator of the sandbox must not reach private addresses by naming a proxy.
        let permitted = |ip: &IpAddr| policy.permits_by_name(*ip);
        let resolved: Vec<IpAddr> = resolved.into_iter().filter(permitted).collect();
        let addresses = happy_eyeballs::alternate_versions(&resolved, port);
        let connect = |address| connect_from(self.slot.clone(), address);
        let stream = happy_eyeballs::connect_first(addresses, connect).await?;
        let stream = Box::new(stream);
        (connector.open_tunnel(stream, proxy, policy.owner(), target)).await
    }
}
