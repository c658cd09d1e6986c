//! Import of microVM snapshots that another host took and that were downloaded from the store.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. It consists of *chunks* of 64 KiB. Chunks of a memory layer that were not
//! downloaded are *missing*. They are fetched later, into a cache. A *pin* is a file of the
//! snapshot that prevents the cache from evicting the snapshot's chunks.

use super::MicroVmEngine;
use crate::imported_files::{incompatible, place_all, without_template};
use jiffy_engine_api::{EngineError, ExistingSnapshot, ImportedFiles, SnapshotImport};
use jiffy_snapshot::{ImportMode, Manifest, MissingMemory, PIN_FILE, check_manifest, is_reserved};

/// Alternative to snapshots that need a particular processor or kernel.
pub(super) const WITHOUT_MEMORY: &str = "store it without memory on its own host (`jiffy snapshot --disk-only`, \
     `jiffy pause --disk-only`): every host can boot it";

impl MicroVmEngine {
    /// Checks that this host can restore the snapshot: manifest, sizes, processor level, template,
    /// kernel modules and network. The full set of processor features is compared during the
    /// restore.
    pub(super) async fn can_restore(&self, import: &SnapshotImport) -> Result<(), EngineError> {
        let manifest = manifest(import)?;
        check_size(import, &manifest)?;
        // The manifest's `cpu` starts with the level, followed by a colon and the features.
        let level = manifest.cpu.split_once(':').map(|(level, _)| level);
        // A guest that boots uses the processor, the kernel and the network of this host.
        let is_restored = !manifest.disk_only;
        if let Some(level) = level
            .filter(|_| is_restored)
            .and_then(|level| level.parse().ok())
        {
            crate::cpu_level::check_features(level).map_err(|missing| {
                EngineError::Incompatible {
                    reason: format!(
                        "snapshot {} needs processor level {level}, but this host's processor lacks {missing}; restore it on a host of that level, or {WITHOUT_MEMORY}",
                        import.id
                    ),
                }
            })?;
        }
        let template = self
            .shared
            .templates
            .prepare_version(&manifest.template)
            .await
            .map_err(|e| without_template(import, &manifest.template, &e))?;
        if let Some(sum) = manifest.modules.as_ref().filter(|_| is_restored) {
            template.has_modules(sum).map_err(|e| {
                incompatible(
                    import,
                    &format!("the modules of kernel {}", manifest.versions.kernel),
                    &crate::template_cache::chain(e),
                    &format!("use the version of jiffy that took it, or {WITHOUT_MEMORY}"),
                )
            })?;
        }
        if is_restored && manifest.net && self.network.is_none() {
            Err(EngineError::Incompatible {
                reason: format!(
                    "snapshot {} was taken with a network, but sandboxes of this host have none; start the daemon with --network on",
                    import.id
                ),
            })
        } else {
            Ok(())
        }
    }

    /// Adds a snapshot from another host to the store.
    pub(super) async fn import_files(
        &self,
        import: &SnapshotImport,
        files: ImportedFiles,
        existing: ExistingSnapshot,
    ) -> Result<(), EngineError> {
        // Validate the manifest; its content is not used.
        manifest(import)?;
        let (store, import) = (self.shared.store.clone(), import.clone());
        let mode = match existing {
            ExistingSnapshot::Keep => ImportMode::New,
            ExistingSnapshot::Replace => ImportMode::Replace,
        };
        // A file with such a name would replace a file that the store itself writes.
        if let Some(file) = files.iter().find(|file| is_reserved(file.name())) {
            return Err(EngineError::Incompatible {
                reason: format!(
                    "snapshot {} is damaged: it contains a file with the reserved name {}",
                    import.id,
                    file.name()
                ),
            });
        }
        // Only the memory layer can have missing chunks, so at most one file is found.
        let missing = files.iter().find_map(|file| file.missing());
        let missing = missing.map(|origin| MissingMemory { origin });
        let work = tokio::task::spawn_blocking(move || {
            let fill = |dir: &std::path::Path| {
                place_all(&files, dir)?;
                // Only layers with missing chunks need a pin: complete layers do not depend on the
                // cache.
                let mut with_holes = files.iter().filter(|file| file.missing().is_some());
                with_holes.try_for_each(|file| file.pin(&dir.join(PIN_FILE)))
            };
            let parent = import.parent.as_deref();
            store.import(&import.id, parent, mode, missing.as_ref(), fill)
        });
        let imported = work.await.map_err(EngineError::failed)?;
        imported.map(drop).map_err(EngineError::failed)
    }
}

fn manifest(import: &SnapshotImport) -> Result<Manifest, EngineError> {
    check_manifest(&import.manifest, &import.id, import.parent.as_deref()).map_err(|e| {
        EngineError::Incompatible {
            reason: e.to_string(),
        }
    })
}

/// Checks that the size in the snapshot's record is the size in its manifest.
fn check_size(import: &SnapshotImport, manifest: &Manifest) -> Result<(), EngineError> {
    let size = import.size;
    let disk = manifest.disks.first().map(|disk| disk.bytes);
    let expected = (u64::from(size.memory_mib) << 20, Some(size.disk_mib << 20));
    if manifest.vcpus == size.vcpus && (manifest.memory.bytes, disk) == expected {
        Ok(())
    } else {
        Err(EngineError::Incompatible {
            reason: format!(
                "snapshot {} is damaged: the sizes in its record and its manifest differ",
                import.id
            ),
        })
    }
}
