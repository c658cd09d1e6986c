//! [`TrustRoot`]: authorities and logs whose statements about signatures are trusted.
//!
//! *Fulcio* is an authority that issues certificates to identities, for keys that exist for
//! minutes. *Rekor* is a log of signatures. Certificates are in logs of their own (certificate
//! transparency, RFC 6962). Authorities for timestamps (RFC 3161) confirm the time of signatures.

use super::json::Base64;
use super::public_key::PublicKey;
use jiff::Timestamp;
use rustls_pki_types::{CertificateDer, TrustAnchor};
use serde::Deserialize;
use std::fmt;

/// Period in which an authority or log may be used.
#[derive(Clone, Copy, Default)]
struct Period {
    start: Option<Timestamp>,
    end: Option<Timestamp>,
}

impl Period {
    fn contains(&self, time: Timestamp) -> bool {
        self.start.is_none_or(|start| start <= time) && self.end.is_none_or(|end| time <= end)
    }
}

/// A log of signatures or of certificates.
pub(super) struct Log {
    /// Identifier of the log in its entries.
    pub id: Vec<u8>,
    pub key: PublicKey,
    period: Period,
}

/// An authority: its root, and its certificates below.
pub(super) struct Authority {
    pub anchor: TrustAnchor<'static>,
    pub intermediates: Vec<CertificateDer<'static>>,
    period: Period,
}

impl Log {
    /// Returns whether the key of the log was in use at this time.
    pub fn is_valid_at(&self, time: Timestamp) -> bool {
        self.period.contains(time)
    }
}

impl Authority {
    /// Returns whether the authority was in use at this time.
    pub fn is_valid_at(&self, time: Timestamp) -> bool {
        self.period.contains(time)
    }
}

/// An authority for timestamps, and the certificate that signs them.
pub(super) struct TimestampAuthority {
    pub authority: Authority,
    pub certificate: CertificateDer<'static>,
}

/// Trusted authorities and logs.
pub(super) struct TrustRoot {
    pub authorities: Vec<Authority>,
    pub logs: Vec<Log>,
    pub certificate_logs: Vec<Log>,
    pub timestamp_authorities: Vec<TimestampAuthority>,
}

impl fmt::Debug for TrustRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TrustRoot")
    }
}

/// File `trusted_root.json` (https://github.com/sigstore/protobuf-specs).
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct File {
    tlogs: Vec<LogEntry>,
    certificate_authorities: Vec<AuthorityEntry>,
    ctlogs: Vec<LogEntry>,
    timestamp_authorities: Vec<AuthorityEntry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LogEntry {
    public_key: KeyEntry,
    log_id: LogId,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LogId {
    key_id: Base64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct KeyEntry {
    raw_bytes: Base64,
    valid_for: Option<PeriodEntry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AuthorityEntry {
    cert_chain: Chain,
    valid_for: Option<PeriodEntry>,
}

#[derive(Deserialize)]
struct Chain {
    certificates: Vec<CertificateEntry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CertificateEntry {
    raw_bytes: Base64,
}

#[derive(Deserialize)]
struct PeriodEntry {
    start: Option<String>,
    end: Option<String>,
}

impl TrustRoot {
    /// Parses a `trusted_root.json`.
    ///
    /// # Errors
    /// The error is a message for the author of the build.
    pub fn parse(text: &str) -> Result<Self, String> {
        let invalid = |what: &str| format!("the trusted root is not valid: {what}");
        let file: File = serde_json::from_str(text).map_err(|e| invalid(&e.to_string()))?;
        let root = Self::from_file(file).map_err(|e| invalid(&e))?;
        if root.logs.is_empty() {
            return Err(invalid("it has no transparency log with a supported key"));
        }
        Ok(root)
    }

    fn from_file(file: File) -> Result<Self, String> {
        let mut authorities = Vec::new();
        for entry in file.certificate_authorities {
            let (_, authority) = authority(entry)?;
            authorities.push(authority);
        }
        let mut timestamp_authorities = Vec::new();
        for entry in file.timestamp_authorities {
            let (certificate, authority) = authority(entry)?;
            timestamp_authorities.push(TimestampAuthority {
                authority,
                certificate,
            });
        }
        Ok(Self {
            authorities,
            logs: logs(file.tlogs)?,
            certificate_logs: logs(file.ctlogs)?,
            timestamp_authorities,
        })
    }
}

/// Returns the logs of a file. Logs with keys of other algorithms are omitted, so that a file with
/// new logs remains usable.
fn logs(entries: Vec<LogEntry>) -> Result<Vec<Log>, String> {
    let mut logs = Vec::new();
    for entry in entries {
        let period = period(entry.public_key.valid_for)?;
        let Some(key) = PublicKey::from_der(&entry.public_key.raw_bytes.0) else {
            continue;
        };
        logs.push(Log {
            id: entry.log_id.key_id.0,
            key,
            period,
        });
    }
    Ok(logs)
}

/// Returns the first certificate of an authority, and the authority. The last certificate is its
/// root.
fn authority(entry: AuthorityEntry) -> Result<(CertificateDer<'static>, Authority), String> {
    let period = period(entry.valid_for)?;
    let certificates = entry.cert_chain.certificates.into_iter();
    let mut chain: Vec<CertificateDer<'static>> = certificates
        .map(|certificate| CertificateDer::from(certificate.raw_bytes.0))
        .collect();
    let first = chain.first().cloned();
    let root = chain.pop();
    let (Some(first), Some(root)) = (first, root) else {
        return Err("an authority has no certificate".to_owned());
    };
    let anchor = webpki::anchor_from_trusted_cert(&root);
    let anchor = anchor.map_err(|e| format!("the certificate of an authority: {e}"))?;
    let authority = Authority {
        anchor: anchor.to_owned(),
        intermediates: chain,
        period,
    };
    Ok((first, authority))
}

fn period(entry: Option<PeriodEntry>) -> Result<Period, String> {
    let parse = |text: Option<String>| {
        let time = text.map(|text| text.parse::<Timestamp>());
        time.transpose().map_err(|e| e.to_string())
    };
    let Some(entry) = entry else {
        return Ok(Period::default());
    };
    Ok(Period {
        start: parse(entry.start)?,
        end: parse(entry.end)?,
    })
}
