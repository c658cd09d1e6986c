//! Executes an import under locks: unpacks layers, writes the image and publishes the manifest.
//!
//! A *layer* of a container image is an archive with the files that one step of its build changed.
//! Its *diff id* is the SHA-256 of the uncompressed archive.

use super::byte_progress::ByteProgress;
use super::document::RunConfig;
use super::layout::ImageLayout;
use super::{FoundImage, Import, ImportError, ProgressSink, up_to_date};
use crate::erofs::ImageRoot;
use crate::file::OnPath;
use crate::home::Home;
use crate::images::ImageStore;
use crate::layer::{LayerError, LayerStore, StoredLayer, UnpackedLayer, shown};
use crate::lock::Lock;
use crate::progress::{Phase, Progress};
use crate::template_model::{HistoryStep, ImageOrigin, ManifestFields, Reference, Template};
use crate::templates::{Templates, write_image};
use crate::work_dir::WorkDir;
use std::cell::Cell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A running import. It holds the lock of the template and the lock of the layer store.
pub(super) struct ImportJob<'a> {
    pub(super) import: &'a Import,
    pub(super) reference: &'a Reference,
    pub(super) templates: &'a Templates,
    pub(super) home: &'a Home,
    pub(super) work: &'a WorkDir,
    pub(super) layers: LayerStore,
    /// Lock of the template. Host programs that write the image inherit the lock.
    pub(super) lock: &'a Lock,
    pub(super) began: Instant,
    /// Bytes of the layers that this import has unpacked.
    pub(super) unpacked_bytes: Cell<u64>,
}

impl ImportJob<'_> {
    /// Imports an archive: an image layout, or a root file system.
    pub(super) fn archive(
        &self,
        path: &Path,
        on_progress: &mut ProgressSink<'_>,
    ) -> Result<Template, ImportError> {
        // The path is not canonicalized: standard input may be a pipe without a name.
        let path = std::path::absolute(path).on("find", path)?;
        let file = File::open(&path).on("open", &path)?;
        let size = file.metadata().on("examine", &path)?.len();
        // Unpacking takes the first 85 %, and `write` continues there.
        let mut steps = ByteProgress::new(Phase::Layers, size, 85, on_progress);
        let pending = self
            .layers
            .unpack_pending(&file, self.import.limits, &self.meter(), &mut |n| {
                steps.at(n)
            })
            // A truncated archive can be recognised only by its missing end mark.
            .and_then(|pending| {
                if pending.unpacked.end_mark {
                    Ok(pending)
                } else {
                    Err(LayerError::Truncated)
                }
            })
            .map_err(|source| ImportError::layer(path.display().to_string(), source))?;
        // The unpacked bytes count even if the archive turns out to be a layout.
        self.count(&pending.unpacked)?;
        if ImageLayout::open(&pending.root)?.is_some() {
            // The layout is moved out of the layer store, whose working directory is then free for
            // the layers.
            let layout = self.work.0.join("layout");
            fs::rename(&pending.root, &layout).on("create", &layout)?;
            // Removes the empty working directory of the layer store.
            drop(pending);
            let layout = ImageLayout::open(&layout)?
                .ok_or_else(|| ImportError::image("its unpacked files were removed".to_owned()))?;
            return self.layout(&layout, path.display().to_string(), on_progress);
        }
        let layer = self.layers.commit(pending)?;
        let found = FoundImage {
            run: RunConfig::default(),
            diff_ids: vec![layer.unpacked.diff_id.clone()],
            manifest_sha256: None,
        };
        let from = path.display().to_string();
        if let Some(template) = self.up_to_date(&found)? {
            return Ok(template);
        }
        self.write_layers(from, found, vec![layer], on_progress)
    }

    /// Imports a directory: an image layout, or a root file system.
    pub(super) fn directory(
        &self,
        path: &Path,
        on_progress: &mut ProgressSink<'_>,
    ) -> Result<Template, ImportError> {
        let path = path.canonicalize().on("find", path)?;
        let from = path.display().to_string();
        if let Some(layout) = ImageLayout::open(&path)? {
            return self.layout(&layout, from, on_progress);
        }
        // A directory has no digest, so it is imported again each time.
        let found = FoundImage {
            run: RunConfig::default(),
            diff_ids: Vec::new(),
            manifest_sha256: None,
        };
        self.write(from, found, &ImageRoot::Directory(path), on_progress)
    }

    /// Imports the image in a layout.
    pub(super) fn layout(
        &self,
        layout: &ImageLayout,
        from: String,
        on_progress: &mut ProgressSink<'_>,
    ) -> Result<Template, ImportError> {
        let (found, names) = layout.image()?;
        if let Some(template) = self.up_to_date(&found)? {
            return Ok(template);
        }
        on_progress(Progress::Phase(Phase::Layers));
        let mut unpacked = Vec::new();
        for (name, diff_id) in names.iter().zip(&found.diff_ids) {
            unpacked.push(match self.layers.get(diff_id) {
                // A stored layer with this diff id has the same content. No proof of access
                // ([`BlobProofs`]) is needed, because only the host's owner imports layouts.
                Some(layer) => layer,
                None => self.unpack(&layout.file(name)?, diff_id, &mut |_| ())?,
            });
        }
        self.write_layers(from, found, unpacked, on_progress)
    }

    /// Unpacks a layer into the store. Its diff id is verified.
    pub(super) fn unpack(
        &self,
        packed: &File,
        diff_id: &str,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<StoredLayer, ImportError> {
        let limits = self.import.limits;
        let added = (self.layers).add(packed, diff_id, limits, &self.meter(), on_bytes);
        let what = || format!("layer sha256:{diff_id}");
        let layer = added.map_err(|source| ImportError::layer(what(), source))?;
        self.count(&layer.unpacked)?;
        Ok(layer)
    }

    /// Returns a meter that reserves the owner's budget for the layers so far and for the next
    /// layer.
    fn meter(&self) -> impl Fn(u64) -> Result<(), String> + Sync + use<> {
        let (disk, before) = (self.import.disk.clone(), self.unpacked_bytes.get());
        move |bytes| disk.reserve(before.saturating_add(bytes))
    }

    /// Adds the bytes of an unpacked layer to the owner's reservation.
    fn count(&self, layer: &UnpackedLayer) -> Result<(), ImportError> {
        let bytes = self.unpacked_bytes.get().saturating_add(layer.bytes);
        self.unpacked_bytes.set(bytes);
        self.import.disk.need(bytes)
    }

    /// Combines the layers into one image.
    pub(super) fn write_layers(
        &self,
        from: String,
        found: FoundImage,
        layers: Vec<StoredLayer>,
        on_progress: &mut ProgressSink<'_>,
    ) -> Result<Template, ImportError> {
        // Informs the owner, who may miss the devices.
        let left_out: u64 = layers.iter().map(|l| l.unpacked.devices_left_out).sum();
        if left_out > 0 {
            let note = format!("{left_out} device nodes left out: sandboxes have their own /dev");
            on_progress(Progress::Line(&note));
        }
        // An opaque layer hides all layers below it.
        let opaque = layers.iter().rposition(|layer| layer.unpacked.opaque);
        let mut roots: Vec<PathBuf> = Vec::new();
        for layer in &layers[opaque.unwrap_or(0)..] {
            // Of equal layers only the uppermost is used, since overlayfs rejects a directory that
            // is listed twice.
            roots.retain(|root| *root != layer.root);
            roots.push(layer.root.clone());
        }
        let work = self.work.0.join("union");
        fs::create_dir(&work).on("create", &work)?;
        let root = ImageRoot::Layers {
            layers: roots,
            work,
        };
        self.write(from, found, &root, on_progress)
    }

    /// Writes the image of `root` and publishes the template.
    pub(super) fn write(
        &self,
        from: String,
        found: FoundImage,
        root: &ImageRoot,
        on_progress: &mut ProgressSink<'_>,
    ) -> Result<Template, ImportError> {
        let defaults = self.import.defaults(&found.run)?;
        let startup = self.import.startup(&found.run)?;
        let hash = self.import.hash(&found)?;
        on_progress(Progress::Percent(85));
        // The lock is held until the manifest refers to the image.
        let _shared = ImageStore::new(self.home).share()?;
        let image =
            write_image::<ImportError>(self.home, root, &hash, self.work, self.lock, on_progress)?;
        // The size of the image was unknown before.
        self.import.disk.need(image.size)?;
        let plan = ManifestFields {
            reference: self.reference,
            visibility: (self.templates).visibility(self.reference, self.import.visibility),
            hash: &hash,
            history: vec![HistoryStep {
                text: format!("image {from}"),
                seconds: self.began.elapsed().as_secs_f64(),
                bytes: Some(image.size),
            }],
            images: vec![image],
            defaults: &defaults,
            idle_timeout_s: None,
            network: Default::default(),
            startup,
            origin: Some(origin(from, found)),
        };
        // The last point at which an import can be cancelled without a trace.
        self.import.check_cancelled()?;
        self.templates
            .publish(&plan.manifest(), self.work, self.lock)?;
        on_progress(Progress::Percent(100));
        Ok(self.templates.get(&self.import.name)?)
    }

    /// Returns the existing template if it equals the import.
    pub(super) fn up_to_date(&self, found: &FoundImage) -> Result<Option<Template>, ImportError> {
        up_to_date(self.templates, self.import, found)
    }

    /// Removes unused layers and abandoned downloads.
    pub(super) fn gc_layers(&self) -> Result<(), ImportError> {
        Ok(self.templates.gc_layers(&self.layers)?)
    }
}

/// Returns the origin for the manifest of the template.
fn origin(from: String, found: FoundImage) -> ImageOrigin {
    let run = found.run;
    let text = |words: Option<Vec<String>>| words.unwrap_or_default();
    let ports = run.exposed_ports.unwrap_or_default();
    ImageOrigin {
        from,
        manifest_sha256: found.manifest_sha256,
        layers: found.diff_ids,
        entrypoint: text(run.entrypoint),
        cmd: text(run.cmd),
        exposed_ports: ports.keys().map(|p| shown(p.as_bytes())).collect(),
        on_build: text(run.on_build),
    }
}
