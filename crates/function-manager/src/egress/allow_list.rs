//! Hosts that a function may reach.

use jiffy_proto::internal::{InternalOrigin, is_api_host};
use std::net::IpAddr;

/// Hosts that one function may have on its list.
pub const MAX_ALLOWED_HOSTS: usize = 64;
/// Longest name of a host, as in DNS.
const MAX_NAME_BYTES: usize = 253;
/// Ports of an entry without one.
const DEFAULT_PORTS: [u16; 2] = [80, 443];

/// List that cannot be one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllowListError {
    /// Not a host.
    #[error(
        "`{0}` is no host to allow: write NAME, *.NAME, ADDRESS or [IPv6], and :PORT behind it"
    )]
    Entry(String),
    /// Too many.
    #[error("a function may have {MAX_ALLOWED_HOSTS} allowed hosts")]
    TooMany,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum AllowedHost {
    Name(String),
    /// Names below this one, which begins with a dot.
    Below(String),
    Address(IpAddr),
}

/// Hosts that a function may reach, with their ports. An empty list allows nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowList {
    hosts: Vec<(AllowedHost, Option<u16>)>,
    /// Origin of its connections to the control plane; none: it does not reach that.
    origin: Option<InternalOrigin>,
}

impl AllowList {
    /// Reads entries `NAME`, `*.NAME` or an address, each with an optional `:PORT`.
    pub fn parse(entries: &[String]) -> Result<Self, AllowListError> {
        if entries.len() > MAX_ALLOWED_HOSTS {
            return Err(AllowListError::TooMany);
        }
        let parsed = entries.iter().map(|text| {
            let shown = || {
                text.chars()
                    .take(300)
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

    /// The same list of a function that reaches the control plane, or does not.
    #[must_use]
    pub fn with_origin(self, origin: Option<InternalOrigin>) -> Self {
        Self { origin, ..self }
    }

    /// The same list without hosts.
    #[must_use]
    pub(crate) fn without_hosts(self) -> Self {
        Self {
            hosts: Vec::new(),
            ..self
        }
    }

    /// Origin of the function's connections to the control plane; none: it does not reach that.
    pub(crate) fn origin(&self) -> Option<&InternalOrigin> {
        self.origin.as_ref()
    }

    /// Returns true if `host`, a name or an address, may be reached at `port`. The control plane is
    /// no host, whatever a list says.
    #[must_use]
    pub fn contains(&self, host: &str, port: u16) -> bool {
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
                (AllowedHost::Below(suffix), None) => {
                    name.len() > suffix.len() && name.ends_with(suffix.as_str())
                }
                _ => false,
            };
            is_port && is_host
        })
    }

    /// Both lists together.
    #[must_use]
    pub(crate) fn and(&self, other: &Self) -> Self {
        Self {
            hosts: [self.hosts.as_slice(), other.hosts.as_slice()].concat(),
            origin: other.origin.as_ref().or(self.origin.as_ref()).cloned(),
        }
    }

    /// Returns true if nothing may be reached.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty() && self.origin.is_none()
    }
}

fn entry(text: &str) -> Option<(AllowedHost, Option<u16>)> {
    if let Ok(address) = text.parse() {
        return Some((AllowedHost::Address(address), None));
    }
    let (host, port) = match text.rsplit_once(':') {
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
        Some(name) if is_name(name) => Some((AllowedHost::Below(format!(".{name}")), port)),
        None if is_name(&host) => Some((AllowedHost::Name(host), port)),
        _ => None,
    }
}

/// Returns true for a name of DNS whose last label is no number: `127.1` would be an address to
/// some resolvers.
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
    fn the_control_plane_is_no_host_of_a_list() {
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
        // Neither the former version nor the next one is refused meanwhile.
        for both in [
            list.and(&AllowList::default()),
            AllowList::default().and(&list),
        ] {
            assert_eq!(both.origin(), Some(&origin));
        }
    }

    #[test]
    fn what_is_no_host_is_refused() {
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
