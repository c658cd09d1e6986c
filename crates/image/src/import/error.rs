//! [`ImportError`]: errors of imports of images.

use crate::erofs::WriteImageError;
use crate::file::FileError;
use crate::layer::LayerError;
use crate::template_model::TemplateError;
use jiffy_registry_pull::PullError;
use std::path::PathBuf;

/// Error of an import.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("`{name}` is the name of a stock template: choose another name with --name")]
    Stock { name: String },
    #[error(
        "the file has another recipe of the stock template `{name}` than this version of jiffy: use the \
         file of this version, choose another name with --name, or pass --force"
    )]
    OtherRecipe { name: String },
    #[error(
        "the file has the SHA-256 {digest}, which is not in the list of this package, and would become \
         the stock template `{name}`: compare it with the digest that the publisher states and pass it with \
         --sha256, choose another name with --name, or pass --force"
    )]
    UnknownFile { name: String, digest: String },
    #[error(
        "the file has the SHA-256 {digest}, which is not in the list of this package: if its publisher \
         states the same digest, run `jiffy template import` with --sha256"
    )]
    UnknownDownload { digest: String },
    #[error(
        "root is required to set the owners of files in a template: run this command with sudo, or \
         run `jiffy template export` as root and `jiffy template import` as this user"
    )]
    NotRoot,
    #[error("cannot download {url}: {source}")]
    Download { url: String, source: PullError },
    #[error("the import was cancelled")]
    Cancelled,
    /// The owner's disk quota is exhausted.
    #[error("{message}")]
    Budget { message: String },
    #[error("{0}")]
    Choice(String),
    /// Invalid image.
    #[error("the image cannot be used: {problem}")]
    Image { problem: String },
    #[error(
        "the image is for {found}, but sandboxes run linux/amd64: choose an image for linux/amd64"
    )]
    Platform { found: String },
    /// The file is not an archive that starts with the manifest of a template.
    #[error("the file is not an exported template")]
    NotExported,
    #[error("{what} does not match its digest (its content has sha256 {found}): run again")]
    Digest { what: String, found: String },
    #[error("image {image} has no signature: sign it with `cosign sign`, or use another image")]
    Unsigned { image: String },
    #[error(
        "image {image} has no valid signature: none of its {count} signatures was made by a required \
         key or signer for this image; the last one was rejected because {reason}"
    )]
    Signature {
        image: String,
        count: usize,
        /// Why the last signature was rejected, as a sentence about it.
        reason: String,
    },
    #[error("cannot unpack {what}")]
    Layer { what: String, source: LayerError },
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error(transparent)]
    WriteImage(#[from] WriteImageError),
    #[error("cannot import the image")]
    File(#[from] FileError),
}

/// Error of a registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error(
        "`{reference}` is not an image reference ({problem}): use the form [HOST[:PORT]/]NAME[:TAG|@DIGEST]"
    )]
    Reference { reference: String, problem: String },
    #[error("image {image} does not exist: check the name and the tag")]
    NotFound { image: String },
    #[error(
        "{registry} denies access to {image}: it does not exist, or needs credentials; run \
         `docker login {registry}`, or set JIFFY_REGISTRY_USER and JIFFY_REGISTRY_PASSWORD"
    )]
    Auth { image: String, registry: String },
    #[error("{registry} has limited the rate of requests: wait, or log in, which raises the limit")]
    RateLimit { registry: String },
    #[error(
        "cannot reach {registry}: {reason}; check network and proxy (a registry without TLS must \
         be named with --plain-http)"
    )]
    Unreachable { registry: String, reason: String },
    /// Error that keys receive. It reveals nothing about the host's network.
    #[error("{registry} could not be reached, or does not speak the protocol over TLS")]
    NoAnswer {
        registry: String,
        /// Detail for the host's owner. It is not part of the message.
        detail: String,
    },
    #[error(
        "registry {registry} is not allowed on this host: its owner must add it to \
         --registry-allow"
    )]
    NotAllowed { registry: String },
    #[error("{registry} is too slow: {reason}")]
    Slow { registry: String, reason: String },
    #[error("{registry} refuses: {reason}")]
    Refused { registry: String, reason: String },
    #[error("{digest} is longer than {max_bytes} bytes")]
    TooLong { digest: String, max_bytes: u64 },
    #[error("cannot run the puller for {registry}: {problem}")]
    Puller { registry: String, problem: String },
    #[error("{digest} ended after {found} of {expected} bytes: run again to get the rest")]
    Truncated {
        digest: String,
        found: u64,
        expected: u64,
    },
    #[error("the disk is full, cannot write {}: free some space and run again", path.display())]
    DiskFull { path: PathBuf },
}

impl ImportError {
    /// Returns the detail that the message omits, since a key may read the message.
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Registry(RegistryError::NoAnswer { detail, .. }) => Some(detail),
            _ => None,
        }
    }

    /// Returns the error of unpacking `what`.
    pub(crate) fn layer(what: String, source: LayerError) -> Self {
        // The message states the owner's quota, so the name of the layer adds nothing.
        match source {
            LayerError::Budget { message } => Self::Budget { message },
            source => Self::Layer { what, source },
        }
    }

    pub(crate) fn image(problem: String) -> Self {
        Self::Image { problem }
    }
}
