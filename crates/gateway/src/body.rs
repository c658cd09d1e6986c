//! Types of HTTP bodies in transit between clients and guests. Their bytes are counted but not
//! collected.

use crate::counters::add;
use bytes::{Buf, Bytes};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::Frame;

pub use jiffy_http::BoxError;

/// Body of a response to a client.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Returns a body with the given content.
pub fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// Adds the length of a data frame to a counter.
pub(crate) fn count(counter: &std::sync::atomic::AtomicU64, frame: &Frame<Bytes>) {
    if let Some(data) = frame.data_ref() {
        add(counter, data.remaining() as u64);
    }
}
