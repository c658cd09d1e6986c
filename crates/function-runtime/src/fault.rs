//! Failures of a request and the answers that clients get. Details of a guest's failure go to the
//! function's log only.

use bytes::Bytes;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde::Serialize;

/// Failure of one request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestFault {
    /// No function of that name.
    #[error("There is no such function")]
    NotFound,
    /// Host that the connection is not for.
    #[error("This connection is for another host: open another one")]
    Misdirected,
    /// Its owner has disabled it.
    #[error("The function is disabled")]
    Disabled,
    /// A head that cannot be passed on.
    #[error("The request cannot be passed to the function: {0}")]
    BadRequest(&'static str),
    /// Body above the limit.
    #[error("The body of the request is larger than the function accepts")]
    RequestTooLarge,
    /// Body that did not arrive in time.
    #[error("The body of the request did not arrive in time")]
    RequestTimeout,
    /// Client that went away inside its body.
    #[error("The body of the request ended early")]
    RequestAborted,
    /// Too many requests run and wait.
    #[error("Too many requests to this function are under way: try again later")]
    Busy,
    /// Slots or memory of the tenant's process are used up.
    #[error("Too many requests to functions are under way: try again later")]
    HostBusy,
    /// Growth of memory or tables was refused, and the guest failed thereafter.
    #[error("The function needed more memory than it may have")]
    Memory(String),
    /// Trap, or no response.
    #[error("The function failed")]
    Trap(String),
    /// Response above the limit.
    #[error("The response of the function is larger than it may be")]
    ResponseTooLarge,
    /// Processor time used up.
    #[error("The function used up its processor time")]
    Cpu,
    /// Time of the request used up.
    #[error("The function did not answer in time")]
    Timeout,
}

/// Body of an answer to a failed request, in the shape of the control plane's errors.
#[derive(Serialize)]
struct FaultBody<'a> {
    code: u16,
    message: &'a str,
    error_code: &'static str,
}

impl RequestFault {
    /// Word for programs; also the name under which metrics count it.
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

    /// Status of the answer.
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

    /// Cause inside of the guest, for the function's log.
    #[must_use]
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Memory(detail) | Self::Trap(detail) => Some(detail),
            _ => None,
        }
    }

    /// Answer with `{code, message, error_code}`.
    #[must_use]
    pub fn answer(&self) -> Response<Bytes> {
        let message = self.to_string();
        let status = self.status();
        let body = FaultBody {
            code: status.as_u16(),
            message: &message,
            error_code: self.error_code(),
        };
        let body = serde_json::to_vec(&body).unwrap_or_default();
        let mut answer = Response::new(Bytes::from(body));
        *answer.status_mut() = status;
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if matches!(self, Self::Busy | Self::HostBusy) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        answer
    }
}
