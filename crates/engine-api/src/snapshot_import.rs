//! [`SnapshotImport`]: a snapshot of another host, which was downloaded from the store and which an
//! engine imports. Its fields come from that host and are not trusted.

use crate::SandboxSize;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Description of a snapshot from another host. No field is trusted before it is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotImport {
    /// Snapshot id.
    pub id: String,
    /// Snapshot on which the layers are based.
    pub parent: Option<String>,
    /// Name of the engine that took the snapshot.
    pub engine: String,
    /// Size of a guest restored from the snapshot.
    pub size: SandboxSize,
    /// Content of `manifest.json`.
    pub manifest: Vec<u8>,
}

/// File of an imported snapshot, stored on this host.
pub trait ImportedFile: Send + Sync {
    /// Returns the name in the snapshot's directory.
    fn name(&self) -> &str;

    /// Creates the file at `to`, which must not exist. Blocks.
    fn place(&self, to: &Path) -> io::Result<()>;

    /// Returns the origin of the missing content, in a format of the store that the engine retains
    /// with the snapshot. [`Self::place`] then creates a file with holes. `None` if the file is
    /// complete.
    fn missing(&self) -> Option<String> {
        None
    }

    /// Creates a file at `to` that protects the cached content of an incomplete file. The cache
    /// does not evict this content before `to` is removed. Blocks.
    fn pin(&self, _to: &Path) -> io::Result<()> {
        Ok(())
    }
}

/// All files of an imported snapshot.
pub type ImportedFiles = Vec<Arc<dyn ImportedFile>>;

/// Handling of an existing snapshot with the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExistingSnapshot {
    /// The existing snapshot remains, and the import fails.
    Keep,
    /// The existing snapshot is damaged and is replaced. Running guests continue to use its files.
    Replace,
}
