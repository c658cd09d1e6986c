//! What the host name of a request says: who is meant, and whether the request may come under it at all.

use crate::config::Config;
use std::net::{IpAddr, Ipv6Addr};

/// Longest sandbox id.
const LONGEST_ID: usize = 64;

/// Who is meant by a host name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Named {
    /// The gateway itself.
    Gateway,
    /// A sandbox.
    Sandbox(Label),
    /// It has the form of a sandbox's name, and is wrong in the way told.
    Malformed(&'static str),
    /// Nobody here: somebody's DNS leads to us who should not (DNS rebinding).
    Stranger,
}

/// The left-most label of a sandbox's host name: `<port>-<id>` or `<port>-<id>-<expires>-<signature>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// TCP port in the guest.
    pub port: u16,
    /// Sandbox id.
    pub id: String,
    /// Expiry and signature as they were written, unchecked.
    pub link: Option<(String, String)>,
}

/// Whether this has the form of a sandbox id: 1 to 64 lower-case letters and digits.
#[must_use]
pub fn is_id(text: &str) -> bool {
    (1..=LONGEST_ID).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}

/// A port from 1 to 65535, written without leading zeros.
#[must_use]
pub fn port(text: &str) -> Option<u16> {
    let plain = !text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

/// The host of `host` or `host:port`, lower case, without a trailing dot or the brackets of IPv6; none if it is no host.
#[must_use]
pub fn host_of(authority: &str) -> Option<String> {
    if let Some(rest) = authority.strip_prefix('[') {
        let (inner, after) = rest.split_once(']')?;
        let ip: Ipv6Addr = inner.parse().ok()?;
        return valid_port(after).then(|| ip.to_string());
    }
    let (host, after) = match authority.find(':') {
        Some(at) => authority.split_at(at),
        None => (authority, ""),
    };
    let host = host.strip_suffix('.').unwrap_or(host);
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    let named = !host.is_empty()
        && host.len() <= 253
        && host.bytes().all(legal)
        && host.split('.').all(|label| !label.is_empty());
    (named && valid_port(after)).then(|| host.to_ascii_lowercase())
}

/// Whether what follows a host is nothing or `:port`.
fn valid_port(after: &str) -> bool {
    after.is_empty()
        || after
            .strip_prefix(':')
            .is_some_and(|digits| port(digits).is_some())
}

/// Who is meant by a host as [`host_of`] gives it.
#[must_use]
pub fn named(host: &str, config: &Config) -> Named {
    let is = |name: &String| name.eq_ignore_ascii_case(host);
    if host.parse::<IpAddr>().is_ok()
        || host == "localhost"
        || config.domains.iter().any(is)
        || config.allowed_hosts.iter().any(is)
    {
        return Named::Gateway;
    }
    let under = |domain: &str| {
        host.len() > domain.len() + 1
            && host
                .get(host.len() - domain.len()..)
                .is_some_and(|end| end.eq_ignore_ascii_case(domain))
            && host.as_bytes().get(host.len() - domain.len() - 1) == Some(&b'.')
    };
    if under("localhost") || config.domains.iter().any(|domain| under(domain)) {
        label(host.split('.').next().unwrap_or_default())
    } else {
        Named::Stranger
    }
}

/// Reads a left-most label. One that begins with digits and a dash means a sandbox, any other the gateway.
fn label(text: &str) -> Named {
    let mut parts = text.split('-');
    let first = parts.next().unwrap_or_default();
    let Some(id) = parts.next() else {
        return Named::Gateway;
    };
    if first.is_empty() || !first.bytes().all(|b| b.is_ascii_digit()) {
        return Named::Gateway;
    }
    let Some(port) = port(first) else {
        return Named::Malformed("the port in the host name is not one from 1 to 65535");
    };
    if !is_id(id) {
        return Named::Malformed("the host name has no sandbox id after the port");
    }
    let link = match (parts.next(), parts.next(), parts.next()) {
        (None, ..) => None,
        (Some(expires), Some(signature), None) => Some((expires.to_owned(), signature.to_owned())),
        _ => {
            return Named::Malformed(
                "the host name is neither <port>-<id> nor <port>-<id>-<expires>-<signature>",
            );
        }
    };
    Named::Sandbox(Label {
        port,
        id: id.to_owned(),
        link,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config {
            domains: vec!["jiffy.example".to_owned()],
            allowed_hosts: vec!["front.internal".to_owned()],
            ..Config::default()
        }
    }

    fn sandbox(port: u16, id: &str) -> Named {
        Named::Sandbox(Label {
            port,
            id: id.to_owned(),
            link: None,
        })
    }

    #[test]
    fn host_names_mean_what_they_say() {
        let malformed = |host: &str| {
            assert!(
                matches!(named(host, &config()), Named::Malformed(_)),
                "{host}"
            );
        };
        for (host, expected) in [
            ("127.0.0.1", Named::Gateway),
            ("::1", Named::Gateway),
            ("localhost", Named::Gateway),
            ("api.localhost", Named::Gateway),
            ("3000-abc.localhost", sandbox(3000, "abc")),
            ("jiffy.example", Named::Gateway),
            ("api.jiffy.example", Named::Gateway),
            ("sandbox.jiffy.example", Named::Gateway),
            ("my-app.jiffy.example", Named::Gateway),
            ("front.internal", Named::Gateway),
            ("49983-i1.jiffy.example", sandbox(49983, "i1")),
            ("1-a.eu.jiffy.example", sandbox(1, "a")),
            ("3000-abc.front.internal", Named::Stranger),
            ("3000-abc.evil.example", Named::Stranger),
            ("evil.example", Named::Stranger),
            ("evil-jiffy.example", Named::Stranger),
            ("3000-abcjiffy.example", Named::Stranger),
            ("jiffy.example.evil.test", Named::Stranger),
            ("localhost.evil.test", Named::Stranger),
            ("127.0.0.1.evil.test", Named::Stranger),
        ] {
            assert_eq!(named(host, &config()), expected, "{host}");
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
    fn a_signed_label_keeps_its_parts() {
        assert_eq!(
            named("80-a-t4-zz.localhost", &config()),
            Named::Sandbox(Label {
                port: 80,
                id: "a".to_owned(),
                link: Some(("t4".to_owned(), "zz".to_owned())),
            })
        );
    }

    #[test]
    fn hosts_are_read_strictly() {
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
            assert_eq!(host_of(authority).as_deref(), host, "{authority}");
        }
        assert_eq!(host_of(&"a".repeat(254)), None);
    }

    #[test]
    fn ids_are_lower_case_letters_and_digits() {
        assert!(is_id("a") && is_id("i0123456789abcdefghi") && is_id(&"z".repeat(64)));
        for id in ["", "A", "a-b", "a.b", "a/b", "é", &"z".repeat(65)] {
            assert!(!is_id(id), "{id}");
        }
    }
}
