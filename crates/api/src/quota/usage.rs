//! Present resource usage of a key, summed over the components of the daemon.

use jiffy_sandbox_manager::{OwnerUsage, QuotaAmount};
use jiffy_template_builder::BuildUsage;

/// Resource usage of a key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct KeyUsage {
    /// Sandboxes and snapshots.
    pub host: OwnerUsage,
    /// Templates, builds and uploads.
    pub builds: BuildUsage,
    /// Bytes of functions' modules and their machine code.
    pub function_bytes: u64,
    /// Sum of the maximum sizes of volumes in bytes. A volume counts with its size, and not with
    /// its content, because its content can grow to this size without a further request.
    pub volume_bytes: u64,
    /// Requests and streams to sandboxes that are in flight.
    pub exchanges: u64,
}

impl KeyUsage {
    /// Returns the bytes on disk by type of resource.
    pub fn disk(&self) -> [(&'static str, u64); 7] {
        [
            ("paused sandboxes", self.host.paused_bytes),
            ("snapshots", self.host.snapshot_bytes),
            ("templates", self.builds.template_bytes),
            ("uploads", self.builds.upload_bytes),
            ("build steps", self.host.step_bytes),
            ("functions", self.function_bytes),
            ("volumes", self.volume_bytes),
        ]
    }

    /// Returns the usage that is subject to limits.
    pub fn amount(&self) -> QuotaAmount {
        let disk = self.disk().into_iter().map(|(_, bytes)| bytes);
        QuotaAmount {
            sandboxes: self.host.sandboxes,
            vcpus: self.host.vcpus,
            memory_mib: self.host.memory_mib,
            paused: self.host.paused,
            snapshots: self.host.snapshots,
            templates: self.builds.templates,
            builds: self.builds.builds,
            disk_bytes: disk.fold(0, u64::saturating_add),
        }
    }
}
