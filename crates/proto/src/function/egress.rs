//! Messages between a tenant's process and its broker of outgoing connections, on a socket of
//! their own. Answers come in any order.

use serde::{Deserialize, Serialize};

/// Request of a tenant's process for a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressRequest {
    /// Number that the answer repeats.
    pub id: u64,
    /// Function whose list of hosts counts.
    pub function: String,
    /// Name or address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// True for TLS, which the broker speaks: the process reads and writes plain text.
    pub tls: bool,
}

/// Answer; the connection, a Unix socket to the broker, comes with it as a descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressResponse {
    /// Number of the request.
    pub id: u64,
    /// Reason for which there is no connection.
    pub failure: Option<EgressFailure>,
}

/// Reason for which there is no connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum EgressFailure {
    /// The function may not reach this host.
    #[error("the function may not reach this host")]
    Denied,
    /// The host's addresses are not in the public internet.
    #[error("the host has no address in the public internet")]
    ProhibitedAddress,
    /// The name has no address.
    #[error("the name has no address")]
    NotFound,
    /// The host does not accept the connection.
    #[error("the host does not accept the connection")]
    Refused,
    /// The host did not answer in time.
    #[error("the host did not answer in time")]
    Timeout,
    /// The tenant has too many connections.
    #[error("too many connections")]
    TooMany,
    /// The host's certificate or its TLS is not accepted.
    #[error("the host's certificate or its TLS is not accepted")]
    Tls,
}
