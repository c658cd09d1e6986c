//! Errors of engine operations.

use crate::ExitReason;

/// Error of an engine operation.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    /// The operation failed. A guest that was running continues to run.
    #[error("{reason}")]
    Failed {
        /// Failed operation, its object, and a remedy.
        reason: String,
    },
    /// The guest has ended.
    #[error("{end}")]
    Ended {
        /// Reason why the guest ended.
        end: ExitReason,
    },
    /// The guest did not boot.
    #[error("{reason}")]
    Boot {
        /// Failed operation, its object, and a remedy.
        reason: String,
        /// Last console output of the guest.
        console: String,
    },
    /// The snapshot would exceed its limit. No data was written, and the guest continues to run.
    #[error("the snapshot needs {needed} bytes of disk space, but at most {most} are allowed")]
    SnapshotTooLarge {
        /// Upper bound of the snapshot's size, in bytes.
        needed: u64,
        /// Limit, in bytes.
        most: u64,
    },
    /// This host cannot restore the snapshot.
    #[error("{reason}")]
    Incompatible {
        /// Requirement of the snapshot that this host lacks, and a remedy.
        reason: String,
    },
    /// The engine does not support the operation.
    #[error("the engine {engine} cannot {what}{}", .instead.map(|i| format!("; use {i}")).unwrap_or_default())]
    Unsupported {
        /// Name of the engine.
        engine: &'static str,
        /// Operation.
        what: &'static str,
        /// Alternative to suggest to the user.
        instead: Option<&'static str>,
    },
}

impl EngineError {
    /// Creates a failure with the message of `error`.
    pub fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed {
            reason: error.to_string(),
        }
    }
}

/// Failure of a rollback in place ([`crate::Guest::roll_back`]).
#[derive(Debug, Clone, thiserror::Error)]
pub enum RollbackFailure {
    /// The guest is unchanged and continues to run.
    #[error("{reason}")]
    Refused {
        /// Reason why the guest cannot be rolled back in place.
        reason: String,
    },
    /// The guest is lost and must be stopped. Its sandbox can be restored from the snapshot.
    #[error(transparent)]
    Lost(EngineError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsupported_operation_is_refused_with_an_alternative() {
        let refused = |instead| EngineError::Unsupported {
            engine: "gvisor",
            what: "verify snapshots",
            instead,
        };
        assert_eq!(
            refused(None).to_string(),
            "the engine gvisor cannot verify snapshots"
        );
        assert_eq!(
            refused(Some("the engine microvm")).to_string(),
            "the engine gvisor cannot verify snapshots; use the engine microvm"
        );
    }
}
