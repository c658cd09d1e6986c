//! A sandbox and its operations.

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

/// Sandbox whose agent has its identity. Dropping it ends it, unless it is kept.
#[derive(Debug)]
pub struct Sandbox {
    body: SandboxBody,
    report: BootReport,
    /// Connection of the agent's greeting, open as long as this process controls the sandbox; none
    /// after an adoption.
    _greeting: Option<UnixStream>,
    /// Held while a snapshot is taken.
    snapshot_lock: tokio::sync::Mutex<()>,
}

impl Sandbox {
    /// Specification for [`Self::adopt`].
    pub fn adopt_spec(&self) -> AdoptSpec {
        AdoptSpec {
            boot: self.body.spec.clone(),
            mark: self.body.process.mark.clone(),
            report: self.report,
        }
    }

    /// Keeps it running when this process ends.
    pub async fn keep(&self) -> Result<(), GvisorError> {
        self.body.ask(&HelperRequest::Detach).await?;
        self.body.kept.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns the report of its boot.
    pub fn report(&self) -> BootReport {
        self.report
    }

    /// Id of the process that isolates it.
    pub fn pid(&self) -> u32 {
        self.body.process.mark.pid
    }

    /// Returns its use of the host's resources.
    pub fn usage(&self) -> Option<GuestUsage> {
        Some(GuestUsage {
            cpu_us: self.body.process.cpu_us()?,
            memory_bytes: self.body.process.memory_bytes()?,
            disk_bytes: None,
            net_bytes: None,
        })
    }

    /// Opens a stream to `port` of the agent. A refused connection reads as closed.
    pub fn connect(&self, port: u32) -> impl Future<Output = Result<UnixStream, GvisorError>> + '_ {
        self.body.connect(port)
    }

    /// True if it has ended.
    pub fn has_ended(&self) -> bool {
        self.body.process.has_ended()
    }

    /// Waits until it has ended and returns the reason.
    pub async fn ended(&self) -> ExitReason {
        self.body.ended().await
    }

    /// Last console output, cleaned for a terminal.
    pub fn console_tail(&self) -> String {
        self.body.console_tail()
    }

    /// Kills it and returns when it does not run any more. [`Self::stop`] removes it.
    pub async fn halt(&self) {
        self.body.halt().await;
    }

    /// Ends it and returns when nothing of it is left.
    pub async fn stop(&self) {
        self.body.remove().await;
    }
}

/// Microseconds since `from`.
fn elapsed_us(from: Instant) -> u64 {
    u64::try_from(from.elapsed().as_micros()).unwrap_or(u64::MAX)
}
