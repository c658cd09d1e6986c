//! Classes of hosts with equal engines, processors and labels. A search considers only classes
//! whose hosts can run the sandbox.

use crate::bucket_index::BucketIndex;
use crate::{CpuLevel, EngineSet, HostSpec, Label, PlacementRequest, Rejection};

/// Properties that all hosts of a class have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    engines: EngineSet,
    cpu_level: CpuLevel,
    /// Further processor features, as bits whose meaning the caller of the scheduler defines.
    cpu_features: u64,
    /// Sorted.
    labels: Vec<Label>,
}

impl Properties {
    /// Returns the properties of a host.
    pub fn of(spec: &HostSpec) -> Self {
        let mut labels = spec.labels.clone();
        labels.sort_unstable();
        Self {
            engines: spec.engines,
            cpu_level: spec.cpu_level,
            cpu_features: spec.cpu_features,
            labels,
        }
    }

    /// Returns the first requirement that hosts with these properties do not meet. `None` if they
    /// meet all.
    pub fn mismatch(&self, request: &PlacementRequest) -> Option<Rejection> {
        if !self.engines.contains(request.engines) {
            return Some(Rejection::Engine);
        }
        if self.cpu_level < request.cpu_level {
            return Some(Rejection::CpuLevel);
        }
        if self.cpu_features & request.cpu_features != request.cpu_features {
            return Some(Rejection::CpuFeatures);
        }
        let missing = request
            .labels
            .iter()
            .find(|label| self.labels.binary_search(label).is_err());
        missing.map(|label| Rejection::Label(label.clone()))
    }
}

/// Hosts with equal properties that accept sandboxes.
#[derive(Debug)]
pub struct Class {
    /// Properties of the hosts.
    pub properties: Properties,
    /// Hosts by free amount, for each of [`super::ORDERS`].
    pub orders: [BucketIndex; 2],
}

impl Class {
    /// Creates a class without hosts.
    pub fn new(properties: Properties) -> Self {
        Self {
            properties,
            orders: [BucketIndex::new(), BucketIndex::new()],
        }
    }
}
