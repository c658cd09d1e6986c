//! What a sandbox reached, or tried to.

use std::fmt;
use std::net::IpAddr;

/// Most lines that are kept of one sandbox.
pub const MAX_CONNECTIONS: usize = 1000;

/// What is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP.
    Icmp,
    /// A question to the sandbox's own name server.
    Dns,
    /// Another one, by its number in the IP header.
    Other(u8),
}

impl Protocol {
    /// By its number in the IP header.
    pub fn of(number: u8) -> Self {
        match number {
            // In IPv4, and in IPv6.
            1 | 58 => Self::Icmp,
            6 => Self::Tcp,
            17 => Self::Udp,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp => f.write_str("tcp"),
            Self::Udp => f.write_str("udp"),
            Self::Icmp => f.write_str("icmp"),
            Self::Dns => f.write_str("dns"),
            Self::Other(number) => write!(f, "ip-{number}"),
        }
    }
}

/// Why something did not leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The sandbox's rules, or what no sandbox may reach.
    Rules,
    /// It has as many connections as a sandbox may have.
    Limit,
    /// It is an address of the host itself.
    Host,
}

impl Refusal {
    /// In one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rules => "rules",
            Self::Limit => "limit",
            Self::Host => "host",
        }
    }
}

/// A connection, or a question about a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// When it began, in milliseconds since 1970; of several alike, the last.
    pub at_ms: u64,
    /// What is spoken.
    pub protocol: Protocol,
    /// Where it leads; none: a question.
    pub address: Option<IpAddr>,
    /// Port there, if the protocol has ports.
    pub port: Option<u16>,
    /// The name that is asked for, or that the connection itself said, in printable ASCII of at most 253 bytes.
    pub host: Option<String>,
    /// Type of the record that is asked for.
    pub question: Option<String>,
    /// What the guest sent so far, and what it got; none: not known, or nothing passed.
    pub bytes: Option<(u64, u64)>,
    /// Why it did not pass; none: it passed.
    pub refused: Option<Refusal>,
    /// How many there were that differ in nothing but their moment; 1 or more.
    pub times: u64,
}

/// What a sandbox reached, or tried to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Connections {
    /// Since when there is a record, in milliseconds since 1970; none: there is none, since it has no network.
    pub since_ms: Option<u64>,
    /// The newest, oldest first.
    pub list: Vec<Connection>,
    /// How many more there were since then, as far as is known.
    pub missing: u64,
    /// What the kernel of this host does not tell: `connections`, `bytes`, `refusals`.
    pub untold: Vec<&'static str>,
}

impl Connections {
    /// Adds what came later. Of all, the newest stay.
    pub fn extend(&mut self, later: Self) {
        self.since_ms = self.since_ms.or(later.since_ms);
        self.list.extend(later.list);
        self.list.sort_by_key(|connection| connection.at_ms);
        self.missing = self.missing.saturating_add(later.missing);
        self.keep_last(MAX_CONNECTIONS);
        self.untold = later.untold;
    }

    /// Leaves the newest.
    pub fn keep_last(&mut self, count: usize) {
        let gone = self.list.len().saturating_sub(count);
        let times = self.list.drain(..gone).map(|c| c.times);
        self.missing = times.fold(self.missing, u64::saturating_add);
    }
}

/// Where the connections of one guest are recorded; it can be read when the guest is gone.
pub trait ConnectionLog: Send + Sync {
    /// All that is known now. Asks the kernel, and waits for it.
    fn read(&self) -> Connections;
}
