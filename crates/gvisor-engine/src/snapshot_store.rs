//! [`SnapshotStore`]: snapshots of gVisor sandboxes on disk. `<root>/<id>/` contains a manifest and
//! the files of gVisor's checkpoint. Snapshots do not depend on each other.
//!
//! The *sentry* is gVisor's kernel in user space, one process per sandbox.
//!
//! A *draft* is the directory of a snapshot that is not published yet.

use crate::error::GvisorError;
use jiffy_engine_api::SandboxSize;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Version of the directory's layout and of the manifest.
const MANIFEST_FORMAT: u32 = 1;
/// Name of the file with the manifest.
const MANIFEST_FILE: &str = "manifest.json";
/// Files of every checkpoint (pkg/sentry/state/checkpointfiles of gVisor).
const CHECKPOINT_FILES: [&str; 3] = ["checkpoint.img", "pages_meta.img", "pages.img"];
/// File that marks a snapshot of a sandbox that was only booted ([`SnapshotStore::mark_boot`]).
const BOOT_MARK_FILE: &str = "boot";
/// Prefix of directories that are not snapshots: unfinished or removed ones. Ids contain no dot.
const DRAFT_PREFIX: &str = ".draft-";

/// Manifest of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GvisorManifest {
    /// Version of the layout.
    pub format: u32,
    /// Snapshot id.
    pub id: String,
    /// Engine that took the snapshot: `gvisor`.
    pub engine: String,
    /// Version of gVisor. Other versions may be unable to read the snapshot.
    pub version: String,
    /// Template of the sandbox with its version.
    pub template: String,
    /// Time of the snapshot, in milliseconds since 1970.
    pub created_ms: u64,
    /// Size of the sandbox.
    pub size: SandboxSize,
    /// True if the sandbox has a network interface.
    pub net: bool,
    /// Path of the image from which the agent was started.
    pub base: String,
}

impl GvisorManifest {
    /// Creates the manifest of a snapshot that will be taken.
    pub(crate) fn new(id: &str, created_ms: u64) -> Self {
        Self {
            format: MANIFEST_FORMAT,
            id: id.to_owned(),
            engine: "gvisor".to_owned(),
            version: String::new(),
            template: String::new(),
            created_ms,
            size: SandboxSize::default(),
            net: false,
            base: String::new(),
        }
    }

    /// Reads the manifest of snapshot `id`.
    pub fn parse(json: &[u8], id: &str) -> Result<Self, GvisorError> {
        let damaged = |reason: String| GvisorError::Snapshot {
            id: id.to_owned(),
            reason,
        };
        let manifest: Self =
            serde_json::from_slice(json).map_err(|e| damaged(format!("is damaged: {e}")))?;
        match manifest.format {
            MANIFEST_FORMAT if manifest.id == id => Ok(manifest),
            MANIFEST_FORMAT => Err(damaged(format!(
                "is damaged: its manifest belongs to snapshot {:?}",
                manifest.id
            ))),
            other => Err(damaged(format!(
                "has format {other}, but this version of jiffy reads format {MANIFEST_FORMAT}: use the version of jiffy that took it"
            ))),
        }
    }
}

/// Snapshots by id.
#[derive(Debug, Clone)]
pub struct SnapshotStore {
    /// Directory of all snapshots.
    root: PathBuf,
}

impl SnapshotStore {
    /// Opens the directory `root`, and creates it if it does not exist.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, GvisorError> {
        let root = root.into();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&root)
            .map_err(GvisorError::file(&root))?;
        Ok(Self { root })
    }

    /// Returns the directory of snapshot `id`.
    pub(crate) fn path(&self, id: &str) -> Result<PathBuf, GvisorError> {
        check_id(id)?;
        Ok(self.root.join(id))
    }

    /// Fails if a snapshot `id` exists or if `id` is not a valid id.
    pub(crate) fn expect_free(&self, id: &str) -> Result<(), GvisorError> {
        if self.path(id)?.exists() {
            Err(GvisorError::Snapshot {
                id: id.to_owned(),
                reason: "already exists".to_owned(),
            })
        } else {
            Ok(())
        }
    }

    /// Creates an empty directory for a snapshot that will be taken.
    pub(crate) fn draft(&self) -> Result<PathBuf, GvisorError> {
        // Only the uniqueness of the numbers matters, so relaxed access suffices.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!(
            "{DRAFT_PREFIX}{}-{}-{number}",
            std::process::id(),
            process_tag()
        );
        let path = self.root.join(name);
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(GvisorError::file(&path))?;
        Ok(path)
    }

    /// Publishes a draft whose checkpoint is complete as a snapshot.
    pub(crate) fn publish(
        &self,
        draft: &Path,
        manifest: &GvisorManifest,
    ) -> Result<(), GvisorError> {
        write_manifest(draft, manifest)?;
        let path = self.path(&manifest.id)?;
        // The rename makes the complete directory visible at once.
        fs::rename(draft, &path).map_err(GvisorError::file(&path))
    }

    /// Publishes an imported snapshot. `fill` places its files in the given directory. If
    /// `replace`, an existing snapshot is replaced. A visible snapshot is always complete. On
    /// success, all files and directory entries are synced to the disk.
    pub fn import(
        &self,
        manifest: &GvisorManifest,
        replace: bool,
        fill: impl FnOnce(&Path) -> io::Result<()>,
    ) -> Result<(), GvisorError> {
        if !replace {
            self.expect_free(&manifest.id)?;
        }
        let draft = self.draft()?;
        let imported = self.import_in(&draft, manifest, replace, fill);
        // After an exchange, the draft contains the replaced files.
        let _ = fs::remove_dir_all(&draft);
        imported
    }

    /// Imports a snapshot into `draft`, checks its files, and publishes it by a rename. With
    /// `replace`, it takes the place of an existing snapshot.
    fn import_in(
        &self,
        draft: &Path,
        manifest: &GvisorManifest,
        replace: bool,
        fill: impl FnOnce(&Path) -> io::Result<()>,
    ) -> Result<(), GvisorError> {
        let failed = |e| GvisorError::file(draft)(e);
        fill(draft).map_err(failed)?;
        // Remove the imported manifest: it may be a hard link to a cached file, which must not be
        // overwritten.
        let own_manifest = draft.join(MANIFEST_FILE);
        match fs::remove_file(&own_manifest) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
            _ => {}
        }
        for entry in fs::read_dir(draft).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let is_expected = name.to_str().is_some_and(is_checkpoint_file);
            // The files come from another host. A link could refer to any file of this host.
            if !is_expected || !entry.file_type().map_err(failed)?.is_file() {
                return Err(GvisorError::Snapshot {
                    id: manifest.id.clone(),
                    reason: format!("is damaged: it contains the unexpected file {name:?}"),
                });
            }
            File::open(entry.path())
                .and_then(|file| file.sync_all())
                .map_err(failed)?;
        }
        write_manifest(draft, manifest)?;
        // The files and their names must be durable before the snapshot is visible.
        File::open(&own_manifest)
            .and_then(|file| file.sync_all())
            .and_then(|()| File::open(draft)?.sync_all())
            .map_err(failed)?;
        let path = self.path(&manifest.id)?;
        if !replace {
            // The snapshot may have been created meanwhile.
            self.expect_free(&manifest.id)?;
        }
        if replace && path.exists() {
            let flags = RenameFlags::RENAME_EXCHANGE;
            // Atomic: at each moment either the old or the new snapshot exists.
            renameat2(AT_FDCWD, draft, AT_FDCWD, &path, flags)
                .map_err(|e| GvisorError::file(&path)(e.into()))?;
        } else {
            // Fails if a snapshot exists: its directory is not empty.
            fs::rename(draft, &path).map_err(GvisorError::file(&path))?;
        }
        let synced = File::open(&path).and_then(|dir| dir.sync_all());
        synced
            // The entry in the parent directory must be durable too.
            .and_then(|()| File::open(&self.root)?.sync_all())
            .map_err(GvisorError::file(&path))
    }

    /// Reads the manifest of snapshot `id`.
    pub fn get(&self, id: &str) -> Result<GvisorManifest, GvisorError> {
        let path = self.path(id)?.join(MANIFEST_FILE);
        match fs::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(GvisorError::Snapshot {
                id: id.to_owned(),
                reason: "does not exist".to_owned(),
            }),
            other => GvisorManifest::parse(&other.map_err(GvisorError::file(&path))?, id),
        }
    }

    /// Describes the first file of snapshot `id` that is missing or empty. `None` if there is no
    /// such file.
    pub fn find_damage(&self, id: &str) -> Option<String> {
        let path = self.path(id).ok()?;
        let mut files = [MANIFEST_FILE].iter().chain(&CHECKPOINT_FILES);
        let damaged = files.find(|name| match fs::metadata(path.join(name)) {
            Ok(metadata) => metadata.len() == 0,
            // Other errors, such as a denied permission, do not prove damage.
            Err(e) => e.kind() == io::ErrorKind::NotFound,
        });
        damaged.map(|name| format!("{} is missing or empty", path.join(name).display()))
    }

    /// Opens all files of snapshot `id`, including the manifest, sorted by name.
    pub fn files(&self, id: &str) -> Result<(GvisorManifest, Vec<(String, File)>), GvisorError> {
        let manifest = self.get(id)?;
        let path = self.path(id)?;
        let failed = |e| GvisorError::file(&path)(e);
        let mut files = Vec::new();
        for entry in fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if let Ok(name) = entry.file_name().into_string()
                && (name == MANIFEST_FILE || is_checkpoint_file(&name))
            {
                files.push((name, File::open(entry.path()).map_err(failed)?));
            }
        }
        // The order of directory entries is arbitrary.
        files.sort_by(|a, b| a.0.cmp(&b.0));
        Ok((manifest, files))
    }

    /// Records that snapshot `id` is equivalent to a boot of its template: no command was started
    /// before it was taken.
    pub fn mark_boot(&self, id: &str) -> Result<(), GvisorError> {
        let path = self.path(id)?.join(BOOT_MARK_FILE);
        File::create(&path)
            .map(drop)
            .map_err(GvisorError::file(&path))
    }

    /// Returns whether snapshot `id` is equivalent to a boot of its template.
    pub fn is_boot(&self, id: &str) -> bool {
        self.path(id)
            .is_ok_and(|path| path.join(BOOT_MARK_FILE).exists())
    }

    /// Returns whether snapshot `id` exists.
    pub fn exists(&self, id: &str) -> bool {
        self.path(id).is_ok_and(|path| path.exists())
    }

    /// Returns the ids of all snapshots, sorted.
    pub fn ids(&self) -> Result<Vec<String>, GvisorError> {
        let failed = |e| GvisorError::file(&self.root)(e);
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.root).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if let Some(id) = name.to_str().filter(|id| check_id(id).is_ok()) {
                ids.push(id.to_owned());
            }
        }
        ids.sort();
        Ok(ids)
    }

    /// Removes a snapshot. A missing snapshot is not an error. Sandboxes restored from it continue
    /// to run.
    pub fn remove(&self, id: &str) -> Result<(), GvisorError> {
        let path = self.path(id)?;
        // Rename first: the snapshot disappears atomically, before its files are removed.
        let trash = self.draft()?;
        match fs::rename(&path, trash.join(id)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(GvisorError::file(&path)(e));
            }
            _ => {}
        }
        fs::remove_dir_all(&trash).map_err(GvisorError::file(&trash))
    }

    /// Iterates over the ids of all snapshots in no particular order, reading the directory lazily.
    /// Removes drafts of processes that exited.
    pub fn walk(
        &self,
    ) -> Result<impl Iterator<Item = Result<String, GvisorError>> + use<>, GvisorError> {
        let root = self.root.clone();
        let entries = fs::read_dir(&root).map_err(GvisorError::file(&root))?;
        let ids = entries.map(move |entry| {
            let entry = entry.map_err(GvisorError::file(&root))?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if check_id(&name).is_ok() {
                return Ok(Some(name.into_owned()));
            }
            if is_abandoned(&name) {
                // Ignore the error: the next walk tries again.
                let _ = fs::remove_dir_all(entry.path());
            }
            Ok(None)
        });
        Ok(ids.filter_map(Result::transpose))
    }

    /// Returns the size of snapshot `id` in bytes.
    pub fn size(&self, id: &str) -> Option<u64> {
        let path = self.path(id).ok()?;
        path.exists().then(|| Self::size_of(&path))
    }

    /// Returns the size of the checkpoint in `directory`: the sum of its file lengths, without the
    /// manifest.
    pub(crate) fn size_of(directory: &Path) -> u64 {
        let files = fs::read_dir(directory).into_iter().flatten().flatten();
        let files = files.filter(|f| f.file_name() != MANIFEST_FILE);
        files.map(|f| f.metadata().map_or(0, |m| m.len())).sum()
    }

    /// Reads the files of snapshot `id` into the page cache in the background.
    pub fn prefetch(&self, id: &str) -> Result<(), GvisorError> {
        let path = self.path(id)?;
        for file in fs::read_dir(&path)
            .map_err(GvisorError::file(&path))?
            .flatten()
        {
            let opened = File::open(file.path()).map_err(GvisorError::file(&file.path()))?;
            let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_WILLNEED;
            // Ignore the error: a restore is only slower.
            let _ = nix::fcntl::posix_fadvise(&opened, 0, 0, advice);
        }
        Ok(())
    }
}

/// Returns whether `name` is a draft of a process that exited.
fn is_abandoned(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(DRAFT_PREFIX) else {
        return false;
    };
    let pid = rest.split('-').next().unwrap_or_default();
    // An earlier process may have had the same process id.
    if pid == std::process::id().to_string() {
        !rest.contains(process_tag())
    } else {
        !Path::new("/proc").join(pid).exists()
    }
}

/// Writes the manifest into the directory of its snapshot.
fn write_manifest(draft: &Path, manifest: &GvisorManifest) -> Result<(), GvisorError> {
    let file = draft.join(MANIFEST_FILE);
    let json = serde_json::to_vec_pretty(manifest).map_err(io::Error::other);
    let written = json.and_then(|json| fs::write(&file, json));
    written.map_err(GvisorError::file(&file))
}

/// Returns whether a checkpoint may contain a file of this name: an image, or the mark of a boot.
fn is_checkpoint_file(name: &str) -> bool {
    // Other versions of gVisor may write further images.
    let image = name.strip_suffix(".img");
    let good = |b: u8| b.is_ascii_lowercase() || b == b'_';
    name == BOOT_MARK_FILE || image.is_some_and(|stem| !stem.is_empty() && stem.bytes().all(good))
}

/// Returns a random string that identifies this process, even if its process id is reused.
fn process_tag() -> &'static str {
    static RUN: OnceLock<String> = OnceLock::new();
    RUN.get_or_init(|| format!("{:016x}", RandomState::new().build_hasher().finish()))
}

/// Checks that `id` consists of 1 to 64 lower-case letters and digits.
fn check_id(id: &str) -> Result<(), GvisorError> {
    let good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    if (1..=64).contains(&id.len()) && id.bytes().all(good) {
        Ok(())
    } else {
        Err(GvisorError::Snapshot {
            id: format!("{:?}", id.chars().take(80).collect::<String>()),
            reason: "has an invalid id: use 1 to 64 lower-case letters and digits".to_owned(),
        })
    }
}

#[cfg(test)]
mod tests;
