//! Errors of imports.

use crate::erofs::WriteImageError;
use crate::file::FileError;
use crate::layer::LayerError;
use crate::template_model::TemplateError;
use jiffy_registry_pull::PullError;
use std::path::PathBuf;

/// Error of an import.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("`{name}` is the name of a stock template: choose another one with --name")]
    Stock { name: String },
    #[error(
        "the file has another recipe of the stock template `{name}` than this version of jiffy: use the \
         file of this version, choose another name with --name, or pass --force"
    )]
    OtherRecipe { name: String },
    #[error(
        "the file has the SHA-256 {digest}, which is not in the list of this package, and would become \
         the stock template `{name}`: compare the digest with that of its publisher and pass it with \
         --sha256, choose another name with --name, or pass --force"
    )]
    UnknownFile { name: String, digest: String },
    #[error(
        "the file has the SHA-256 {digest}, which is not in the list of this package: if its publisher \
         states the same digest, run `jiffy template import` with --sha256"
    )]
    UnknownDownload { digest: String },
    #[error(
        "making a template of an image, or of what a sandbox changed, needs root of this host, to \
         give files to their owners and to mark what was removed: run it with sudo, or take the \
         template along (`jiffy template export` as root, `jiffy template import` as this user)"
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
        "the image is for {found}, and sandboxes here are linux/amd64: choose an image for that"
    )]
    Platform { found: String },
    #[error(
        "{what} is not what its digest says (found {found}): it was damaged or changed on its way; run again"
    )]
    Digest { what: String, found: String },
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
        "`{reference}` is not an image reference ({problem}): write [HOST[:PORT]/]NAME[:TAG|@DIGEST]"
    )]
    Reference { reference: String, problem: String },
    #[error("there is no image {image}: check name and tag")]
    NotFound { image: String },
    #[error(
        "{registry} does not let us read {image}: it does not exist, or needs credentials; run \
         `docker login {registry}`, or set JIFFY_REGISTRY_USER and JIFFY_REGISTRY_PASSWORD"
    )]
    Auth { image: String, registry: String },
    #[error("{registry} wants us to ask less often: wait, or log in, which raises the limit")]
    RateLimit { registry: String },
    #[error(
        "cannot reach {registry}: {reason}; check network and proxy (a registry without TLS must \
         be named with --plain-http)"
    )]
    Unreachable { registry: String, reason: String },
    /// Error for keys that reveals nothing of the host's network.
    #[error("{registry} could not be reached, or does not speak the protocol over TLS")]
    NoAnswer {
        registry: String,
        /// Detail for the host's owner; not in the message.
        detail: String,
    },
    #[error(
        "this host lets keys reach no registry but those that its owner names with \
         --registry-allow, and {registry} is not among them"
    )]
    NotAllowed { registry: String },
    #[error("{registry} is too slow: {reason}")]
    Slow { registry: String, reason: String },
    #[error("{registry} refuses: {reason}")]
    Refused { registry: String, reason: String },
    #[error("{digest} is longer than {most} bytes")]
    TooLong { digest: String, most: u64 },
    #[error("cannot ask {registry}: {problem}")]
    Puller { registry: String, problem: String },
    #[error("{digest} ended after {found} of {expected} bytes: run again to get the rest")]
    Truncated {
        digest: String,
        found: u64,
        expected: u64,
    },
    #[error("the disk is full at {}: free some space and run again", path.display())]
    DiskFull { path: PathBuf },
}

impl ImportError {
    /// Detail that the message omits, since a key may read it.
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Registry(RegistryError::NoAnswer { detail, .. }) => Some(detail),
            _ => None,
        }
    }

    /// Error of unpacking `what`.
    pub(crate) fn layer(what: String, source: LayerError) -> Self {
        match source {
            LayerError::Budget { message } => Self::Budget { message },
            source => Self::Layer { what, source },
        }
    }

    pub(crate) fn image(problem: String) -> Self {
        Self::Image { problem }
    }
}
