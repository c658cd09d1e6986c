//! Functions: messages between the daemon and `jiffy-functions serve`, the process that executes
//! the functions of one tenant. Each message is one packet, and requests are answered in order.
//!
//! The *head* of a request or response is its first line and its headers, without the body. A
//! *direct* connection is passed from the daemon to the process of the tenant, which then serves
//! its requests without the gateway. The *broker* is the process that opens outgoing connections of
//! a tenant's functions. The *world* of a module is its interface ([`World`]).

mod compile_limits;
mod direct;
mod egress;
mod limits;

pub use compile_limits::CompileLimits;
pub use direct::{DirectAccess, DirectActivity, DirectClosed, DirectConnection, DirectEvent};
pub use egress::{EgressFailure, EgressRequest, EgressResponse};
pub use limits::{
    FunctionLimits, LimitError, MAX_ARTIFACT_BYTES, MAX_BODY_BYTES, MAX_CONCURRENCY,
    MAX_FUNCTION_MEMORY_MIB, MAX_MODULE_BYTES, MAX_REQUEST_TIME, MAX_RETAINED_BYTES,
    MEMORIES_PER_SLOT, SlotReset, TenantLimits, UnknownSlotReset,
};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Descriptor of the listening control socket in a tenant's process.
pub const CONTROL_FD: i32 = 3;
/// Descriptor of the listener for HTTP requests in a tenant's process.
pub const LISTENER_FD: i32 = 4;
/// Header with the name of the function for a request. The gateway always replaces the client's
/// value.
pub const FUNCTION_HEADER: &str = "jiffy-function";
/// Maximum number of functions of a tenant.
pub const MAX_FUNCTIONS: usize = 1000;

/// Request to a tenant's process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum ControlRequest {
    /// Loads the compiled file whose descriptor is sent with the message, and starts to serve it.
    Load {
        /// Name of the function.
        function: String,
        /// Digest of the file in hexadecimal digits.
        digest: String,
        /// Settings from now on.
        settings: LoadSettings,
    },
    /// Makes outgoing connections through the broker whose socket is sent with the message.
    /// Replaces an earlier broker.
    Egress,
    /// Serves the connections that arrive on the socket that is sent with the message. When an
    /// earlier socket is closed, its connections are closed after the requests in flight.
    Direct,
    /// Sets the response of a function to direct requests.
    Publish {
        /// Name of the function.
        function: String,
        /// Response from now on.
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
    /// Requests the counters of a function.
    Metrics {
        /// Name of the function.
        function: String,
    },
    /// Requests entries of the log.
    Logs {
        /// Name of the function.
        function: String,
        /// Number of the first entry.
        sequence: u64,
    },
}

/// Settings of a version of a function. Each deployment creates a version.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoadSettings {
    /// Limits.
    pub limits: FunctionLimits,
    /// Environment variables of its guests. Only for `wasi:http/proxy`.
    pub env: BTreeMap<String, String>,
    /// Hosts to which its guests may send requests.
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

/// Response of a tenant's process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum ControlResponse {
    /// First message of each connection: the process is confined and serves requests.
    Ready {
        /// Fingerprint of the Wasmtime engine of the process (version and settings) in hexadecimal
        /// digits. Compiled files of another fingerprint cannot be loaded.
        engine: String,
    },
    /// The request was executed.
    Done,
    /// The version was loaded and serves requests from now on.
    Loaded {
        /// World of the version.
        world: World,
    },
    /// Counters of a function.
    Metrics {
        /// Current values.
        metrics: MetricsSnapshot,
    },
    /// Entries of the log.
    Logs {
        /// Entries, oldest first.
        entries: Vec<LogEntry>,
    },
    /// The request was rejected.
    Refused {
        /// Reason as text.
        message: String,
    },
}

/// Interface of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum World {
    /// Core module with Jiffy's ABI.
    #[serde(rename = "jiffy-core/1")]
    Core,
    /// Component that exports `wasi:http/incoming-handler@0.2`.
    #[serde(rename = "wasi:http/proxy@0.2")]
    Http,
}

/// Magic number of WebAssembly.
const WASM_MAGIC: &[u8] = b"\0asm";
/// Version and layer of a core module and of a component.
const CORE_VERSION: &[u8] = &[1, 0, 0, 0];
const COMPONENT_VERSION: &[u8] = &[13, 0, 1, 0];

impl World {
    /// Detects the interface from the first bytes of a file. Returns `None` if the file is not
    /// binary WebAssembly.
    #[must_use]
    pub fn detect(module: &[u8]) -> Option<Self> {
        match module.strip_prefix(WASM_MAGIC)?.get(..4)? {
            CORE_VERSION => Some(Self::Core),
            COMPONENT_VERSION => Some(Self::Http),
            _ => None,
        }
    }

    /// Returns the name in responses.
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
    /// Failure of a request, reported by the process.
    Fault,
}

/// Entry of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    /// Number of the entry. Each entry has the next higher number.
    pub sequence: u64,
    /// Time in milliseconds since 1970.
    pub unix_ms: u64,
    /// Id of the request that the entry belongs to.
    pub request_id: String,
    /// Source.
    pub stream: LogStream,
    /// Text. Bytes that are not UTF-8 are replaced.
    pub text: String,
}

/// Counters of a function's requests at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetricsSnapshot {
    /// Number of completed requests.
    pub requests: u64,
    /// Number of requests in flight.
    pub running: u64,
    /// CPU time of all requests in microseconds.
    pub cpu_us: u64,
    /// Sum of latencies, from admission to the response's head, in microseconds.
    pub latency_us: u64,
    /// Requests per bucket of [`LATENCY_BUCKETS_US`].
    pub latency_buckets: Vec<u64>,
    /// Number of failures by error code.
    pub faults: BTreeMap<String, u64>,
}

/// Upper bounds of the histogram's buckets in microseconds. The last bucket has no bound.
pub const LATENCY_BUCKETS_US: [u64; 14] = [
    50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 500_000, 2_500_000,
    10_000_000,
];

impl MetricsSnapshot {
    /// Adds the counters of another process of the same function.
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
    fn the_world_is_detected_from_the_first_bytes() {
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
