//! Steps of a guest's boot or rollback. The VMM driver (the task that serves a VMM's control
//! socket) reports them to the operation that waits.
//!
//! The *greeting* is the first message of the agent, which then receives the identity of its
//! sandbox (id, host name, entropy and clock).

use jiffy_agent_client::GreetingError;
use jiffy_proto::agent::Hello;
use parking_lot::Mutex;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Step of a guest's boot.
pub(crate) enum BootStep {
    /// The guest runs.
    Running,
    /// The agent has sent its greeting.
    Hello {
        /// Content of the greeting.
        hello: Hello,
    },
    /// The agent has taken its identity.
    Ready {
        /// Identity that the agent confirmed. `None` if the greeting failed before an identity was
        /// assigned.
        id: Option<String>,
        /// Duplicate of the stream of the greeting, or the reason why the greeting failed. `None`
        /// if the stream could not be duplicated.
        greeted: Result<Option<OwnedFd>, GreetingError>,
    },
}

/// Sender for the steps of the next rollback. The driver takes it when the VMM reports the start of
/// the rollback.
#[derive(Debug, Clone, Default)]
pub(crate) struct NextSteps(Arc<Mutex<Option<mpsc::Sender<BootStep>>>>);

impl NextSteps {
    pub fn set(&self, steps: Option<mpsc::Sender<BootStep>>) {
        *self.0.lock() = steps;
    }

    pub fn take(&self) -> Option<mpsc::Sender<BootStep>> {
        self.0.lock().take()
    }
}
