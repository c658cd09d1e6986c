//! Boot mode of a sandbox, and the duration of each phase.

use serde::{Deserialize, Serialize};

/// Origin of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BootMode {
    /// Booted from its kernel.
    Cold,
    /// Restored from a snapshot: its template's, its own or a relative's. `kernel_us` is then the
    /// time from the first instruction to the agent's greeting.
    Snapshot,
    /// Taken from the warm pool.
    WarmPool,
    /// Forked: restored from a snapshot of a live sandbox taken for this.
    Fork,
}

/// Phases of a boot in microseconds; they add up to `total_us`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootReport {
    /// Origin of the sandbox.
    pub mode: BootMode,
    /// From the request to the first instruction.
    pub vmm_us: u64,
    /// From the first instruction to the agent's first.
    pub kernel_us: u64,
    /// From the agent's first instruction to its greeting: file systems mounted, services
    /// listening.
    pub init_us: u64,
    /// From the greeting to the agent's confirmation of its identity.
    pub agent_us: u64,
    /// From the request to that confirmation.
    pub total_us: u64,
}
