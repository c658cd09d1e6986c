//! Import of a snapshot from another host. The imported files are untrusted, so they are checked
//! before the snapshot is published.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *layer* is the part of a memory or disk that one
//! snapshot stores: the content that differs from its ancestors.
//!
//! A *draft* is the directory of a snapshot that is not published yet. The *importer* is the caller
//! of [`Store::import`], which fetches snapshots from a shared store.

use crate::draft::remove_draft;
use crate::manifest::{Manifest, check_id};
use crate::snapshot::missing::PIN_FILE;
use crate::snapshot::working_set::SET_FILES;
use crate::snapshot::{
    MANIFEST, MAX_MANIFEST_BYTES, MEMORY_INDEX, MEMORY_LAYER, STATE, Snapshot, disk_index,
    disk_layer, read,
};
use crate::{MissingMemory, SnapshotError, Store, checksums};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Maximum number of writable disks of an imported snapshot.
const MAX_DISKS: usize = 64;

/// Handling of an existing snapshot with the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImportMode {
    /// Fail with [`SnapshotError::Exists`].
    New,
    /// Replace the existing snapshot. Running guests continue to use its files.
    Replace,
}

/// Directory of an import. Its path is removed on drop: after the publication, the path refers to
/// nothing or to the replaced snapshot.
struct ImportDraft(PathBuf);

impl Drop for ImportDraft {
    fn drop(&mut self) {
        remove_draft(&self.0);
    }
}

/// Checks the manifest of a snapshot that will be imported.
pub fn check_manifest(
    bytes: &[u8],
    id: &str,
    parent: Option<&str>,
) -> Result<Manifest, SnapshotError> {
    check_id(id)?;
    let path = Path::new(MANIFEST);
    if bytes.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(SnapshotError::damaged(path, "it is too long"));
    }
    let manifest = Manifest::parse(bytes, id, path)?;
    if manifest.disks.len() > MAX_DISKS {
        return Err(SnapshotError::damaged(path, "it has too many disks"));
    }
    if manifest.parent.as_deref() != parent {
        let reason = "its parent differs from the parent in its lineage";
        return Err(SnapshotError::damaged(path, reason));
    }
    Ok(manifest)
}

impl Store {
    /// Publishes snapshot `id`. `fill` creates its files in the given directory. A returned
    /// snapshot is checked and durable. A call that fails before the publication leaves the store
    /// unchanged. If `missing` is given, the memory layer has holes, and is persisted later. `fill`
    /// must then also create the presence file ([`crate::PIN_FILE`]), which lists the present
    /// chunks.
    pub fn import(
        &self,
        id: &str,
        parent: Option<&str>,
        mode: ImportMode,
        missing: Option<&MissingMemory>,
        fill: impl FnOnce(&Path) -> io::Result<()>,
    ) -> Result<Snapshot, SnapshotError> {
        check_id(id)?;
        let place = self.root().join(id);
        // An early check, before the files are transferred. The rename below decides.
        if mode == ImportMode::New && place.exists() {
            return Err(SnapshotError::Exists(id.to_owned()));
        }
        let draft = ImportDraft(self.new_draft_path());
        fs::create_dir(&draft.0).map_err(SnapshotError::io(&draft.0))?;
        fill(&draft.0).map_err(SnapshotError::io(&draft.0))?;
        let path = draft.0.join(MANIFEST);
        let manifest = check_manifest(&read(&path, MAX_MANIFEST_BYTES)?, id, parent)?;
        check_files(&draft.0, &manifest, missing.is_some())?;
        let snapshot = Snapshot::checked_at(&draft.0, manifest)?;
        // A child of a parent with other sizes could not be opened.
        if let Some(parent) = parent {
            self.lineage(parent)?.check_child(snapshot.manifest())?;
        }
        if let Some(missing) = missing {
            missing.write(&draft.0)?;
        }
        // Sync before the rename: a published snapshot must survive a crash of the host.
        sync(&draft.0, missing.is_some()).map_err(SnapshotError::io(&draft.0))?;
        let flags = match mode {
            ImportMode::Replace if place.exists() => RenameFlags::RENAME_EXCHANGE,
            ImportMode::New | ImportMode::Replace => RenameFlags::RENAME_NOREPLACE,
        };
        renameat2(AT_FDCWD, &draft.0, AT_FDCWD, &place, flags).map_err(|e| match e {
            nix::errno::Errno::EEXIST => SnapshotError::Exists(id.to_owned()),
            e => SnapshotError::io(&place)(e.into()),
        })?;
        self.index.insert(id, parent);
        // Sync the directory, so that the rename is durable.
        let synced = File::open(self.root()).and_then(|root| root.sync_all());
        synced.map_err(SnapshotError::io(self.root()))?;
        // The path of the draft now refers to nothing, or to the replaced files.
        drop(draft);
        self.get(id)
    }
}

/// Checks that the directory contains no other files than the files that belong to `manifest`.
/// [`Snapshot::checked_at`] reports missing files. `pinned` states whether a file with present
/// chunks ([`PIN_FILE`]) belongs to it.
fn check_files(dir: &Path, manifest: &Manifest, pinned: bool) -> Result<(), SnapshotError> {
    let mut allowed: BTreeSet<String> = [
        MANIFEST,
        STATE,
        MEMORY_LAYER,
        MEMORY_INDEX,
        checksums::CHECKSUMS_FILE,
    ]
    .map(str::to_owned)
    .into();
    if pinned {
        allowed.insert(PIN_FILE.to_owned());
    }
    allowed.extend(SET_FILES.map(|(name, _)| name.to_owned()));
    allowed.extend((0..manifest.disks.len()).flat_map(|n| [disk_layer(n), disk_index(n)]));
    for entry in fs::read_dir(dir).map_err(SnapshotError::io(dir))? {
        let entry = entry.map_err(SnapshotError::io(dir))?;
        let name = entry.file_name();
        let is_expected = name.to_str().is_some_and(|name| allowed.contains(name));
        let kind = entry
            .file_type()
            .map_err(SnapshotError::io(&entry.path()))?;
        // Links and directories could refer to files outside the snapshot.
        if !is_expected || !kind.is_file() {
            let reason = "it is not a file of a snapshot";
            return Err(SnapshotError::damaged(Path::new(&name), reason));
        }
    }
    Ok(())
}

/// Syncs the files. A memory layer with holes and its presence file ([`PIN_FILE`]) are not synced:
/// both belong to the importer's cache, which adds further chunks and persists them in the
/// background. After a crash of the host, only chunks that the presence file marks as persisted
/// count as present.
fn sync(dir: &Path, has_holes: bool) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if !has_holes || (name != MEMORY_LAYER && name != PIN_FILE) {
            File::open(entry.path())?.sync_all()?;
        }
    }
    File::open(dir)?.sync_all()
}
