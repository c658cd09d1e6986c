//! Publication of templates: writes an image, and replaces a template atomically.

use super::Templates;
use crate::erofs::{self, EPOCH, ImageRoot, WriteImageError};
use crate::file::{self, FileError, OnPath};
use crate::home::Home;
use crate::images::ImageStore;
use crate::lock::Lock;
use crate::progress::{Phase, Progress};
use crate::template_model::{ImageSum, MANIFEST, Reference, TemplateError, TemplateManifest};
use crate::version;
use crate::work_dir::WorkDir;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;

impl Templates {
    /// Publishes `manifest` under its name atomically. The replaced template is retained as a
    /// version. The caller must hold the template's lock and a shared lock on the images.
    pub(crate) fn publish(
        &self,
        manifest: &TemplateManifest,
        work: &WorkDir,
        _lock: &Lock,
    ) -> Result<(), TemplateError> {
        // The version is stored first: a published template always has its version.
        version::store(&self.home, manifest)?;
        let finished = work.0.join("template");
        DirBuilder::new()
            .mode(0o700)
            .create(&finished)
            .on("create", &finished)?;
        file::write(&finished, MANIFEST, &version::text(manifest, &finished)?)?;

        let reference = Reference::parse(&manifest.reference())?;
        let place = self.directory(&reference);
        // An unreadable manifest is skipped. A version that sandboxes use was stored when the
        // template was opened.
        if let Ok(before) = self.manifest(&reference.to_string()) {
            version::store(&self.home, &before)?;
            // A template in format 1 has its image in its directory, which is removed below. The
            // stored version needs the image.
            self.move_format_1(&before, &place)?;
        }
        // The exchange leaves the replaced directory in `work`, which removes it on drop.
        let flags = if place.exists() {
            RenameFlags::RENAME_EXCHANGE
        } else {
            RenameFlags::RENAME_NOREPLACE
        };
        renameat2(AT_FDCWD, &finished, AT_FDCWD, &place, flags)
            .map_err(io::Error::from)
            .on("create", &place)?;
        Ok(file::sync_dir(place.parent().unwrap_or(&place))?)
    }
}

/// Writes an image of `root` and flushes it. The caller must hold a shared lock on the images until
/// the image is referenced.
pub(crate) fn write_image<E>(
    home: &Home,
    root: &ImageRoot,
    hash: &str,
    work: &WorkDir,
    lock: &Lock,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<ImageSum, E>
where
    E: From<WriteImageError> + From<FileError> + From<TemplateError>,
{
    on_progress(Progress::Phase(Phase::Image));
    let image = work.0.join("image.erofs");
    erofs::write(root, &image, &uuid(hash), EPOCH, Some(lock))?;
    // The image must be on disk before a manifest refers to it.
    fs::File::open(&image)
        .and_then(|file| file.sync_all())
        .on("flush", &image)?;
    // 95 % of the build is complete when the image is written. The checksum is the remaining part.
    on_progress(Progress::Percent(95));
    on_progress(Progress::Phase(Phase::Verification));
    Ok(ImageStore::new(home).add(&image)?)
}

/// Returns the UUID of an image. It consists of digits of the recipe's hash, and of the fixed
/// digits of version 8 ("vendor specific") and of the variant (RFC 9562). `hash` has at least 32
/// hexadecimal digits.
fn uuid(hash: &str) -> String {
    format!(
        "{}-{}-8{}-8{}-{}",
        &hash[..8],
        &hash[8..12],
        &hash[13..16],
        &hash[17..20],
        &hash[20..32]
    )
}
