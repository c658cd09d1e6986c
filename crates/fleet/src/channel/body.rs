//! Bodies of requests and responses on the members' channel.
//!
//! The *channel* is the HTTP/2 connection with mutual TLS between two members of a fleet.

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use std::time::Duration;

/// Error of any type.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Error of a body whose sender was interrupted.
#[derive(Debug, thiserror::Error)]
#[error("the sender was interrupted: {0}")]
pub struct Interrupted(#[source] BoxError);

impl Interrupted {
    /// Returns an error with this cause.
    pub fn new(cause: impl Into<BoxError>) -> Self {
        Self(cause.into())
    }
}

/// Body of a request or response, of any length.
pub type Body = UnsyncBoxBody<Bytes, Interrupted>;

/// Returns a body with this content.
pub fn body(content: impl Into<Bytes>) -> Body {
    Full::new(content.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// Returns an empty body.
pub fn empty_body() -> Body {
    body(Bytes::new())
}

/// Error of [`read_body`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// The body is too large.
    #[error("the body exceeds {0} bytes")]
    TooLarge(usize),
    /// The body did not arrive in time.
    #[error("the body did not arrive within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// The sender was interrupted.
    #[error("the body was interrupted: {0}")]
    Interrupted(String),
}

/// Reads a body of at most `max` bytes, which must arrive within `limit`. A body whose announced
/// length is larger is rejected before its content arrives.
///
/// # Errors
/// [`BodyError`].
pub async fn read_body<B>(body: B, max: usize, limit: Duration) -> Result<Bytes, BodyError>
where
    B: hyper::body::Body,
    B::Error: Into<BoxError>,
{
    if body.size_hint().lower() > max as u64 {
        return Err(BodyError::TooLarge(max));
    }
    let collected = tokio::time::timeout(limit, Limited::new(body, max).collect());
    match collected.await {
        Err(_) => Err(BodyError::Timeout(limit)),
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(BodyError::TooLarge(max)),
        Ok(Err(error)) => Err(BodyError::Interrupted(error.to_string())),
    }
}
