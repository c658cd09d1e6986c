//! Forwards connections to the address that the guest chose.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! The proxy of a slot receives the connections that its nftables table redirects. Some need no
//! host name, because rules permit their address.

use super::ProxyRoute;
use crate::counted_stream::CountedStream;
use crate::egress_connector::EgressTarget;
use crate::header_connection::GuestStream;
use crate::host_names;
use crate::policy::EgressPolicy;
use jiffy_engine_api::RefusalReason;
use std::io;
use std::net::SocketAddr;
use std::time::Instant;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

impl ProxyRoute {
    /// Returns the address that the guest chose, if an address rule permits it. Only with rules for
    /// headers and with an egress proxy are such connections redirected.
    pub(super) fn permitted(&self, dialled: Option<SocketAddr>) -> Option<SocketAddr> {
        let policy = self.policy.borrow();
        let is_redirected =
            |policy: &&EgressPolicy| policy.has_headers() || policy.egress_proxy().is_some();
        let policy = policy.as_ref().filter(is_redirected)?;
        dialled.filter(|address| policy.allows(address.ip()))
    }

    /// Forwards a connection to an address that an address rule permits.
    pub(super) async fn carry_allowed(
        &self,
        client: TcpStream,
        head: Vec<u8>,
        name: Option<&str>,
        address: SocketAddr,
    ) -> io::Result<()> {
        let allows = |policy: &EgressPolicy| policy.allows(address.ip());
        (self.carry_to(client, head, name, address, allows)).await
    }

    /// Forwards a connection unchanged to the address that the guest chose, as long as `allows`
    /// returns true for the policy.
    pub(super) async fn carry_to(
        &self,
        client: TcpStream,
        head: Vec<u8>,
        name: Option<&str>,
        address: SocketAddr,
        allows: impl Fn(&EgressPolicy) -> bool,
    ) -> io::Result<()> {
        let Some(policy) = self.policy.borrow().clone() else {
            return client.set_zero_linger();
        };
        let carrying = self.record.carry(Some(address), name);
        let connected = self.connect_to(&policy, name, address).await;
        let mut server = match connected {
            Ok(server) => server,
            Err(reason) => {
                if let Some(reason) = reason {
                    carrying.refuse(reason);
                }
                // Reset the connection, as if the server had rejected it.
                return client.set_zero_linger();
            }
        };
        let allows = |now: &Option<EgressPolicy>| {
            let is_same = |now: &EgressPolicy| now.egress_proxy() == policy.egress_proxy();
            now.as_ref().is_some_and(|now| allows(now) && is_same(now))
        };
        let mut changes = self.policy.clone();
        if !allows(&changes.borrow()) {
            // The policy changed while the server was connected.
            return client.set_zero_linger();
        }
        let mut client = CountedStream::new(client, carrying.bytes.clone());
        let carry = async {
            server.write_all(&head).await?;
            server.flush().await?;
            carrying.count_read(head.len());
            tokio::io::copy_bidirectional(&mut client, &mut server).await
        };
        tokio::select! {
            // Ignore how the copy ended: both peers see a closed connection.
            _ = carry => {}
            _ = changes.wait_for(|now| !allows(now)) => {}
        }
        Ok(())
    }

    /// Connects to `address`. `name` is the name that the connection contains. An error has the
    /// reason for the record, if the egress proxy is the cause.
    async fn connect_to(
        &self,
        policy: &EgressPolicy,
        name: Option<&str>,
        address: SocketAddr,
    ) -> Result<Box<dyn GuestStream>, Option<RefusalReason>> {
        let outbound = self.outbound();
        let Some(proxy) = policy.egress_proxy() else {
            return outbound.connect(policy, address).await.ok_or(None);
        };
        let name = self.name_for_proxy(policy, name, address);
        let target = match &name {
            Some(name) => EgressTarget::Name(name, address.port()),
            None => EgressTarget::Address(address),
        };
        let stream = outbound.connect_through(policy, proxy, target).await;
        stream.ok_or(Some(RefusalReason::Proxy))
    }

    /// Returns the name that an egress proxy receives instead of `address`. `None` if the proxy
    /// must receive the address.
    ///
    /// A name is used in two cases. Rules permit the name at any address, or rules permit all
    /// addresses and the DNS server resolved the name to `address`. In all other cases, the guest
    /// could reach a denied address by a false name.
    fn name_for_proxy(
        &self,
        policy: &EgressPolicy,
        name: Option<&str>,
        address: SocketAddr,
    ) -> Option<String> {
        let name = name.map(host_names::normalize);
        let permits = |name: &String| policy.allows_name(name, address.port());
        if let Some(name) = name.clone().filter(permits) {
            return Some(name).filter(|name| host_names::is_unambiguous(name));
        }
        if !policy.is_open() {
            return None;
        }
        let mut resolved = self
            .resolved
            .names_of(address.ip(), Instant::now())
            .into_iter();
        let resolved = match name {
            Some(name) => resolved.find(|own| *own == name),
            None => resolved.next(),
        };
        resolved.filter(|name| host_names::is_unambiguous(name))
    }
}
