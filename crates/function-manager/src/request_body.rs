//! Body of a request to a function, and the error of its source.

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;

/// Any error.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// Body of a request to a function.
pub type RequestBody = UnsyncBoxBody<Bytes, BoxError>;
