//! Files of a microVM snapshot for upload to the store. Each layer lists the chunks that only its
//! ancestors contain.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. A *layer* is the
//! part of a memory or disk that one snapshot stores: the content that differs from its ancestors.
//! It consists of *chunks* of 64 KiB.

use jiffy_engine_api::{EngineError, MICROVM, SnapshotFile, SnapshotFileKind, SnapshotParts};
use jiffy_snapshot::{PartKind, SnapshotPart, Store};
use std::sync::Arc;

/// Opens the files of snapshot `id`.
pub(super) fn parts(store: &Store, id: &str) -> Result<SnapshotParts, EngineError> {
    let (manifest, parts) = store.parts(id).map_err(EngineError::failed)?;
    Ok(SnapshotParts {
        id: manifest.id,
        parent: manifest.parent,
        engine: MICROVM.to_owned(),
        template: manifest.template,
        version: manifest.versions.vmm,
        kernel: manifest.versions.kernel,
        agent: manifest.versions.agent,
        processor: manifest.cpu,
        files: parts.into_iter().map(file).collect(),
        working_set: working_set(store, id),
    })
}

/// Converts a file of the snapshot store to a file of the engine interface.
fn file(part: SnapshotPart) -> SnapshotFile {
    SnapshotFile {
        name: part.name,
        kind: match part.kind {
            PartKind::Memory => SnapshotFileKind::Memory,
            PartKind::Disk(number) => SnapshotFileKind::Disk(number),
            PartKind::State => SnapshotFileKind::DeviceState,
            PartKind::Other => SnapshotFileKind::Other,
        },
        file: Arc::new(part.file),
        inherited: part.inherited,
    }
}

/// Returns the working set of the newest snapshot in the lineage that has one. Returns an empty set
/// if it cannot be read: it only speeds up restores.
fn working_set(store: &Store, id: &str) -> Vec<u32> {
    let recorded = store.lineage(id).and_then(|lineage| lineage.working_set());
    let Ok(Some((set, _))) = recorded else {
        return Vec::new();
    };
    // Chunks beyond 2^32 do not occur: guests have far less memory.
    set.iter()
        .filter_map(|chunk| chunk.try_into().ok())
        .collect()
}
