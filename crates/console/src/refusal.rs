//! [`Refusal`]: the response to a rejected request of a browser, in the form of the API's errors.

use crate::checks::append_cookies;
use crate::session_store::StoreError;
use axum::Json;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use jiffy_agent_client::{ClientError, RpcCode};
use jiffy_api::{ApiError, PortRefusal};
use jiffy_engine_api::IdentityError;
use serde_json::json;
use std::fmt::Display;

const TWO_COOKIES: &str = "the browser sent two session cookies, of which another page set one: \
    both were deleted; sign in again";

/// A rejected request.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Error of the API.
    Api(ApiError),
    /// Error of the console: status, error code and message.
    Console(StatusCode, &'static str, String),
    /// Request with two session cookies, and the headers that delete them.
    TwoCookies(Vec<HeaderValue>),
}

impl Refusal {
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self::Console(status, code, message.into())
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", message)
    }

    /// Logs `cause`, which may name files of the host. Callers receive a general message.
    pub fn internal(cause: impl Display) -> Self {
        tracing::error!(error = %cause, "internal error of the console");
        let message = "internal error of the host; see the log of the daemon for the cause";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }

    /// The request has no session, or its session has ended.
    pub fn signed_out() -> Self {
        let message = "the session has ended: sign in again";
        Self::new(StatusCode::UNAUTHORIZED, "signed_out", message)
    }

    /// Returns the status and the error code.
    pub fn status_and_code(&self) -> (u16, &'static str) {
        match self {
            Self::Console(status, code, _) => (status.as_u16(), code),
            Self::Api(error) => error.status_and_code(),
            Self::TwoCookies(_) => (StatusCode::BAD_REQUEST.as_u16(), "two_cookies"),
        }
    }

    /// Returns the message for users.
    pub fn message(self) -> String {
        match self {
            Self::Console(_, _, message) => message,
            Self::Api(error) => error.into_message(),
            Self::TwoCookies(_) => TWO_COOKIES.to_owned(),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        match self {
            Self::Api(error) => error.into_response(),
            Self::TwoCookies(cookies) => {
                let refusal = Self::new(StatusCode::BAD_REQUEST, "two_cookies", TWO_COOKIES);
                let mut response = refusal.into_response();
                append_cookies(&mut response, cookies);
                response
            }
            Self::Console(status, code, message) => {
                let body = json!({
                    "code": status.as_u16(), "message": message, "error_code": code,
                });
                (status, Json(body)).into_response()
            }
        }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Self::internal(error)
    }
}

impl From<IdentityError> for Refusal {
    fn from(error: IdentityError) -> Self {
        Self::internal(error)
    }
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

impl From<PortRefusal> for Refusal {
    fn from(refusal: PortRefusal) -> Self {
        Self::Api(refusal.into())
    }
}

impl From<ClientError> for Refusal {
    /// Converts an error of a guest's agent. The text of the error comes from the guest.
    fn from(error: ClientError) -> Self {
        let (status, code) = match &error {
            error if error.is_not_found() => (StatusCode::NOT_FOUND, "file_not_found"),
            ClientError::Rpc { code, .. } => match code {
                RpcCode::PermissionDenied => (StatusCode::FORBIDDEN, "permission_denied"),
                RpcCode::AlreadyExists => (StatusCode::CONFLICT, "already_exists"),
                RpcCode::InvalidArgument => (StatusCode::BAD_REQUEST, "invalid_request"),
                _ => (StatusCode::BAD_GATEWAY, "guest_error"),
            },
            _ => (StatusCode::BAD_GATEWAY, "guest_error"),
        };
        Self::new(status, code, error.to_string())
    }
}
