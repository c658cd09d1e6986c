//! Import of gVisor snapshots that another host took and that were downloaded from the store.

use super::GvisorEngine;
use crate::imported_files::{place_all, without_template};
use crate::template_cache::chain;
use jiffy_engine_api::{EngineError, ExistingSnapshot, ImportedFiles, SnapshotImport};
use jiffy_gvisor_engine::GvisorManifest;
use std::path::Path;

impl GvisorEngine {
    /// Checks that this host can restore the snapshot. Returns its manifest with the paths of this
    /// host.
    pub(super) async fn can_restore(
        &self,
        import: &SnapshotImport,
    ) -> Result<GvisorManifest, EngineError> {
        let refuse = |reason: String| EngineError::Incompatible { reason };
        let parsed = GvisorManifest::parse(&import.manifest, &import.id);
        let mut manifest = parsed.map_err(|e| refuse(e.to_string()))?;
        if import.parent.is_some() {
            return Err(refuse(format!(
                "snapshot {} is damaged: a gVisor snapshot must not have a parent",
                import.id
            )));
        }
        if manifest.size != import.size {
            return Err(refuse(format!(
                "snapshot {} is damaged: the sizes in its record and its manifest differ",
                import.id
            )));
        }
        let version = &self.runtime()?.version;
        if manifest.version != *version {
            return Err(refuse(format!(
                "snapshot {} needs gVisor {}, but this host has {}; use the version of jiffy that took it",
                import.id, manifest.version, version
            )));
        }
        if manifest.net && self.network.is_none() {
            return Err(refuse(format!(
                "snapshot {} was taken with a network, but sandboxes of this host have none; start the daemon with --network on",
                import.id
            )));
        }
        let prepared = self
            .templates
            .prepare_version(&manifest.template)
            .await
            .map_err(|e| without_template(import, &manifest.template, &e))?;
        let agent = prepared.agent_root().map_err(chain)?;
        // The path in the manifest is of the other host. The file name contains the agent's
        // checksum.
        let name = Path::new(&manifest.base).file_name().unwrap_or_default();
        let base = agent.with_file_name(name);
        if name.is_empty() || !base.is_file() {
            return Err(refuse(format!(
                "snapshot {} needs the guest agent {}, which this host lacks; use the version of jiffy that took it",
                import.id,
                name.display()
            )));
        }
        manifest.base = base.display().to_string();
        Ok(manifest)
    }

    /// Adds a snapshot from another host to the store.
    pub(super) async fn import_files(
        &self,
        import: &SnapshotImport,
        files: ImportedFiles,
        existing: ExistingSnapshot,
    ) -> Result<(), EngineError> {
        // Check again, because the stored manifest must have the paths of this host.
        let manifest = self.can_restore(import).await?;
        let store = self.store.clone();
        let replace = existing == ExistingSnapshot::Replace;
        let work = tokio::task::spawn_blocking(move || {
            store.import(&manifest, replace, |dir| place_all(&files, dir))
        });
        let imported = work.await.map_err(EngineError::failed)?;
        imported.map_err(EngineError::failed)
    }
}
