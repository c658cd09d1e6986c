//! Messages between a tenant's process and its broker, the process that opens outgoing connections
//! on its behalf. These messages use a socket of their own, not the control socket. Answers arrive
//! in any order.

use serde::{Deserialize, Serialize};

/// Request of a tenant's process for a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressRequest {
    /// Number that the answer repeats.
    pub id: u64,
    /// Function whose list of allowed hosts applies.
    pub function: String,
    /// Name or address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Set for TLS. The broker handles TLS, and the process reads and writes plain text.
    pub tls: bool,
}

/// Answer. If successful, the descriptor of the connection, a Unix socket to the broker, is sent
/// with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressResponse {
    /// Number of the request.
    pub id: u64,
    /// Reason for a failure. `None` if there is a connection.
    pub failure: Option<EgressFailure>,
}

/// Reason for a failed connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum EgressFailure {
    /// The function is not allowed to reach this host.
    #[error("the function is not allowed to reach this host")]
    Denied,
    /// The host has no address in the public internet.
    #[error("the host has no address in the public internet")]
    ProhibitedAddress,
    /// The name has no address.
    #[error("the name has no address")]
    NotFound,
    /// The host rejected the connection.
    #[error("the host rejected the connection")]
    Refused,
    /// The host did not answer in time.
    #[error("the host did not answer in time")]
    Timeout,
    /// The tenant has too many connections.
    #[error("too many connections")]
    TooMany,
    /// The host's TLS version or certificate was rejected.
    #[error("the TLS version or the certificate of the host was rejected")]
    Tls,
}
