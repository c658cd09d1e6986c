//! Specifications of sandboxes that are booted, restored or adopted.

use crate::sentry_process::SentryProcess;
use crate::snapshot_store::GvisorManifest;
use jiffy_engine_api::{BootReport, ProcessInstance, SandboxSize};
use jiffy_proto::agent::{GVISOR_DISK_MIB, GVISOR_DNS, GVISOR_IMAGES};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::PathBuf;

/// Specification of a sandbox that is booted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootSpec {
    /// Id in the helper; all ids have the same length.
    pub id: String,
    /// EROFS image with the agent.
    pub base: PathBuf,
    /// Images of the root file system, the lowest first.
    pub images: Vec<PathBuf>,
    /// Resources.
    pub size: SandboxSize,
    /// Template, noted in its snapshots.
    pub template: String,
    /// Network namespace with its interface.
    pub namespace: Option<PathBuf>,
    /// Addresses of its name servers.
    pub dns: Vec<IpAddr>,
}

/// Specification of a sandbox that is restored from a snapshot.
#[derive(Debug, Clone)]
pub struct RestoreSpec {
    /// Specification of its boot, with another id.
    pub boot: BootSpec,
    /// Manifest of the snapshot.
    pub manifest: GvisorManifest,
}

/// Specification of a sandbox that is to be adopted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptSpec {
    /// Specification of its boot.
    pub boot: BootSpec,
    /// Process that isolates it.
    pub mark: ProcessInstance,
    /// Report of its boot.
    pub report: BootReport,
}

impl BootSpec {
    /// Returns the environment that the agent is started with.
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
    /// Kills the process that isolates it, without its helper. Returns true if there was one. Must
    /// be called inside a tokio runtime.
    pub fn end(&self) -> bool {
        let process = SentryProcess::watch(self.mark.pid);
        let own = process.ok().filter(|process| process.mark == self.mark);
        own.as_ref().map(SentryProcess::kill).is_some()
    }
}
