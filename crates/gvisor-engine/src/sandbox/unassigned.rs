//! [`UnassignedSandbox`]: a booted or restored gVisor sandbox whose agent waits for an identity.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. The *sentry* is gVisor's kernel in user space, one process per
//! sandbox. The *greeting* is the first message of the agent, which then receives the identity of
//! its sandbox.

use super::body::{BOOT_TIMEOUT, SandboxBody};
use super::spec::{BootSpec, RestoreSpec};
use super::{Sandbox, elapsed_us};
use crate::error::GvisorError;
use crate::helper::{Helper, HelperRequest};
use crate::snapshot_store::SnapshotStore;
use jiffy_agent_client::Greeting;
use jiffy_engine_api::{BootMode, BootReport};
use jiffy_proto::agent::{Hello, Identity};
use std::time::Instant;

/// Sandbox whose agent has sent its greeting and has no identity yet.
#[derive(Debug)]
pub struct UnassignedSandbox {
    body: SandboxBody,
    greeting: Greeting,
    mode: BootMode,
    /// Time from the request until the process was created, in microseconds.
    created_us: u64,
    /// Time from the request until the agent's greeting, in microseconds.
    greeted_us: u64,
}

impl UnassignedSandbox {
    /// Starts the agent in a new sandbox and returns when its greeting is received.
    pub async fn boot(helper: &Helper, spec: &BootSpec) -> Result<Self, GvisorError> {
        let requested_at = Instant::now();
        let body = SandboxBody::create(helper, spec).await?;
        let created_us = elapsed_us(requested_at);
        let started = body.request(&HelperRequest::Start);
        tokio::time::timeout(BOOT_TIMEOUT, started)
            .await
            .map_err(|_| body.timed_out(BOOT_TIMEOUT))??;
        Self::receive_greeting(body, BootMode::Cold, requested_at, created_us).await
    }

    /// Restores a sandbox from a snapshot and returns when the agent's new greeting is received.
    pub async fn restore(
        helper: &Helper,
        store: &SnapshotStore,
        spec: &RestoreSpec,
    ) -> Result<Self, GvisorError> {
        let requested_at = Instant::now();
        // Check the path first, so that an error leaves no sandbox behind.
        let image = store.path(&spec.manifest.id)?;
        let body = SandboxBody::create(helper, &spec.boot).await?;
        let created_us = elapsed_us(requested_at);
        let request = HelperRequest::Restore { image };
        let restored = body.request(&request);
        tokio::time::timeout(BOOT_TIMEOUT, restored)
            .await
            .map_err(|_| body.timed_out(BOOT_TIMEOUT))??;
        Self::receive_greeting(body, BootMode::Snapshot, requested_at, created_us).await
    }

    /// Waits for the greeting of the agent.
    async fn receive_greeting(
        body: SandboxBody,
        mode: BootMode,
        requested_at: Instant,
        created_us: u64,
    ) -> Result<Self, GvisorError> {
        let greeting = body.receive_greeting().await?;
        Ok(Self {
            body,
            greeting,
            mode,
            created_us,
            greeted_us: elapsed_us(requested_at),
        })
    }

    /// Returns whether the sandbox still waits for its identity: it has not ended.
    pub fn is_waiting(&self) -> bool {
        !self.body.process.has_ended()
    }

    /// Returns the hello message of the agent.
    pub fn hello(&self) -> &Hello {
        &self.greeting.hello
    }

    /// Assigns the identity and returns when it is in effect.
    pub async fn assign_identity(self, identity: &Identity) -> Result<Sandbox, GvisorError> {
        let Self {
            body,
            greeting,
            mode,
            created_us,
            greeted_us,
        } = self;
        let started_at = Instant::now();
        let hello = greeting.hello.clone();
        let answered = tokio::time::timeout(BOOT_TIMEOUT, greeting.answer(identity)).await;
        let agent = answered
            .map_err(|_| body.timed_out(BOOT_TIMEOUT))?
            .map_err(|source| GvisorError::Greeting {
                source,
                console: body.console_tail(),
            })?;
        // `hello` contains two readings of the guest's clock. A restored agent is already
        // initialised.
        let init_us = match mode {
            BootMode::Cold => hello.hello_us.saturating_sub(hello.init_us),
            _ => 0,
        };
        // Time from the creation of the sentry to the greeting. The clocks of host and guest may
        // differ, so `init_us` is limited to this time.
        let before = greeted_us.saturating_sub(created_us);
        let agent_us = elapsed_us(started_at);
        let report = BootReport {
            mode,
            vmm_us: created_us,
            kernel_us: before.saturating_sub(init_us),
            init_us: init_us.min(before),
            agent_us,
            // A guest may wait in the warm pool between its greeting and this call. This time is
            // not included.
            total_us: created_us + before + agent_us,
        };
        Ok(Sandbox {
            body,
            report,
            _greeting: Some(agent.stream),
            snapshot_lock: tokio::sync::Mutex::default(),
        })
    }
}
