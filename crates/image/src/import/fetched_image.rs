//! Images of registries that are downloaded, but not unpacked yet. Downloads run without the locks
//! of the template and of the layer store.
//!
//! Imports share unpacked layers. A *proof* shows that the registry of this import has a layer, so
//! that the import may use the copy of another import.

use super::byte_progress::ByteProgress;
use super::download::Download;
use super::job::ImportJob;
use super::registry::RegistryImage;
use super::{
    FoundImage, Import, ImportError, ProgressSink, PullSettings, RegistryAccess, RegistryError,
    signature,
};
use crate::file::OnPath;
use crate::home::Home;
use crate::layer::Repository;
use crate::progress::Phase;
use crate::template_model::Template;
use crate::templates::Templates;
use std::collections::BTreeMap;
use std::io::{Seek, SeekFrom};
use std::path::Path;

/// Percentage of the whole import at which all layers are unpacked. Downloads take the first half
/// of it, and unpacking the second. [`ImportJob`] then starts to write the image.
const UNPACKED_PERCENT: u64 = 85;

/// Image of a registry with a proof for each layer ([`crate::layer::BlobProofs`]). The layers are
/// not unpacked yet.
pub(super) struct FetchedImage {
    registry: RegistryImage,
    /// Complete reference of the image.
    from: String,
    found: FoundImage,
    layers: Vec<FetchedLayer>,
    /// Proofs by SHA-256 of the blob.
    blobs: BTreeMap<String, BlobProof>,
}

/// Layer that was downloaded.
struct FetchedLayer {
    descriptor: super::document::Descriptor,
    diff_id: String,
    sha256: String,
}

/// Proof that the registry has the bytes of a blob.
enum BlobProof {
    /// The blob was downloaded.
    Downloaded(Download),
    /// The registry confirmed the blob, and served these bytes to this host in the past.
    Confirmed,
}

/// A fetched image, or the existing template of an equal image.
pub(super) enum FetchOutcome {
    Fetched(Box<FetchedImage>),
    UpToDate(Box<Template>),
}

impl FetchedImage {
    /// Resolves an image and downloads missing layers.
    pub(super) fn fetch(
        (templates, home): (&Templates, &Home),
        import: &Import,
        (reference, access, pull): (&str, &RegistryAccess, &PullSettings),
        on_progress: &mut ProgressSink<'_>,
    ) -> Result<FetchOutcome, ImportError> {
        let mut registry = RegistryImage::new(reference, access, pull)?;
        let (found, descriptors) = registry.image()?;
        if !import.signatures.is_empty() {
            // A second client, because a mirror may lack the signatures of its images.
            let mut signatures = RegistryImage::new(reference, access, pull)?;
            signature::verify(&mut signatures, registry.digests(), &import.signatures)?;
        }
        if let Some(template) = super::up_to_date(templates, import, &found)? {
            return Ok(FetchOutcome::UpToDate(Box::new(template)));
        }
        let sum = (descriptors.iter()).fold(0_u64, |sum, l| sum.saturating_add(l.size));
        if sum > import.limits.bytes {
            let max_mib = import.limits.bytes >> 20;
            let problem = format!("its layers have {} MiB, more than {max_mib}", sum >> 20);
            return Err(ImportError::image(problem));
        }
        // The packed size is a lower bound of the disk space that the layers need.
        import.disk.need(sum)?;
        let layers = descriptors.into_iter().zip(&found.diff_ids);
        let layers = layers.map(|(descriptor, diff_id)| {
            let sha256 = super::document::sha256(&descriptor.digest)?.to_owned();
            Ok(FetchedLayer {
                descriptor,
                diff_id: diff_id.clone(),
                sha256,
            })
        });
        let mut fetched = Self {
            from: registry.name(),
            registry,
            layers: layers.collect::<Result<_, ImportError>>()?,
            found,
            blobs: BTreeMap::new(),
        };
        fetched.download(home, &[], on_progress)?;
        Ok(FetchOutcome::Fetched(Box::new(fetched)))
    }

    /// Obtains a proof for each layer without one. The blobs with the SHA-256 digests in `anew` are
    /// downloaded even if there is a proof.
    pub(super) fn download(
        &mut self,
        home: &Home,
        anew: &[String],
        on_progress: &mut ProgressSink<'_>,
    ) -> Result<(), ImportError> {
        let sum: u64 = self.layers.iter().map(|l| l.descriptor.size).sum();
        // The free space is checked before the download, because a full disk affects other users.
        let blobs = home.blobs();
        let disk = rustix::fs::statvfs(&blobs)
            .map_err(std::io::Error::from)
            .on("examine", &blobs)?;
        if sum > disk.f_bavail.saturating_mul(disk.f_frsize) {
            return Err(RegistryError::DiskFull { path: blobs }.into());
        }
        let mut steps = ByteProgress::new(Phase::Download, sum, UNPACKED_PERCENT / 2, on_progress);
        for layer in &self.layers {
            let FetchedLayer {
                descriptor,
                diff_id,
                sha256,
            } = layer;
            let again = anew.contains(sha256);
            if again || !self.blobs.contains_key(sha256) {
                let proved = !again && self.registry.proves(descriptor, diff_id, home)?;
                let blob = if proved {
                    BlobProof::Confirmed
                } else {
                    let mut on_bytes = |n| steps.at(n);
                    BlobProof::Downloaded(self.registry.download(
                        descriptor,
                        home,
                        &mut on_bytes,
                    )?)
                };
                self.blobs.insert(sha256.clone(), blob);
            }
            steps.done(descriptor.size);
        }
        Ok(())
    }

    /// Creates the template of the image. The inner error contains the digests of blobs that must
    /// be downloaded, because their layers are missing.
    pub(super) fn import(
        &mut self,
        job: &ImportJob<'_>,
        on_progress: &mut ProgressSink<'_>,
    ) -> Result<Result<Template, Vec<String>>, ImportError> {
        // Another import may have created the template during the download.
        if let Some(template) = job.up_to_date(&self.found)? {
            return Ok(Ok(template));
        }
        let sum: u64 = self.layers.iter().map(|l| l.descriptor.size).sum();
        let mut steps = ByteProgress::after(
            Phase::Layers,
            sum,
            UNPACKED_PERCENT / 2,
            UNPACKED_PERCENT,
            on_progress,
        );
        let (mut layers, mut missing) = (Vec::new(), Vec::new());
        let repository: Option<Repository> = self.registry.repository();
        for layer in &self.layers {
            let FetchedLayer {
                descriptor,
                diff_id,
                sha256,
            } = layer;
            let stored = job.layers.get(diff_id);
            // A layer that was unpacked from another blob is not used: this registry proved only
            // its own blob.
            let stored = stored.filter(|_| job.layers.knows(diff_id, sha256));
            match (stored, self.blobs.get(sha256)) {
                (Some(stored), Some(proof)) => {
                    if matches!(proof, BlobProof::Downloaded(_)) {
                        job.layers.record(diff_id, sha256, repository.as_ref())?;
                    }
                    layers.push(stored);
                }
                (None, Some(BlobProof::Downloaded(download))) => {
                    let mut file = &download.file;
                    let rewound = file.seek(SeekFrom::Start(0));
                    rewound.on("read", Path::new(&download.path))?;
                    let unpacked = job.unpack(file, diff_id, &mut |n| steps.at(n))?;
                    job.layers.record(diff_id, sha256, repository.as_ref())?;
                    layers.push(unpacked);
                }
                // The registry confirmed the layer, but the store no longer has it: the layer was
                // removed with the last template that used it. The second pattern never matches,
                // since `download` obtains a proof for each layer.
                (None, _) | (_, None) => missing.push(sha256.clone()),
            }
            steps.done(descriptor.size);
        }
        if !missing.is_empty() {
            return Ok(Err(missing));
        }
        for blob in std::mem::take(&mut self.blobs).into_values() {
            if let BlobProof::Downloaded(download) = blob {
                download.remove()?;
            }
        }
        let (from, found) = (self.from.clone(), self.found.clone());
        job.write_layers(from, found, layers, on_progress).map(Ok)
    }
}
