//! Control messages between the daemon and a tenant's process, one packet each, answered in order.

use crate::limits::FunctionLimits;
use crate::logs::LogEntry;
use crate::metrics::MetricsSnapshot;
use crate::world::World;
use serde::{Deserialize, Serialize};

/// Descriptor of the control socket in a tenant's process.
pub const CONTROL_FD: i32 = 3;
/// Descriptor of its listener.
pub const LISTENER_FD: i32 = 4;

/// Order to a tenant's process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum ControlRequest {
    /// Loads the compiled file whose descriptor comes with the message, and lets it answer.
    Load {
        /// Name of the function.
        function: String,
        /// Digest of the file in hexadecimal digits.
        digest: String,
        /// Limits from now on.
        limits: FunctionLimits,
    },
    /// Replaces limits.
    Limit {
        /// Name of the function.
        function: String,
        /// Limits from now on.
        limits: FunctionLimits,
    },
    /// Enables or disables a function.
    Enable {
        /// Name of the function.
        function: String,
        /// True to enable.
        enabled: bool,
    },
    /// Removes a function.
    Remove {
        /// Name of the function.
        function: String,
    },
    /// Asks for counts.
    Metrics {
        /// Name of the function.
        function: String,
    },
    /// Asks for entries of the log.
    Logs {
        /// Name of the function.
        function: String,
        /// First entry's number.
        sequence: u64,
    },
}

/// Answer of a tenant's process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum ControlResponse {
    /// First message: the process is confined and serves.
    Ready {
        /// Fingerprint of its engine in hexadecimal digits.
        engine: String,
    },
    /// Done.
    Done,
    /// The version answers from now on.
    Loaded {
        /// Its world.
        world: World,
    },
    /// Counts.
    Metrics {
        /// Counts at this moment.
        metrics: MetricsSnapshot,
    },
    /// Entries of the log.
    Logs {
        /// Entries, oldest first.
        entries: Vec<LogEntry>,
    },
    /// Not done.
    Refused {
        /// Reason, for people.
        message: String,
    },
}
