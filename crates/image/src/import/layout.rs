//! Images in files: OCI image layouts, and the output of `docker save`.

use super::document::{Descriptor, Document, ImageConfig, MAX_DOCUMENT_BYTES, parse, sha256};
use super::{FoundImage, ImportError};
use crate::file::{FileError, OnPath};
use crate::verified::sum_of;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use serde::Deserialize;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Maximum depth of nested indexes.
const MAX_INDEXES: usize = 4;

/// Directory of an image. Its files may be symbolic links to each other, as in archives of older
/// versions of `docker save`. Links to files outside of the directory are not followed.
pub(super) struct ImageLayout {
    path: PathBuf,
    directory: OwnedFd,
}

/// Entry of `manifest.json` of `docker save`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerSaveEntry {
    config: String,
    #[serde(default)]
    layers: Vec<String>,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
}

impl ImageLayout {
    /// Opens the image in `path`. Returns `None` if `path` is a plain directory.
    pub(super) fn open(path: &Path) -> Result<Option<Self>, FileError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(CWD, path, flags, Mode::empty());
        let layout = Self {
            path: path.to_owned(),
            directory: directory.map_err(io::Error::from).on("open", path)?,
        };
        let is_image =
            layout.has("oci-layout") && layout.has("index.json") || layout.has("manifest.json");
        Ok(is_image.then_some(layout))
    }

    fn has(&self, name: &str) -> bool {
        self.file(name).is_ok()
    }

    /// Opens a regular file by its path in the layout.
    pub(super) fn file(&self, name: &str) -> Result<File, ImportError> {
        // NONBLOCK: opening a FIFO must not block.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // IN_ROOT resolves absolute links and `..` inside the directory.
        let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let opened = openat2(&self.directory, name, flags, Mode::empty(), inside);
        let path = self.path.join(name);
        let file = opened
            .map(File::from)
            .map_err(io::Error::from)
            .on("open", &path)?;
        if !file.metadata().on("examine", &path)?.is_file() {
            return Err(io::Error::from(io::ErrorKind::InvalidInput)).on("read", &path)?;
        }
        Ok(file)
    }

    /// Reads a document of at most [`MAX_DOCUMENT_BYTES`].
    fn read(&self, name: &str) -> Result<Vec<u8>, ImportError> {
        let mut text = Vec::new();
        let file = self.file(name)?.take(MAX_DOCUMENT_BYTES + 1);
        let read = { file }.read_to_end(&mut text);
        read.on("read", &self.path.join(name))?;
        if text.len() as u64 > MAX_DOCUMENT_BYTES {
            return Err(ImportError::image(format!("`{name}` is too large")));
        }
        Ok(text)
    }

    /// Reads a document of the image, and checks its digest.
    fn document(&self, descriptor: &Descriptor) -> Result<Vec<u8>, ImportError> {
        let expected = sha256(&descriptor.digest)?;
        let text = self.read(&blob(expected))?;
        let found = sum_of(&text);
        if found != expected {
            return Err(ImportError::Digest {
                what: format!("document sha256:{expected}"),
                found,
            });
        }
        Ok(text)
    }

    /// Returns the image and the file names of its layers.
    pub(super) fn image(&self) -> Result<(FoundImage, Vec<String>), ImportError> {
        if self.has("oci-layout") && self.has("index.json") {
            self.oci_image()
        } else {
            self.saved_image()
        }
    }

    /// Finds the image in an OCI layout, through at most `MAX_INDEXES` nested indexes.
    fn oci_image(&self) -> Result<(FoundImage, Vec<String>), ImportError> {
        let mut document: Document = parse("index.json", &self.read("index.json")?)?;
        // An index may refer to other indexes, for example one per platform.
        let mut manifest_sha256 = None;
        for _ in 0..MAX_INDEXES {
            if document.config.is_some() {
                break;
            }
            let next = match &document.manifests[..] {
                // A single entry needs no platform, since its configuration has a platform.
                [only] if only.platform.is_none() => only,
                // Entries without platforms are different images, not the platforms of one image.
                [first, .., last] if first.platform.is_none() && last.platform.is_none() => {
                    return Err(several(document.manifests.iter().map(name_of)));
                }
                _ => document.linux_amd64()?,
            };
            manifest_sha256 = Some(sha256(&next.digest)?.to_owned());
            document = parse("manifest", &self.document(next)?)?;
        }
        let config = document
            .config
            .as_ref()
            .ok_or_else(|| ImportError::image("it has no manifest".to_owned()))?;
        let config: ImageConfig = parse("configuration", &self.document(config)?)?;
        let layers = document.layers.iter();
        let files = layers.map(|layer| Ok(blob(sha256(&layer.digest)?)));
        let files = files.collect::<Result<Vec<_>, ImportError>>()?;
        Ok((
            FoundImage::new(config, manifest_sha256, files.len())?,
            files,
        ))
    }

    /// Reads an archive in the older format of `docker save`, which lists its images in
    /// `manifest.json`.
    fn saved_image(&self) -> Result<(FoundImage, Vec<String>), ImportError> {
        let images: Vec<DockerSaveEntry> = parse("manifest.json", &self.read("manifest.json")?)?;
        let [image] = &images[..] else {
            let tags = images.iter().flat_map(|i| i.repo_tags.iter().flatten());
            return Err(several(tags.cloned()));
        };
        // This format has no digest of the configuration. The layers are verified by their diff
        // ids.
        let config: ImageConfig = parse("configuration", &self.read(&image.config)?)?;
        let found = FoundImage::new(config, None, image.layers.len())?;
        Ok((found, image.layers.clone()))
    }
}

fn blob(sha256: &str) -> String {
    format!("blobs/sha256/{sha256}")
}

fn name_of(descriptor: &Descriptor) -> String {
    let name = descriptor
        .annotations
        .get("org.opencontainers.image.ref.name");
    name.unwrap_or(&descriptor.digest).clone()
}

/// Returns the error for an archive with several images, with the names of the first ten.
fn several(names: impl Iterator<Item = String>) -> ImportError {
    let names: Vec<String> = names
        .take(10)
        .map(|n| crate::layer::shown(n.as_bytes()))
        .collect();
    let names = names.join(", ");
    ImportError::image(format!(
        "the archive contains several images ({names}): save only one image"
    ))
}
