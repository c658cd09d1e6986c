//! Guest of a run: one of this process, or a sandbox of the daemon's.

use super::outcome;
use crate::sandbox::forward::{PortOpener, PortStream};
use anyhow::Context;
use jiffy_agent_client::AgentClient;
use jiffy_engine_api::Guest;
use jiffy_gateway::tcp_handshake;
use jiffy_proto::agent::{ENVD_PORT, TCP_PORT};
use std::sync::Arc;
use std::time::Duration;

/// A guest that commands run in.
pub trait CommandTarget {
    /// A client of its agent.
    fn agent(&self) -> AgentClient;

    /// Opens streams to its TCP ports.
    fn ports(&self) -> PortOpener;

    /// Its memory.
    fn memory_mib(&self) -> u32;

    /// Tells if it ends when this program does, with every command in it.
    fn ends_with_client(&self) -> bool;

    /// Why it is gone, if it is or goes within `patience`.
    async fn end_reason(&self, limit: Duration) -> Option<String>;
}

/// A client of the agent in `guest`.
pub fn agent(guest: &Arc<dyn Guest>) -> AgentClient {
    let guest = guest.clone();
    AgentClient::new(move || {
        let guest = guest.clone();
        async move { guest.connect(ENVD_PORT).await }
    })
}

/// A guest of our own as a place for commands.
pub struct LocalGuest {
    guest: Arc<dyn Guest>,
    memory_mib: u32,
}

impl LocalGuest {
    /// The guest, which has so much memory.
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
                let opened = tcp_handshake(&mut stream, port).await;
                opened.with_context(|| format!("cannot reach port {port} of the guest"))?;
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

    async fn end_reason(&self, limit: Duration) -> Option<String> {
        let end = tokio::time::timeout(limit, self.guest.ended()).await.ok()?;
        Some(outcome::end(&end, &self.guest.console_tail()))
    }
}
