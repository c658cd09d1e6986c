//! Changes of the limits of a key.

use super::Limits;
use jiffy_api_types::KeyLimit;

/// Change of the limits of a key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LimitChanges {
    /// New limits. Limits that are `None` do not change.
    pub set: Limits,
    /// Limits that the key no longer has.
    pub removed: Vec<KeyLimit>,
}

impl LimitChanges {
    /// Returns the limits after the change.
    pub(super) fn apply(&self, former: Limits) -> Limits {
        let set = self.set;
        let mut limits = Limits {
            max_sandboxes: set.max_sandboxes.or(former.max_sandboxes),
            max_vcpus: set.max_vcpus.or(former.max_vcpus),
            max_memory_mib: set.max_memory_mib.or(former.max_memory_mib),
            creates_per_minute: set.creates_per_minute.or(former.creates_per_minute),
            max_paused: set.max_paused.or(former.max_paused),
            max_snapshots: set.max_snapshots.or(former.max_snapshots),
            max_templates: set.max_templates.or(former.max_templates),
            max_builds: set.max_builds.or(former.max_builds),
            max_disk_mib: set.max_disk_mib.or(former.max_disk_mib),
            max_exchanges: set.max_exchanges.or(former.max_exchanges),
            idle_timeout_s: set.idle_timeout_s.or(former.idle_timeout_s),
            snapshot_ack: set.snapshot_ack.or(former.snapshot_ack),
        };
        for removed in &self.removed {
            match removed {
                KeyLimit::Sandboxes => limits.max_sandboxes = None,
                KeyLimit::Vcpus => limits.max_vcpus = None,
                KeyLimit::MemoryMb => limits.max_memory_mib = None,
                KeyLimit::CreatesPerMinute => limits.creates_per_minute = None,
                KeyLimit::Paused => limits.max_paused = None,
                KeyLimit::Snapshots => limits.max_snapshots = None,
                KeyLimit::Templates => limits.max_templates = None,
                KeyLimit::Builds => limits.max_builds = None,
                KeyLimit::Exchanges => limits.max_exchanges = None,
                KeyLimit::DiskMb => limits.max_disk_mib = None,
                KeyLimit::IdleTimeout => limits.idle_timeout_s = None,
                KeyLimit::SnapshotAck => limits.snapshot_ack = None,
            }
        }
        limits
    }
}
