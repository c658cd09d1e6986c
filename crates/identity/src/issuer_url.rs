//! [`IssuerUrl`]: the public address of the issuer, as tokens and their verifiers name it.

use std::fmt;
use std::str::FromStr;

/// Maximum length of the URL in bytes.
const MAX_URL: usize = 255;

/// The URL cannot be the name of an issuer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "use the public address of this API: `https://NAME[:PORT][/PATH]` with a host name, at most \
     {MAX_URL} bytes, without user, query, fragment and slash at the end"
)]
pub struct InvalidIssuer;

/// URL of an issuer: the claim `iss` of its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuerUrl {
    text: String,
    host: String,
}

impl IssuerUrl {
    /// Returns the URL.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the host name, in lower case.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }
}

impl fmt::Display for IssuerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for IssuerUrl {
    type Err = InvalidIssuer;

    fn from_str(text: &str) -> Result<Self, InvalidIssuer> {
        // Plain HTTP is for tests: most verifiers accept HTTPS only.
        let rest = text.strip_prefix("https://");
        let rest = rest.or_else(|| text.strip_prefix("http://"));
        let rest = rest.ok_or(InvalidIssuer)?;
        let (authority, path) = rest
            .split_once('/')
            .map_or((rest, None), |(authority, path)| (authority, Some(path)));
        let (host, port) = authority
            .split_once(':')
            .map_or((authority, None), |(host, port)| (host, Some(port)));
        // The host is the trust domain of subjects, which permits these characters (SPIFFE ID 2.1).
        let is_of_host = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
        let is_of_path = |b: u8| is_of_host(b) || b"~/".contains(&b);
        let is_valid = text.len() <= MAX_URL
            && !host.is_empty()
            && host.bytes().all(is_of_host)
            && port.is_none_or(|port| {
                port.bytes().all(|b| b.is_ascii_digit()) && port.parse().is_ok_and(|n: u16| n > 0)
            })
            && path.is_none_or(|path| {
                path.bytes().all(is_of_path) && path.split('/').all(|part| !part.is_empty())
            });
        if !is_valid {
            return Err(InvalidIssuer);
        }
        Ok(Self {
            text: text.to_owned(),
            host: host.to_ascii_lowercase(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_plain_addresses_are_issuers() {
        for good in [
            "https://jiffy.example",
            "https://Jiffy.example:8443",
            "https://a.example/sandboxes/eu",
            "http://localhost:3000",
        ] {
            let url: IssuerUrl = good.parse().unwrap();
            assert_eq!(url.as_str(), good);
            assert_eq!(url.host(), url.host().to_ascii_lowercase());
        }
        for bad in [
            "",
            "jiffy.example",
            "ftp://a.example",
            "https://",
            "https://a.example/",
            "https://a.example//x",
            "https://a.example?x",
            "https://a.example/#x",
            "https://user@a.example",
            "https://[::1]",
            "https://a.example:0",
            "https://a.example:+1",
            "https://a.example:",
            "https://a.example/\"",
            &format!("https://{}", "a".repeat(MAX_URL)),
        ] {
            assert_eq!(bad.parse::<IssuerUrl>(), Err(InvalidIssuer), "{bad}");
        }
    }
}
