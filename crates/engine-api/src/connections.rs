//! Connection records of a sandbox: the connections that its guest opened or tried to open. The
//! network records them for engines with a network slot.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. *Header rules* ([`HeaderRules`](crate::HeaderRules)) name hosts;
//! the host of the sandbox adds headers, for example with secrets, to HTTP requests to them.

use std::fmt;
use std::net::IpAddr;

/// Maximum number of connection records stored per sandbox.
pub const MAX_CONNECTIONS: usize = 1000;

/// Protocol of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConnectionProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP.
    Icmp,
    /// DNS query to the sandbox's name server.
    Dns,
    /// HTTP request to a host that the header rules name.
    Http,
    /// Another protocol, with its number in the IP header.
    Other(u8),
}

impl ConnectionProtocol {
    /// Returns the protocol with this number in the IP header.
    pub fn of(number: u8) -> Self {
        match number {
            // ICMP and ICMPv6.
            1 | 58 => Self::Icmp,
            6 => Self::Tcp,
            17 => Self::Udp,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for ConnectionProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp => f.write_str("tcp"),
            Self::Udp => f.write_str("udp"),
            Self::Icmp => f.write_str("icmp"),
            Self::Dns => f.write_str("dns"),
            Self::Http => f.write_str("http"),
            Self::Other(number) => write!(f, "ip-{number}"),
        }
    }
}

/// Reason why a connection was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalReason {
    /// Egress rules of the sandbox or of the host.
    Rules,
    /// The maximum number of connections is reached.
    Limit,
    /// The address belongs to the host.
    Host,
    /// The certificate authority that the sandbox trusts for header rules cannot be used on this
    /// host.
    Authority,
    /// The egress proxy of the sandbox did not connect.
    Proxy,
}

impl RefusalReason {
    /// Returns the name used in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rules => "rules",
            Self::Limit => "limit",
            Self::Host => "host",
            Self::Authority => "authority",
            Self::Proxy => "proxy",
        }
    }
}

/// Request to a host that the header rules name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderUse {
    /// Method, at most 16 characters.
    pub method: String,
    /// Status of the response.
    pub status: u16,
    /// Name of the rule that applied.
    pub rule: Option<String>,
    /// Names of the secrets that the request contained.
    pub secrets: Vec<String>,
    /// Names of the identity tokens that the request contained.
    pub tokens: Vec<String>,
}

/// Record of a connection, a DNS query or a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionRecord {
    /// Time of the start, in milliseconds since 1970. If `times` is above 1, the start of the
    /// latest of these connections.
    pub at_ms: u64,
    /// Protocol.
    pub protocol: ConnectionProtocol,
    /// Destination address. `None` for a DNS query.
    pub address: Option<IpAddr>,
    /// Destination port. `None` if the protocol has no ports.
    pub port: Option<u16>,
    /// Queried name, or the name sniffed from the connection, in printable ASCII of at most 253
    /// bytes.
    pub host: Option<String>,
    /// Queried record type.
    pub question: Option<String>,
    /// Bytes sent and received by the guest so far. `None` if unknown or zero.
    pub bytes: Option<(u64, u64)>,
    /// Reason for the rejection. `None` if the connection was allowed.
    pub refused: Option<RefusalReason>,
    /// Request to a host that the header rules name. `None` for other records.
    pub header_use: Option<HeaderUse>,
    /// Number of connections that this record represents: equal connections differ only in their
    /// times.
    pub times: u64,
}

/// Connection records of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConnectionRecords {
    /// Start of the records, in milliseconds since 1970. `None` if the sandbox has no network.
    pub since_ms: Option<u64>,
    /// Newest records, oldest first.
    pub list: Vec<ConnectionRecord>,
    /// Number of known connections since `since_ms` that are not in `list`.
    pub missing: u64,
    /// Data that the host's kernel does not provide: `connections`, `bytes`, `refusals`.
    pub unavailable: Vec<&'static str>,
}

impl ConnectionRecords {
    /// Adds later records and drops the oldest records above the maximum.
    pub fn extend(&mut self, later: Self) {
        // The records still begin at the earlier time.
        self.since_ms = self.since_ms.or(later.since_ms);
        self.list.extend(later.list);
        // Later records may contain older connections, for example long ones that have ended.
        self.list.sort_by_key(|connection| connection.at_ms);
        self.missing = self.missing.saturating_add(later.missing);
        self.keep_last(MAX_CONNECTIONS);
        // The latest reading describes the present abilities of the kernel.
        self.unavailable = later.unavailable;
    }

    /// Drops all but the newest `count` records. Counts the dropped connections as missing.
    pub fn keep_last(&mut self, count: usize) {
        let excess = self.list.len().saturating_sub(count);
        // The oldest records are at the start. A record may represent several connections.
        let times = self.list.drain(..excess).map(|c| c.times);
        self.missing = times.fold(self.missing, u64::saturating_add);
    }
}

/// Connection log of one guest. It remains readable after the guest has ended.
pub trait ConnectionLog: Send + Sync {
    /// Reads all records. This queries the kernel and blocks.
    fn read(&self) -> ConnectionRecords;
}
