//! Address and credentials of an etcd cluster.
//!
//! A fleet stores its *records* (heads of sandboxes, members, tables) in the store, or in etcd. A
//! member in this module is a server of the etcd cluster.

use super::super::RecordError;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Maximum number of members of a cluster.
const MAX_ENDPOINTS: usize = 16;

/// URL of a cluster: `etcd://HOST:PORT,HOST:PORT[/PREFIX]`, or `etcd+http://` without TLS for
/// loopback addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdUrl {
    is_tls: bool,
    endpoints: Vec<String>,
    prefix: String,
}

impl EtcdUrl {
    /// Returns whether the connection uses TLS.
    pub fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// Returns the URLs of the members.
    pub fn endpoints(&self) -> impl Iterator<Item = String> + '_ {
        let scheme = if self.is_tls { "https" } else { "http" };
        self.endpoints
            .iter()
            .map(move |endpoint| format!("{scheme}://{endpoint}"))
    }

    /// Returns the prefix of all keys, without a slash at its end. May be empty.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

impl fmt::Display for EtcdUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "etcd" } else { "etcd+http" };
        write!(f, "{scheme}://{}/{}", self.endpoints.join(","), self.prefix)
    }
}

impl FromStr for EtcdUrl {
    type Err = RecordError;

    fn from_str(text: &str) -> Result<Self, RecordError> {
        let invalid = |reason: &str| RecordError::Url {
            url: text.chars().take(300).collect(),
            reason: reason.to_owned(),
        };
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| invalid("it has no scheme"))?;
        let is_tls = match scheme {
            "etcd" => true,
            "etcd+http" => false,
            _ => return Err(invalid("the scheme is neither etcd nor etcd+http")),
        };
        let (members, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_matches('/');
        if !prefix.is_empty() {
            prefix
                .parse::<super::super::RecordKey>()
                .map_err(|_| invalid("the prefix has other characters than a-z, 0-9, '-', '_'"))?;
        }
        let endpoints: Vec<String> = members.split(',').map(str::to_owned).collect();
        if endpoints.len() > MAX_ENDPOINTS {
            return Err(invalid("it has too many members"));
        }
        for endpoint in &endpoints {
            let (host, port) = endpoint
                .rsplit_once(':')
                .ok_or_else(|| invalid("a member has no port"))?;
            let is_name = |c: char| c.is_ascii_alphanumeric() || ".-_[]:".contains(c);
            if host.is_empty() || !host.chars().all(is_name) || port.parse::<u16>().is_err() {
                return Err(invalid("a member is not HOST:PORT"));
            }
            if !is_tls && !is_loopback(host) {
                return Err(invalid(
                    "connections without TLS are limited to loopback addresses",
                ));
            }
        }
        Ok(Self {
            is_tls,
            endpoints,
            prefix: prefix.to_owned(),
        })
    }
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || address.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Cluster with the credentials of a client.
#[derive(Debug, Clone)]
pub struct EtcdSettings {
    /// Cluster.
    pub url: EtcdUrl,
    /// File with the certificates of authorities that sign the members' certificates.
    pub ca: Option<PathBuf>,
    /// Files with the client's certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Name of an etcd user, and file with the password of this user. `None` if authentication is
    /// disabled in etcd.
    pub user: Option<(String, PathBuf)>,
    /// Maximum duration of an attempt. Defaults to 2 s.
    pub attempt: Duration,
    /// Maximum duration of a call. Defaults to 6 s.
    pub call: Duration,
}

impl EtcdSettings {
    /// Returns settings without credentials.
    pub fn new(url: EtcdUrl) -> Self {
        Self {
            url,
            ca: None,
            identity: None,
            user: None,
            attempt: super::super::ATTEMPT_TIMEOUT,
            call: super::super::CALL_TIMEOUT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_clusters_are_validated() {
        let url: EtcdUrl = "etcd://a:2379,[fd00::1]:2379/prod/x/".parse().unwrap();
        let endpoints: Vec<String> = url.endpoints().collect();
        assert_eq!(endpoints, ["https://a:2379", "https://[fd00::1]:2379"]);
        assert_eq!((url.prefix(), url.is_tls()), ("prod/x", true));
        assert_eq!(url.to_string(), "etcd://a:2379,[fd00::1]:2379/prod/x");
        let url: EtcdUrl = "etcd+http://127.0.0.1:1,localhost:2,[::1]:3"
            .parse()
            .unwrap();
        assert!(!url.is_tls());
        for (text, reason) in [
            ("a:2379", "no scheme"),
            ("http://a:2379", "neither"),
            ("etcd://", "no port"),
            ("etcd://a", "no port"),
            ("etcd://a:x", "HOST:PORT"),
            ("etcd://a:2379,", "no port"),
            ("etcd://a@b:2379", "HOST:PORT"),
            ("etcd://a:2379/A", "prefix"),
            ("etcd+http://10.0.0.1:2379", "loopback"),
        ] {
            let error = text.parse::<EtcdUrl>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
