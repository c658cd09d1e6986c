//! Templates in a store that hosts share: the manifest and the images as files.

use super::{ImageSum, Images, MAX_MANIFEST_BYTES, bring_all, entry_name};
use crate::file::OnPath;
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

/// Files of a template, its images verified. They exist as long as this.
pub struct TemplateFiles {
    /// Content of [`Self::MANIFEST`].
    pub manifest: Vec<u8>,
    /// Template, with its images in the order of their names.
    pub template: Template,
}

impl TemplateFiles {
    /// Name of the file with the manifest.
    pub const MANIFEST: &str = MANIFEST;

    /// Opens the files of a template.
    pub fn open(templates: &Templates, name: &str) -> Result<Self, TemplateError> {
        let template = templates.get(name)?;
        let about = TemplateManifest {
            owner: None,
            ..template.manifest.clone()
        };
        let manifest = version::text(&about, Path::new(MANIFEST))?;
        Ok(Self { manifest, template })
    }

    /// Imports a template from the files that `open` finds by name. A stock template stays what
    /// this host has if it has another recipe; the version that came is kept beside it for
    /// snapshots. Returns the manifest, and whether the template is what it says now.
    pub fn import(
        templates: &Templates,
        manifest: &[u8],
        visibility: Option<Visibility>,
        limit: u64,
        mut open: impl FnMut(&str) -> io::Result<File>,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(TemplateManifest, bool), ImportError> {
        if manifest.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(ImportError::image(format!("its {MANIFEST} is too long")));
        }
        let mut parsed = TemplateManifest::parse(manifest)
            .map_err(|problem| ImportError::image(format!("{MANIFEST}: {problem}")))?;
        parsed.owner = None;
        let name = parsed.reference();
        let stock = Reference::parse(&name)?.is_stock();
        let (reference, visibility, published) = match stock {
            true => {
                let reference = Reference::parse(&name)?;
                let own = Recipe::built_in(reference.name());
                let same = own.is_ok_and(|own| own.hash() == parsed.recipe_sha256);
                (reference, Some(Visibility::Public), same)
            }
            false => (check_name(&name, visibility)?, visibility, true),
        };
        let mut files = Vec::new();
        for sum in &parsed.images {
            let name = entry_name(sum);
            let file = open(&name).map_err(|e| ImportError::image(format!("{name}: {e}")))?;
            let bytes = file.metadata().on("examine", Path::new(&name))?.len();
            if bytes != sum.size {
                return Err(ImportError::image(format!("{name} has another size")));
            }
            files.push(file);
        }
        let mut files = files.into_iter();
        let images = Images {
            limit,
            open: |_: &ImageSum| {
                let file = files.next();
                let file = file.ok_or_else(|| ImportError::image("an image is missing".to_owned()));
                file.map(|file| FromStart { file, offset: 0 })
            },
            confirm: || Ok(()),
        };
        let told = parsed.clone();
        bring_all(
            templates,
            parsed,
            &reference,
            visibility,
            published,
            images,
            on_progress,
        )?;
        Ok((told, published))
    }

    /// Names of the images, and the images.
    pub fn images(&self) -> impl Iterator<Item = (String, &File)> {
        let names = self.template.manifest.images.iter().map(entry_name);
        names.zip(self.template.images.iter().map(|image| &image.file))
    }
}

/// Reader of a file from its start, whatever the position of its descriptor is.
struct FromStart {
    file: File,
    offset: u64,
}

impl Read for FromStart {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}
