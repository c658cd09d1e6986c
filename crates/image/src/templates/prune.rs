//! Garbage collection: removes images, versions and layers to which no template, snapshot or
//! running sandbox refers.
//!
//! Images are *borrowed* if the directory of images is a symbolic link into another data directory.

use crate::file::OnPath;
use crate::home::Home;
use crate::images::ImageStore;
use crate::layer::LayerStore;
use crate::template_model::{ImageSum, TemplateError, TemplateManifest};
use crate::templates::Templates;
use crate::version::{self, is_of_image};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// Maximum number of bytes that are read of a snapshot's manifest.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

/// Retention time of interrupted downloads in seconds.
const DOWNLOAD_RETENTION_S: u64 = 24 * 3600;

/// Removed images and versions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrunedImages {
    pub images: Vec<ImageSum>,
    /// Versions of templates, as `name@version`.
    pub versions: Vec<String>,
    /// Freed disk space in bytes.
    pub bytes: u64,
}

/// Part of a snapshot's manifest that refers to a template.
#[derive(Deserialize)]
struct SnapshotNeeds {
    template: String,
}

impl Templates {
    /// Removes unreferenced images and versions. Waits for running builds.
    pub fn prune(&self) -> Result<PrunedImages, TemplateError> {
        Ok(self.prune_when(true, None)?.unwrap_or_default())
    }

    /// Returns the result of [`Self::prune`] as if the templates `without` did not exist. Removes
    /// no image and no version.
    pub fn preview_prune(&self, without: &[String]) -> Result<PrunedImages, TemplateError> {
        Ok(self.prune_when(true, Some(without))?.unwrap_or_default())
    }

    /// Prunes unless a template is being built or opened. Ignores errors, since the next call
    /// repeats the work.
    pub(crate) fn prune_if_idle(&self) {
        let _ = self.prune_when(false, None);
    }

    /// Removes layers and images without a template. Skips the layers while an import holds the
    /// layer store, since a successful import removes unused layers itself.
    pub(crate) fn gc_unused(&self) -> Result<(), TemplateError> {
        if let Some(layers) = LayerStore::try_open(&self.home)? {
            self.gc_layers(&layers)?;
        }
        self.prune_if_idle();
        Ok(())
    }

    /// Removes layers without a template, and abandoned downloads. The caller must hold the lock of
    /// the layer store.
    pub(crate) fn gc_layers(&self, layers: &LayerStore) -> Result<(), TemplateError> {
        let manifests = self.list()?;
        // The layer store is locked, so no import can add a layer that is not yet in a manifest.
        let origins = manifests.into_iter().filter_map(|m| m.origin);
        let named: Vec<String> = origins.flat_map(|o| o.layers).collect();
        layers.retain(&named)?;
        for entry in fs::read_dir(self.home.blobs()).on("list", &self.home.blobs())? {
            let path = entry.on("list", &self.home.blobs())?.path();
            let age = path
                .metadata()
                .and_then(|m| m.modified())
                .map(|m| m.elapsed());
            // A clock that was set back makes `elapsed` fail; the file is removed later.
            if matches!(age, Ok(Ok(age)) if age.as_secs() > DOWNLOAD_RETENTION_S) {
                fs::remove_file(&path).on("remove", &path)?;
            }
        }
        Ok(())
    }

    /// Returns `None` if pruning is not possible now: another caller or process holds the lock and
    /// `wait` is false, or the images are borrowed. With `rehearsal`, no unused image or version is
    /// removed, and the templates in `rehearsal` count as removed.
    fn prune_when(
        &self,
        wait: bool,
        rehearsal: Option<&[String]>,
    ) -> Result<Option<PrunedImages>, TemplateError> {
        let images = ImageStore::new(&self.home);
        // Borrowed images may be in use in their own data directory.
        if fs::symlink_metadata(self.home.images()).is_ok_and(|m| m.is_symlink()) {
            return Ok(None);
        }
        let Some(_exclusive) = images.exclusive(wait)? else {
            return Ok(None);
        };
        // The order matters: a sandbox that is being paused writes its snapshot before it releases
        // its images. If the snapshots were read first, both could be missed.
        let (unused, in_use) = images.classify()?;
        let mut templates = self.list()?;
        templates.retain(|m| !rehearsal.unwrap_or_default().contains(&m.reference()));
        let named = named_by_snapshots(&self.home)?;

        let in_use: HashSet<&String> = in_use.iter().collect();
        let current: HashSet<String> = templates.iter().map(TemplateManifest::version).collect();
        let needed = |m: &TemplateManifest| {
            let version = m.version();
            let by_snapshot = |n: &String| *n == version || is_of_image(m, n);
            current.contains(&version)
                || named.iter().any(by_snapshot)
                // A running sandbox may have been started from this version.
                || m.images.iter().all(|i| in_use.contains(&i.sha256))
        };
        let mut pruned = PrunedImages::default();
        let mut referenced: HashSet<String> = named.iter().cloned().collect();
        referenced.extend(templates.iter().flat_map(sums));
        for (path, manifest) in version::all(&self.home)? {
            if needed(&manifest) {
                referenced.extend(sums(&manifest));
            } else {
                if rehearsal.is_none() {
                    fs::remove_file(&path).on("remove", &path)?;
                }
                let name = manifest.reference();
                pruned
                    .versions
                    .push(format!("{name}@{}", manifest.version()));
            }
        }
        // Versions are removed before images, so that no stored version refers to a missing image
        // after a crash.
        for image in unused
            .iter()
            .filter(|i| !referenced.contains(&i.sum.sha256))
        {
            if rehearsal.is_none() {
                image.remove()?;
            }
            pruned.bytes += image.bytes;
            pruned.images.push(image.sum.clone());
        }
        Ok(Some(pruned))
    }
}

fn sums(manifest: &TemplateManifest) -> impl Iterator<Item = String> {
    manifest.images.iter().map(|i| i.sha256.clone())
}

/// Returns the versions that snapshots refer to. Old snapshots refer to the digest of the image
/// instead.
fn named_by_snapshots(home: &Home) -> Result<HashSet<String>, TemplateError> {
    let mut named = HashSet::new();
    for directory in home.snapshots() {
        named_in(&directory, &mut named)?;
    }
    Ok(named)
}

/// Adds the template versions that the snapshots in `directory` need. An unreadable manifest is an
/// error, because its version must not be removed.
fn named_in(directory: &Path, named: &mut HashSet<String>) -> Result<(), TemplateError> {
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.on("list", directory)?,
    };
    for entry in entries {
        let path = entry.on("list", directory)?.path();
        let id = path.file_name().unwrap_or_default().to_string_lossy();
        // Unfinished and deleted snapshots are skipped. An unfinished snapshot belongs to a running
        // sandbox, which holds its images.
        if id.starts_with('.') {
            continue;
        }
        let broken = |problem: String| TemplateError::Snapshot {
            id: id.to_string(),
            problem,
        };
        let text = match File::open(path.join("manifest.json")) {
            // The snapshot was removed after the directory was listed.
            Err(_) if !path.exists() => continue,
            Err(e) => return Err(broken(e.to_string())),
            Ok(file) => {
                let mut text = Vec::new();
                let read = file.take(MAX_MANIFEST_BYTES).read_to_end(&mut text);
                read.map_err(|e| broken(e.to_string()))?;
                text
            }
        };
        let needs: SnapshotNeeds =
            serde_json::from_slice(&text).map_err(|e| broken(e.to_string()))?;
        let version = needs.template.rsplit_once('@').map(|(_, version)| version);
        named.extend(version.map(str::to_owned));
    }
    Ok(())
}
