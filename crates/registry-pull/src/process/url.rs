//! URLs of requests to registries, and of redirects. They come from registries and are untrusted.

use crate::error::PullFault;
use hyper::Uri;

/// `http` or `https` URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RequestUrl {
    pub origin: UrlOrigin,
    /// Path and query.
    pub target: String,
}

/// Scheme, host and port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct UrlOrigin {
    pub tls: bool,
    pub host: String,
    pub port: u16,
}

impl UrlOrigin {
    /// Returns `host` or `host:port`.
    pub fn authority(&self) -> String {
        match (self.tls, self.port) {
            // Default ports are omitted, as in a `Host` header.
            (true, 443) | (false, 80) => self.host.clone(),
            (_, port) => format!("{}:{port}", self.host),
        }
    }

    /// Returns true if this origin is one of `hosts` (`host` or `host:port`).
    pub fn is_among(&self, hosts: &[String]) -> bool {
        let full = format!("{}:{}", self.host, self.port);
        let short = self.authority();
        let same = |h: &String| h.eq_ignore_ascii_case(&full) || h.eq_ignore_ascii_case(&short);
        hosts.iter().any(same)
    }
}

impl RequestUrl {
    /// Parses an absolute URL with the scheme `http` or `https`.
    pub fn parse(text: &str) -> Result<Self, PullFault> {
        let bad = || PullFault::Refused(format!("`{}` is not a URL", PullFault::text(text)));
        // Fragments are not sent.
        let text = text.split('#').next().unwrap_or_default();
        let uri: Uri = text.parse().map_err(|_| bad())?;
        let authority = uri.authority().ok_or_else(bad)?;
        // Credentials in a URL of a registry would end up in logs and requests.
        if authority.as_str().contains('@') {
            return Err(bad());
        }
        let tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(bad()),
        };
        let port = if tls { 443 } else { 80 };
        let target = uri.path_and_query().map_or("/", |p| p.as_str());
        Ok(Self {
            origin: UrlOrigin {
                tls,
                // Host names are case-insensitive. Lower case makes origins comparable.
                host: authority.host().to_ascii_lowercase(),
                port: authority.port_u16().unwrap_or(port),
            },
            target: target.to_owned(),
        })
    }

    /// Resolves a `location` relative to this URL (RFC 3986 5.2, as far as registries use it).
    pub fn join(&self, location: &str) -> Result<Self, PullFault> {
        if location.contains("://") {
            return Self::parse(location);
        }
        let scheme = if self.origin.tls { "https" } else { "http" };
        // Only the scheme is inherited.
        if location.starts_with("//") {
            return Self::parse(&format!("{scheme}:{location}"));
        }
        let at = format!("{scheme}://{}:{}", self.origin.host, self.origin.port);
        // An absolute path on the same host.
        if location.starts_with('/') {
            return Self::parse(&format!("{at}{location}"));
        }
        // A relative path replaces the last component. The query is not inherited.
        let path = self.target.split('?').next().unwrap_or_default();
        let directory = path.rsplit_once('/').map_or("", |(d, _)| d);
        Self::parse(&format!("{at}{directory}/{location}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_resolved_relative_to_their_request() {
        let at = RequestUrl::parse("https://r.example/v2/a/blobs/x?q").unwrap();
        for (location, origin, target) in [
            ("https://Other:8443/p?s=1#f", "other:8443", "/p?s=1"),
            ("/p", "r.example", "/p"),
            ("y", "r.example", "/v2/a/blobs/y"),
            ("//c.example/z", "c.example", "/z"),
        ] {
            let url = at.join(location).unwrap();
            assert_eq!(
                (url.origin.authority().as_str(), &url.target[..]),
                (origin, target)
            );
            assert!(url.origin.tls);
        }
        for bad in [
            "ftp://a/b",
            "https://u:p@a/b",
            "https://",
            "file:///etc/passwd",
        ] {
            assert!(at.join(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn plain_http_hosts_match_with_or_without_their_default_port() {
        let origin = RequestUrl::parse("http://a.example/x").unwrap().origin;
        let named = |text: &str| origin.is_among(&[text.to_owned()]);
        assert!(named("a.example") && named("A.example:80"));
        assert!(!named("a.example:5000") && !named("b.example"));
    }
}
