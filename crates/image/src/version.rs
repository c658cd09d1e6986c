//! Versions of templates, for snapshots and sandboxes that were created from them.
//!
//! `<home>/versions/<version>.json` is the manifest of a version that was opened on this host. It
//! is retained when the template is rebuilt or removed, so that snapshots and sandboxes can still
//! open the version.

use crate::file::{self, FileError, OnPath};
use crate::home::Home;
use crate::template_model::{TemplateError, TemplateManifest};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Suffix of the files that describe versions.
const SUFFIX: &str = ".json";

pub(crate) fn path(home: &Home, version: &str) -> PathBuf {
    home.versions().join(format!("{version}{SUFFIX}"))
}

/// Serialized form of a manifest.
pub(crate) fn text(manifest: &TemplateManifest, path: &Path) -> Result<Vec<u8>, FileError> {
    let text = serde_json::to_vec_pretty(manifest).map_err(io::Error::other);
    let mut text = text.on("write", path)?;
    text.push(b'\n');
    Ok(text)
}

/// Stores a version unless it exists. The caller must ensure that its images are not removed.
pub(crate) fn store(home: &Home, manifest: &TemplateManifest) -> Result<(), FileError> {
    let version = manifest.version();
    let path = path(home, &version);
    if path.exists() {
        return Ok(());
    }
    let text = text(manifest, &path)?;
    file::write(&home.versions(), &format!("{version}{SUFFIX}"), &text).map(drop)
}

/// Returns all stored versions.
pub(crate) fn all(home: &Home) -> Result<Vec<(PathBuf, TemplateManifest)>, TemplateError> {
    let directory = home.versions();
    let mut found = Vec::new();
    for entry in fs::read_dir(&directory).on("list", &directory)? {
        let path = entry.on("list", &directory)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // Names that start with a dot belong to files that are being written.
        if !name.starts_with('.') && name.ends_with(SUFFIX) {
            let manifest = TemplateManifest::read(&path)?;
            found.push((path, manifest));
        }
    }
    Ok(found)
}

/// Returns whether the template has a single image with this digest. Old snapshots use the digest
/// as the version.
pub(crate) fn is_of_image(manifest: &TemplateManifest, sha256: &str) -> bool {
    matches!(&manifest.images[..], [only] if only.sha256 == sha256)
}
