//! Versions of templates, for snapshots and sandboxes that were created from them.
//!
//! `<home>/versions/<version>.json` is the manifest of every version that was opened here. It stays
//! when the template is rebuilt or removed, so that the version can be opened.

use crate::file::{self, FileError, OnPath};
use crate::home::Home;
use crate::manifest::TemplateManifest;
use crate::template::{TemplateError, Templates, load};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const SUFFIX: &str = ".json";

fn path(home: &Home, version: &str) -> PathBuf {
    home.versions().join(format!("{version}{SUFFIX}"))
}

/// Serialized form of a manifest.
pub(crate) fn text(manifest: &TemplateManifest, path: &Path) -> Result<Vec<u8>, FileError> {
    let text = serde_json::to_vec_pretty(manifest).map_err(io::Error::other);
    let mut text = text.on("write", path)?;
    text.push(b'\n');
    Ok(text)
}

/// Stores a version unless it exists. The caller keeps its images.
pub(crate) fn keep(home: &Home, manifest: &TemplateManifest) -> Result<(), FileError> {
    let version = manifest.version();
    let path = path(home, &version);
    if path.exists() {
        return Ok(());
    }
    let text = text(manifest, &path)?;
    file::write(&home.versions(), &format!("{version}{SUFFIX}"), &text).map(drop)
}

/// All stored versions.
pub(crate) fn all(home: &Home) -> Result<Vec<(PathBuf, TemplateManifest)>, TemplateError> {
    let directory = home.versions();
    let mut found = Vec::new();
    for entry in fs::read_dir(&directory).on("list", &directory)? {
        let path = entry.on("list", &directory)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with('.') && name.ends_with(SUFFIX) {
            let manifest = load(&path)?;
            found.push((path, manifest));
        }
    }
    Ok(found)
}

/// Version `name@version`. Before versions existed, the digest of the image was used instead.
pub(crate) fn find(templates: &Templates, called: &str) -> Result<TemplateManifest, TemplateError> {
    let (name, version) = called.rsplit_once('@').unwrap_or((called, ""));
    let missing = || TemplateError::Version {
        name: name.to_owned(),
        version: version.to_owned(),
    };
    if version.len() != 64 || !version.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(missing());
    }
    let path = path(&templates.home, version);
    if path.exists() {
        let manifest = load(&path)?;
        // The content must match the file name.
        return (manifest.version() == version)
            .then_some(manifest)
            .ok_or_else(missing);
    }
    let is_it = |m: &TemplateManifest| m.version() == version || is_of_image(m, version);
    if let Ok(current) = templates.manifest(name)
        && is_it(&current)
    {
        keep(&templates.home, &current)?;
        return Ok(current);
    }
    let mut kept = all(&templates.home)?.into_iter().map(|(_, m)| m);
    kept.find(|m| m.name == name && is_it(m))
        .ok_or_else(missing)
}

/// Tells if the template has a single image with this digest, the version of old snapshots.
pub(crate) fn is_of_image(manifest: &TemplateManifest, sha256: &str) -> bool {
    matches!(&manifest.images[..], [only] if only.sha256 == sha256)
}
