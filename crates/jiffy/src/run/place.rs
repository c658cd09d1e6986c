//! Where a command runs: a guest of our own, or a sandbox of the daemon's.

use super::outcome;
use jiffy_agent_client::AgentClient;
use jiffy_microvm::MicroVm;
use std::time::Duration;

/// A guest that commands run in.
pub trait Place {
    /// A client of its agent.
    fn agent(&self) -> AgentClient;

    /// Its memory.
    fn memory_mib(&self) -> u32;

    /// Why it is gone, if it is or goes within `patience`.
    async fn gone(&self, patience: Duration) -> Option<String>;
}

/// A guest of our own.
pub struct Local<'a> {
    vm: &'a MicroVm,
    memory_mib: u32,
}

impl<'a> Local<'a> {
    /// The guest of `vm`.
    pub fn new(vm: &'a MicroVm, memory_mib: u32) -> Self {
        Self { vm, memory_mib }
    }
}

impl Place for Local<'_> {
    fn agent(&self) -> AgentClient {
        jiffy_host::agent(self.vm)
    }

    fn memory_mib(&self) -> u32 {
        self.memory_mib
    }

    async fn gone(&self, patience: Duration) -> Option<String> {
        let end = tokio::time::timeout(patience, self.vm.ended()).await.ok()?;
        Some(outcome::end(&end, &self.vm.console_tail()))
    }
}
