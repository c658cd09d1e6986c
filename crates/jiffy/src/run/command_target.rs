//! Guests that commands run in: guests of this process and sandboxes of a daemon.

use super::outcome;
use crate::sandbox::forward::{PortOpener, PortStream};
use anyhow::Context;
use jiffy_agent_client::AgentClient;
use jiffy_engine_api::Guest;
use jiffy_gateway::tcp_handshake;
use jiffy_proto::agent::{ENVD_PORT, TCP_PORT};
use std::sync::Arc;
use std::time::Duration;

/// Guest in which commands run.
pub trait CommandTarget {
    /// Returns a client of the agent in the guest.
    fn agent(&self) -> AgentClient;

    /// Returns a function that opens streams to TCP ports of the guest.
    fn ports(&self) -> PortOpener;

    /// Returns the memory size of the guest in MiB.
    fn memory_mib(&self) -> u32;

    /// Returns whether the guest, with all its processes, is removed when this process exits.
    fn ends_with_client(&self) -> bool;

    /// Returns the exit reason if the guest terminates within `limit`. `None` if the guest
    /// continues to run.
    async fn exit_reason(&self, limit: Duration) -> Option<String>;
}

/// Returns a client of the agent in `guest`.
pub fn agent(guest: &Arc<dyn Guest>) -> AgentClient {
    let guest = guest.clone();
    AgentClient::new(move || {
        let guest = guest.clone();
        async move { guest.connect(ENVD_PORT).await }
    })
}

/// Guest of this process.
pub struct LocalGuest {
    guest: Arc<dyn Guest>,
    memory_mib: u32,
}

impl LocalGuest {
    /// Creates a target from a guest with `memory_mib` of memory.
    pub fn new(guest: Arc<dyn Guest>, memory_mib: u32) -> Self {
        Self { guest, memory_mib }
    }
}

impl CommandTarget for LocalGuest {
    fn agent(&self) -> AgentClient {
        agent(&self.guest)
    }

    fn ports(&self) -> PortOpener {
        let guest = self.guest.clone();
        Arc::new(move |port| {
            let guest = guest.clone();
            Box::pin(async move {
                let mut stream = guest.connect(TCP_PORT).await?;
                // The agent connects the stream with the port.
                tcp_handshake(&mut stream, port)
                    .await
                    .with_context(|| format!("cannot connect to port {port} of the guest"))?;
                Ok(Box::new(stream) as Box<dyn PortStream>)
            })
        })
    }

    fn memory_mib(&self) -> u32 {
        self.memory_mib
    }

    fn ends_with_client(&self) -> bool {
        true
    }

    async fn exit_reason(&self, limit: Duration) -> Option<String> {
        let reason = tokio::time::timeout(limit, self.guest.ended()).await.ok()?;
        Some(outcome::exit_message(&reason, &self.guest.console_tail()))
    }
}
