//! Files of a gVisor snapshot for upload to the store. gVisor snapshots have no parents, so all
//! files are complete.

use jiffy_engine_api::{EngineError, GVISOR, SnapshotFile, SnapshotFileKind, SnapshotParts};
use jiffy_gvisor_engine::SnapshotStore;
use std::sync::Arc;

/// Opens the files of snapshot `id`.
pub(super) fn parts(store: &SnapshotStore, id: &str) -> Result<SnapshotParts, EngineError> {
    let (manifest, files) = store.files(id).map_err(EngineError::failed)?;
    let files = files.into_iter().map(|(name, file)| SnapshotFile {
        name,
        kind: SnapshotFileKind::Other,
        file: Arc::new(file),
        inherited: Vec::new(),
    });
    Ok(SnapshotParts {
        id: manifest.id,
        parent: None,
        engine: GVISOR.to_owned(),
        template: manifest.template,
        // One version covers gVisor's kernel. The agent is named by the manifest's `base`.
        version: String::new(),
        kernel: manifest.version,
        agent: String::new(),
        processor: String::new(),
        files: files.collect(),
        working_set: Vec::new(),
    })
}
