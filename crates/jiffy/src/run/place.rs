//! Where a command runs: a guest of our own, or a sandbox of the daemon's.

use super::outcome;
use jiffy_agent_client::AgentClient;
use jiffy_engine::{BootReport, Guest, SandboxEnd};
use jiffy_host::GvisorGuest;
use jiffy_microvm::MicroVm;
use jiffy_proto::agent::ENVD_PORT;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;

/// A guest that commands run in.
pub trait Place {
    /// A client of its agent.
    fn agent(&self) -> AgentClient;

    /// Its memory.
    fn memory_mib(&self) -> u32;

    /// Why it is gone, if it is or goes within `patience`.
    async fn gone(&self, patience: Duration) -> Option<String>;
}

/// A guest that this process made, and that ends with it.
pub trait OwnGuest: Send + Sync + 'static {
    /// How it came up.
    fn report(&self) -> BootReport;

    /// Opens a stream to `port` in it.
    fn connect(&self, port: u32) -> impl Future<Output = io::Result<UnixStream>> + Send;

    /// Waits until it is gone and says why.
    fn ended(&self) -> impl Future<Output = SandboxEnd> + Send;

    /// Its last console output.
    fn console_tail(&self) -> String;

    /// Ends it, and returns when nothing of it is left.
    fn stop(&self) -> impl Future<Output = ()> + Send;
}

impl OwnGuest for MicroVm {
    fn report(&self) -> BootReport {
        self.report()
    }

    async fn connect(&self, port: u32) -> io::Result<UnixStream> {
        let connector = self.connector();
        connector.connect(port).await.map_err(io::Error::other)
    }

    async fn ended(&self) -> SandboxEnd {
        self.ended().await
    }

    fn console_tail(&self) -> String {
        self.console_tail()
    }

    async fn stop(&self) {
        self.end_now().await;
    }
}

impl OwnGuest for GvisorGuest {
    fn report(&self) -> BootReport {
        Guest::report(self)
    }

    async fn connect(&self, port: u32) -> io::Result<UnixStream> {
        Guest::connect(self, port).await
    }

    async fn ended(&self) -> SandboxEnd {
        Guest::ended(self).await
    }

    fn console_tail(&self) -> String {
        Guest::console_tail(self)
    }

    async fn stop(&self) {
        Guest::stop(self).await;
    }
}

/// A client of the agent in `guest`.
pub fn agent<G: OwnGuest>(guest: &Arc<G>) -> AgentClient {
    let guest = guest.clone();
    AgentClient::new(move || {
        let guest = guest.clone();
        async move { guest.connect(ENVD_PORT).await }
    })
}

/// A guest of our own as a place for commands.
pub struct Local<G> {
    guest: Arc<G>,
    memory_mib: u32,
}

impl<G: OwnGuest> Local<G> {
    /// The guest, which has so much memory.
    pub fn new(guest: Arc<G>, memory_mib: u32) -> Self {
        Self { guest, memory_mib }
    }
}

impl<G: OwnGuest> Place for Local<G> {
    fn agent(&self) -> AgentClient {
        agent(&self.guest)
    }

    fn memory_mib(&self) -> u32 {
        self.memory_mib
    }

    async fn gone(&self, patience: Duration) -> Option<String> {
        let end = tokio::time::timeout(patience, self.guest.ended())
            .await
            .ok()?;
        Some(outcome::end(&end, &self.guest.console_tail()))
    }
}
