//! Bodies, headers and errors of responses.

use crate::error::PullFault;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Response, StatusCode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use std::error::Error;

/// Maximum length of an error response in bytes.
const MAX_ERROR: usize = 16 << 10;

/// Error response of a registry.
#[derive(Deserialize)]
struct Errors {
    errors: Vec<ErrorEntry>,
}

/// Error in the response of a registry.
#[derive(Deserialize)]
struct ErrorEntry {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

/// Returns the value of a header as text.
pub(super) fn header(headers: &HeaderMap, name: hyper::header::HeaderName) -> Option<String> {
    let value = headers.get(name)?.to_str().ok()?;
    Some(value.to_owned())
}

/// Reads a body of at most `limit` bytes.
pub(super) async fn read_body(
    response: Response<Incoming>,
    limit: usize,
) -> Result<Vec<u8>, PullFault> {
    let mut bytes = Vec::new();
    let mut body = response.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| PullFault::Broken(PullFault::text(&with_sources(&e))))?;
        if let Ok(data) = frame.into_data() {
            bytes.extend_from_slice(&data);
        }
        if bytes.len() > limit {
            return Err(PullFault::TooLong(limit as u64));
        }
    }
    Ok(bytes)
}

/// Converts an error response. The text of the registry is untrusted and shown to the host's owner,
/// so its length is bounded.
pub(super) async fn fault_of(response: Response<Incoming>) -> PullFault {
    let status = response.status();
    match status {
        StatusCode::NOT_FOUND => return PullFault::NotFound,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return PullFault::Unauthorized,
        StatusCode::TOO_MANY_REQUESTS => return PullFault::RateLimit,
        _ => {}
    }
    let body = read_body(response, MAX_ERROR).await.unwrap_or_default();
    let errors: Option<Errors> = serde_json::from_slice(&body).ok();
    let first = errors.and_then(|e| e.errors.into_iter().next());
    let text = match first {
        Some(entry) if entry.message.is_empty() => entry.code,
        Some(entry) => entry.message,
        None => status.canonical_reason().unwrap_or_default().to_owned(),
    };
    PullFault::Status(status.as_u16(), PullFault::text(&text))
}

/// Percent-encodes a query value. `:`, `/` and `,` are common in scopes and permitted in queries
/// (RFC 3986 3.4).
pub(super) fn encoded(text: &str) -> String {
    const ESCAPED: AsciiSet = NON_ALPHANUMERIC
        .remove(b'-')
        .remove(b'.')
        .remove(b'_')
        .remove(b'~')
        .remove(b':')
        .remove(b'/')
        .remove(b',');
    utf8_percent_encode(text, &ESCAPED).to_string()
}

/// Returns the message of an error with its causes.
pub(super) fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        // Many errors repeat the message of their cause.
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = cause.source();
    }
    text
}
