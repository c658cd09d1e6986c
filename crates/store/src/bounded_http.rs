//! HTTP client for S3 servers that bounds the size of responses.
//!
//! The S3 client collects listings, error messages and write confirmations in memory. Each of these
//! bodies has a limit here. The body of an object is a stream, which [`crate::Backend`] bounds by
//! the size that the caller expects.

use async_trait::async_trait;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService, ReqwestConnector,
};
use std::fmt;

/// Maximum size in bytes of a page of a listing: 1,000 keys of 1,024 bytes, each byte of which may
/// be written as an XML entity.
const MAX_PAGE_BYTES: usize = 8 << 20;
/// Maximum size in bytes of the message of a failed request.
const MAX_ERROR_BYTES: usize = 64 << 10;
/// Maximum size in bytes of the response to a write or a removal.
const MAX_CONFIRMATION_BYTES: usize = 1 << 20;
/// Maximum number of digits of a number in a `Content-Range` header. The S3 client adds 1 to the
/// end of the range, which would overflow for the largest `u64`.
const MAX_DIGITS: usize = 15;

/// Connector whose clients bound the size of responses.
#[derive(Debug)]
pub(crate) struct BoundedConnector;

/// Client that bounds the size of responses.
#[derive(Debug)]
struct BoundedClient(HttpClient);

/// The response of the store exceeds its maximum size.
#[derive(Debug)]
struct AnswerTooLarge {
    limit: usize,
}

impl fmt::Display for AnswerTooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = self.limit;
        write!(f, "the response body is larger than {limit} bytes")
    }
}

impl std::error::Error for AnswerTooLarge {}

impl HttpConnector for BoundedConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(BoundedClient(client)))
    }
}

#[async_trait]
impl HttpService for BoundedClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let limit = success_limit(&request);
        let answer = self.0.execute(request).await?;
        let range = answer.headers().get("content-range");
        if range.is_some_and(|range| has_long_number(range.as_bytes())) {
            let reason = "malformed Content-Range in the response";
            return Err(HttpError::new_boxed(HttpErrorKind::Decode, reason.into()));
        }
        let limit = if answer.status().is_success() {
            limit
        } else {
            Some(MAX_ERROR_BYTES)
        };
        Ok(match limit {
            Some(limit) => answer.map(|body| bounded(body, limit)),
            None => answer,
        })
    }
}

fn has_long_number(header: &[u8]) -> bool {
    let mut numbers = header.split(|byte| !byte.is_ascii_digit());
    numbers.any(|number| number.len() > MAX_DIGITS)
}

/// Returns the maximum size in bytes of a successful response's body. `None` for the body of an
/// object.
fn success_limit(request: &HttpRequest) -> Option<usize> {
    let is_read = request.method().as_str() == "GET";
    let query = request.uri().query().unwrap_or_default();
    match (is_read, query.contains("list-type=")) {
        (true, true) => Some(MAX_PAGE_BYTES),
        (true, false) => None,
        (false, _) => Some(MAX_CONFIRMATION_BYTES),
    }
}

/// Returns a body that fails after `limit` bytes.
fn bounded(body: HttpResponseBody, limit: usize) -> HttpResponseBody {
    let body = Limited::new(body, limit).map_err(move |e| match e.downcast::<HttpError>() {
        Ok(e) => *e,
        Err(e) if e.is::<LengthLimitError>() => {
            HttpError::new(HttpErrorKind::Decode, AnswerTooLarge { limit })
        }
        Err(e) => HttpError::new_boxed(HttpErrorKind::Decode, e),
    });
    HttpResponseBody::new(body)
}
