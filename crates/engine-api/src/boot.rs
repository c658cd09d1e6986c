//! Duration of each phase of a boot.

use jiffy_api_types::BootMode;
use serde::{Deserialize, Serialize};

/// Phases of a boot in microseconds; they add up to `total_us`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootReport {
    /// Origin of the sandbox.
    pub mode: BootMode,
    /// From the request to the first instruction.
    pub vmm_us: u64,
    /// From the first instruction to the agent's first; for a restored guest, to the agent's
    /// greeting.
    pub kernel_us: u64,
    /// From the agent's first instruction to its greeting: file systems mounted, services
    /// listening.
    pub init_us: u64,
    /// From the greeting to the agent's confirmation of its identity.
    pub agent_us: u64,
    /// From the request to that confirmation.
    pub total_us: u64,
}
