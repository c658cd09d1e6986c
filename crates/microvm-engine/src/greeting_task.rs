//! Host's side of one greeting of an agent, in a task of its own.

use crate::boot_steps::BootStep;
use jiffy_agent_client::{Greeting, GreetingError};
use jiffy_proto::agent::{Hello, Identity};
use std::os::fd::AsFd;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};

/// Answers an agent's greeting with its identity, and holds the stream open.
pub(crate) struct GreetingTask {
    /// Identity of the guest, once it is known.
    identity: watch::Receiver<Option<Identity>>,
    /// Receives the steps of a boot.
    steps: Option<mpsc::Sender<BootStep>>,
    /// True if the guest was restored: a connection from before the snapshot may break at any time.
    restored: bool,
    /// True once the agent has sent its first message.
    heard: bool,
    /// Id that the agent was given.
    id: Option<String>,
}

impl GreetingTask {
    pub fn new(
        identity: watch::Receiver<Option<Identity>>,
        steps: Option<mpsc::Sender<BootStep>>,
        restored: bool,
    ) -> Self {
        Self {
            identity,
            steps,
            restored,
            heard: false,
            id: None,
        }
    }

    /// Serves the agent until the guest ends, or is to wait for an identity again.
    pub async fn run(mut self, stream: UnixStream) {
        let (stream, greeted) = match self.greet(stream).await {
            Ok(Some(stream)) => {
                let copy = stream.as_fd().try_clone_to_owned().ok();
                (Some(stream), Ok(copy))
            }
            // The guest was dropped before it had an identity.
            Ok(None) => return,
            // The agent greets again on another connection.
            Err(GreetingError::Io(_) | GreetingError::NoLine) if self.restored && !self.heard => {
                return;
            }
            Err(e) => (None, Err(e)),
        };
        if let Some(steps) = self.steps.take() {
            let id = self.id.take();
            let _ = steps.send(BootStep::Ready { id, greeted }).await;
        }
        // Held open until the VM ends or is to wait again: its closing tells the agent to greet
        // anew.
        let Some(stream) = stream else { return };
        let _ = self.identity.wait_for(Option::is_none).await;
        drop(stream);
    }

    /// Returns the stream once the identity is in force; none: there will be no identity.
    async fn greet(&mut self, stream: UnixStream) -> Result<Option<UnixStream>, GreetingError> {
        let known = self.identity.borrow().clone();
        // A guest that boots opens its connection long before its agent can take an identity, and
        // the clock with it.
        if let Some(identity) = known.filter(|_| self.restored) {
            self.id = Some(identity.id.clone());
            let greeting = Greeting::receive_assigned(stream, &identity).await?;
            self.on_hello(&greeting.hello).await;
            let (stream, _) = greeting.ready().await?;
            return Ok(Some(stream));
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
        let (stream, _) = greeting.answer(&identity).await?;
        Ok(Some(stream))
    }

    async fn on_hello(&mut self, hello: &Hello) {
        self.heard = true;
        if let Some(steps) = &self.steps {
            let hello = hello.clone();
            let _ = steps.send(BootStep::Hello { hello }).await;
        }
    }
}
