//! [`RestError`]: errors of plain HTTP requests: `{"code": <status>, "message": <text>}`, with an
//! optional `"reason"` for programs.

use crate::body::ReplyBody;
use crate::rpc::RpcError;
use crate::users::UnknownUser;
use hyper::{Response, StatusCode};
use std::io;

/// A failed call.
#[derive(Debug, Clone)]
pub struct RestError {
    /// HTTP status.
    pub status: StatusCode,
    /// The failed operation and its object.
    pub message: String,
    /// Kind of the error, for programs.
    pub reason: Option<&'static str>,
}

impl RestError {
    /// Creates an error with a status and a message.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            reason: None,
        }
    }

    /// Sets the machine-readable kind.
    pub fn reason(mut self, reason: &'static str) -> Self {
        self.reason = Some(reason);
        self
    }

    /// Creates the error for an invalid request.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// Creates the error of a failed system call. The status depends on errno.
    pub fn io(what: &str, error: &io::Error) -> Self {
        let status = match error.raw_os_error() {
            Some(libc::ENOENT) => StatusCode::NOT_FOUND,
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => StatusCode::FORBIDDEN,
            Some(libc::ENOSPC | libc::EDQUOT) => StatusCode::INSUFFICIENT_STORAGE,
            Some(
                libc::EISDIR | libc::ENOTDIR | libc::EINVAL | libc::ENAMETOOLONG | libc::ELOOP,
            ) => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, format!("{what}: {error}"))
    }

    /// Returns the error as a response.
    pub fn response(&self) -> Response<ReplyBody> {
        let mut body = serde_json::json!({
            "code": self.status.as_u16(),
            "message": self.message,
        });
        if let Some(reason) = self.reason {
            body["reason"] = reason.into();
        }
        let mut response = crate::body::json(&body);
        *response.status_mut() = self.status;
        response
    }
}

impl From<RpcError> for RestError {
    fn from(e: RpcError) -> Self {
        let status = match e.code {
            // In REST handlers, this code means that the body of a request exceeds its limit.
            crate::rpc::RpcCode::ResourceExhausted => StatusCode::PAYLOAD_TOO_LARGE,
            code => code.status(),
        };
        Self {
            reason: e.reason,
            ..Self::new(status, e.message)
        }
    }
}

impl From<UnknownUser> for RestError {
    fn from(error: UnknownUser) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, error.to_string())
    }
}
