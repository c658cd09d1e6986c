//! Templates in a store that several hosts share. The manifest and each image are one file of the
//! store.

use super::{ImageSum, Images, MAX_MANIFEST_BYTES, entry_name, import_images};
use crate::file::OnPath;
use crate::images::ImageStore;
use crate::import::{ImportError, check_name};
use crate::progress::Progress;
use crate::template_model::{
    MANIFEST, Recipe, Reference, Template, TemplateError, TemplateManifest, Visibility,
};
use crate::templates::Templates;
use crate::version;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Files of a template. The images are verified, and are not removed while this value exists.
pub struct TemplateFiles {
    /// Content of [`Self::MANIFEST`].
    pub manifest: Vec<u8>,
    /// Template. Its images are in the order of the manifest.
    pub template: Template,
}

impl TemplateFiles {
    /// Name of the file with the manifest.
    pub const MANIFEST: &str = MANIFEST;

    /// Opens the files of a template.
    pub fn open(templates: &Templates, name: &str) -> Result<Self, TemplateError> {
        let template = templates.get(name)?;
        // The owner is an API key of this host, which the importing host does not have.
        let about = TemplateManifest {
            owner: None,
            ..template.manifest.clone()
        };
        let manifest = version::text(&about, Path::new(MANIFEST))?;
        Ok(Self { manifest, template })
    }

    /// Imports a template. `limit` is the maximum total size of the images in bytes. `open` opens a
    /// file of the store by name. Returns the manifest, and whether the name refers to the imported
    /// version.
    ///
    /// A stock template is not replaced if this host has another recipe for it. In this case only
    /// the imported version is stored, for snapshots.
    pub fn import(
        templates: &Templates,
        manifest: &[u8],
        visibility: Option<Visibility>,
        limit: u64,
        mut open: impl FnMut(&str) -> io::Result<File>,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(TemplateManifest, bool), ImportError> {
        if manifest.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(ImportError::image(format!("its {MANIFEST} is too large")));
        }
        let mut parsed = TemplateManifest::parse(manifest)
            .map_err(|problem| ImportError::image(format!("{MANIFEST}: {problem}")))?;
        parsed.owner = None;
        let name = parsed.reference();
        let is_stock = Reference::parse(&name)?.is_stock();
        let (reference, visibility, published) = if is_stock {
            let reference = Reference::parse(&name)?;
            let recipe = Recipe::built_in(reference.name());
            let is_same = recipe.is_ok_and(|recipe| recipe.hash() == parsed.recipe_sha256);
            (reference, Some(Visibility::Public), is_same)
        } else {
            (check_name(&name, visibility)?, visibility, true)
        };
        // All files are opened first, so that a missing file is found before any image is copied.
        // An image that this host has is not requested. It is locked until the end of the import,
        // so that it is not removed meanwhile.
        let store = ImageStore::new(&templates.home);
        let (mut files, mut existing) = (Vec::new(), Vec::new());
        for sum in &parsed.images {
            if let Ok(image) = store.open(sum) {
                existing.push(image);
                files.push(None);
                continue;
            }
            let name = entry_name(sum);
            let file = open(&name).map_err(|e| ImportError::image(format!("{name}: {e}")))?;
            let bytes = file.metadata().on("examine", Path::new(&name))?.len();
            if bytes != sum.size {
                return Err(ImportError::image(format!(
                    "the size of {name} differs from its manifest"
                )));
            }
            files.push(Some(file));
        }
        let mut files = files.into_iter();
        let images = Images {
            limit,
            open: |_: &ImageSum| {
                let file = files
                    .next()
                    .ok_or_else(|| ImportError::image("an image is missing".to_owned()));
                file.map(|file| FromStart { file, offset: 0 })
            },
            // No further check is needed: each image is verified by its digest.
            confirm: || Ok(()),
        };
        let imported = parsed.clone();
        import_images(
            templates,
            parsed,
            &reference,
            visibility,
            published,
            images,
            on_progress,
        )?;
        drop(existing);
        Ok((imported, published))
    }

    /// Returns the names of the images, with the images.
    pub fn images(&self) -> impl Iterator<Item = (String, &File)> {
        let names = self.template.manifest.images.iter().map(entry_name);
        names.zip(self.template.images.iter().map(|image| &image.file))
    }
}

/// Reader of a file from its start, independent of the position of its descriptor.
struct FromStart {
    /// `None` for an image that exists, which is not read.
    file: Option<File>,
    offset: u64,
}

impl Read for FromStart {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let file = self.file.as_ref();
        let file = file.ok_or_else(|| io::Error::other("the image was removed meanwhile"))?;
        let read = file.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}
