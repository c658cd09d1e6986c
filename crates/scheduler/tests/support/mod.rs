//! Hosts, requests and random numbers for tests.

mod random;

pub use random::Random;

use jiffy_scheduler::{
    CpuLevel, EngineSet, HostReport, HostSpec, PlacementRequest, Resources, TemplateId,
};

/// Returns amounts of processor time (in thousandths of a processor), memory and disk.
pub fn resources(cpu_milli: u32, memory_mib: u32, disk_mib: u32) -> Resources {
    Resources {
        cpu_milli,
        memory_mib,
        disk_mib,
    }
}

/// Returns a host with this capacity and all engines.
pub fn spec(capacity: Resources) -> HostSpec {
    HostSpec {
        capacity,
        engines: EngineSet::MICROVM.with(EngineSet::GVISOR),
        cpu_level: CpuLevel(3),
        cpu_features: 0b111,
        labels: Vec::new(),
    }
}

/// Returns the report of a host with these free resources.
pub fn report(free: Resources) -> HostReport {
    HostReport {
        free,
        is_store_reachable: true,
        ..HostReport::default()
    }
}

/// Returns a request for a microVM with these resources.
pub fn request(needs: Resources) -> PlacementRequest {
    PlacementRequest {
        needs,
        engines: EngineSet::MICROVM,
        ..PlacementRequest::default()
    }
}

/// Returns the request for a sandbox of this template.
pub fn with_template(request: PlacementRequest, template: u64) -> PlacementRequest {
    PlacementRequest {
        template: Some(TemplateId(template)),
        ..request
    }
}
