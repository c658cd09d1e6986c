//! Host's side of an agent's greeting, in a separate task. The greeting is the first exchange after
//! a boot, restore or rollback: the agent sends a message and receives the guest's identity.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. A *hook* is an executable in the guest that the agent runs
//! before the state of the guest is stored, and after the guest continues.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

use crate::boot_steps::BootStep;
use jiffy_agent_client::{Greeting, GreetingError, ReadyAgent};
use jiffy_proto::agent::{Hello, Identity};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};

/// Replies to an agent's greeting with its identity, and holds the stream open.
pub(crate) struct GreetingTask {
    /// Identity of the guest. `None` until it is assigned.
    identity: watch::Receiver<Option<Identity>>,
    /// Sender for the steps of the current boot or rollback. `None` for an adopted guest until its
    /// first rollback.
    steps: Option<mpsc::Sender<BootStep>>,
    /// True if the guest was restored. Connections from before the snapshot may then break at any
    /// time.
    restored: bool,
    /// Set when the agent has sent its first message. Errors before it are expected in a restored
    /// guest.
    has_greeted: bool,
    /// Id that the agent received.
    id: Option<String>,
    /// Set when the agent reports that the guest may have hooks.
    hooks: Arc<AtomicBool>,
}

impl GreetingTask {
    pub fn new(
        identity: watch::Receiver<Option<Identity>>,
        steps: Option<mpsc::Sender<BootStep>>,
        restored: bool,
        hooks: Arc<AtomicBool>,
    ) -> Self {
        Self {
            identity,
            steps,
            restored,
            has_greeted: false,
            id: None,
            hooks,
        }
    }

    /// Serves the agent until the guest ends or must wait for an identity again.
    pub async fn run(mut self, stream: UnixStream) {
        let (stream, greeted) = match self.greet(stream).await {
            Ok(Some(stream)) => {
                // Duplicate for the snapshot context, which passes it to the VMM of a detached
                // guest.
                let copy = stream.as_fd().try_clone_to_owned().ok();
                (Some(stream), Ok(copy))
            }
            // The guest was dropped before an identity was assigned.
            Ok(None) => return,
            // The agent sends a new greeting on another connection.
            Err(GreetingError::Io(_) | GreetingError::NoLine)
                if self.restored && !self.has_greeted =>
            {
                return;
            }
            Err(e) => (None, Err(e)),
        };
        if let Some(steps) = self.steps.take() {
            let id = self.id.take();
            // Ignore the error: no task waits for the boot now.
            let _ = steps.send(BootStep::Ready { id, greeted }).await;
        }
        // The stream stays open until the guest ends or must wait again: when it is closed, the
        // agent sends a new greeting.
        let Some(mut stream) = stream else { return };
        let hooks = self.hooks.clone();
        let withdrawn = self.identity.wait_for(Option::is_none);
        tokio::pin!(withdrawn);
        tokio::select! {
            // An error means that the guest was dropped.
            _ = &mut withdrawn => return,
            // Any byte after the greeting means that a directory for hooks was created.
            read = stream.read_u8() => {
                if read.is_ok() {
                    hooks.store(true, Ordering::Release);
                }
            }
        }
        // Further bytes are not read. The guest's connection has a bounded buffer.
        let _ = withdrawn.await;
        drop(stream);
    }

    /// Returns the stream when the identity is in effect. `None` if no identity will be assigned.
    async fn greet(&mut self, stream: UnixStream) -> Result<Option<UnixStream>, GreetingError> {
        let assigned = self.identity.borrow().clone();
        // Send the identity at once only to restored guests, whose agents read it at once. A
        // booting guest opens its connection long before its agent reads the identity, so the
        // identity's time would be outdated.
        if let Some(identity) = assigned.filter(|_| self.restored) {
            self.id = Some(identity.id.clone());
            let greeting = Greeting::receive_assigned(stream, &identity).await?;
            self.on_hello(&greeting.hello).await;
            return Ok(Some(self.on_ready(greeting.ready().await?)));
        }
        let greeting = Greeting::receive(stream).await?;
        self.on_hello(&greeting.hello).await;
        let identity = match self.identity.wait_for(Option::is_some).await {
            Ok(identity) => identity.clone(),
            Err(_) => None,
        };
        let Some(identity) = identity else {
            return Ok(None);
        };
        self.id = Some(identity.id.clone());
        Ok(Some(self.on_ready(greeting.answer(&identity).await?)))
    }

    fn on_ready(&self, agent: ReadyAgent) -> UnixStream {
        if agent.has_new_hooks {
            self.hooks.store(true, Ordering::Release);
        }
        agent.stream
    }

    /// Handles the first message of the agent.
    async fn on_hello(&mut self, hello: &Hello) {
        self.has_greeted = true;
        // Each greeting states whether the guest has hooks. It replaces the report of an earlier
        // greeting, for example of the guest before a rollback.
        self.hooks.store(hello.hooks, Ordering::Release);
        if let Some(steps) = &self.steps {
            let hello = hello.clone();
            let _ = steps.send(BootStep::Hello { hello }).await;
        }
    }
}
