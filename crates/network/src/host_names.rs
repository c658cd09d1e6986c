//! Patterns of host names that the egress rules of a sandbox permit, with the ports to which they
//! apply.

use std::collections::BTreeSet;

/// Ports of connections whose name the daemon reads from the connection. A name without a port
/// applies to these ports.
pub(crate) const WEB_PORTS: [u16; 2] = [80, 443];

/// Host names and wildcards (`*.domain`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct HostNames(Vec<HostName>);

/// Name or wildcard with its port.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HostName {
    /// Name or wildcard, in lower case.
    pattern: String,
    /// `None` for [`WEB_PORTS`].
    port: Option<u16>,
}

impl HostName {
    /// Returns whether `name` is this name, or matches a pattern such as `*.example.com`.
    fn matches(&self, name: &str) -> bool {
        match self.pattern.strip_prefix('*') {
            // The suffix includes the dot, so that "evilexample.com" does not match
            // "*.example.com".
            Some(domain) => name.len() > domain.len() && name.ends_with(domain),
            None => self.pattern == name,
        }
    }

    /// Returns whether the name applies to `port`.
    fn has_port(&self, port: u16) -> bool {
        match self.port {
            Some(own) => own == port,
            None => WEB_PORTS.contains(&port),
        }
    }
}

/// Normalizes a name: lower case, without a trailing dot.
pub(crate) fn normalize(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

/// Splits `name:port`. The port is `None` if `text` has none. Returns `None` for an invalid port.
pub(crate) fn split_port(text: &str) -> Option<(&str, Option<u16>)> {
    let Some((name, port)) = text.split_once(':') else {
        return Some((text, None));
    };
    // Stricter than `parse`, which accepts a sign.
    let is_number = port.bytes().all(|b| b.is_ascii_digit());
    let port = port.parse().ok().filter(|port| is_number && *port > 0)?;
    Some((name, Some(port)))
}

/// Returns true if `name` is a host name that has the same meaning to every resolver: without
/// special characters, and not an address in any form (`127.1`, `0x7f.1`).
pub(crate) fn is_unambiguous(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or_default();
    is_labels(name) && !last.starts_with(|first: char| first.is_ascii_digit())
}

/// Returns true if `text` consists of the labels of a host name.
fn is_labels(text: &str) -> bool {
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    text.len() <= 253
        && text
            .split('.')
            .all(|label| (1..=63).contains(&label.len()) && label.bytes().all(good))
}

impl HostNames {
    /// Adds a name or wildcard, optionally with a port. Returns false for invalid text, such as an
    /// address.
    pub fn add(&mut self, text: &str) -> bool {
        let Some((name, port)) = split_port(text) else {
            return false;
        };
        let pattern = normalize(name);
        let labels = pattern.strip_prefix("*.").unwrap_or(&pattern);
        let is_name = is_labels(labels) && !labels.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        if is_name {
            self.0.push(HostName { pattern, port });
        }
        is_name
    }

    /// Returns true if there are no names.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if `name` matches a name or wildcard, for any port.
    pub fn contains(&self, name: &str) -> bool {
        let name = normalize(name);
        self.0.iter().any(|own| own.matches(&name))
    }

    /// Returns true if `name` matches a name or wildcard that applies to `port`.
    pub fn contains_at(&self, name: &str, port: u16) -> bool {
        let name = normalize(name);
        let mut at_port = self.0.iter().filter(|own| own.has_port(port));
        at_port.any(|own| own.matches(&name))
    }

    /// Returns true if `name` matches a name or wildcard for a port other than [`WEB_PORTS`].
    pub fn contains_beside_web(&self, name: &str) -> bool {
        let name = normalize(name);
        let is_web = |own: &&HostName| own.port.is_none_or(|port| WEB_PORTS.contains(&port));
        self.0.iter().any(|own| !is_web(&own) && own.matches(&name))
    }

    /// Returns true if a name applies to one of [`WEB_PORTS`].
    pub fn has_web_ports(&self) -> bool {
        let mut of_names = self
            .0
            .iter()
            .flat_map(|own| WEB_PORTS.map(|port| own.has_port(port)));
        of_names.any(|has_port| has_port)
    }

    /// Returns the ports other than [`WEB_PORTS`] to which names apply, in ascending order.
    pub fn other_ports(&self) -> BTreeSet<u16> {
        let ports = self.0.iter().filter_map(|own| own.port);
        ports.filter(|port| !WEB_PORTS.contains(port)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_itself_and_a_wildcard_everything_below() {
        let mut names = HostNames::default();
        assert!(names.add("Example.com") && names.add("*.pypi.org."));
        for yes in [
            "example.com",
            "EXAMPLE.com.",
            "files.pypi.org",
            "a.b.pypi.org",
        ] {
            assert!(names.contains(yes) && names.contains_at(yes, 443), "{yes}");
            assert!(!names.contains_at(yes, 22), "{yes}");
        }
        for no in [
            "www.example.com",
            "pypi.org",
            "evilpypi.org",
            ".pypi.org",
            "",
            "com",
        ] {
            assert!(!names.contains(no), "{no}");
        }
        for bad in ["", "*", "*.", "a..b", "1.2.3.4", "a b", "*.*.a"] {
            assert!(!names.add(bad), "{bad}");
        }
    }

    #[test]
    fn a_name_with_a_port_applies_to_that_port_only() {
        let mut names = HostNames::default();
        assert!(names.add("Git.example:22") && names.add("*.db.example:5432"));
        assert!(!names.has_web_ports());
        assert!(names.add("web.example:443") && names.has_web_ports());
        assert_eq!(names.other_ports(), BTreeSet::from([22, 5432]));
        assert!(names.contains_at("git.example.", 22) && names.contains_at("a.DB.example", 5432));
        assert!(names.contains_at("web.example", 443));
        for (name, port) in [
            ("git.example", 443),
            ("git.example", 5432),
            ("a.db.example", 22),
            ("web.example", 80),
        ] {
            assert!(!names.contains_at(name, port), "{name}:{port}");
        }
        assert!(names.contains_beside_web("git.example") && names.contains("web.example"));
        assert!(!names.contains_beside_web("web.example"));
        for bad in [
            "a:",
            "a:0",
            "a:65536",
            "a:+22",
            "a:22:22",
            ":22",
            "1.2.3.4:22",
            "a:*",
            "[::1]:22",
        ] {
            assert!(!names.add(bad), "{bad}");
        }
    }

    #[test]
    fn names_for_other_resolvers_have_one_meaning() {
        for good in ["a.example", "a-b_c.example", "localhost", "1.example"] {
            assert!(is_unambiguous(good), "{good}");
        }
        for bad in [
            "",
            "a.",
            "a..b",
            "127.1",
            "1.2.3.4",
            "0x7f.0x1",
            "2130706433",
            "a.b.0x7f",
            "a b",
            "a\0.example",
            "a@b",
            "[::1]",
            "a/b",
            "é.example",
        ] {
            assert!(!is_unambiguous(bad), "{bad}");
        }
    }
}
