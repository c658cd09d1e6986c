//! [`AllowList`]: the hosts that a function may reach. The egress broker, a thread of the daemon
//! that opens the outgoing connections of functions, checks each connection against it.

use jiffy_proto::internal::{InternalOrigin, is_api_host};
use std::net::IpAddr;

/// Maximum number of hosts on a function's list.
pub const MAX_ALLOWED_HOSTS: usize = 64;
/// Maximum length of a host name in bytes, as in DNS.
const MAX_NAME_BYTES: usize = 253;
/// Ports of an entry without a port.
const DEFAULT_PORTS: [u16; 2] = [80, 443];
/// Maximum number of characters of an invalid entry in an error.
const MAX_SHOWN_CHARS: usize = 300;

/// Error: the list of hosts is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllowListError {
    /// The entry is not a host.
    #[error(
        "`{0}` is not a valid host: use NAME, *.NAME, ADDRESS or [IPv6], optionally followed by :PORT"
    )]
    Entry(String),
    /// The list has too many entries.
    #[error("a function may have at most {MAX_ALLOWED_HOSTS} allowed hosts")]
    TooMany,
}

/// Host of one entry.
#[derive(Debug, Clone, PartialEq, Eq)]
enum AllowedHost {
    Name(String),
    /// All subdomains of a name. The value starts with a dot.
    Subdomains(String),
    Address(IpAddr),
}

/// Hosts and ports that a function may reach. An empty list allows no host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowList {
    /// Hosts with their ports. `None` allows the default ports.
    hosts: Vec<(AllowedHost, Option<u16>)>,
    /// Origin of the function's connections to the control plane. `None` if the function has no
    /// access.
    origin: Option<InternalOrigin>,
}

impl AllowList {
    /// Parses entries `NAME`, `*.NAME` or an address, each with an optional `:PORT`.
    pub fn parse(entries: &[String]) -> Result<Self, AllowListError> {
        if entries.len() > MAX_ALLOWED_HOSTS {
            return Err(AllowListError::TooMany);
        }
        let parsed = entries.iter().map(|text| {
            // The entry may be long or contain control characters.
            let shown = || {
                text.chars()
                    .take(MAX_SHOWN_CHARS)
                    .flat_map(char::escape_debug)
                    .collect()
            };
            entry(text).ok_or_else(|| AllowListError::Entry(shown()))
        });
        let hosts = parsed.collect::<Result<_, _>>()?;
        Ok(Self {
            hosts,
            origin: None,
        })
    }

    /// Returns this list with the given access to the control plane.
    #[must_use]
    pub fn with_origin(self, origin: Option<InternalOrigin>) -> Self {
        Self { origin, ..self }
    }

    /// Returns this list without hosts.
    #[must_use]
    pub(crate) fn without_hosts(self) -> Self {
        Self {
            hosts: Vec::new(),
            ..self
        }
    }

    /// Returns the origin of the function's connections to the control plane. `None` if the
    /// function has no access.
    pub(crate) fn origin(&self) -> Option<&InternalOrigin> {
        self.origin.as_ref()
    }

    /// Returns whether the function may reach `host`, a name or an address, at `port`. Always false
    /// for the control plane.
    #[must_use]
    pub fn contains(&self, host: &str, port: u16) -> bool {
        // `host.` and `HOST` denote the same host.
        let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        if is_api_host(&name) {
            return false;
        }
        let address: Option<IpAddr> = name.parse().ok();
        self.hosts.iter().any(|(allowed, allowed_port)| {
            let is_port = match allowed_port {
                Some(allowed) => *allowed == port,
                None => DEFAULT_PORTS.contains(&port),
            };
            let is_host = match (allowed, address) {
                (AllowedHost::Address(allowed), Some(address)) => *allowed == address,
                (AllowedHost::Name(allowed), None) => *allowed == name,
                (AllowedHost::Subdomains(suffix), None) => {
                    // The suffix starts with a dot: `*.a.example` allows neither `a.example` nor
                    // `ba.example`.
                    name.len() > suffix.len() && name.ends_with(suffix.as_str())
                }
                // A name and an address never match, even if the name resolves to the address: the
                // broker resolves names only after this check.
                _ => false,
            };
            is_port && is_host
        })
    }

    /// Returns the union of both lists. The origin of `other` takes precedence.
    #[must_use]
    pub(crate) fn union(&self, other: &Self) -> Self {
        Self {
            hosts: [self.hosts.as_slice(), other.hosts.as_slice()].concat(),
            origin: other.origin.as_ref().or(self.origin.as_ref()).cloned(),
        }
    }

    /// Returns whether the list allows nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty() && self.origin.is_none()
    }
}

/// Parses an entry into a host and an optional port.
fn entry(text: &str) -> Option<(AllowedHost, Option<u16>)> {
    // Parse an address first, because the colons of an IPv6 address do not separate a port.
    if let Ok(address) = text.parse() {
        return Some((AllowedHost::Address(address), None));
    }
    let (host, port) = match text.rsplit_once(':') {
        // The last colon is part of an IPv6 address without a port.
        Some(_) if text.ends_with(']') => (text, None),
        Some((host, port)) => (host, Some(port.parse().ok().filter(|port| *port != 0)?)),
        None => (text, None),
    };
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    if let Ok(address) = bare.unwrap_or(host).parse() {
        return Some((AllowedHost::Address(address), port));
    }
    let host = host.to_ascii_lowercase();
    match host.strip_prefix("*.") {
        Some(name) if is_name(name) => Some((AllowedHost::Subdomains(format!(".{name}")), port)),
        None if is_name(&host) => Some((AllowedHost::Name(host), port)),
        _ => None,
    }
}

/// Returns whether `name` is a DNS name whose last label is not a number. Some resolvers treat
/// `127.1` as an address.
pub(crate) fn is_name(name: &str) -> bool {
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        let inside = |b: &u8| b.is_ascii_alphanumeric() || *b == b'-' || *b == b'_';
        (1..=63).contains(&bytes.len()) && bytes.iter().all(inside)
    };
    let last = name.rsplit('.').next().unwrap_or_default();
    let is_number = last.bytes().all(|b| b.is_ascii_digit())
        || last
            .strip_prefix("0x")
            .is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
    name.len() <= MAX_NAME_BYTES && name.split('.').all(is_label) && !is_number
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> Result<AllowList, AllowListError> {
        AllowList::parse(&entries.iter().map(|e| (*e).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn a_list_allows_its_hosts_at_their_ports() {
        let list = list(&[
            "api.example.com",
            "*.cdn.example:8443",
            "[2600::1]:80",
            "[2600::2]",
            "192.0.2.1",
        ])
        .unwrap();
        for (host, port) in [
            ("api.example.com", 443),
            ("API.example.com.", 80),
            ("a.cdn.example", 8443),
            ("a.b.cdn.example", 8443),
            ("2600::1", 80),
            ("2600::2", 443),
            ("192.0.2.1", 443),
        ] {
            assert!(list.contains(host, port), "{host}:{port}");
        }
        // Other hosts, and other ports than the ports of the entry. An entry without a port has the
        // ports 80 and 443.
        for (host, port) in [
            ("api.example.com", 8080),
            ("example.com", 443),
            ("xapi.example.com", 443),
            ("cdn.example", 8443),
            ("a.cdn.example", 443),
            ("2600::1", 443),
            ("192.0.2.2", 443),
            ("", 80),
        ] {
            assert!(!list.contains(host, port), "{host}:{port}");
        }
        assert!(!AllowList::default().contains("api.example.com", 443));
    }

    #[test]
    fn a_list_never_contains_the_control_plane() {
        let list = list(&["api.jiffy.internal", "*.internal", "*.jiffy.internal:3000"]).unwrap();
        assert!(list.contains("other.jiffy.internal", 80));
        for host in [
            "api.jiffy.internal",
            "API.jiffy.internal.",
            "api.jiffy.internal.",
        ] {
            for port in [80, 443, 3000] {
                assert!(!list.contains(host, port), "{host}:{port}");
            }
        }
        assert!(AllowList::default().is_empty() && list.origin().is_none());
        let origin = InternalOrigin::Sandbox {
            key: "k".to_owned(),
        };
        let list = AllowList::default().with_origin(Some(origin.clone()));
        assert!(!list.is_empty() && !list.contains("api.jiffy.internal", 80));
        // During the change from one version to the next, neither loses its access.
        for both in [
            list.union(&AllowList::default()),
            AllowList::default().union(&list),
        ] {
            assert_eq!(both.origin(), Some(&origin));
        }
    }

    #[test]
    fn invalid_hosts_are_rejected() {
        for bad in [
            "",
            "*",
            "*.",
            "a..b",
            "a b",
            "http://a",
            "a/b",
            "a:0",
            "a:x",
            "127.1",
            "0x7f000001",
            "2130706433",
        ] {
            assert!(list(&[bad]).is_err(), "{bad:?}");
        }
        assert_eq!(list(&["a"; 65]), Err(AllowListError::TooMany));
    }
}
