//! [`Sandbox`]: a running gVisor sandbox whose agent has received an identity.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used, in the answer to the *greeting*: the first message of the agent.
//! The *helper* is the process `jiffy-gvisor` that starts and drives the sandboxes of a daemon.
//!
//! The *mark* of a process is its id with its start time. It identifies the process even if the
//! kernel assigns the id to another process later.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

mod adopt;
mod body;
mod snapshot;
mod spec;
mod unassigned;

pub use spec::{AdoptSpec, BootSpec, RestoreSpec};
pub use unassigned::UnassignedSandbox;

use crate::error::GvisorError;
use crate::helper::HelperRequest;
use body::SandboxBody;
use jiffy_engine_api::{BootReport, ExitReason, GuestUsage};
use std::future::Future;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tokio::net::UnixStream;

/// Sandbox whose agent has an identity. Dropping it terminates the sandbox, unless it is detached.
#[derive(Debug)]
pub struct Sandbox {
    body: SandboxBody,
    report: BootReport,
    /// Connection of the agent's greeting, open while this process controls the sandbox. `None`
    /// after an adoption.
    _greeting: Option<UnixStream>,
    /// Held while a snapshot is taken.
    snapshot_lock: tokio::sync::Mutex<()>,
}

impl Sandbox {
    /// Returns the specification for [`Self::adopt`].
    pub fn adopt_spec(&self) -> AdoptSpec {
        AdoptSpec {
            boot: self.body.spec.clone(),
            mark: self.body.process.mark.clone(),
            report: self.report,
        }
    }

    /// Detaches the sandbox: it continues to run after this process exits.
    pub async fn detach(&self) -> Result<(), GvisorError> {
        self.body.request(&HelperRequest::Detach).await?;
        // After the helper has confirmed: until then the sandbox ends with the helper.
        self.body.detached.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns the report of the boot.
    pub fn report(&self) -> BootReport {
        self.report
    }

    /// Returns the id of the process that isolates the sandbox.
    pub fn pid(&self) -> u32 {
        self.body.process.mark.pid
    }

    /// Returns the resource usage on the host.
    pub fn usage(&self) -> Option<GuestUsage> {
        Some(GuestUsage {
            cpu_us: self.body.process.cpu_us()?,
            memory_bytes: self.body.process.memory_bytes()?,
            // This crate measures neither disk nor network traffic. The caller may know the traffic
            // of the network slot.
            disk_bytes: None,
            net_bytes: None,
        })
    }

    /// Opens a stream to `port` of the agent. If the connection is rejected, reads return the end
    /// of the stream.
    pub fn connect(&self, port: u32) -> impl Future<Output = Result<UnixStream, GvisorError>> + '_ {
        self.body.connect(port)
    }

    /// Returns whether the sandbox has ended.
    pub fn has_ended(&self) -> bool {
        self.body.process.has_ended()
    }

    /// Waits until the sandbox has ended and returns the reason.
    pub async fn ended(&self) -> ExitReason {
        self.body.ended().await
    }

    /// Returns the end of the console output without control characters.
    pub fn console_tail(&self) -> String {
        self.body.console_tail()
    }

    /// Kills the sandbox and returns when it no longer runs. [`Self::stop`] removes its files.
    pub async fn halt(&self) {
        self.body.halt().await;
    }

    /// Kills and removes the sandbox. Returns when all of its resources are released.
    pub async fn stop(&self) {
        self.body.remove().await;
    }
}

/// Returns the microseconds since `from`.
fn elapsed_us(from: Instant) -> u64 {
    u64::try_from(from.elapsed().as_micros()).unwrap_or(u64::MAX)
}
