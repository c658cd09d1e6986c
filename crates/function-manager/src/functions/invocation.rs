//! Requests of clients to functions: passed to the owner's process, and repeated if the process
//! exits before it has answered.

use super::{Functions, Owner};
use crate::function_error::FunctionError;
use crate::function_record::FunctionRecord;
use crate::request_body::RequestBody;
use crate::request_limit::limited;
use crate::response_body::FunctionBody;
use http_body_util::{BodyExt, Empty};
use hyper::body::Body;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Request, Response, Uri};
use jiffy_proto::function::FUNCTION_HEADER;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Maximum number of attempts for a repeatable request.
const MAX_ATTEMPTS: u32 = 3;
/// Maximum time to wait for the exit of a process after a connection to it was lost.
const MAX_END_DELAY: Duration = Duration::from_millis(200);
/// Header with the request's id, which the gateway sets.
const REQUEST_ID_HEADER: &str = "x-request-id";
/// Error code under which requests with too large a body are counted, as in the process.
const TOO_LARGE: &str = "request_too_large";

impl Functions {
    /// Passes a request to a function. Starts the process and loads the version if necessary. The
    /// request must have the path that the function receives, and a `Host` header.
    pub async fn send(
        &self,
        record: &FunctionRecord,
        mut request: Request<RequestBody>,
    ) -> Result<Response<FunctionBody>, FunctionError> {
        let owner = self.existing_owner(record.owner.as_deref(), &record.name)?;
        prepare(&mut request, &record.name)?;
        let max = record.settings.limits.request_bytes;
        let (head, body) = request.into_parts();
        let (body, exceeded) = limited(body, max);
        let mut request = Request::from_parts(head, body);
        // The announced length alone exceeds the limit: do not start a process.
        if exceeded.load(Ordering::Acquire) {
            return Err(too_large(
                &owner,
                record,
                request.headers().get(REQUEST_ID_HEADER),
            ));
        }
        // A request can be repeated only if it has no body, which cannot be copied, and if it is
        // idempotent: the function may receive it twice.
        let repeatable = request.body().is_end_stream() && request.method().is_idempotent();
        // The id is copied for the error below: `send` consumes the request.
        let id = request.headers().get(REQUEST_ID_HEADER).cloned();
        let mut attempt = 1;
        loop {
            let again = (repeatable && attempt < MAX_ATTEMPTS).then(|| copy(&request));
            let in_use = self.loaded(&owner, &record.name).await?;
            match in_use.0.connections.send(request).await {
                Ok(response) => {
                    return Ok(response.map(|body| FunctionBody::new(body, in_use)));
                }
                // The limited body failed, which is not a failure of the process.
                Err(_) if exceeded.load(Ordering::Acquire) => {
                    return Err(too_large(&owner, record, id.as_ref()));
                }
                Err(e) => {
                    tracing::debug!(function = record.name, error = %e, "a request to a function failed");
                    let failed = || {
                        FunctionError::Unavailable(
                            "the process exited while it handled the request".to_owned(),
                        )
                    };
                    request = again.ok_or_else(failed)?;
                    attempt += 1;
                    // The next attempt must not be sent to the process that is exiting.
                    in_use.0.wait_for_end(MAX_END_DELAY).await;
                }
            }
        }
    }
}

/// Records that a request was rejected because of its body.
fn too_large(owner: &Owner, record: &FunctionRecord, id: Option<&HeaderValue>) -> FunctionError {
    let id = id.and_then(|id| id.to_str().ok());
    if let Ok(state) = owner.function(&record.name) {
        state.record_fault(id.unwrap_or_default(), TOO_LARGE);
    }
    FunctionError::RequestTooLarge
}

/// Rewrites a request for the process: path only, HTTP/1.1, and the name of the function.
fn prepare(request: &mut Request<RequestBody>, name: &str) -> Result<(), FunctionError> {
    let bad = |e: &dyn std::fmt::Display| FunctionError::Setting(e.to_string());
    let path = request.uri().path_and_query().cloned();
    *request.uri_mut() = path.map_or(Uri::from_static("/"), Uri::from);
    // The client's request may use HTTP/2.
    *request.version_mut() = hyper::Version::HTTP_11;
    let name = HeaderValue::from_str(name).map_err(|e| bad(&e))?;
    let header = HeaderName::from_static(FUNCTION_HEADER);
    request.headers_mut().insert(header, name);
    Ok(())
}

/// Copies a request without its body.
fn copy(request: &Request<RequestBody>) -> Request<RequestBody> {
    let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
    let mut copy = Request::new(body);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    copy
}
