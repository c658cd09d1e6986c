//! Images in registries, over the OCI distribution protocol.

use super::document::{Descriptor, Document, ImageConfig, MAX_DOCUMENT, parse, sha256};
use super::{Access, Found, ImportError, RegistryError, credentials};
use crate::file::{FileError, OnPath};
use crate::verified::{sum, sum_of};
use futures_util::StreamExt;
use oci_client::Reference;
use oci_client::client::{BlobResponse, Client, ClientConfig, ClientProtocol};
use oci_client::errors::OciDistributionError;
use oci_client::secrets::RegistryAuth;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

const MANIFESTS: &[&str] = &[
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
/// For a connection, and for the next bytes of an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// For a manifest.
const DOCUMENT_TIME: Duration = Duration::from_secs(60);
/// How often a download that made progress and broke off is taken up again.
const RESUMES: usize = 5;

/// One image in a registry.
pub(super) struct Registry {
    runtime: Runtime,
    client: Client,
    reference: Reference,
    auth: RegistryAuth,
}

impl Registry {
    pub(super) fn new(
        reference: &str,
        plain_http: &[String],
        access: &Access,
    ) -> Result<Self, ImportError> {
        let parsed: Result<Reference, _> = reference.parse();
        let reference = parsed.map_err(|e| RegistryError::Reference {
            reference: crate::layer::shown(reference.as_bytes()),
            problem: e.to_string(),
        })?;
        // Another part of the program may have chosen before.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let config = ClientConfig {
            protocol: ClientProtocol::HttpsExcept(plain_http.to_vec()),
            connect_timeout: Some(PATIENCE),
            read_timeout: Some(PATIENCE),
            user_agent: concat!("jiffy/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.on("start an event loop for", Path::new("downloads"))?;
        let auth = match access {
            Access::Host => credentials::find(reference.resolve_registry()),
            Access::Nobody => RegistryAuth::Anonymous,
            Access::User { name, password } => RegistryAuth::Basic(name.clone(), password.clone()),
        };
        let client = Client::try_from(config).map_err(|e| failed(&reference, e))?;
        Ok(Self {
            runtime,
            client,
            reference,
            auth,
        })
    }

    /// The reference with all that was left out.
    pub(super) fn name(&self) -> String {
        self.reference.whole()
    }

    /// What image it is, and its layers. Every document is what its digest says.
    pub(super) fn image(&self) -> Result<(Found, Vec<Descriptor>), ImportError> {
        let (mut text, mut digest) = self.manifest(&self.reference)?;
        let mut document: Document = parse("manifest", &text)?;
        if document.config.is_none() && !document.manifests.is_empty() {
            let ours = document.ours()?.digest.clone();
            sha256(&ours)?;
            (text, digest) = self.manifest(&self.reference.clone_with_digest(ours))?;
            document = parse("manifest", &text)?;
        }
        let config = document.config.as_ref().ok_or_else(|| {
            ImportError::image("what its name stands for is not an image".to_owned())
        })?;
        let config: ImageConfig = parse("configuration", &self.document(config)?)?;
        let found = Found::new(config, Some(digest), document.layers.len())?;
        Ok((found, document.layers))
    }

    /// A manifest and its SHA-256, which is the one that was asked for if one was.
    fn manifest(&self, reference: &Reference) -> Result<(Vec<u8>, String), ImportError> {
        let pulling = self
            .client
            .pull_manifest_raw(reference, &self.auth, MANIFESTS);
        let pulled = self
            .runtime
            .block_on(async { timeout(DOCUMENT_TIME, pulling).await });
        let (text, _) = pulled
            .map_err(|_| self.silent())?
            .map_err(|e| failed(reference, e))?;
        let found = sum_of(&text);
        if let Some(expected) = reference.digest()
            && sha256(expected)? != found
        {
            let what = format!("manifest {expected}");
            return Err(ImportError::Digest { what, found });
        }
        Ok((text.to_vec(), found))
    }

    fn silent(&self) -> RegistryError {
        RegistryError::Unreachable {
            registry: self.reference.resolve_registry().to_owned(),
            reason: format!("no answer within {} s", DOCUMENT_TIME.as_secs()),
        }
    }

    fn document(&self, descriptor: &Descriptor) -> Result<Vec<u8>, ImportError> {
        let expected = sha256(&descriptor.digest)?;
        let mut text = Vec::new();
        let mut take = |bytes: &[u8]| {
            text.extend_from_slice(bytes);
            Ok(())
        };
        let reading = self.stream(descriptor, 0, MAX_DOCUMENT, &mut take);
        let read = self
            .runtime
            .block_on(async { timeout(DOCUMENT_TIME, reading).await });
        read.map_err(|_| self.silent())??;
        let found = sum_of(&text);
        if found != expected {
            let what = format!("document sha256:{expected}");
            return Err(ImportError::Digest { what, found });
        }
        Ok(text)
    }

    /// Downloads a layer into `blobs`, going on where an earlier download ended. `on_bytes` is told how many there are.
    pub(super) fn download(
        &self,
        layer: &Descriptor,
        blobs: &Path,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<PathBuf, ImportError> {
        let expected = sha256(&layer.digest)?;
        let path = blobs.join(format!("sha256-{expected}"));
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path);
        let file = file.on("open", &path)?;
        let mut resumes = 0;
        loop {
            let have = file.metadata().on("examine", &path)?.len();
            if have > layer.size {
                file.set_len(0).on("shorten", &path)?;
                continue;
            }
            if have == layer.size {
                break;
            }
            match self.append(layer, &file, have, &path, on_bytes) {
                Ok(()) => break,
                Err(ImportError::Registry(
                    RegistryError::Unreachable { .. } | RegistryError::Truncated { .. },
                )) if resumes < RESUMES && file.metadata().on("examine", &path)?.len() > have => {
                    resumes += 1;
                }
                Err(e) => return Err(e),
            }
        }
        let found = sum(&file).on("read", &path)?;
        if found != expected {
            // Nothing that begins with this can become right.
            std::fs::remove_file(&path).on("remove", &path)?;
            let what = format!("layer sha256:{expected}");
            return Err(ImportError::Digest { what, found });
        }
        Ok(path)
    }

    fn append(
        &self,
        layer: &Descriptor,
        file: &File,
        have: u64,
        path: &Path,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<(), ImportError> {
        use std::os::unix::fs::FileExt;
        let mut at = have;
        let mut take = |bytes: &[u8]| {
            file.write_all_at(bytes, at).map_err(|e| match e.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    RegistryError::DiskFull {
                        path: path.to_owned(),
                    }
                    .into()
                }
                _ => ImportError::File(FileError {
                    action: "write",
                    path: path.to_owned(),
                    source: e,
                }),
            })?;
            at += bytes.len() as u64;
            on_bytes(at);
            Ok(())
        };
        self.runtime
            .block_on(self.stream(layer, have, layer.size, &mut take))?;
        if at < layer.size {
            return Err(RegistryError::Truncated {
                digest: layer.digest.clone(),
                found: at,
                expected: layer.size,
            }
            .into());
        }
        Ok(())
    }

    /// Passes on what the registry sends of a blob from `offset` on, if it is no more than up to `most`.
    async fn stream(
        &self,
        blob: &Descriptor,
        offset: u64,
        most: u64,
        take: &mut dyn FnMut(&[u8]) -> Result<(), ImportError>,
    ) -> Result<(), ImportError> {
        let (client, digest) = (&self.client, blob.digest.as_str());
        let failed = |e| failed(&self.reference, e);
        client
            .store_auth_if_needed(self.reference.resolve_registry(), &self.auth)
            .await;
        let (mut stream, mut skip) = if offset == 0 {
            (
                client
                    .pull_blob_stream(&self.reference, digest)
                    .await
                    .map_err(failed)?,
                0,
            )
        } else {
            let pulled = client
                .pull_blob_stream_partial(&self.reference, digest, offset, None)
                .await;
            match pulled.map_err(failed)? {
                BlobResponse::Partial(stream) => (stream, 0),
                // It does not know parts: what we have comes once more.
                BlobResponse::Full(stream) => (stream, offset),
            }
        };
        let mut left = most.saturating_sub(offset);
        while let Some(bytes) = stream.next().await {
            let bytes = bytes.map_err(|e| self.broken(blob, &e))?;
            let known = usize::try_from(skip).unwrap_or(usize::MAX).min(bytes.len());
            skip -= known as u64;
            let bytes = &bytes[known..];
            left = left.checked_sub(bytes.len() as u64).ok_or_else(|| {
                ImportError::image(format!("`{digest}` is longer than its manifest says"))
            })?;
            take(bytes)?;
        }
        Ok(())
    }

    /// A stream that fails in the middle: the client's check of the content, or the connection.
    fn broken(&self, blob: &Descriptor, error: &io::Error) -> ImportError {
        let digest_error = error
            .get_ref()
            .is_some_and(|e| e.is::<oci_client::errors::DigestError>());
        if digest_error || error.to_string().contains("igest") {
            return ImportError::Digest {
                what: format!("blob {}", blob.digest),
                found: "another".to_owned(),
            };
        }
        RegistryError::Unreachable {
            registry: self.reference.resolve_registry().to_owned(),
            reason: format!("the connection broke off: {}", chain(error)),
        }
        .into()
    }
}

/// What a registry's answer means to whoever asked.
fn failed(reference: &Reference, error: OciDistributionError) -> ImportError {
    use oci_client::errors::OciErrorCode as Code;
    let (registry, image) = (reference.resolve_registry().to_owned(), reference.whole());
    let not_found = || RegistryError::NotFound {
        image: image.clone(),
    };
    let auth = || RegistryError::Auth {
        image: image.clone(),
        registry: registry.clone(),
    };
    let limited = || RegistryError::RateLimit {
        registry: registry.clone(),
    };
    let other = |reason: String| RegistryError::Refused {
        registry: registry.clone(),
        reason: crate::layer::shown(reason.as_bytes()),
    };
    match error {
        OciDistributionError::UnauthorizedError { .. }
        | OciDistributionError::AuthenticationFailure(_) => auth(),
        OciDistributionError::ImageManifestNotFoundError(_) => not_found(),
        OciDistributionError::ServerError { code, message, .. } => match code {
            404 => not_found(),
            401 | 403 => auth(),
            429 => limited(),
            code => other(format!("status {code}: {message}")),
        },
        OciDistributionError::RegistryError { envelope, .. } => {
            match envelope.errors.first().map(|e| &e.code) {
                Some(
                    Code::ManifestUnknown
                    | Code::NameUnknown
                    | Code::NotFound
                    | Code::BlobUnknown
                    | Code::ManifestBlobUnknown,
                ) => not_found(),
                Some(Code::Unauthorized | Code::Denied) => auth(),
                Some(Code::Toomanyrequests) => limited(),
                _ => other(envelope.to_string()),
            }
        }
        OciDistributionError::DigestError(e) => {
            return ImportError::Digest {
                what: format!("manifest of {image}"),
                found: e.to_string(),
            };
        }
        OciDistributionError::RequestError(e) => RegistryError::Unreachable {
            registry: registry.clone(),
            reason: chain(&e),
        },
        e => other(e.to_string()),
    }
    .into()
}

/// An error with all its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
