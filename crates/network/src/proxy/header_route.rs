//! Passes connections of a slot to the header proxy, if they go to a host whose requests receive
//! headers.

use super::{ProxyRoute, connect_from, original_destination};
use crate::connections::ConnectionRecorder;
use crate::counted_stream::CountedStream;
use crate::happy_eyeballs;
use crate::header_connection::{Connecting, HeaderConnection, HeaderInjector, ServerConnector};
use crate::policy::EgressPolicy;
use crate::read_ahead::ReadAhead;
use crate::sniff::SniffProtocol;
use crate::upstream::{self, Upstreams};
use jiffy_engine_api::{HeaderRules, HeaderUse, RefusalReason};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use tokio::net::TcpStream;

/// Maximum number of concurrent connections of one sandbox whose requests receive headers. Each
/// costs the daemon up to 2 MB of memory.
pub(crate) const MAX_HEADER_CONNECTIONS: usize = 128;

/// Connects to one host from a slot.
struct HostConnector {
    slot: String,
    policy: EgressPolicy,
    host: Arc<Upstreams>,
    record: Arc<ConnectionRecorder>,
    name: String,
    port: u16,
    /// Address that the guest chose. It is only recorded.
    dialled: Option<SocketAddr>,
}

impl ServerConnector for HostConnector {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            let servers = self.policy.upstreams(&self.host);
            let resolved = upstream::addresses(&self.name, &servers, self.policy.ipv6()).await;
            let permitted = |ip: &IpAddr| {
                let address = SocketAddr::new(*ip, self.port);
                self.policy.permits_header_host(&self.name, address)
            };
            let reachable: Vec<IpAddr> = resolved.into_iter().filter(permitted).collect();
            let addresses = happy_eyeballs::alternate_versions(&reachable, self.port);
            let connect = |address| connect_from(self.slot.clone(), address);
            let stream = happy_eyeballs::connect_first(addresses, connect).await?;
            Some(Box::new(stream) as Box<_>)
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
        // Otherwise small responses would wait for confirmations. A failure only costs time.
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
                slot: self.slot.clone(),
                policy: policy.clone(),
                host: self.host.clone(),
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
