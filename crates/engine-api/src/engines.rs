//! Registry of the engines of a host.

use crate::{Engine, EngineDescription, EngineError, SnapshotFiles};
use std::fmt;
use std::sync::Arc;

/// Engines of a host, by name. The records of sandboxes and snapshots contain the name of their
/// engine. A new sandbox uses the default engine unless its creator selects another one.
#[derive(Clone)]
pub struct Engines {
    all: Arc<[Arc<dyn Engine>]>,
    default: Arc<dyn Engine>,
}

impl Engines {
    /// Creates a registry of `all`, which must contain the engine named `default`.
    pub fn new(all: Vec<Arc<dyn Engine>>, default: &str) -> Result<Self, EngineError> {
        // Check the default here, so that `default_engine` cannot fail.
        let default = find(&all, default)?.clone();
        Ok(Self {
            all: all.into(),
            default,
        })
    }

    /// Returns all engines.
    pub fn all(&self) -> impl Iterator<Item = &Arc<dyn Engine>> {
        self.all.iter()
    }

    /// Returns the default engine.
    pub fn default_engine(&self) -> &Arc<dyn Engine> {
        &self.default
    }

    /// Returns the engine `name`.
    ///
    /// # Errors
    /// Fails if this host has no engine of that name.
    pub fn get(&self, name: &str) -> Result<&Arc<dyn Engine>, EngineError> {
        find(&self.all, name)
    }

    /// Returns the snapshot files of the engine `name`.
    ///
    /// # Errors
    /// Fails if this host has no engine of that name.
    pub fn snapshot_files(&self, name: &str) -> Result<&dyn SnapshotFiles, EngineError> {
        Ok(self.get(name)?.snapshot_files())
    }

    /// Returns the descriptions of all engines.
    pub fn descriptions(&self) -> Vec<EngineDescription> {
        let described = self.all().map(|engine| EngineDescription {
            // An engine does not know whether it is the default.
            default: Arc::ptr_eq(engine, &self.default),
            ..engine.description()
        });
        described.collect()
    }

    /// Terminates the guests of all engines that are neither detached nor owned by a caller. The
    /// engines must not be used afterwards.
    pub async fn close(&self) {
        for engine in self.all() {
            engine.close().await;
        }
    }
}

impl fmt::Debug for Engines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.all().map(|engine| engine.name()))
            .finish()
    }
}

/// Returns the engine with this name. The error lists the names of all engines.
fn find<'a>(all: &'a [Arc<dyn Engine>], name: &str) -> Result<&'a Arc<dyn Engine>, EngineError> {
    let engine = all.iter().find(|engine| engine.name() == name);
    engine.ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|engine| engine.name()).collect();
        EngineError::Failed {
            reason: format!(
                "unknown engine `{name}`: choose one of {}",
                names.join(", ")
            ),
        }
    })
}
