//! Images in registries. A confined puller process sends the requests. The process is not trusted:
//! this module verifies the digests of all documents and layers.

use super::document::{Descriptor, Document, ImageConfig, MAX_DOCUMENT_BYTES, parse, sha256};
use super::download::Download;
use super::{FoundImage, ImportError, RegistryAccess, RegistryError, credentials};
use crate::file::{FileError, OnPath};
use crate::home::Home;
use crate::layer::{BlobProofs, Repository};
use crate::verified::{sum, sum_of};
use jiffy_registry_pull::{
    ConnectionGate, PullError, PullFault, PullSettings, PullTarget, Puller, RegistryLogin,
};
use oci_spec::distribution::Reference;
use std::io;
use std::os::unix::fs::FileExt;
use std::vec::IntoIter;

/// Maximum number of times that the download of a layer is resumed. A download is resumed only
/// after an attempt that received bytes.
const MAX_RESUMES: usize = 5;

/// An image in a registry.
pub(super) struct RegistryImage {
    puller: Puller,
    reference: Reference,
    /// An API key requested the import, so errors must not describe the host's network.
    by_key: bool,
    /// Server from which `puller` pulls.
    source: ImageSource,
    /// Servers that are used if `source` fails, in this order.
    others: IntoIter<ImageSource>,
    /// True once a layer was downloaded.
    has_downloaded: bool,
    /// True if layers come from more than one server.
    is_mixed: bool,
    /// SHA-256 digests of the manifests that determine the image: an index, if any, and the
    /// manifest of the image.
    digests: Vec<String>,
}

/// Server that has an image: its registry, or a mirror of the registry.
struct ImageSource {
    /// `host` or `host:port`.
    registry: String,
    login: Option<RegistryLogin>,
    pull: PullSettings,
}

impl ImageSource {
    /// Returns the server that is used first for an image, and the others in the order of their
    /// use.
    fn all(
        reference: &Reference,
        access: &RegistryAccess,
        pull: &PullSettings,
    ) -> (Self, IntoIter<Self>) {
        let login = match access {
            RegistryAccess::Host => {
                credentials::find(reference.resolve_registry()).map(RegistryLogin::Password)
            }
            RegistryAccess::Anonymous => None,
            RegistryAccess::Login(login) => Some(login.clone()),
        };
        // Mirrors receive no credentials. An image for which a caller has credentials comes from
        // its registry, which checks them.
        let uses_mirrors = !matches!(access, RegistryAccess::Login(_));
        let mirrors = pull.registries.mirrors.iter();
        let mut mirrors: Vec<Self> = mirrors
            .filter(|mirror| uses_mirrors && mirror.is_of(reference.registry()))
            .map(|mirror| Self {
                registry: mirror.authority().to_owned(),
                login: None,
                pull: mirror.pull(pull),
            })
            .collect();
        let origin = Self {
            registry: reference.resolve_registry().to_owned(),
            login,
            pull: pull.clone(),
        };
        if mirrors.is_empty() {
            return (origin, mirrors.into_iter());
        }
        let first = mirrors.remove(0);
        mirrors.push(origin);
        (first, mirrors.into_iter())
    }

    /// Starts a puller for this server.
    fn puller(&self, reference: &Reference) -> Result<Puller, PullError> {
        let registries = &self.pull.registries;
        let target = PullTarget {
            registry: self.registry.clone(),
            repository: reference.repository().to_owned(),
            plain_http: registries.plain_http.clone(),
            login: self.login.clone(),
        };
        let gate = ConnectionGate::new(&self.pull, &self.registry)?;
        Puller::start(registries.program, target, gate, &self.pull.cancel)
    }

    /// Returns whether connections use TLS, which authenticates the name of the server.
    fn uses_tls(&self) -> bool {
        let mut plain_http = self.pull.registries.plain_http.iter();
        !plain_http.any(|host| host.eq_ignore_ascii_case(&self.registry))
    }
}

impl RegistryImage {
    /// Parses a reference of an image, finds the credentials, and starts the puller for its
    /// registry.
    pub(super) fn new(
        reference: &str,
        access: &RegistryAccess,
        pull: &PullSettings,
    ) -> Result<Self, ImportError> {
        let parsed: Result<Reference, _> = reference.parse();
        let reference = parsed.map_err(|e| RegistryError::Reference {
            reference: crate::layer::shown(reference.as_bytes()),
            problem: e.to_string(),
        })?;
        let failed = |e| failed(&reference, pull.by_key, "", e);
        let (source, others) = ImageSource::all(&reference, access, pull);
        let puller = source.puller(&reference).map_err(failed)?;
        Ok(Self {
            puller,
            by_key: pull.by_key,
            reference,
            source,
            others,
            has_downloaded: false,
            is_mixed: false,
            digests: Vec::new(),
        })
    }

    /// Continues with the next server after `error`. Returns the error if it is final: the import
    /// was cancelled, the data cannot be written, or no server is left.
    fn fall_back(&mut self, what: &str, error: PullError) -> Result<(), ImportError> {
        let is_final = matches!(error, PullError::Cancelled | PullError::Sink(_));
        let next = if is_final { None } else { self.others.next() };
        let Some(next) = next else {
            return Err(self.failed(what, error));
        };
        let puller = next.puller(&self.reference);
        self.puller = puller.map_err(|e| self.failed(what, e))?;
        self.source = next;
        self.is_mixed |= self.has_downloaded;
        Ok(())
    }

    /// Returns the complete reference, with defaults filled in.
    pub(super) fn name(&self) -> String {
        self.reference.whole()
    }

    /// Returns the repository of all layers if later imports may rely on its name, that is, if the
    /// connection uses TLS.
    pub(super) fn repository(&self) -> Option<Repository> {
        let is_named = self.source.uses_tls() && !self.is_mixed;
        is_named.then(|| Repository {
            registry: self.source.registry.clone(),
            repository: self.reference.repository().to_owned(),
        })
    }

    /// Returns the configuration and the layers of the image. Their digests are verified.
    pub(super) fn image(&mut self) -> Result<(FoundImage, Vec<Descriptor>), ImportError> {
        let requested = self.reference.digest().map(str::to_owned);
        let (mut text, mut digest) = self.manifest(requested)?;
        self.digests = vec![digest.clone()];
        let mut document: Document = parse("manifest", &text)?;
        if document.config.is_none() && !document.manifests.is_empty() {
            let selected = document.linux_amd64()?.digest.clone();
            sha256(&selected)?;
            (text, digest) = self.manifest(Some(selected))?;
            self.digests.push(digest.clone());
            document = parse("manifest", &text)?;
        }
        let config = document.config.as_ref().ok_or_else(|| {
            ImportError::image("its manifest does not describe an image".to_owned())
        })?;
        let config: ImageConfig = parse("configuration", &self.document(config)?)?;
        let found = FoundImage::new(config, Some(digest), document.layers.len())?;
        Ok((found, document.layers))
    }

    /// Returns the digests of the manifests that [`Self::image`] has read.
    pub(super) fn digests(&self) -> &[String] {
        &self.digests
    }

    /// Returns the manifest of a tag without checking its digest. `None` if no server has the tag.
    pub(super) fn optional_manifest(&mut self, tag: &str) -> Result<Option<Vec<u8>>, ImportError> {
        loop {
            match self.puller.manifest(tag, MAX_DOCUMENT_BYTES) {
                Ok(text) => return Ok(Some(text)),
                Err(PullError::Fault(PullFault::NotFound)) if self.others.len() == 0 => {
                    return Ok(None);
                }
                Err(e) => self.fall_back("its signature", e)?,
            }
        }
    }

    /// Returns the manifest with this digest.
    pub(super) fn manifest_of_digest(&mut self, digest: &str) -> Result<Vec<u8>, ImportError> {
        Ok(self.manifest(Some(digest.to_owned()))?.0)
    }

    /// Returns the manifests that refer to the manifest with this SHA-256, such as signatures (OCI
    /// distribution specification 1.1). Registries without this call have the list as the manifest
    /// of a tag. Neither list is verified.
    pub(super) fn referrers(&mut self, sha256: &str) -> Result<Vec<Descriptor>, ImportError> {
        let repository = self.reference.repository();
        let call = format!("/v2/{repository}/referrers/sha256:{sha256}");
        loop {
            let mut list = self.puller.document_at(&call, MAX_DOCUMENT_BYTES);
            if let Err(PullError::Fault(PullFault::NotFound | PullFault::Status(..))) = &list {
                let tag = format!("sha256-{sha256}");
                list = self.puller.manifest(&tag, MAX_DOCUMENT_BYTES);
            }
            let error = match list {
                Ok(list) => {
                    let list: Document = parse("list of signatures", &list)?;
                    if !list.manifests.is_empty() || self.others.len() == 0 {
                        return Ok(list.manifests);
                    }
                    PullFault::NotFound.into()
                }
                Err(PullError::Fault(PullFault::NotFound)) if self.others.len() == 0 => {
                    return Ok(Vec::new());
                }
                Err(e) => e,
            };
            self.fall_back("its signatures", error)?;
        }
    }

    /// Returns a manifest and its SHA-256. The SHA-256 equals `digest` if given.
    fn manifest(&mut self, digest: Option<String>) -> Result<(Vec<u8>, String), ImportError> {
        let expected = digest.as_deref().map(sha256).transpose()?;
        let tag = self.reference.tag().unwrap_or("latest");
        let named = digest.as_deref().unwrap_or(tag).to_owned();
        let text = loop {
            match self.puller.manifest(&named, MAX_DOCUMENT_BYTES) {
                Ok(text) => break text,
                Err(e) => self.fall_back("its manifest", e)?,
            }
        };
        let found = sum_of(&text);
        if expected.is_some_and(|expected| expected != found) {
            let what = format!("manifest {named}");
            return Err(ImportError::Digest { what, found });
        }
        Ok((text, found))
    }

    /// Downloads and verifies a small document.
    pub(super) fn document(&mut self, descriptor: &Descriptor) -> Result<Vec<u8>, ImportError> {
        let expected = sha256(&descriptor.digest)?;
        let text = loop {
            match self
                .puller
                .small_blob(&descriptor.digest, MAX_DOCUMENT_BYTES)
            {
                Ok(text) => break text,
                Err(e) => self.fall_back(&descriptor.digest, e)?,
            }
        };
        let found = sum_of(&text);
        if found != expected {
            let what = format!("document sha256:{expected}");
            return Err(ImportError::Digest { what, found });
        }
        Ok(text)
    }

    /// Returns whether the registry proves by a `HEAD` request that it has the layer. Returns false
    /// without a request unless this repository has served the layer before ([`BlobProofs`]). A
    /// layer with a record is usually in the store, because the store removes both together.
    pub(super) fn proves(
        &mut self,
        layer: &Descriptor,
        diff_id: &str,
        home: &Home,
    ) -> Result<bool, ImportError> {
        let digest = sha256(&layer.digest)?;
        let served = |by: Repository| BlobProofs::peek(home, diff_id).served(digest, &by);
        if !self.repository().is_some_and(served) {
            return Ok(false);
        }
        match self.puller.has(&layer.digest, layer.size) {
            Ok(has) => Ok(has),
            Err(e) => {
                self.fall_back(&layer.digest, e)?;
                Ok(false)
            }
        }
    }

    /// Downloads a layer. `on_bytes` receives the number of bytes downloaded so far.
    pub(super) fn download(
        &mut self,
        layer: &Descriptor,
        home: &Home,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<Download, ImportError> {
        let expected = sha256(&layer.digest)?;
        let download = Download::open(&home.blobs(), expected, self.by_key)?;
        let (file, path) = (&download.file, &download.path);
        let mut deadlines = self.puller.layer();
        let mut resumes = 0;
        loop {
            let have = file.metadata().on("examine", path)?.len();
            // The file cannot be the beginning of this layer.
            if have > layer.size {
                file.set_len(0).on("shorten", path)?;
                continue;
            }
            if have == layer.size {
                break;
            }
            let mut at = have;
            let mut sink = |bytes: &[u8]| {
                file.write_all_at(bytes, at)?;
                // Count the bytes here, because an interrupted download returns an error without
                // the number of bytes.
                at += bytes.len() as u64;
                on_bytes(at);
                Ok(())
            };
            let digest = &layer.digest;
            let read = self
                .puller
                .blob(&mut deadlines, digest, have, layer.size, &mut sink);
            let broken = matches!(
                read,
                Err(PullError::Fault(
                    PullFault::Broken(_) | PullFault::Unreachable(_)
                ))
            );
            // An attempt that received no bytes is not repeated. `MAX_RESUMES` bounds the attempts
            // with a registry that sends only a few bytes each time.
            if (broken || (read.is_ok() && at < layer.size)) && resumes < MAX_RESUMES && at > have {
                resumes += 1;
                continue;
            }
            match read {
                Ok(()) if at == layer.size => break,
                // The registry sends no more bytes, for example since the descriptor states a wrong
                // size. Status 416 rejects a range that begins at the end of the blob.
                Ok(()) | Err(PullError::Fault(PullFault::Status(416, _))) => {
                    return Err(RegistryError::Truncated {
                        digest: layer.digest.clone(),
                        found: at,
                        expected: layer.size,
                    }
                    .into());
                }
                Err(PullError::Sink(e)) => return Err(not_written(e, &download)),
                Err(e) => {
                    self.fall_back(digest, e)?;
                    (deadlines, resumes) = (self.puller.layer(), 0);
                }
            }
        }
        let found = sum(file).on("read", path)?;
        if found != expected {
            // The content is wrong, so a later import must not resume this file.
            download.remove()?;
            let what = format!("layer sha256:{expected}");
            return Err(ImportError::Digest { what, found });
        }
        self.has_downloaded = true;
        Ok(download)
    }

    fn failed(&self, what: &str, error: PullError) -> ImportError {
        failed(&self.reference, self.by_key, what, error)
    }
}

/// Returns the error for a download that cannot be written.
fn not_written(error: io::Error, download: &Download) -> ImportError {
    let path = download.path.clone();
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            RegistryError::DiskFull { path }.into()
        }
        _ => ImportError::File(FileError {
            action: "write",
            path,
            source: error,
        }),
    }
}

/// Converts an error of the puller. An API key must not learn about the host's network. A key
/// therefore receives the same message for closed, filtered and refused ports, other protocols and
/// certificate errors.
fn failed(reference: &Reference, by_key: bool, what: &str, error: PullError) -> ImportError {
    let (registry, image) = (reference.resolve_registry().to_owned(), reference.whole());
    let unreachable = |reason: String| {
        if by_key {
            RegistryError::NoAnswer {
                registry: registry.clone(),
                detail: reason,
            }
        } else {
            RegistryError::Unreachable {
                registry: registry.clone(),
                reason,
            }
        }
    };
    match error {
        PullError::Cancelled => return ImportError::Cancelled,
        PullError::NoNetwork(registry) => RegistryError::NotAllowed { registry },
        PullError::Slow(reason) => RegistryError::Slow { registry, reason },
        PullError::Fault(PullFault::NotFound) => RegistryError::NotFound { image },
        PullError::Fault(PullFault::Unauthorized) => RegistryError::Auth { image, registry },
        PullError::Fault(PullFault::RateLimit) => RegistryError::RateLimit { registry },
        PullError::Fault(PullFault::TooLong(max_bytes)) => RegistryError::TooLong {
            digest: crate::layer::shown(what.as_bytes()),
            max_bytes,
        },
        PullError::Fault(PullFault::Status(code, text)) => RegistryError::Refused {
            registry,
            // The text may come from a server that is not a registry.
            reason: if by_key {
                format!("status {code}")
            } else {
                format!("status {code}: {text}")
            },
        },
        PullError::Fault(PullFault::Unreachable(text) | PullFault::Refused(text)) => {
            unreachable(text)
        }
        PullError::Fault(PullFault::Broken(text)) => {
            unreachable(format!("the connection was interrupted: {text}"))
        }
        other @ (PullError::Start(_)
        | PullError::Died(_)
        | PullError::Sink(_)
        | PullError::Fault(PullFault::Confinement(_))) => RegistryError::Puller {
            registry,
            problem: other.to_string(),
        },
    }
    .into()
}
