//! Descriptions of hosts, and requests for the placement of a sandbox: the input of the scheduler.

use crate::Resources;

/// Number of a host in the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostId(pub u32);

/// Number of a template version in the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TemplateId(pub u64);

/// Processor level (psABI of x86-64). A guest runs on hosts of its level and of higher levels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CpuLevel(pub u8);

/// Label of a host, which a request may require.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Label {
    /// Name, for example `zone`.
    pub name: String,
    /// Value, for example `eu-1`.
    pub value: String,
}

/// Engines of a host, as bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct EngineSet(u8);

impl EngineSet {
    /// MicroVMs on KVM.
    pub const MICROVM: Self = Self(1);
    /// gVisor.
    pub const GVISOR: Self = Self(2);

    /// Returns the union of two sets.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns whether all engines of `other` are in this set.
    #[must_use]
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Properties of a host that do not change while it is a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSpec {
    /// Resources for sandboxes.
    pub capacity: Resources,
    /// Engines.
    pub engines: EngineSet,
    /// Highest processor level of guests.
    pub cpu_level: CpuLevel,
    /// Further processor features, as bits whose meaning the caller defines.
    pub cpu_features: u64,
    /// Labels.
    pub labels: Vec<Label>,
}

/// State of a host, from its latest heartbeat.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostReport {
    /// Free resources. Resources of sandboxes that the host is creating are not free.
    pub free: Resources,
    /// The host accepts no new sandboxes.
    pub is_draining: bool,
    /// The host can reach the object store.
    pub is_store_reachable: bool,
    /// Templates that are on the host, in any order.
    pub templates: Vec<TemplateId>,
}

/// Requirements of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlacementRequest {
    /// Resources that the sandbox occupies.
    pub needs: Resources,
    /// Engines of which the host must have all. An empty set permits every host.
    pub engines: EngineSet,
    /// Minimum processor level.
    pub cpu_level: CpuLevel,
    /// Processor features that the host must have.
    pub cpu_features: u64,
    /// Labels that the host must have.
    pub labels: Vec<Label>,
    /// The host must reach the object store, for example because a snapshot is fetched from it.
    pub needs_store: bool,
    /// Template of the sandbox. Hosts that have it are preferred.
    pub template: Option<TemplateId>,
    /// Only hosts that have the template are considered. Has no effect if `template` is `None`.
    pub requires_template: bool,
    /// Host that has the volumes of the sandbox, which is the only suitable one. `None` if the
    /// sandbox has no volumes.
    pub volume_host: Option<HostId>,
    /// Hosts that have rejected the request.
    pub excluded: Vec<HostId>,
}
