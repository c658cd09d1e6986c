//! Errors of calls on worker threads, for example because a file system does not answer.

use crate::rest::error::RestError;
use crate::rpc::{RpcCode, RpcError};
use hyper::StatusCode;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Machine-readable `reason` of errors about a file system that does not answer.
pub const REASON: &str = "file_system_not_responding";

/// Error of a call that returned no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallError {
    /// The file system did not answer in time. The call remains stuck.
    NoAnswer {
        /// Operation and its object.
        what: String,
        /// Time without progress.
        patience: Duration,
    },
    /// Earlier calls on the same file system are stuck.
    Unresponsive {
        /// Mount point of the file system, or the accessed path if it is on the root file system.
        path: PathBuf,
    },
    /// The number of stuck calls has reached the maximum number of threads for this class of calls.
    Exhausted {
        /// Operation and its object.
        what: String,
        /// Number of stuck calls.
        stuck: usize,
    },
    /// Too many calls are in progress.
    Busy {
        /// Operation and its object.
        what: String,
    },
    /// The call was aborted by an internal error.
    Failed {
        /// Operation and its object.
        what: String,
    },
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const ADVICE: &str = "unmount that file system, or stop the process that serves it";
        match self {
            Self::NoAnswer { what, patience } => write!(
                f,
                "{what}: the file system did not answer within {} s; {ADVICE}",
                patience.as_secs()
            ),
            Self::Unresponsive { path } => write!(
                f,
                "cannot access '{}': the file system has not answered earlier calls; {ADVICE}",
                path.display()
            ),
            Self::Exhausted { what, stuck } => write!(
                f,
                "{what}: {stuck} earlier calls wait for a file system that does not answer, which \
                 is the limit; {ADVICE}"
            ),
            Self::Busy { what } => write!(
                f,
                "{what}: too many file system calls are in progress in this sandbox; try again later"
            ),
            Self::Failed { what } => write!(f, "{what}: internal error of the agent"),
        }
    }
}

impl std::error::Error for CallError {}

impl From<CallError> for RpcError {
    fn from(error: CallError) -> Self {
        let message = error.to_string();
        match error {
            CallError::NoAnswer { .. } | CallError::Unresponsive { .. } => {
                Self::new(RpcCode::DeadlineExceeded, message).reason(REASON)
            }
            CallError::Exhausted { .. } => {
                Self::new(RpcCode::ResourceExhausted, message).reason(REASON)
            }
            CallError::Busy { .. } => Self::new(RpcCode::ResourceExhausted, message),
            CallError::Failed { .. } => Self::new(RpcCode::Internal, message),
        }
    }
}

impl From<CallError> for RestError {
    fn from(error: CallError) -> Self {
        let status = match error {
            CallError::NoAnswer { .. } | CallError::Unresponsive { .. } => {
                StatusCode::GATEWAY_TIMEOUT
            }
            CallError::Exhausted { .. } | CallError::Busy { .. } => StatusCode::SERVICE_UNAVAILABLE,
            CallError::Failed { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let is_stuck = !matches!(error, CallError::Busy { .. } | CallError::Failed { .. });
        let rest = Self::new(status, error.to_string());
        if is_stuck { rest.reason(REASON) } else { rest }
    }
}

impl From<CallError> for std::io::Error {
    fn from(error: CallError) -> Self {
        Self::new(std::io::ErrorKind::TimedOut, error)
    }
}
