//! Snapshot that another host made, as an engine puts it in place.

use crate::SandboxSize;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Description of a snapshot that another host made. All of it is hostile until it is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotImport {
    /// Id.
    pub id: String,
    /// Snapshot that its layers are based on.
    pub parent: Option<String>,
    /// Name of the engine that took it.
    pub engine: String,
    /// Resources of a guest made from it.
    pub size: SandboxSize,
    /// Content of its `manifest.json`.
    pub manifest: Vec<u8>,
}

/// File of such a snapshot, which has arrived.
pub trait ImportedFile: Send + Sync {
    /// Name in the snapshot's directory.
    fn name(&self) -> &str;

    /// Makes the file at `to`, which does not exist. Blocks.
    fn place(&self, to: &Path) -> io::Result<()>;

    /// Place of its other content, in the words of the one who gave it, if not all has arrived:
    /// then the file has holes.
    fn missing(&self) -> Option<String> {
        None
    }

    /// Makes the file `to`, by which what has arrived is kept. Blocks.
    fn pin(&self, _to: &Path) -> io::Result<()> {
        Ok(())
    }
}

/// All files of such a snapshot.
pub type ImportedFiles = Vec<Arc<dyn ImportedFile>>;

/// Treatment of a snapshot of the same id that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExistingSnapshot {
    /// It stays, and the import fails.
    Keep,
    /// It is damaged: the import takes its place. Guests that run from it keep its files.
    Replace,
}
