//! Removing what no template, no snapshot and no running sandbox needs.

use crate::file::OnPath;
use crate::home::Home;
use crate::images::Images;
use crate::manifest::{ImageSum, Manifest};
use crate::template::{TemplateError, Templates};
use crate::version::{self, is_of_image};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// Longest manifest of a snapshot.
const MAX_MANIFEST: u64 = 1 << 20;

/// What was removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pruned {
    pub images: Vec<ImageSum>,
    /// Versions of templates, as `name@version`.
    pub versions: Vec<String>,
    /// Bytes of disk space that are free now.
    pub bytes: u64,
}

/// The part of a snapshot's manifest that says what it needs.
#[derive(Deserialize)]
struct Needs {
    template: String,
}

impl Templates {
    /// Removes images and versions that nobody needs. Waits for builds that are under way.
    pub fn prune(&self) -> Result<Pruned, TemplateError> {
        Ok(self.prune_when(true, None)?.unwrap_or_default())
    }

    /// Tells what that would remove if the templates `without` were gone. Removes nothing.
    pub fn would_prune(&self, without: &[String]) -> Result<Pruned, TemplateError> {
        Ok(self.prune_when(true, Some(without))?.unwrap_or_default())
    }

    /// The same if nobody builds or opens a template just now. What fails here is left for the next time.
    pub(crate) fn prune_if_quiet(&self) {
        let _ = self.prune_when(false, None);
    }

    /// With `rehearsal` nothing is removed, and the templates that it names count as gone.
    fn prune_when(
        &self,
        wait: bool,
        rehearsal: Option<&[String]>,
    ) -> Result<Option<Pruned>, TemplateError> {
        let images = Images::new(&self.home);
        // What is borrowed from another data directory is needed there.
        if fs::symlink_metadata(self.home.images()).is_ok_and(|m| m.is_symlink()) {
            return Ok(None);
        }
        let Some(_alone) = images.alone(wait)? else {
            return Ok(None);
        };
        // In this order: a sandbox that falls asleep has its snapshot before it lets go of its images.
        let (unused, in_use) = images.sort_out()?;
        let mut templates = self.list()?;
        templates.retain(|m| !rehearsal.unwrap_or_default().contains(&m.reference()));
        let named = named_by_snapshots(&self.home)?;

        let in_use: HashSet<&String> = in_use.iter().collect();
        let current: HashSet<String> = templates.iter().map(Manifest::version).collect();
        let needed = |m: &Manifest| {
            let version = m.version();
            let by_snapshot = |n: &String| *n == version || is_of_image(m, n);
            current.contains(&version)
                || named.iter().any(by_snapshot)
                || m.images.iter().all(|i| in_use.contains(&i.sha256))
        };
        let mut pruned = Pruned::default();
        let mut wanted: HashSet<String> = named.iter().cloned().collect();
        wanted.extend(templates.iter().flat_map(sums));
        for (path, manifest) in version::all(&self.home)? {
            if needed(&manifest) {
                wanted.extend(sums(&manifest));
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
        for image in unused.iter().filter(|i| !wanted.contains(&i.sum.sha256)) {
            if rehearsal.is_none() {
                image.remove()?;
            }
            pruned.bytes += image.bytes;
            pruned.images.push(image.sum.clone());
        }
        Ok(Some(pruned))
    }
}

fn sums(manifest: &Manifest) -> impl Iterator<Item = String> {
    manifest.images.iter().map(|i| i.sha256.clone())
}

/// What snapshots call the versions they were taken of; of old ones, the checksum of the image.
fn named_by_snapshots(home: &Home) -> Result<HashSet<String>, TemplateError> {
    let mut named = HashSet::new();
    for directory in home.snapshots() {
        named_in(&directory, &mut named)?;
    }
    Ok(named)
}

fn named_in(directory: &Path, named: &mut HashSet<String>) -> Result<(), TemplateError> {
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.on("list", directory)?,
    };
    for entry in entries {
        let path = entry.on("list", directory)?.path();
        let id = path.file_name().unwrap_or_default().to_string_lossy();
        // What has no name yet runs, and what has none any more needs nothing.
        if id.starts_with('.') {
            continue;
        }
        let broken = |problem: String| TemplateError::Snapshot {
            id: id.to_string(),
            problem,
        };
        let text = match File::open(path.join("manifest.json")) {
            Err(_) if !path.exists() => continue,
            Err(e) => return Err(broken(e.to_string())),
            Ok(file) => {
                let mut text = Vec::new();
                let read = file.take(MAX_MANIFEST).read_to_end(&mut text);
                read.map_err(|e| broken(e.to_string()))?;
                text
            }
        };
        let needs: Needs = serde_json::from_slice(&text).map_err(|e| broken(e.to_string()))?;
        let version = needs.template.rsplit_once('@').map(|(_, version)| version);
        named.extend(version.map(str::to_owned));
    }
    Ok(())
}
