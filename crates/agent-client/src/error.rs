//! [`ClientError`]: errors of calls to an agent.

use serde::Deserialize;

/// Error code of the Connect protocol, with which the agent is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the protocol defines the names")]
pub enum RpcCode {
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

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection to the agent could be established.
    #[error("cannot connect to the agent in the sandbox: {0}")]
    Connect(#[from] std::io::Error),
    /// The connection broke, or the peer does not speak HTTP.
    #[error("the connection to the agent broke: {0}")]
    Http(#[from] hyper::Error),
    /// The command does not exist in the sandbox. The exit status of a shell would be 127.
    #[error("{0}")]
    CommandNotFound(String),
    /// The command cannot be executed. The exit status of a shell would be 126.
    #[error("{0}")]
    CommandNotExecutable(String),
    /// A file system of the sandbox does not answer. Calls that do not need it continue to work.
    #[error("{0}")]
    FileSystemNotResponding(String),
    /// The agent rejected a call.
    #[error("{message}")]
    Rpc {
        /// Error code.
        code: RpcCode,
        /// The agent's message.
        message: String,
    },
    /// An HTTP endpoint of the agent (files, archives, health, metrics) responded with an error, or
    /// a gateway responded in the agent's place.
    #[error("{message}")]
    Status {
        /// HTTP status.
        status: u16,
        /// The agent's message.
        message: String,
    },
    /// The agent's response violates the protocol.
    #[error("the agent violated the protocol: {0}")]
    Protocol(String),
    /// The response is longer than the caller's limit.
    #[error("the response is longer than {limit} bytes")]
    TooLarge {
        /// Limit in bytes.
        limit: usize,
    },
}

impl ClientError {
    /// Returns whether the object of the call does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(
            self,
            Self::Rpc {
                code: RpcCode::NotFound,
                ..
            } | Self::Status { status: 404, .. }
                | Self::CommandNotFound(_)
        )
    }
}

/// Maximum length of a guest's error text in characters.
const MAX_ERROR_CHARS: usize = 4 * 1024;

/// Error in the agent's JSON.
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
        // The guest chose this text, which may end up in logs and terminals.
        let message: String = wire.message.chars().take(MAX_ERROR_CHARS).collect();
        match (wire.reason.as_deref(), wire.code) {
            (Some("command_not_found"), _) => Self::CommandNotFound(message),
            (Some("command_not_executable"), _) => Self::CommandNotExecutable(message),
            (Some("file_system_not_responding"), _) => Self::FileSystemNotResponding(message),
            // HTTP endpoints send a numeric status, and Connect calls send a code in words.
            (_, serde_json::Value::Number(n)) => Self::Status {
                // A number that is no status counts as an internal error of the agent.
                status: n.as_u64().and_then(|n| n.try_into().ok()).unwrap_or(500),
                message,
            },
            (_, code) => Self::Rpc {
                code: serde_json::from_value(code).unwrap_or(RpcCode::Unknown),
                message,
            },
        }
    }
}
