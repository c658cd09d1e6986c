//! [`PublicAddress`]: the address of the API for clients, and links to ports.
//!
//! Clients use the address on which the daemon listens, or a domain of the host.

use jiffy_gateway::LinkSigner;
use std::net::SocketAddr;

/// Addresses and names under which clients connect to the daemon.
#[derive(Debug, Clone)]
pub struct PublicAddress {
    pub scheme: &'static str,
    pub url: String,
    /// First domain, with the port if it is not the default port of the scheme.
    pub domain: Option<String>,
    address: SocketAddr,
}

impl PublicAddress {
    pub fn new(domains: &[String], address: SocketAddr, tls: bool) -> Self {
        let (scheme, default_port) = if tls { ("https", 443) } else { ("http", 80) };
        let port = address.port();
        let domain = domains.first().map(|domain| {
            if port == default_port {
                domain.clone()
            } else {
                format!("{domain}:{port}")
            }
        });
        Self {
            scheme,
            url: format!("{scheme}://{address}"),
            domain,
            address,
        }
    }

    /// Returns a link for browsers. If possible, its host name belongs to `port` alone: a name
    /// below the domain, or on loopback a name below `localhost`, which browsers resolve
    /// themselves. If not possible, the link is a path of the API's own address.
    pub fn page_link(&self, signer: &LinkSigner, id: &str, port: u16, expires: u64) -> String {
        let is_local = self.domain.is_none() && self.address.ip().is_loopback();
        match signer.label(id, port, expires) {
            Ok(label) if is_local => {
                let port = self.address.port();
                format!("{}://{label}.localhost:{port}/", self.scheme)
            }
            _ => self.link(signer, id, port, expires),
        }
    }

    /// Returns a link that opens `port` of a sandbox until `expires`, in seconds since 1970.
    /// Without a domain, the link is a path of the API's own address.
    pub fn link(&self, signer: &LinkSigner, id: &str, port: u16, expires: u64) -> String {
        if let Some(domain) = &self.domain
            && let Ok(label) = signer.label(id, port, expires)
        {
            return format!("{}://{label}.{domain}/", self.scheme);
        }
        let path = signer.path(id, port, "/", expires);
        // All valid ports and ids can be signed.
        format!("{}{}", self.url, path.unwrap_or_default())
    }
}
