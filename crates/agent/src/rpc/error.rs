//! Errors of RPCs, in the format that Connect clients expect.

use crate::body::ReplyBody;
use crate::users::UnknownUser;
use hyper::{Response, StatusCode, header};
use serde::Serialize;

/// Connect error code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RpcCode {
    /// The request is invalid.
    InvalidArgument,
    /// The token is missing or wrong, or the user is unknown.
    Unauthenticated,
    /// The caller is known, but has no permission.
    PermissionDenied,
    /// The process, path, command or watcher does not exist.
    NotFound,
    /// The directory already exists.
    AlreadyExists,
    /// A limit was exceeded: size, number or disk space.
    ResourceExhausted,
    /// The state does not permit the operation.
    FailedPrecondition,
    /// The method does not exist.
    Unimplemented,
    /// A process or stream exceeded its timeout, or a file system did not answer.
    DeadlineExceeded,
    /// An error of the agent or of the kernel.
    Internal,
}

impl RpcCode {
    /// Returns the HTTP status of unary errors.
    pub fn status(self) -> StatusCode {
        match self {
            Self::InvalidArgument | Self::FailedPrecondition => StatusCode::BAD_REQUEST,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::PermissionDenied => StatusCode::FORBIDDEN,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::AlreadyExists => StatusCode::CONFLICT,
            Self::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Self::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// A failed call.
#[derive(Debug, Clone, Serialize)]
pub struct RpcError {
    /// Error code.
    pub code: RpcCode,
    /// The failed operation and its object.
    pub message: String,
    /// Extension of the protocol: kind of the error for programs, for example
    /// `command_not_found`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
}

impl RpcError {
    /// Creates an error with a code and a message.
    pub fn new(code: RpcCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            reason: None,
        }
    }

    /// Sets the machine-readable extension.
    pub fn reason(mut self, reason: &'static str) -> Self {
        self.reason = Some(reason);
        self
    }

    /// Creates the error of a failed system call. The code depends on errno.
    pub fn io(what: &str, error: &std::io::Error) -> Self {
        let code = match error.raw_os_error() {
            Some(libc::ENOENT) => RpcCode::NotFound,
            Some(libc::EEXIST) => RpcCode::AlreadyExists,
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => RpcCode::PermissionDenied,
            Some(
                libc::ENOTDIR | libc::EISDIR | libc::EINVAL | libc::ENAMETOOLONG | libc::ELOOP,
            ) => RpcCode::InvalidArgument,
            Some(
                libc::ENOSPC
                | libc::EDQUOT
                | libc::EMFILE
                | libc::ENFILE
                | libc::EAGAIN
                | libc::ENOMEM,
            ) => RpcCode::ResourceExhausted,
            _ => RpcCode::Internal,
        };
        Self::new(code, format!("{what}: {error}"))
    }

    /// Returns the error as the response to a unary call.
    pub fn response(&self) -> Response<ReplyBody> {
        let mut response = Response::new(ReplyBody::whole(
            serde_json::to_vec(self).unwrap_or_default(),
        ));
        *response.status_mut() = self.code.status();
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            header::HeaderValue::from_static("application/json"),
        );
        if self.code == RpcCode::ResourceExhausted {
            // Clients retry a 429 automatically. The agent's 429 is not about rates.
            headers.insert("should-retry", header::HeaderValue::from_static("false"));
        }
        response
    }
}

impl From<UnknownUser> for RpcError {
    fn from(UnknownUser(name): UnknownUser) -> Self {
        Self::new(
            RpcCode::Unauthenticated,
            format!("invalid username: '{name}'"),
        )
    }
}
