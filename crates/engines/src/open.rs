//! Opens the engines of this host: all of them for a daemon, or one for a short-lived process such
//! as `jiffy run` without a daemon.

use crate::gvisor_engine::GvisorEngine;
use crate::host::{Host, PreparedTemplate};
use crate::microvm_engine::{LazyStore, MicroVmEngine};
use crate::template_cache::TemplateCache;
use jiffy_engine_api::{Engine, EngineError, EngineName, Engines};
use jiffy_network::Network;
use std::path::Path;
use std::sync::Arc;

/// Opens the engines of a daemon on `host`. Guests use `network`, or have no network if it is
/// `None`. `lazy` provides the memory of snapshots that is not stored on this host. Must be called
/// inside a tokio runtime.
///
/// # Errors
/// Fails if `default` is gVisor and gVisor cannot be used. In all other cases, an unusable engine
/// does not prevent the start of the daemon: the engine's description contains the reason.
pub async fn open_engines(
    host: Host,
    network: Option<Network>,
    default: EngineName,
    lazy: Option<LazyStore>,
) -> Result<Engines, EngineError> {
    let templates = Arc::new(TemplateCache::new(host));
    let microvm = MicroVmEngine::open(templates.clone())?
        .with_network(network.clone())
        .with_lazy_store(lazy);
    let gvisor = GvisorEngine::open(templates, network).await?;
    if default == EngineName::Gvisor {
        // An unusable gVisor is the default only if the operator selected gVisor, so this is an
        // error of the configuration. MicroVMs are also the default if no engine is usable. The
        // daemon must start in that case, to report the reason and to serve existing data.
        gvisor.check_usable()?;
    }
    let all: Vec<Arc<dyn Engine>> = vec![Arc::new(microvm), Arc::new(gvisor)];
    Engines::new(all, &default.to_string())
}

/// Opens one engine for guests that are terminated with this process. gVisor stores its sandboxes
/// and snapshots in `directory`. `prepared` is the open template `template`.
pub async fn open_ephemeral_engine(
    host: Host,
    network: Option<Network>,
    engine: EngineName,
    directory: &Path,
    template: &str,
    prepared: PreparedTemplate,
) -> Result<Arc<dyn Engine>, EngineError> {
    let templates = Arc::new(TemplateCache::new(host));
    templates.insert(template, Arc::new(prepared))?;
    match engine {
        EngineName::MicroVm => {
            let engine = MicroVmEngine::open(templates)?;
            Ok(Arc::new(engine.with_network(network)))
        }
        EngineName::Gvisor => {
            let engine = GvisorEngine::open_ephemeral(templates, directory, network).await?;
            engine.check_usable()?;
            Ok(Arc::new(engine))
        }
    }
}
