//! The other end of a client's connection.

use std::net::IpAddr;

/// Other end of a client's connection. The control plane finds it among a request's extensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Address it comes from.
    pub ip: IpAddr,
    /// It came over TLS.
    pub tls: bool,
    /// It came over a Unix socket, which only its owner can open.
    pub local: bool,
}

/// Mark that the control plane puts among the extensions of an answer to a caller it knows. The
/// connection may then stay open as long as those of clients do; others are bounded in number and
/// closed soon when nothing happens on them.
#[derive(Debug, Clone, Copy)]
pub struct KnownCaller;
