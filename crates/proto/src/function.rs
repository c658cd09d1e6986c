//! Functions: messages between the daemon and a tenant's process (`jiffy-functions serve`), one
//! packet each, answered in order.

mod compile_limits;
mod direct;
mod egress;
mod limits;

pub use compile_limits::CompileLimits;
pub use direct::{DirectAccess, DirectActivity, DirectClosed, DirectConnection, DirectEvent};
pub use egress::{EgressFailure, EgressRequest, EgressResponse};
pub use limits::{
    FunctionLimits, LimitError, MAX_ARTIFACT_BYTES, MAX_BODY_BYTES, MAX_CONCURRENCY,
    MAX_FUNCTION_MEMORY_MIB, MAX_KEPT_BYTES, MAX_MODULE_BYTES, MAX_REQUEST_TIME, MEMORIES_PER_SLOT,
    SlotReset, TenantLimits, UnknownSlotReset,
};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Descriptor of the listening control socket in a tenant's process.
pub const CONTROL_FD: i32 = 3;
/// Descriptor of its listener of requests.
pub const LISTENER_FD: i32 = 4;
/// Header that names the function of a request. The gateway sets it, whatever a client sent.
pub const FUNCTION_HEADER: &str = "jiffy-function";
/// Functions that a tenant may have.
pub const MAX_FUNCTIONS: usize = 1000;

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
        /// Settings from now on.
        settings: LoadSettings,
    },
    /// Sends outgoing connections through the broker whose socket comes with the message, and no
    /// longer through an earlier one.
    Egress,
    /// Serves the connections that come over the socket that comes with the message. The end of an
    /// earlier one ends its connections, each after the request under way.
    Direct,
    /// Sets how a function answers direct requests.
    Publish {
        /// Name of the function.
        function: String,
        /// Its answer from now on.
        access: DirectAccess,
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

/// Settings of a version that is loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoadSettings {
    /// Limits.
    pub limits: FunctionLimits,
    /// Environment variables of its guests (`wasi:http/proxy` only).
    pub env: BTreeMap<String, String>,
    /// Hosts that its guests may send requests to.
    pub allow: Vec<String>,
}

impl From<FunctionLimits> for LoadSettings {
    fn from(limits: FunctionLimits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }
}

/// Answer of a tenant's process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum ControlResponse {
    /// First message of each connection: the process is confined and serves.
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

/// Interface of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum World {
    /// Core module with Jiffy's own ABI.
    #[serde(rename = "jiffy-core/1")]
    Core,
    /// Component that exports `wasi:http/incoming-handler@0.2`.
    #[serde(rename = "wasi:http/proxy@0.2")]
    Http,
}

/// Magic number of WebAssembly.
const WASM_MAGIC: &[u8] = b"\0asm";
/// Version and layer of a core module, then of a component.
const CORE_VERSION: &[u8] = &[1, 0, 0, 0];
const COMPONENT_VERSION: &[u8] = &[13, 0, 1, 0];

impl World {
    /// Detects the world from the first bytes of a file; none if it is no WebAssembly in binary
    /// form.
    #[must_use]
    pub fn detect(module: &[u8]) -> Option<Self> {
        match module.strip_prefix(WASM_MAGIC)?.get(..4)? {
            CORE_VERSION => Some(Self::Core),
            COMPONENT_VERSION => Some(Self::Http),
            _ => None,
        }
    }

    /// Name in answers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Core => "jiffy-core/1",
            Self::Http => "wasi:http/proxy@0.2",
        }
    }
}

/// Source of an entry of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogStream {
    /// Standard output of the guest.
    Stdout,
    /// Standard error of the guest.
    Stderr,
    /// Failure of a request, told by the process.
    Fault,
}

/// Entry of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    /// Number of the entry; each is one more than the one before.
    pub sequence: u64,
    /// Milliseconds since 1970.
    pub unix_ms: u64,
    /// Request that it belongs to.
    pub request_id: String,
    /// Source.
    pub stream: LogStream,
    /// Text, with bytes that are not UTF-8 replaced.
    pub text: String,
}

/// Counts of a function's requests at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetricsSnapshot {
    /// Requests that have ended.
    pub requests: u64,
    /// Requests that run.
    pub running: u64,
    /// Processor time of all in microseconds.
    pub cpu_us: u64,
    /// Sum of latencies, from admission to the response's head, in microseconds.
    pub latency_us: u64,
    /// Requests per bucket of [`LATENCY_BUCKETS_US`].
    pub latency_buckets: Vec<u64>,
    /// Failures by error code.
    pub faults: BTreeMap<String, u64>,
}

/// Upper bounds of the histogram's buckets in microseconds; a last bucket has no bound.
pub const LATENCY_BUCKETS_US: [u64; 14] = [
    50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 500_000, 2_500_000,
    10_000_000,
];

impl MetricsSnapshot {
    /// Adds the counts of another process of the same function.
    pub fn add(&mut self, other: &Self) {
        self.requests = self.requests.saturating_add(other.requests);
        self.running = self.running.saturating_add(other.running);
        self.cpu_us = self.cpu_us.saturating_add(other.cpu_us);
        self.latency_us = self.latency_us.saturating_add(other.latency_us);
        self.latency_buckets.resize(LATENCY_BUCKETS_US.len() + 1, 0);
        for (sum, more) in self.latency_buckets.iter_mut().zip(&other.latency_buckets) {
            *sum = sum.saturating_add(*more);
        }
        for (code, count) in &other.faults {
            let sum = self.faults.entry(code.clone()).or_default();
            *sum = sum.saturating_add(*count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_world_is_told_from_the_first_bytes() {
        assert_eq!(World::detect(b"\0asm\x01\0\0\0"), Some(World::Core));
        assert_eq!(World::detect(b"\0asm\x0d\0\x01\0"), Some(World::Http));
        for other in [&b""[..], b"\0asm", b"\0asm\x02\0\0\0", b"#!/bin/sh"] {
            assert_eq!(World::detect(other), None);
        }
    }

    #[test]
    fn counts_of_processes_add_up() {
        let one = MetricsSnapshot {
            requests: 2,
            latency_buckets: vec![1; LATENCY_BUCKETS_US.len() + 1],
            faults: BTreeMap::from([("function_cpu".to_owned(), 1)]),
            ..MetricsSnapshot::default()
        };
        let mut sum = MetricsSnapshot::default();
        sum.add(&one);
        sum.add(&one);
        assert_eq!((sum.requests, sum.faults["function_cpu"]), (4, 2));
        assert_eq!(sum.latency_buckets, [2; LATENCY_BUCKETS_US.len() + 1]);
    }
}
