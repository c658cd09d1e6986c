//! How a sandbox came up and how long each part took.

use serde::{Deserialize, Serialize};

/// Where a sandbox came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BootMode {
    /// Booted from its kernel.
    Cold,
    /// Restored from a snapshot: its template's, its own or a relative's. Then `kernel_us` is the time from the first instruction to
    /// the agent's greeting.
    Snapshot,
    /// Restored before it was asked for.
    WarmPool,
    /// Restored from a snapshot taken of a live sandbox for this.
    Fork,
}

/// Phases of a boot in microseconds; they add up to `total_us`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootReport {
    /// Where the sandbox came from.
    pub mode: BootMode,
    /// From asking for the sandbox to its first instruction.
    pub vmm_us: u64,
    /// From the first instruction to the agent's first.
    pub kernel_us: u64,
    /// From the agent's first instruction to its greeting: file systems mounted, services listening.
    pub init_us: u64,
    /// From the greeting to the agent's word that its identity is in force.
    pub agent_us: u64,
    /// From asking for the sandbox to that word.
    pub total_us: u64,
}
