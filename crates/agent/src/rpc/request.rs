//! Reads requests of RPCs, with limits on their size.

use super::error::{RpcCode, RpcError};
use super::frame::{self, MAX_MESSAGE};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{HeaderMap, header};
use serde::de::DeserializeOwned;
use std::time::Duration;

/// Maximum number of bytes of a rejected request that are read, so that the client receives the
/// error.
const MAX_DISCARDED_BYTES: usize = 64 * 1024 * 1024;

/// Reads a unary message.
pub async fn unary<T: DeserializeOwned>(body: &mut Incoming) -> Result<T, RpcError> {
    parse(&collect(body, MAX_MESSAGE).await?)
}

/// Reads a body of at most `limit` bytes.
pub async fn collect(body: &mut Incoming, limit: usize) -> Result<Bytes, RpcError> {
    let mut all = BytesMut::new();
    let mut seen = 0;
    while let Some(piece) = next(body).await? {
        seen += piece.len();
        // The bytes above the limit are read and discarded, so that the client receives the error
        // and not a broken connection.
        if seen <= limit {
            all.extend_from_slice(&piece);
        } else if seen > limit + MAX_DISCARDED_BYTES {
            break;
        }
    }
    if seen > limit {
        return Err(RpcError::new(
            RpcCode::ResourceExhausted,
            format!("the request is longer than the limit of {limit} bytes"),
        ));
    }
    Ok(all.freeze())
}

/// Reads the rest of a rejected request. If a connection with unread bytes is closed, the client
/// may not receive the response. At most 64 MiB are read, for at most 2 s.
pub async fn discard(body: &mut Incoming) {
    let all = async {
        let mut seen = 0;
        while let Ok(Some(piece)) = next(body).await {
            seen += piece.len();
            if seen > MAX_DISCARDED_BYTES {
                return;
            }
        }
    };
    // Ignore a timeout: the connection is then closed with unread bytes.
    let _ = tokio::time::timeout(Duration::from_secs(2), all).await;
}

/// Returns the next bytes of a body.
pub async fn next(body: &mut Incoming) -> Result<Option<Bytes>, RpcError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| {
            RpcError::new(
                RpcCode::InvalidArgument,
                format!("the request was interrupted: {e}"),
            )
        })?;
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// Parses JSON. An empty body is an empty message.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RpcError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    serde_json::from_slice(bytes)
        .map_err(|e| RpcError::new(RpcCode::InvalidArgument, format!("malformed JSON: {e}")))
}

/// Reads the single message of a server-streaming request and the end of the request. A connection
/// with unread bytes is closed after the response, and the next request on it would fail.
pub async fn single<T: DeserializeOwned>(body: &mut Incoming) -> Result<T, RpcError> {
    let mut frames = RequestFrames::new(body);
    let Some(message) = frames.next().await? else {
        return Err(RpcError::new(
            RpcCode::InvalidArgument,
            "the request has no message",
        ));
    };
    if frames.next().await?.is_some() {
        return Err(RpcError::new(
            RpcCode::InvalidArgument,
            "the request has more than one message",
        ));
    }
    parse(&message)
}

/// Reader of the messages of a client stream.
pub struct RequestFrames<'a> {
    body: &'a mut Incoming,
    buffer: BytesMut,
}

impl<'a> RequestFrames<'a> {
    /// Creates a reader of the messages in `body`.
    pub fn new(body: &'a mut Incoming) -> Self {
        Self {
            body,
            buffer: BytesMut::new(),
        }
    }

    /// Returns the next message, or `None` at the end of the stream.
    pub async fn next(&mut self) -> Result<Option<Bytes>, RpcError> {
        loop {
            if let Some(message) = frame::take(&mut self.buffer)? {
                return Ok(Some(message));
            }
            match next(self.body).await? {
                Some(piece) => self.buffer.extend_from_slice(&piece),
                None if self.buffer.is_empty() => return Ok(None),
                None => {
                    return Err(RpcError::new(
                        RpcCode::InvalidArgument,
                        "the request ends inside a frame",
                    ));
                }
            }
        }
    }
}

/// Parameters in the headers of a call.
#[derive(Debug, Clone, Default)]
pub struct CallInfo {
    /// User name from Basic authentication.
    pub user: Option<String>,
    /// Timeout of the process or stream.
    pub timeout: Option<Duration>,
    /// Interval of keepalives on an idle stream.
    pub keepalive: Duration,
}

impl CallInfo {
    /// Reads `Authorization`, `connect-timeout-ms` and `Keepalive-Ping-Interval`.
    pub fn of(headers: &HeaderMap) -> Result<Self, RpcError> {
        let number = |name: &str| -> Result<Option<u64>, RpcError> {
            let Some(value) = headers.get(name) else {
                return Ok(None);
            };
            value
                .to_str()
                .ok()
                .and_then(|v| v.trim().parse().ok())
                .map(Some)
                .ok_or_else(|| {
                    RpcError::new(
                        RpcCode::InvalidArgument,
                        format!("header {name} is not a number"),
                    )
                })
        };
        let timeout = number("connect-timeout-ms")?
            .filter(|ms| *ms > 0)
            .map(Duration::from_millis);
        let keepalive = number("keepalive-ping-interval")?.filter(|s| *s > 0);
        Ok(Self {
            user: basic_user(headers)?,
            timeout,
            // 90 s is the default of E2B's envd. A day bounds the timer.
            keepalive: Duration::from_secs(keepalive.unwrap_or(90).min(86_400)),
        })
    }
}

/// Returns the user in the header `Authorization`, in which E2B's clients send it.
fn basic_user(headers: &HeaderMap) -> Result<Option<String>, RpcError> {
    let Some(value) = headers.get(header::AUTHORIZATION) else {
        return Ok(None);
    };
    let value = value.to_str().unwrap_or_default();
    // Other authentication schemes are for a proxy in front of the agent.
    let Some(encoded) = value.strip_prefix("Basic ") else {
        return Ok(None);
    };
    let name = STANDARD
        .decode(encoded.trim())
        .ok()
        .and_then(|bytes| String::from_utf8(bytes).ok())
        .and_then(|text| user_of_credentials(&text).map(str::to_owned))
        .ok_or_else(|| RpcError::new(RpcCode::Unauthenticated, "malformed Basic authorization"))?;
    Ok(Some(name).filter(|n| !n.is_empty()))
}

/// Returns the user in the credentials `user:password`. Clients send an empty password, so a final
/// colon separates the password, and the text before it may be `user:group`. With a password, the
/// first colon ends the user.
fn user_of_credentials(credentials: &str) -> Option<&str> {
    match credentials.strip_suffix(':') {
        Some(user) => Some(user),
        None => credentials.split_once(':').map(|(user, _)| user),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_without_a_password_may_name_a_group() {
        for (credentials, user) in [
            ("user:", Some("user")),
            ("app:staff:", Some("app:staff")),
            ("1000:27:", Some("1000:27")),
            ("user:password", Some("user")),
            (":", Some("")),
            ("user", None),
        ] {
            assert_eq!(user_of_credentials(credentials), user, "{credentials}");
        }
    }
}
