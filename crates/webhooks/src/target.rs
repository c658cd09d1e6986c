//! [`Target`]: the parsed and checked URL of a webhook.

use crate::WebhookError;
use hyper::Uri;
use jiffy_api_types::MAX_WEBHOOK_URL;

/// Server and path of a webhook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub host: String,
    pub port: u16,
    pub is_tls: bool,
    /// Value of the header `Host`.
    pub authority: String,
    /// Path and query.
    pub path: String,
}

impl Target {
    /// Parses a URL with the scheme `http` or `https`, without user and fragment.
    pub fn parse(url: &str) -> Result<Self, WebhookError> {
        if url.len() > MAX_WEBHOOK_URL {
            return Err(WebhookError::LongUrl);
        }
        let parsed: Uri = url
            .parse()
            .map_err(|_| WebhookError::Url("use a URL such as https://example.com/events"))?;
        let is_tls = match parsed.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(WebhookError::Url("it must begin with https:// or http://")),
        };
        let authority = parsed
            .authority()
            .map_or("", |authority| authority.as_str());
        if authority.contains('@') {
            return Err(WebhookError::Url("it must not contain a user or password"));
        }
        if url.contains('#') {
            return Err(WebhookError::Url("it must not contain a fragment"));
        }
        let host = parsed.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(WebhookError::Url("it has no host"));
        }
        let port = parsed.port_u16();
        // The colons of an IPv6 address are before the bracket.
        let has_port = authority
            .rsplit(']')
            .next()
            .is_some_and(|end| end.contains(':'));
        if port == Some(0) || (port.is_none() && has_port) {
            return Err(WebhookError::Url("its port is invalid"));
        }
        let path = parsed.path_and_query().map_or("/", |path| path.as_str());
        Ok(Self {
            host: host.to_owned(),
            port: port.unwrap_or(if is_tls { 443 } else { 80 }),
            is_tls,
            authority: authority.to_owned(),
            path: if path.is_empty() { "/" } else { path }.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_a_scheme_a_host_and_no_credentials() {
        let parsed = Target::parse("https://Example.com:8443/a/b?c=d").unwrap();
        assert_eq!((parsed.host.as_str(), parsed.port), ("Example.com", 8443));
        assert_eq!(parsed.path, "/a/b?c=d");
        assert!(parsed.is_tls);
        let parsed = Target::parse("http://[2001:db8::1]").unwrap();
        assert_eq!((parsed.host.as_str(), parsed.port), ("2001:db8::1", 80));
        assert_eq!(parsed.path, "/");
        for url in [
            "",
            "example.com/a",
            "ftp://example.com/",
            "https://",
            "https:///a",
            "https://user@example.com/",
            "https://example.com/#a",
            "https://example.com:0/",
            "https://example.com:99999/",
            "https://example.com/a b",
            "https://example.com/\r\nX: y",
            &format!("https://example.com/{}", "a".repeat(MAX_WEBHOOK_URL)),
        ] {
            assert!(Target::parse(url).is_err(), "{url}");
        }
    }
}
