//! Engine of new sandboxes.

use jiffy_engine_api::EngineName;
use jiffy_engines::{EngineChoice, EngineFacts, Host};
use jiffy_network::NicKind;

/// The engine of `host` that was asked for, or else the one that suits it. It may not be usable.
pub fn choose(engine: Option<EngineName>, host: &Host) -> EngineChoice {
    match engine {
        None => EngineFacts::of(host).choose(),
        Some(engine) => EngineChoice {
            engine,
            why: "as it was asked for".to_owned(),
        },
    }
}

/// Kind of network interface of sandboxes on `engine`.
pub fn nic_kind(engine: EngineName) -> NicKind {
    match engine {
        EngineName::MicroVm => NicKind::Tap,
        EngineName::Gvisor => NicKind::Veth,
    }
}
