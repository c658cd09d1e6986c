//! [`RequestFault`]: failures of a request to a function, and the answers that clients receive.
//! Details of a guest's failure are written only to the function's log.
//!
//! The *head* of a request or response is its first line and its headers, without the body. A
//! *slot* is address space for the memory of one instance, which requests use one after the other.

use bytes::Bytes;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde::Serialize;

/// Failure of one request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestFault {
    /// No function has this name.
    #[error("The function does not exist")]
    NotFound,
    /// The host of the request differs from the host of the connection.
    #[error("This connection is for another host: open another connection")]
    Misdirected,
    /// The owner has disabled the function.
    #[error("The function is disabled")]
    Disabled,
    /// The head of the request cannot be passed on.
    #[error("The request cannot be passed to the function: {0}")]
    BadRequest(&'static str),
    /// The body of the request exceeds the limit.
    #[error("The body of the request is larger than the function accepts")]
    RequestTooLarge,
    /// The body of the request did not arrive in time.
    #[error("The body of the request did not arrive in time")]
    RequestTimeout,
    /// The client disconnected while sending the body.
    #[error("The body of the request ended early")]
    RequestAborted,
    /// Too many requests of this function are running and queued.
    #[error("Too many requests to this function are in flight: try again later")]
    Busy,
    /// The slots or the memory of the tenant's process are exhausted.
    #[error("Too many requests to functions are in flight: try again later")]
    HostBusy,
    /// A growth of memory or tables was denied, and the guest failed afterwards.
    #[error("The function exceeded its memory limit")]
    Memory(String),
    /// The guest trapped or returned no response.
    #[error("The function failed")]
    Trap(String),
    /// The response exceeds the limit.
    #[error("The response of the function exceeds the size limit")]
    ResponseTooLarge,
    /// The request exceeded its processor time.
    #[error("The function exceeded its processor time limit")]
    Cpu,
    /// The request exceeded its time limit.
    #[error("The function did not answer in time")]
    Timeout,
}

/// Body of an error response, in the same format as errors of the control plane.
#[derive(Serialize)]
struct FaultBody<'a> {
    code: u16,
    message: &'a str,
    error_code: &'static str,
}

impl RequestFault {
    /// Returns the machine-readable error code, which is also the label in metrics.
    #[must_use]
    pub fn error_code(&self) -> &'static str {
        match self {
            Self::NotFound => "function_not_found",
            Self::Misdirected => "misdirected_request",
            Self::Disabled => "function_disabled",
            Self::BadRequest(_) => "invalid_request",
            Self::RequestTooLarge => "request_too_large",
            Self::RequestTimeout => "request_timeout",
            Self::RequestAborted => "request_aborted",
            Self::Busy => "function_busy",
            Self::HostBusy => "host_busy",
            Self::Memory(_) => "function_memory",
            Self::Trap(_) => "function_trap",
            Self::ResponseTooLarge => "response_too_large",
            Self::Cpu => "function_cpu",
            Self::Timeout => "function_timeout",
        }
    }

    /// Returns the HTTP status of the error response.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::Misdirected => StatusCode::MISDIRECTED_REQUEST,
            Self::Disabled | Self::HostBusy => StatusCode::SERVICE_UNAVAILABLE,
            Self::BadRequest(_) | Self::RequestAborted => StatusCode::BAD_REQUEST,
            Self::RequestTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::Busy => StatusCode::TOO_MANY_REQUESTS,
            Self::Memory(_) | Self::Trap(_) | Self::ResponseTooLarge => StatusCode::BAD_GATEWAY,
            Self::Cpu | Self::Timeout => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    /// Returns the cause inside the guest, for the function's log.
    #[must_use]
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Memory(detail) | Self::Trap(detail) => Some(detail),
            _ => None,
        }
    }

    /// Returns the error response with the body `{code, message, error_code}`.
    #[must_use]
    pub fn answer(&self) -> Response<Bytes> {
        let message = self.to_string();
        let status = self.status();
        let body = FaultBody {
            code: status.as_u16(),
            message: &message,
            error_code: self.error_code(),
        };
        // Numbers and strings are always serialisable: the default is never used.
        let body = serde_json::to_vec(&body).unwrap_or_default();
        let mut answer = Response::new(Bytes::from(body));
        *answer.status_mut() = status;
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        // A failure must not be served again from a cache.
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        // Capacity becomes free when requests in flight complete.
        if matches!(self, Self::Busy | Self::HostBusy) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        answer
    }
}
