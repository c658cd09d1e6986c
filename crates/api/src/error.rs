//! [`ApiError`]: error responses of the API, `{code, message, error_code}` as JSON for every
//! failure.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use jiffy_api_types::ErrorBody;
use jiffy_engine_api::EngineError;
use jiffy_sandbox_manager::{ErrorKind, OperationError, SandboxState};

/// Error code: resources of the host are exhausted, in contrast to the limits of a key.
pub(crate) const HOST_BUSY: &str = "host_busy";
/// Error code: a failure of the host.
pub(crate) const INTERNAL: &str = "internal";
/// Error code: a temporary failure of the snapshot store.
const STORE_UNAVAILABLE: &str = "store_unavailable";
/// Error code of a sandbox whose host is dead or does not answer.
pub(crate) const HOST_LOST: &str = "host_lost";
/// Response header that states whether a retry can succeed.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

/// Marks the response of a function. [`convert_error`] leaves marked responses unchanged.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FunctionAnswer;

/// Code of an error response, as an extension of the response, for the audit log.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ErrorCode(pub &'static str);

/// Cause of an internal error, as an extension of the response. Only for administrators, [`reveal`]
/// copies it to the body.
#[derive(Debug, Clone)]
pub(crate) struct Detail {
    pub message: String,
    pub error_code: &'static str,
}

/// An error response.
#[derive(Debug, Clone)]
pub struct ApiError {
    pub(crate) status: StatusCode,
    /// Code for programs. Stable, because clients match it.
    pub(crate) error_code: &'static str,
    /// Message for users.
    pub(crate) message: String,
    /// True if the same request may succeed later. `None` if unknown.
    retry: Option<bool>,
    /// Delay in seconds before a retry.
    retry_after: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(
        status: StatusCode,
        error_code: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self {
            status,
            error_code: listed(error_code),
            message: message.into(),
            retry: None,
            retry_after: None,
        }
    }

    /// Returns the status and the code for programs.
    pub fn status_and_code(&self) -> (u16, &'static str) {
        (self.status.as_u16(), self.error_code)
    }

    /// Returns the message for users.
    pub fn into_message(self) -> String {
        self.message
    }

    /// The request is invalid.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    /// The request uses a known option that this host does not support.
    pub(crate) fn unsupported_option(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "unsupported_option", message)
    }

    /// The request is a known call that this host does not support.
    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        // Permanent: the host will not support the call on a retry either.
        Self::new(StatusCode::NOT_IMPLEMENTED, "unsupported", message).permanent()
    }

    pub(crate) fn not_found(error_code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, error_code, message)
    }

    pub(crate) fn conflict(error_code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, error_code, message)
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", message)
    }

    /// The caller's key is read-only, and the call changes or grants something.
    pub(crate) fn read_only() -> Self {
        Self::forbidden(
            "the key is read-only (scope `read`): use a key with the scope `create` or `admin`",
        )
    }

    pub(crate) fn too_many(error_code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, error_code, message)
    }

    /// The disk budget of the key is exhausted.
    pub(crate) fn out_of_disk(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INSUFFICIENT_STORAGE, "max_disk", message).permanent()
    }

    /// This host has no contact with the other hosts of its fleet.
    pub(crate) fn fleet_unavailable(message: impl Into<String>) -> Self {
        // If the host that coordinates the fleet fails, another one takes over within 20 s: two of
        // these delays.
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "fleet_unavailable",
            message,
        )
        .after(10)
    }

    /// The host lacks free resources at present.
    pub(crate) fn host_busy(message: impl Into<String>) -> Self {
        // Resources usually become free when a sandbox terminates, which takes a while.
        Self::new(StatusCode::SERVICE_UNAVAILABLE, HOST_BUSY, message).after(30)
    }

    /// Returns whether the disk budget of the key is exhausted.
    pub(crate) fn is_out_of_disk(&self) -> bool {
        self.status == StatusCode::INSUFFICIENT_STORAGE
    }

    /// The store of the host does not respond.
    pub(crate) fn store_unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, STORE_UNAVAILABLE, message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, INTERNAL, message)
    }

    /// Returns whether only trusted callers are shown the message (see [`Self::body`]).
    fn is_internal(&self) -> bool {
        self.status == StatusCode::INTERNAL_SERVER_ERROR || self.error_code == STORE_UNAVAILABLE
    }

    /// Returns the body. Messages of internal errors name files of the host and are shown to
    /// `trusted` callers only.
    pub(crate) fn body(&self, trusted: bool) -> ErrorBody {
        ErrorBody {
            code: self.status.as_u16(),
            message: if trusted || !self.is_internal() {
                self.message.clone()
            } else if self.error_code == STORE_UNAVAILABLE {
                "the snapshot store is not available; see the log of the daemon for the cause"
                    .to_owned()
            } else {
                "internal error of the host; see the log of the daemon for the cause".to_owned()
            },
            error_code: Some(self.error_code.to_owned()),
        }
    }

    /// Marks the error as permanent: a retry of the same request fails again.
    pub(crate) fn permanent(mut self) -> Self {
        self.retry = Some(false);
        self
    }

    /// Marks the error as temporary: a retry may succeed after `seconds`.
    pub(crate) fn after(mut self, seconds: u64) -> Self {
        self.retry = Some(true);
        self.retry_after = Some(seconds);
        self
    }
}

impl From<OperationError> for ApiError {
    fn from(error: OperationError) -> Self {
        use OperationError as O;
        let message = error.to_string();
        // The order matters: specific errors precede the general kinds.
        match (&error, error.kind()) {
            (
                // The engine lacks the capability, so a retry is useless.
                O::Engine {
                    source: EngineError::Unsupported { .. },
                    ..
                },
                _,
            ) => Self::unsupported(message),
            (
                O::Engine {
                    source: EngineError::Incompatible { .. },
                    ..
                },
                _,
            ) => Self::conflict("snapshot_incompatible", message).permanent(),
            (O::Store { .. }, ErrorKind::Busy) => {
                let wait = error.retry_after().unwrap_or_default();
                let status = StatusCode::SERVICE_UNAVAILABLE;
                Self::new(status, STORE_UNAVAILABLE, message).after(wait.as_secs().max(1))
            }
            // The message omits the damaged object and its location on this host.
            (O::Store { id, .. }, ErrorKind::Conflict) => {
                let message = format!("snapshot {id} in the store is damaged; push it again");
                Self::conflict("snapshot_damaged", message).permanent()
            }
            (O::Unknown { what, .. }, _) => {
                let error_code = match *what {
                    "snapshot" => "snapshot_not_found",
                    _ => "sandbox_not_found",
                };
                Self::not_found(error_code, message)
            }
            (O::NoVolume(_), _) => Self::not_found("volume_not_found", message),
            (O::CaptureLost { .. }, _) => {
                let message = format!("the snapshot does not exist: {message}");
                Self::not_found("snapshot_not_found", message)
            }
            // The sandbox was killed after the lookup: for clients it does not exist.
            (O::State { id, state, .. }, _) if *state == SandboxState::Killed => {
                let message = format!("sandbox `{id}` does not exist: {message}");
                Self::not_found("sandbox_not_found", message)
            }
            // The head: the record in the store that decides which host runs the sandbox.
            (O::Head(_), ErrorKind::Unknown) => Self::not_found("sandbox_not_found", message),
            (O::Head(_), ErrorKind::Busy) => {
                let wait = error.retry_after().unwrap_or_default();
                let status = StatusCode::SERVICE_UNAVAILABLE;
                let code = match error {
                    O::Head(e) if e.is_host_lost() => HOST_LOST,
                    _ => STORE_UNAVAILABLE,
                };
                Self::new(status, code, message).after(wait.as_secs().max(1))
            }
            (O::NameTaken { .. }, _) => Self::conflict("name_taken", message),
            (O::NoEngine { .. }, _) => {
                let status = StatusCode::BAD_REQUEST;
                Self::new(status, "engine_unavailable", message).permanent()
            }
            (O::InUse { .. }, _) => Self::conflict("in_use", message),
            (O::IncompatibleSnapshot { .. }, _) => Self::conflict("wrong_snapshot", message),
            // The other errors by kind. An error with a code of its own precedes its kind.
            (_, ErrorKind::Unknown) => Self::not_found("not_found", message),
            (_, ErrorKind::Invalid) => Self::invalid(message),
            (_, ErrorKind::Conflict) => Self::conflict("wrong_state", message),
            (_, ErrorKind::TooLarge) => {
                Self::new(StatusCode::BAD_REQUEST, "too_large", message).permanent()
            }
            (O::NotStored { .. }, _) => {
                let wait = error.retry_after().unwrap_or_default();
                let status = StatusCode::SERVICE_UNAVAILABLE;
                Self::new(status, "store_unavailable", message).after(wait.as_secs().max(1))
            }
            (_, ErrorKind::Busy) => {
                let wait = error.retry_after().unwrap_or_default();
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "host_busy", message)
                    .after(wait.as_secs().max(1))
            }
            // The refusal has a code and a message of its own.
            (O::Quota(refusal), _) => refusal.clone().into(),
            (_, ErrorKind::Quota) => Self::too_many("quota", message).permanent(),
            (O::HostDisk { .. }, _) => {
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "host_disk", message).permanent()
            }
            (_, ErrorKind::DiskQuota) => Self::out_of_disk(message),
            (_, ErrorKind::Failed) => Self::internal(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let is_internal = self.is_internal();
        let mut response = (self.status, Json(self.body(false))).into_response();
        response.extensions_mut().insert(ErrorCode(self.error_code));
        let headers = response.headers_mut();
        if let Some(retry) = self.retry {
            let value = if retry { "true" } else { "false" };
            headers.insert(SHOULD_RETRY, HeaderValue::from_static(value));
        }
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        // This status requires the header (RFC 9110, 15.5.2).
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        if is_internal {
            tracing::error!(error = self.message, "responding with an internal error");
            response.extensions_mut().insert(Detail {
                message: self.message,
                error_code: self.error_code,
            });
        }
        response
    }
}

/// Replaces the message of an internal error by its cause. Must only be called for administrators
/// of this host.
pub(crate) fn reveal(mut response: Response) -> Response {
    let Some(detail) = response.extensions_mut().remove::<Detail>() else {
        return response;
    };
    let body = ErrorBody {
        code: response.status().as_u16(),
        message: detail.message,
        error_code: Some(detail.error_code.to_owned()),
    };
    // Only the headers about retries are copied below; `Json` sets the content type.
    let headers = response.headers().clone();
    // A new response, because the length of the body changes.
    let mut revealed = (response.status(), Json(body)).into_response();
    revealed
        .extensions_mut()
        .insert(ErrorCode(detail.error_code));
    for (name, value) in [header::RETRY_AFTER, SHOULD_RETRY]
        .into_iter()
        .filter_map(|name| headers.get(&name).map(|value| (name, value)))
    {
        revealed.headers_mut().insert(name, value.clone());
    }
    revealed
}

/// Converts error responses of the router (unknown path or method) to the form of this API.
pub(crate) async fn convert_error(response: Response) -> Response {
    let status = response.status();
    if response.extensions().get::<FunctionAnswer>().is_some() {
        return response;
    }
    // Errors of handlers already have the form of this API.
    let json = response
        .headers()
        .get(header::CONTENT_TYPE)
        .is_some_and(|t| t.as_bytes().starts_with(b"application/json"));
    if json || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    let (error_code, message) = match status {
        StatusCode::METHOD_NOT_ALLOWED => (
            "method_not_allowed",
            "the path does not support this method; the `Allow` header lists the supported methods",
        ),
        StatusCode::NOT_FOUND => (
            "no_such_call",
            "unknown path; `GET /openapi.json` describes all calls",
        ),
        StatusCode::BAD_REQUEST => ("invalid_request", "the path is not valid UTF-8"),
        _ => ("refused", status.canonical_reason().unwrap_or("refused")),
    };
    let mut converted = ApiError::new(status, error_code, message).into_response();
    // Status 405 requires the header (RFC 9110, 15.5.6).
    if let Some(allow) = response.headers().get(header::ALLOW) {
        converted.headers_mut().insert(header::ALLOW, allow.clone());
    }
    converted
}

/// Error codes of the API, in alphabetical order. `docs/troubleshooting.md` has a cause and a
/// remedy for each.
pub const ERROR_CODES: [&str; 84] = [
    "address_not_allowed",
    "already_paused",
    "already_running",
    "authentication_failures",
    "body_too_large",
    "build_not_found",
    "build_started",
    "content_differs",
    "creates_per_minute",
    "engine_unavailable",
    "fleet_unavailable",
    "forbidden",
    "function_disabled",
    "function_not_found",
    "functions_unavailable",
    "host_busy",
    "host_disk",
    "host_lost",
    "idempotency_key_reused",
    "in_use",
    "internal",
    "invalid_module",
    "invalid_request",
    "key_expired",
    "key_not_found",
    "key_over",
    "limit",
    "max_builds",
    "max_disk",
    "max_exchanges",
    "max_functions",
    "max_memory",
    "max_paused",
    "max_sandboxes",
    "max_secrets",
    "max_snapshots",
    "max_templates",
    "max_vcpus",
    "max_volumes",
    "max_webhooks",
    "method_not_allowed",
    "module_damaged",
    "module_not_found",
    "module_too_large",
    "name_taken",
    "no_such_call",
    "not_found",
    "not_running",
    "pause_failed",
    "port_closed",
    "quota",
    "refused",
    "request_too_large",
    "sandbox_broken",
    "sandbox_moved",
    "sandbox_not_found",
    "sandbox_snapshot_guest_agent_unresponsive",
    "secret_not_found",
    "snapshot_damaged",
    "snapshot_incompatible",
    "snapshot_not_found",
    "store_unavailable",
    "template_not_found",
    "too_large",
    "too_many_uploads",
    "too_many_waiting_builds",
    "unauthenticated",
    "unavailable",
    "unsupported",
    "unsupported_media_type",
    "unsupported_option",
    "upgrade_required",
    "upload_not_found",
    "upload_too_large",
    "version_not_found",
    "volume_full",
    "volume_mounted",
    "volume_not_found",
    "volume_path_exists",
    "volume_path_not_found",
    "webhook_not_found",
    "wrong_content",
    "wrong_snapshot",
    "wrong_state",
];

/// Returns `code`. Panics in builds with debug assertions if [`ERROR_CODES`] lacks the code, so
/// that tests find a code without documentation.
fn listed(code: &'static str) -> &'static str {
    // Every listed code is documented: tests compare the list with `docs/troubleshooting.md`.
    debug_assert!(
        ERROR_CODES.binary_search(&code).is_ok(),
        "ERROR_CODES lacks {code}"
    );
    code
}
