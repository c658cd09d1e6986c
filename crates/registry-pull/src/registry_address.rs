//! [`RegistryAddress`]: the address of a registry that the host's owner allows.

use std::fmt;
use std::str::FromStr;

/// Address of a registry as `host` or `host:port`. Without a port, it means the ports of HTTPS
/// (443) and HTTP (80).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryAddress {
    host: String,
    port: Option<u16>,
}

impl RegistryAddress {
    /// Returns true if a connection to this host and port goes to this registry.
    pub fn is(&self, host: &str, port: u16) -> bool {
        let same_port = match self.port {
            Some(own) => own == port,
            None => [80, 443].contains(&port),
        };
        // `host` may be an IPv6 address in brackets.
        same_port
            && self
                .host
                .eq_ignore_ascii_case(host.trim_matches(['[', ']']))
    }
}

impl FromStr for RegistryAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("`{text}` is not HOST or HOST:PORT, as in localhost:5000");
        let (host, port) = match text.rsplit_once(':') {
            // Colons of IPv6 addresses are in brackets.
            Some((host, port)) if !port.contains(']') => {
                (host, Some(port.parse().map_err(|_| bad())?))
            }
            _ => (text, None),
        };
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let good = match bare {
            Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
            None => !host.is_empty() && host.chars().all(plain),
        };
        if good {
            Ok(Self {
                host: bare.unwrap_or(host).to_ascii_lowercase(),
                port,
            })
        } else {
            Err(bad())
        }
    }
}

impl fmt::Display for RegistryAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = &self.host;
        match (host.contains(':'), self.port) {
            (true, Some(port)) => write!(f, "[{host}]:{port}"),
            (true, None) => write!(f, "[{host}]"),
            (false, Some(port)) => write!(f, "{host}:{port}"),
            (false, None) => f.write_str(host),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registry_address_matches_its_host_and_port_only() {
        let named: RegistryAddress = "Localhost:5000".parse().unwrap();
        assert!(named.is("localhost", 5000) && named.is("LOCALHOST", 5000));
        assert!(!named.is("localhost", 5001) && !named.is("127.0.0.1", 5000));
        let usual: RegistryAddress = "r.example".parse().unwrap();
        assert!(usual.is("r.example", 443) && usual.is("r.example", 80));
        assert!(!usual.is("r.example", 5000));
        let six: RegistryAddress = "[fd00::1]:5000".parse().unwrap();
        assert!(six.is("fd00::1", 5000) && six.is("[fd00::1]", 5000));
        assert_eq!(six.to_string(), "[fd00::1]:5000");
        for bad in [
            "",
            ":5000",
            "a b",
            "a/b",
            "a:x",
            "a:70000",
            "[::1",
            "https://a",
        ] {
            assert!(bad.parse::<RegistryAddress>().is_err(), "{bad}");
        }
    }
}
