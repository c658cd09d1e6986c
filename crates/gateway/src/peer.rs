//! [`Peer`]: properties of a client's connection, which the control plane receives with each
//! request.

use std::net::IpAddr;

/// Peer of a client's connection. The control plane finds it in the extensions of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Address of the client.
    pub ip: IpAddr,
    /// True if the connection uses TLS.
    pub tls: bool,
    /// True if the connection uses a Unix socket, which only the owner of the host
    /// can open.
    pub local: bool,
}

/// Marker in the extensions of the control plane's response to a known caller. Connections of known
/// callers have the long idle timeout. Connections of other callers are bounded in number and
/// closed soon when they are idle.
#[derive(Debug, Clone, Copy)]
pub struct KnownCaller;
