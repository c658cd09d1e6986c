//! Versions of templates: what a template was when something was made with it.
//!
//! `<home>/versions/<version>.json` is the manifest of every version that was opened here. A template that is built again or
//! removed leaves it, so that what was made with it can be opened.

use crate::file::{self, FileError, OnPath};
use crate::home::Home;
use crate::manifest::Manifest;
use crate::template::{TemplateError, Templates, load};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const SUFFIX: &str = ".json";

fn path(home: &Home, version: &str) -> PathBuf {
    home.versions().join(format!("{version}{SUFFIX}"))
}

/// A manifest as it is kept in files.
pub(crate) fn text(manifest: &Manifest, path: &Path) -> Result<Vec<u8>, FileError> {
    let text = serde_json::to_vec_pretty(manifest).map_err(io::Error::other);
    let mut text = text.on("write", path)?;
    text.push(b'\n');
    Ok(text)
}

/// Writes a version down, unless it is. Its images are there, and the caller sees to it that they stay.
pub(crate) fn keep(home: &Home, manifest: &Manifest) -> Result<(), FileError> {
    let version = manifest.version();
    let path = path(home, &version);
    if path.exists() {
        return Ok(());
    }
    let text = text(manifest, &path)?;
    file::write(&home.versions(), &format!("{version}{SUFFIX}"), &text).map(drop)
}

/// All that are kept.
pub(crate) fn all(home: &Home) -> Result<Vec<(PathBuf, Manifest)>, TemplateError> {
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

/// The version that is called `name@version`. Before there were versions a template was named with the checksum of its image.
pub(crate) fn find(templates: &Templates, called: &str) -> Result<Manifest, TemplateError> {
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
        // What is kept under a name is what has that name.
        return (manifest.version() == version)
            .then_some(manifest)
            .ok_or_else(missing);
    }
    let is_it = |m: &Manifest| m.version() == version || is_of_image(m, version);
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

/// Whether a template is what was named with the checksum of its only image.
pub(crate) fn is_of_image(manifest: &Manifest, sha256: &str) -> bool {
    matches!(&manifest.images[..], [only] if only.sha256 == sha256)
}
