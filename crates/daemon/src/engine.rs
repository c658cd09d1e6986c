//! Selection of the engine of new sandboxes, by option or by the capabilities of the host.

use jiffy_engine_api::EngineName;
use jiffy_engines::{EngineChoice, EngineFacts, Host};
use jiffy_network::NicKind;

/// Returns the requested engine, or the most suitable engine of `host`. The engine may be unusable.
pub fn choose(engine: Option<EngineName>, host: &Host) -> EngineChoice {
    match engine {
        None => EngineFacts::of(host).choose(),
        Some(engine) => EngineChoice {
            engine,
            why: "requested by an option".to_owned(),
        },
    }
}

/// Returns the kind of network interface of sandboxes on `engine`.
pub fn nic_kind(engine: EngineName) -> NicKind {
    match engine {
        EngineName::MicroVm => NicKind::Tap,
        EngineName::Gvisor => NicKind::Veth,
    }
}
