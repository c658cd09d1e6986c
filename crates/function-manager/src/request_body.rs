//! Body of a request to a function, and its error type.

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;

pub use jiffy_http::BoxError;

/// Body of a request to a function.
pub type RequestBody = UnsyncBoxBody<Bytes, BoxError>;
