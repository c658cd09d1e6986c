//! Errors of reads and conditional writes. They distinguish writes that were certainly not executed
//! from writes with an unknown outcome.

use super::{MAX_RECORD_BYTES, RecordKey};

/// Failure of a call of [`Records`](super::Records).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The back end is unreachable or keeps failing. The record was not changed.
    #[error("cannot access record {record}: {reason}; try again when the records are available")]
    Unavailable {
        /// Record.
        record: RecordKey,
        /// Last failure.
        reason: String,
    },
    /// A write may have been executed: the back end did not confirm or reject it.
    #[error(
        "cannot determine whether record {record} was written: {reason}; repeat the write until \
         its outcome is known"
    )]
    Unknown {
        /// Record.
        record: RecordKey,
        /// Last failure.
        reason: String,
    },
    /// The record exceeds the maximum size. It was not written.
    #[error("record {record} has {bytes} bytes, more than the limit of {MAX_RECORD_BYTES}")]
    TooLarge {
        /// Record.
        record: RecordKey,
        /// Size of the record in bytes.
        bytes: usize,
    },
    /// The back end has no space. The record was not changed.
    #[error("the records are full: {reason}; increase their quota or remove old data")]
    Full {
        /// Response of the back end.
        reason: String,
    },
    /// The back end denies the request.
    #[error("access to the records was denied: {reason}; check the credentials and permissions")]
    Denied {
        /// Response of the back end.
        reason: String,
    },
    /// A record or a response has invalid or unauthentic content.
    #[error("record {record} is damaged: {reason}")]
    Damaged {
        /// Record.
        record: RecordKey,
        /// Defect.
        reason: String,
    },
    /// The records are older than this process has seen before.
    #[error(
        "record {record} is older than this host has seen: {reason}; if the records were restored \
         from a backup, run `jiffy fleet accept-restore`"
    )]
    Regressed {
        /// Record.
        record: RecordKey,
        /// Difference.
        reason: String,
    },
    /// The back end does not implement conditional writes correctly, or is configured wrongly.
    #[error("the records cannot be used: {0}")]
    Unsuitable(String),
    /// The text is not a key of a record.
    #[error("{0:?} is not a key of a record")]
    Key(String),
    /// The URL of the back end is invalid.
    #[error("{url:?} is not a URL of records: {reason}; use etcd://HOST:PORT,HOST:PORT[/PREFIX]")]
    Url {
        /// URL.
        url: String,
        /// Defect.
        reason: String,
    },
}

impl RecordError {
    /// Returns whether the same call may succeed later without any change.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Unknown { .. })
    }
}
