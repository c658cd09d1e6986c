//! What can go wrong between host and agent.

use serde::Deserialize;

/// Connect error code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are the protocol's")]
pub enum Code {
    Canceled,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
    #[serde(other)]
    Unknown,
}

/// A failed call.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection to the agent.
    #[error("cannot connect to the agent in the sandbox: {0}")]
    Connect(#[from] std::io::Error),
    /// The connection broke or spoke no HTTP.
    #[error("the connection to the agent broke: {0}")]
    Http(#[from] hyper::Error),
    /// The command does not exist in the sandbox; a shell would exit with 127.
    #[error("{0}")]
    CommandNotFound(String),
    /// The command exists and cannot be executed; a shell would exit with 126.
    #[error("{0}")]
    CommandNotExecutable(String),
    /// The agent refused a call.
    #[error("{message}")]
    Rpc {
        /// What kind.
        code: Code,
        /// The agent's words.
        message: String,
    },
    /// The agent answered a file request with an error.
    #[error("{message}")]
    Status {
        /// HTTP status.
        status: u16,
        /// The agent's words.
        message: String,
    },
    /// The agent's answer is not what the protocol allows.
    #[error("the agent broke the protocol: {0}")]
    Protocol(String),
    /// The answer is longer than the caller allowed.
    #[error("the answer is longer than {limit} bytes")]
    TooLarge {
        /// Bytes allowed.
        limit: usize,
    },
}

impl ClientError {
    /// Whether the thing asked for does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(
            self,
            Self::Rpc {
                code: Code::NotFound,
                ..
            } | Self::Status { status: 404, .. }
                | Self::CommandNotFound(_)
        )
    }
}

/// Longest error text that is kept of what a guest says.
const MAX_TEXT: usize = 4 * 1024;

/// An error as the agent writes it.
#[derive(Debug, Deserialize)]
pub(crate) struct WireError {
    code: serde_json::Value,
    #[serde(default)]
    message: String,
    #[serde(default)]
    reason: Option<String>,
}

impl From<WireError> for ClientError {
    fn from(wire: WireError) -> Self {
        let message: String = wire.message.chars().take(MAX_TEXT).collect();
        match (wire.reason.as_deref(), wire.code) {
            (Some("command_not_found"), _) => Self::CommandNotFound(message),
            (Some("command_not_executable"), _) => Self::CommandNotExecutable(message),
            (_, serde_json::Value::Number(n)) => Self::Status {
                status: n.as_u64().and_then(|n| n.try_into().ok()).unwrap_or(500),
                message,
            },
            (_, code) => Self::Rpc {
                code: serde_json::from_value(code).unwrap_or(Code::Unknown),
                message,
            },
        }
    }
}
