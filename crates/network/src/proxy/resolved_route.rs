//! Forwards connections to the ports of names other than 80 and 443. Such connections need not
//! contain the name of their host. They are permitted by the name that the DNS server resolved to
//! the address that the guest chose, and lead to this address.

use super::ProxyRoute;
use crate::host_names::WEB_PORTS;
use crate::policy::EgressPolicy;
use jiffy_engine_api::RefusalReason;
use std::io;
use std::net::SocketAddr;
use std::time::Instant;
use tokio::net::TcpStream;

impl ProxyRoute {
    /// Returns true if the proxy does not read a name from connections to `port`, because they need
    /// not contain one.
    pub(super) fn is_without_name(&self, port: u16) -> bool {
        let policy = self.policy.borrow();
        let is_redirected = |policy: &EgressPolicy| {
            policy.has_resolved_port(port)
                || (policy.egress_proxy().is_some() && !WEB_PORTS.contains(&port))
        };
        policy.as_ref().is_some_and(is_redirected)
    }

    /// Returns the name that permits a connection to `address`.
    fn resolved_name(&self, address: SocketAddr) -> Option<String> {
        let names = self.resolved.names_of(address.ip(), Instant::now());
        let policy = self.policy.borrow();
        let policy = policy.as_ref()?;
        let mut names = names.into_iter();
        names.find(|name| policy.permits_resolved(name, address))
    }

    /// Forwards a connection to `address`, if a resolved name permits it. The connection outlives
    /// the TTL of the name. It is closed if the rules no longer permit it.
    pub(super) async fn carry_resolved(
        &self,
        client: TcpStream,
        address: SocketAddr,
    ) -> io::Result<()> {
        let Some(name) = self.resolved_name(address) else {
            if let Some(address) = self.permitted(Some(address)) {
                // As below, a failure only costs time.
                let _ = client.set_nodelay(true);
                return self.carry_allowed(client, Vec::new(), None, address).await;
            }
            (self.record).refused_by_name(Some(address), None, RefusalReason::Rules);
            return client.set_zero_linger();
        };
        // Messages of other protocols are often small. A failure only costs time.
        let _ = client.set_nodelay(true);
        let allows = |policy: &EgressPolicy| policy.permits_resolved(&name, address);
        (self.carry_to(client, Vec::new(), Some(&name), address, allows)).await
    }
}
