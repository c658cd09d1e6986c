//! Comparison of microVM snapshots with their recorded checksums, which detects damaged files.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.

use jiffy_engine_api::{DamagedChunk, EngineError, VerifiedSnapshot};
use jiffy_snapshot::{Store, VerifyResult};

/// Compares all snapshots of a lineage with their checksums. This function blocks.
pub(super) fn verify(store: &Store, id: &str) -> Result<Vec<VerifiedSnapshot>, EngineError> {
    let lineage = store.lineage(id).map_err(EngineError::failed)?;
    let verified = lineage.snapshots().iter().map(|snapshot| {
        let result = snapshot.verify().map_err(EngineError::failed)?;
        let has_checksums = result != VerifyResult::NoChecksums;
        let damaged = match result {
            VerifyResult::Damaged(damages) => damages,
            VerifyResult::NoChecksums | VerifyResult::Intact => Vec::new(),
        };
        Ok(VerifiedSnapshot {
            id: snapshot.id().to_owned(),
            has_checksums,
            damaged: damaged
                .into_iter()
                .map(|d| DamagedChunk {
                    file: d.file,
                    chunk: d.chunk,
                })
                .collect(),
            repaired: false,
        })
    });
    verified.collect()
}
