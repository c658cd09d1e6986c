//! Durations of the phases of a boot, as an engine reports them.

use jiffy_api_types::BootMode;
use serde::{Deserialize, Serialize};

/// Durations of the phases of a boot, in microseconds. They add up to `total_us`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootReport {
    /// Origin of the sandbox.
    pub mode: BootMode,
    /// Time from the request to the first instruction of the guest.
    pub vmm_us: u64,
    /// Time from the first instruction of the guest to the first instruction of the agent. For a
    /// restored guest, time to the agent's greeting.
    pub kernel_us: u64,
    /// Time from the agent's first instruction to its greeting: file systems are mounted, and
    /// services listen.
    pub init_us: u64,
    /// Time from the greeting until the agent confirms its identity.
    pub agent_us: u64,
    /// Time from the request until the agent confirms its identity.
    pub total_us: u64,
}
