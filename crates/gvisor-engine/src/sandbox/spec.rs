//! Specifications for booting, restoring and adopting gVisor sandboxes: paths of images, sizes,
//! network.
//!
//! The *helper* is the process `jiffy-gvisor` that starts and drives the sandboxes of a daemon.

use crate::sentry_process::SentryProcess;
use crate::snapshot_store::GvisorManifest;
use jiffy_engine_api::{BootReport, ProcessInstance, SandboxSize};
use jiffy_proto::agent::{GVISOR_DISK_MIB, GVISOR_DNS, GVISOR_IMAGES};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::PathBuf;

/// Specification for booting a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootSpec {
    /// Id in the helper. All ids have the same length.
    pub id: String,
    /// EROFS image with the agent.
    pub base: PathBuf,
    /// Images of the root file system, lowest first.
    pub images: Vec<PathBuf>,
    /// Resources.
    pub size: SandboxSize,
    /// Template that is recorded in the sandbox's snapshots.
    pub template: String,
    /// Path of the network namespace that contains the sandbox's interface. `None` without a
    /// network.
    pub namespace: Option<PathBuf>,
    /// Addresses of the sandbox's name servers.
    pub dns: Vec<IpAddr>,
}

/// Specification for restoring a sandbox from a snapshot.
#[derive(Debug, Clone)]
pub struct RestoreSpec {
    /// Specification for a boot, with a new id.
    pub boot: BootSpec,
    /// Manifest of the snapshot.
    pub manifest: GvisorManifest,
}

/// Specification for adopting a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptSpec {
    /// Specification with which the sandbox was booted.
    pub boot: BootSpec,
    /// Id and start time of the process that isolates the sandbox.
    pub mark: ProcessInstance,
    /// Report of the boot.
    pub report: BootReport,
}

impl BootSpec {
    /// Returns the environment of the agent.
    pub(super) fn environment(&self) -> Vec<String> {
        let dns: Vec<String> = self.dns.iter().map(IpAddr::to_string).collect();
        vec![
            format!("{GVISOR_IMAGES}={}", self.images.len()),
            format!("{GVISOR_DISK_MIB}={}", self.size.disk_mib),
            format!("{GVISOR_DNS}={}", dns.join(",")),
        ]
    }
}

impl AdoptSpec {
    /// Kills the process of the sandbox without the helper. Returns whether the process existed.
    /// Must be called inside a tokio runtime.
    pub fn end(&self) -> bool {
        let process = SentryProcess::watch(self.mark.pid);
        // Another process may have received the process id.
        let own = process.ok().filter(|process| process.mark == self.mark);
        own.as_ref().map(SentryProcess::kill).is_some()
    }
}
