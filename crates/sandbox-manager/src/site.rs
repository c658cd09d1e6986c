//! Settings of the *site*, which is the network in which the guests are: certificate authorities
//! and the proxy.
//!
//! Certificates are parsed here and encoded again, so that guests receive no other content of a
//! file.

mod subject_hash;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiffy_api_types::{MAX_NO_PROXY, MAX_PROXY_URL};
use jiffy_proto::agent::{Authority, ProxySettings, SiteSettings};
use std::fmt::Write as _;
use x509_parser::pem::Pem;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Maximum size of the PEM text of a host's authorities, in bytes. A file of all public authorities
/// has 220 KiB.
pub const MAX_HOST_AUTHORITIES_BYTES: usize = 384 * 1024;

/// Label of a certificate in PEM.
const CERTIFICATE: &str = "CERTIFICATE";
/// Characters per line of PEM.
const PEM_LINE: usize = 64;

/// Reason why settings of a network are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SiteError {
    /// The text is too long.
    #[error("{bytes} bytes of certificates exceed the limit of {limit} bytes")]
    TooLong {
        /// Size, in bytes.
        bytes: usize,
        /// Maximum size, in bytes.
        limit: usize,
    },
    /// The text contains a private key, which must not be copied into guests.
    #[error("the certificates contain a private key: pass only the certificate of the authority")]
    PrivateKey,
    /// The text contains no certificate.
    #[error("the text contains no certificate: PEM starts with `-----BEGIN CERTIFICATE-----`")]
    Empty,
    /// The text contains another PEM block than a certificate.
    #[error("entry {entry} is `{label}`, but only certificates are allowed")]
    Label {
        /// Number of the block, counted from 1.
        entry: usize,
        /// Label of the PEM block.
        label: String,
    },
    /// A certificate cannot be parsed.
    #[error("certificate {entry} is invalid: {reason}")]
    Certificate {
        /// Number of the certificate, counted from 1.
        entry: usize,
        /// Reason.
        reason: String,
    },
    /// The URL of the proxy is invalid.
    #[error("`{url}` is not a proxy URL: use http://[USER:PASSWORD@]HOST[:PORT]")]
    Proxy {
        /// URL without user and password.
        url: String,
    },
    /// The list of hosts without proxy is invalid.
    #[error(
        "`{entry}` is not a host for direct connections: separate names, addresses and networks by commas"
    )]
    NoProxy {
        /// First invalid entry.
        entry: String,
    },
}

/// Returns the distinct certificates in PEM `text` of at most `limit` bytes, in their order.
pub fn authorities(text: &str, limit: usize) -> Result<Vec<Authority>, SiteError> {
    if text.len() > limit {
        let bytes = text.len();
        return Err(SiteError::TooLong { bytes, limit });
    }
    // Check this first, so that a private key is always reported as such.
    if text.contains("PRIVATE KEY-----") {
        return Err(SiteError::PrivateKey);
    }
    let mut certificates: Vec<Authority> = Vec::new();
    for (n, pem) in Pem::iter_from_buffer(text.as_bytes()).enumerate() {
        let entry = n + 1;
        let broken = |e: &dyn std::fmt::Display| SiteError::Certificate {
            entry,
            reason: e.to_string(),
        };
        let pem = pem.map_err(|e| broken(&e))?;
        if pem.label != CERTIFICATE {
            let label = pem.label.chars().take(40).collect();
            return Err(SiteError::Label { entry, label });
        }
        let (rest, certificate) =
            X509Certificate::from_der(&pem.contents).map_err(|e| broken(&e))?;
        // DER has one element. Other bytes might be interpreted by the programs in the guest.
        if !rest.is_empty() {
            return Err(broken(&"it is followed by other data"));
        }
        let subject_hash = subject_hash::of(certificate.subject().as_raw());
        let authority = Authority {
            pem: encode(&pem.contents),
            subject_hash: subject_hash.map_err(|e| broken(&e))?,
        };
        if !certificates.contains(&authority) {
            certificates.push(authority);
        }
    }
    if certificates.is_empty() {
        return Err(SiteError::Empty);
    }
    Ok(certificates)
}

/// Encodes a certificate as PEM.
fn encode(der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut pem = format!("-----BEGIN {CERTIFICATE}-----\n");
    for line in text.as_bytes().chunks(PEM_LINE) {
        // Base64 is ASCII.
        pem.push_str(&String::from_utf8_lossy(line));
        pem.push('\n');
    }
    let _ = writeln!(pem, "-----END {CERTIFICATE}-----");
    pem
}

/// Checks proxy settings. An empty `url` means that there is no proxy.
pub fn proxy(url: &str, no_proxy: &str) -> Result<ProxySettings, SiteError> {
    let settings = ProxySettings {
        url: url.trim().trim_end_matches('/').to_owned(),
        no_proxy: no_proxy.trim().to_owned(),
    };
    if !settings.url.is_empty() && !is_proxy(&settings.url) {
        let url = settings.public_url().chars().take(200).collect();
        return Err(SiteError::Proxy { url });
    }
    let entries = settings.no_proxy.split(',').map(str::trim);
    let mut bad = entries.filter(|entry| !entry.bytes().all(is_of_host));
    // The text is cut off, since it is repeated in the error.
    let bad = bad.next().map(|entry| entry.chars().take(200).collect());
    match bad {
        None if settings.no_proxy.len() <= MAX_NO_PROXY => Ok(settings),
        None => Err(SiteError::NoProxy {
            entry: format!("{} bytes", settings.no_proxy.len()),
        }),
        Some(entry) => Err(SiteError::NoProxy { entry }),
    }
}

/// Returns whether the URL is valid, and needs no quoting in an environment variable, a shell
/// command or a command line of Java.
fn is_proxy(url: &str) -> bool {
    let plain = |b: u8| b.is_ascii_graphic() && !br#""'\`$;<>{}|^"#.contains(&b);
    let rest = url.strip_prefix("http://").or(url.strip_prefix("https://"));
    let Some(rest) = rest.filter(|_| url.len() <= MAX_PROXY_URL && url.bytes().all(plain)) else {
        return false;
    };
    // A password may contain `@`, so the host follows the last one.
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let (name, port) = match host.strip_prefix('[').and_then(|h| h.split_once(']')) {
        Some((name, port)) => {
            let is_ipv6 = name.parse::<std::net::Ipv6Addr>().is_ok();
            (name.to_owned(), Some(port).filter(|_| is_ipv6))
        }
        None => {
            let end = host.find(':').unwrap_or(host.len());
            let named = !host[..end].is_empty() && host[..end].bytes().all(is_of_name);
            (host[..end].to_owned(), Some(&host[end..]).filter(|_| named))
        }
    };
    let number = |port: &str| port.parse::<u16>().is_ok_and(|port| port != 0);
    !name.is_empty()
        && port.is_some_and(|p| p.is_empty() || p.strip_prefix(':').is_some_and(number))
}

/// Returns whether a host name may contain the byte.
fn is_of_name(b: u8) -> bool {
    b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_')
}

/// Returns whether an entry of `no_proxy` may contain the byte: a name, an address, a network or a
/// pattern.
fn is_of_host(b: u8) -> bool {
    is_of_name(b) || matches!(b, b'*' | b':' | b'/' | b'[' | b']')
}

/// Returns the settings of a sandbox: the authorities of the host and of the sandbox, and one
/// proxy. The sandbox's proxy replaces the host's proxy.
pub fn joined(host: &SiteSettings, own: &SiteSettings) -> SiteSettings {
    let mut site = host.clone();
    let new = own.authorities.iter();
    let new: Vec<_> = new
        .filter(|a| !host.authorities.contains(a))
        .cloned()
        .collect();
    site.authorities.extend(new);
    if own.proxy.is_some() {
        site.proxy.clone_from(&own.proxy);
    }
    // An empty URL is a sandbox's way to opt out of the host's proxy.
    site.proxy = site.proxy.filter(|proxy| !proxy.url.is_empty());
    site
}

#[cfg(test)]
mod tests;
