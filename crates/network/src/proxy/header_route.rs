//! Passes connections of a slot to the header proxy, if they go to a host whose requests receive
//! headers.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use super::outbound::Outbound;
use super::{ProxyRoute, original_destination};
use crate::connections::ConnectionRecorder;
use crate::counted_stream::CountedStream;
use crate::egress_connector::EgressTarget;
use crate::happy_eyeballs;
use crate::header_connection::{Connecting, HeaderConnection, HeaderInjector, ServerConnector};
use crate::host_names;
use crate::policy::EgressPolicy;
use crate::read_ahead::ReadAhead;
use crate::sniff::SniffProtocol;
use crate::upstream;
use jiffy_engine_api::{HeaderRules, HeaderUse, RefusalReason};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use tokio::net::TcpStream;

/// Maximum number of concurrent connections of one sandbox whose requests receive headers. Each
/// costs the daemon up to 2 MB of memory.
pub(crate) const MAX_HEADER_CONNECTIONS: usize = 128;

/// Connects to one host from a slot.
struct HostConnector {
    outbound: Outbound,
    policy: EgressPolicy,
    record: Arc<ConnectionRecorder>,
    /// Name of the host.
    name: String,
    port: u16,
    /// Address that the guest chose. It is only recorded.
    dialled: Option<SocketAddr>,
}

impl ServerConnector for HostConnector {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            if let Some(proxy) = self.policy.egress_proxy()
                && (self.policy.is_open() || self.policy.allows_name(&self.name, self.port))
                && host_names::is_unambiguous(&self.name)
            {
                let target = EgressTarget::Name(&self.name, self.port);
                return self
                    .outbound
                    .connect_through(&self.policy, proxy, target)
                    .await;
            }
            let servers = self.policy.upstreams(&self.outbound.host);
            let resolved = upstream::addresses(&self.name, &servers, self.policy.ipv6()).await;
            let permitted = |ip: &IpAddr| {
                let address = SocketAddr::new(*ip, self.port);
                self.policy.permits_header_host(&self.name, address)
            };
            let reachable: Vec<IpAddr> = resolved.into_iter().filter(permitted).collect();
            let mut addresses = happy_eyeballs::alternate_versions(&reachable, self.port);
            if self.policy.egress_proxy().is_some() {
                // Attempts in parallel would not be faster, because they share the proxy.
                addresses.truncate(1);
            }
            let connect = |address| {
                let (outbound, policy) = (self.outbound.clone(), self.policy.clone());
                async move { outbound.connect(&policy, address).await }
            };
            happy_eyeballs::connect_first(addresses, connect).await
        })
    }

    fn used(&self, used: HeaderUse) {
        self.record.header_use(&self.name, self.port, used);
    }

    fn refused(&self, reason: RefusalReason) {
        (self.record).refused_by_name(self.dialled, Some(&self.name), reason);
    }
}

impl ProxyRoute {
    /// Returns the rules for headers and their proxy, if the rules name `host`.
    pub(super) fn header_rules(
        &self,
        host: &str,
    ) -> Option<(Arc<HeaderRules>, Arc<dyn HeaderInjector>)> {
        let policy = self.policy.borrow();
        let rules = policy.as_ref()?.headers_for(host)?;
        // `EgressPolicy::new` rejects such rules if there is no proxy.
        Some((rules.clone(), self.header_injector.clone()?))
    }

    /// Passes a connection to the proxy that adds headers, until it ends or the rules change.
    pub(super) async fn add_headers(
        &self,
        client: TcpStream,
        head: Vec<u8>,
        name: &str,
        protocol: SniffProtocol,
        (rules, injector): (Arc<HeaderRules>, Arc<dyn HeaderInjector>),
    ) {
        let Some(policy) = self.policy.borrow().clone() else {
            return;
        };
        let Ok(_permit) = self.header_permits.clone().try_acquire_owned() else {
            self.reset(&client);
            return;
        };
        let name = name.to_ascii_lowercase();
        let dialled = original_destination(&client);
        // The address that the guest chose is not used.
        let carrying = self.record.carry(None, Some(&name));
        // Without this option, small responses wait for confirmations. A failure only costs time.
        let _ = client.set_nodelay(true);
        carrying.count_read(head.len());
        let counted = CountedStream::new(client, carrying.bytes.clone());
        let connection = HeaderConnection {
            client: Box::new(ReadAhead::new(head, counted)),
            host: name.clone(),
            is_tls: protocol == SniffProtocol::Tls,
            rules: rules.clone(),
            owner: policy.owner().map(str::to_owned),
            connector: Arc::new(HostConnector {
                outbound: self.outbound(),
                policy: policy.clone(),
                record: self.record.clone(),
                name,
                port: protocol.port(),
                dialled,
            }),
        };
        let mut changes = self.policy.clone();
        tokio::select! {
            () = injector.serve(connection) => {}
            // New rules apply to the next connection.
            _ = changes.wait_for(|now| now.as_ref() != Some(&policy)) => {}
        }
    }
}
