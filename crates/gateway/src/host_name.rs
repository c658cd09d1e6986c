//! Classifies the host name of a request: a name of the gateway, of a sandbox, of a function, or
//! unknown.

use crate::config::GatewayConfig;
use std::net::{IpAddr, Ipv6Addr};

/// Label of a host name that separates the label of a function from the domain: `LABEL.fn.DOMAIN`.
const FUNCTIONS_LABEL: &str = "fn";
/// Maximum length of a sandbox id.
const MAX_ID_BYTES: usize = 64;

/// Meaning of a host name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostTarget {
    /// The gateway.
    Gateway,
    /// A sandbox.
    Sandbox(SandboxLabel),
    /// A function. Contains its unvalidated label.
    Function(String),
    /// Invalid host name of a sandbox. Contains the error.
    Malformed(&'static str),
    /// Name that this server does not serve. A browser may send such a name in a DNS rebinding
    /// attack.
    Foreign,
}

/// First label of a sandbox's host name: `<port>-<id>` or `<port>-<id>-<expires>-<signature>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxLabel {
    /// TCP port in the guest.
    pub port: u16,
    /// Sandbox id.
    pub id: String,
    /// Expiry and signature, unvalidated.
    pub link: Option<(String, String)>,
}

/// Returns true if `text` has the form of a sandbox id: 1 to 64 lower-case letters and digits.
#[must_use]
pub fn is_id(text: &str) -> bool {
    (1..=MAX_ID_BYTES).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}

/// Parses a port from 1 to 65535 without leading zeros.
#[must_use]
pub fn parse_port(text: &str) -> Option<u16> {
    // `parse` alone would accept a sign and leading zeros.
    let plain = !text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

/// Parses `host` or `host:port`. Returns the host in lower case, without a trailing dot or the
/// brackets of IPv6. `None` if it is invalid.
#[must_use]
pub fn parse_host(authority: &str) -> Option<String> {
    // An IPv6 address is in brackets, because it contains colons.
    if let Some(rest) = authority.strip_prefix('[') {
        let (inner, after) = rest.split_once(']')?;
        let ip: Ipv6Addr = inner.parse().ok()?;
        return valid_port(after).then(|| ip.to_string());
    }
    let (host, after) = match authority.find(':') {
        Some(at) => authority.split_at(at),
        None => (authority, ""),
    };
    // A trailing dot marks a complete name and does not change its meaning.
    let host = host.strip_suffix('.').unwrap_or(host);
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    let named = !host.is_empty()
        && host.len() <= 253
        && host.bytes().all(legal)
        && host.split('.').all(|label| !label.is_empty());
    (named && valid_port(after)).then(|| host.to_ascii_lowercase())
}

/// Returns true if the text after a host is empty or `:port`.
fn valid_port(after: &str) -> bool {
    after.is_empty()
        || after
            .strip_prefix(':')
            .is_some_and(|digits| parse_port(digits).is_some())
}

/// Returns the meaning of a host in the form returned by [`parse_host`].
#[must_use]
pub fn classify(host: &str, config: &GatewayConfig) -> HostTarget {
    let is = |name: &String| name.eq_ignore_ascii_case(host);
    if host.parse::<IpAddr>().is_ok()
        || host == "localhost"
        || config.domains.iter().any(is)
        || config.allowed_hosts.iter().any(is)
    {
        return HostTarget::Gateway;
    }
    // One domain may be below another, so several may match.
    let domains = config.domains.iter().map(String::as_str);
    let mut below = domains.chain(["localhost"]).filter_map(|d| below(host, d));
    let Some(labels) = below.next() else {
        return HostTarget::Foreign;
    };
    // Names of functions take precedence, because their labels may look like labels of sandboxes.
    if let Some(function) = std::iter::once(labels)
        .chain(below)
        .find_map(function_label)
    {
        return HostTarget::Function(function.to_owned());
    }
    parse_label(host.split('.').next().unwrap_or_default())
}

/// Returns the labels of a host before its domain.
fn below<'a>(host: &'a str, domain: &str) -> Option<&'a str> {
    let at = host.len().checked_sub(domain.len())?;
    // `get` fails inside a character; valid hosts are ASCII.
    let end = host.get(at..)?;
    let labels = host.get(..at)?.strip_suffix('.')?;
    (end.eq_ignore_ascii_case(domain) && !labels.is_empty()).then_some(labels)
}

/// Returns the label of a function: `LABEL.fn` before the domain.
fn function_label(labels: &str) -> Option<&str> {
    let (label, rest) = labels.split_once('.')?;
    (rest == FUNCTIONS_LABEL).then_some(label)
}

/// Parses the first label. A label that begins with digits and a dash refers to a sandbox. Any
/// other label refers to the gateway.
fn parse_label(text: &str) -> HostTarget {
    let mut parts = text.split('-');
    let first = parts.next().unwrap_or_default();
    let Some(id) = parts.next() else {
        return HostTarget::Gateway;
    };
    if first.is_empty() || !first.bytes().all(|b| b.is_ascii_digit()) {
        return HostTarget::Gateway;
    }
    let Some(port) = parse_port(first) else {
        return HostTarget::Malformed("the port in the host name is not a number from 1 to 65535");
    };
    if !is_id(id) {
        return HostTarget::Malformed("the host name has no sandbox id after the port");
    }
    let link = match (parts.next(), parts.next(), parts.next()) {
        (None, ..) => None,
        (Some(expires), Some(signature), None) => Some((expires.to_owned(), signature.to_owned())),
        _ => {
            return HostTarget::Malformed(
                "the host name is neither <port>-<id> nor <port>-<id>-<expires>-<signature>",
            );
        }
    };
    HostTarget::Sandbox(SandboxLabel {
        port,
        id: id.to_owned(),
        link,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> GatewayConfig {
        GatewayConfig {
            domains: vec!["jiffy.example".to_owned()],
            allowed_hosts: vec!["front.internal".to_owned()],
            ..GatewayConfig::default()
        }
    }

    fn sandbox(port: u16, id: &str) -> HostTarget {
        HostTarget::Sandbox(SandboxLabel {
            port,
            id: id.to_owned(),
            link: None,
        })
    }

    fn function(label: &str) -> HostTarget {
        HostTarget::Function(label.to_owned())
    }

    #[test]
    fn host_names_are_classified() {
        let malformed = |host: &str| {
            assert!(
                matches!(classify(host, &config()), HostTarget::Malformed(_)),
                "{host}"
            );
        };
        for (host, expected) in [
            ("127.0.0.1", HostTarget::Gateway),
            ("::1", HostTarget::Gateway),
            ("localhost", HostTarget::Gateway),
            ("api.localhost", HostTarget::Gateway),
            ("3000-abc.localhost", sandbox(3000, "abc")),
            ("jiffy.example", HostTarget::Gateway),
            ("api.jiffy.example", HostTarget::Gateway),
            ("sandbox.jiffy.example", HostTarget::Gateway),
            ("my-app.jiffy.example", HostTarget::Gateway),
            ("front.internal", HostTarget::Gateway),
            ("49983-i1.jiffy.example", sandbox(49983, "i1")),
            ("1-a.eu.jiffy.example", sandbox(1, "a")),
            ("hello--0a.fn.jiffy.example", function("hello--0a")),
            ("80-a.fn.localhost", function("80-a")),
            ("fn.jiffy.example", HostTarget::Gateway),
            ("a.b.fn.jiffy.example", HostTarget::Gateway),
            ("a.fn.front.internal", HostTarget::Foreign),
            ("a.fnjiffy.example", HostTarget::Foreign),
            ("3000-abc.front.internal", HostTarget::Foreign),
            ("3000-abc.evil.example", HostTarget::Foreign),
            ("evil.example", HostTarget::Foreign),
            ("evil-jiffy.example", HostTarget::Foreign),
            ("3000-abcjiffy.example", HostTarget::Foreign),
            ("jiffy.example.evil.test", HostTarget::Foreign),
            ("localhost.evil.test", HostTarget::Foreign),
            ("127.0.0.1.evil.test", HostTarget::Foreign),
        ] {
            assert_eq!(classify(host, &config()), expected, "{host}");
        }
        malformed("0-abc.jiffy.example");
        malformed("65536-abc.jiffy.example");
        malformed("080-abc.jiffy.example");
        malformed("80-.jiffy.example");
        malformed("80-a_b.jiffy.example");
        malformed("80-a-b.jiffy.example");
        malformed("80-a-b-c-d.jiffy.example");
    }

    #[test]
    fn a_signed_label_is_split_into_its_parts() {
        assert_eq!(
            classify("80-a-t4-zz.localhost", &config()),
            HostTarget::Sandbox(SandboxLabel {
                port: 80,
                id: "a".to_owned(),
                link: Some(("t4".to_owned(), "zz".to_owned())),
            })
        );
    }

    #[test]
    fn hosts_are_parsed_strictly() {
        for (authority, host) in [
            ("LocalHost:3000", Some("localhost")),
            ("a.b.", Some("a.b")),
            ("[::1]:80", Some("::1")),
            ("[0:0::1]", Some("::1")),
            ("10.0.0.1:1", Some("10.0.0.1")),
            ("", None),
            (".", None),
            ("a..b", None),
            ("a b", None),
            ("a@b", None),
            ("a/b", None),
            ("a:b", None),
            ("a:", None),
            ("a:0", None),
            ("a:99999", None),
            ("a:80:80", None),
            ("[::1", None),
            ("[x]", None),
            ("[::1]x", None),
            ("a\u{e9}.b", None),
        ] {
            assert_eq!(parse_host(authority).as_deref(), host, "{authority}");
        }
        assert_eq!(parse_host(&"a".repeat(254)), None);
    }

    #[test]
    fn ids_are_lower_case_letters_and_digits() {
        assert!(is_id("a") && is_id("i0123456789abcdefghi") && is_id(&"z".repeat(64)));
        for id in ["", "A", "a-b", "a.b", "a/b", "é", &"z".repeat(65)] {
            assert!(!is_id(id), "{id}");
        }
    }
}
