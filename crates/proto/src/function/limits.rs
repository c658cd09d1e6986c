//! Limits of a function's requests and of a tenant's process.
//!
//! The daemon sends these limits to the process that runs the functions of one tenant (an API key).
//!
//! The *head* of a request or response is its first line and its headers, without the body. A
//! *slot* is address space for the memory of one instance, which requests use one after the other.
//! The *reset* cleans a slot after a request.

use serde::{Deserialize, Serialize};
use std::str::FromStr;
use std::time::Duration;

/// Maximum size of a module in bytes.
pub const MAX_MODULE_BYTES: u64 = 64 << 20;
/// Maximum size of a compiled module in bytes. Machine code is larger than its source.
pub const MAX_ARTIFACT_BYTES: u64 = 512 << 20;
/// Maximum memory of a function in MiB. Each memory in Wasmtime's pool may grow up to this size.
pub const MAX_FUNCTION_MEMORY_MIB: u32 = 512;
/// Maximum value for the limit of a request's or a response's body, in bytes.
pub const MAX_BODY_BYTES: u64 = 64 << 20;
/// Maximum value for the limits of the CPU time and of the duration of a request.
pub const MAX_REQUEST_TIME: Duration = Duration::from_secs(900);
/// Maximum value for the number of running requests, and of queued requests, of one function.
pub const MAX_CONCURRENCY: u32 = 1024;

/// Limits of one function. Defaults are in docs/functions.md.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FunctionLimits {
    /// Maximum linear memory of one request in MiB.
    pub memory_mib: u32,
    /// Maximum CPU time of one request in milliseconds.
    pub cpu_ms: u32,
    /// Maximum time from a request's head to the end of its response, in milliseconds.
    pub wall_ms: u32,
    /// Maximum size of a request's body in bytes.
    pub request_bytes: u64,
    /// Maximum time for receiving the body of a request, in milliseconds.
    pub request_body_ms: u32,
    /// Maximum size of a response's body in bytes.
    pub response_bytes: u64,
    /// Maximum number of requests that run concurrently.
    pub concurrency: u32,
    /// Maximum number of queued requests.
    pub queue: u32,
    /// Maximum time in the queue, in milliseconds.
    pub queue_ms: u32,
}

impl Default for FunctionLimits {
    fn default() -> Self {
        Self {
            memory_mib: 128,
            cpu_ms: 50,
            wall_ms: 30_000,
            request_bytes: 10 << 20,
            request_body_ms: 10_000,
            response_bytes: 10 << 20,
            concurrency: 64,
            queue: 256,
            queue_ms: 1000,
        }
    }
}

/// Error: a limit is out of range.
#[derive(Debug, thiserror::Error)]
#[error("the limit {name} must be between {min} and {max}, not {value}")]
pub struct LimitError {
    name: &'static str,
    min: u64,
    max: u64,
    value: u64,
}

impl FunctionLimits {
    /// Checks the range of each limit.
    pub fn check(&self) -> Result<(), LimitError> {
        let time = u64::try_from(MAX_REQUEST_TIME.as_millis()).unwrap_or(u64::MAX);
        let ranges = [
            (
                "memory_mib",
                1,
                MAX_FUNCTION_MEMORY_MIB.into(),
                self.memory_mib.into(),
            ),
            ("cpu_ms", 1, time, self.cpu_ms.into()),
            ("wall_ms", 1, time, self.wall_ms.into()),
            ("request_bytes", 0, MAX_BODY_BYTES, self.request_bytes),
            ("request_body_ms", 1, time, self.request_body_ms.into()),
            ("response_bytes", 0, MAX_BODY_BYTES, self.response_bytes),
            (
                "concurrency",
                1,
                MAX_CONCURRENCY.into(),
                self.concurrency.into(),
            ),
            ("queue", 0, MAX_CONCURRENCY.into(), self.queue.into()),
            ("queue_ms", 0, time, self.queue_ms.into()),
        ];
        let outside = ranges
            .into_iter()
            .find(|(_, min, max, value)| value < min || value > max);
        match outside {
            None => Ok(()),
            Some((name, min, max, value)) => Err(LimitError {
                name,
                min,
                max,
                value,
            }),
        }
    }

    /// Returns the maximum linear memory of one request in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        u64::from(self.memory_mib) << 20
    }

    /// Returns the maximum time from a request's head to the end of its response.
    #[must_use]
    pub fn wall_time(&self) -> Duration {
        Duration::from_millis(self.wall_ms.into())
    }

    /// Returns the maximum CPU time of one request.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        Duration::from_millis(self.cpu_ms.into())
    }
}

/// Method of cleaning a slot after a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotReset {
    /// All pages are set to zero or returned to the kernel.
    #[default]
    Strict,
    /// Pages that were written, as found by the kernel's page scan, are restored to their initial
    /// content and remain in memory.
    Fast,
}

/// Maximum number of bytes of a memory that the method `fast` retains between requests.
pub const MAX_RETAINED_BYTES: u64 = 4 << 20;
/// Number of memories in Wasmtime's pool per concurrent request. A component may use several.
pub const MEMORIES_PER_SLOT: u32 = 2;

impl SlotReset {
    /// Returns the name in commands and messages.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Fast => "fast",
        }
    }
}

/// Error: unknown method of cleaning slots.
#[derive(Debug, thiserror::Error)]
#[error("unknown reset method: use strict or fast")]
pub struct UnknownSlotReset;

impl FromStr for SlotReset {
    type Err = UnknownSlotReset;

    fn from_str(word: &str) -> Result<Self, UnknownSlotReset> {
        let all = [Self::Strict, Self::Fast];
        let found = all.into_iter().find(|reset| reset.word() == word);
        found.ok_or(UnknownSlotReset)
    }
}

/// Limits of a tenant's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TenantLimits {
    /// Maximum number of concurrent requests of all functions.
    pub slots: u32,
    /// Maximum linear memory and bodies of all requests together, in bytes.
    pub memory_bytes: u64,
    /// Maximum number of concurrent connections.
    pub connections: u32,
    /// Method of cleaning slots.
    pub reset: SlotReset,
}

impl TenantLimits {
    /// Returns the maximum number of bytes of memories that the process retains while no request
    /// uses them.
    #[must_use]
    pub fn retained_bytes(&self) -> u64 {
        match self.reset {
            SlotReset::Strict => 0,
            SlotReset::Fast => {
                u64::from(self.slots) * u64::from(MEMORIES_PER_SLOT) * MAX_RETAINED_BYTES
            }
        }
    }
}

impl Default for TenantLimits {
    fn default() -> Self {
        Self {
            slots: 256,
            memory_bytes: 2 << 30,
            connections: 4096,
            reset: SlotReset::Strict,
        }
    }
}
