//! Errors of the template builder.

use super::records::RecordError;
use super::uploads::UploadError;
use super::{MAX_TAGS, MAX_WAITING_BUILDS, WAITING_BUILD_TIMEOUT};
use jiffy_engine_api::IdentityError;
use jiffy_image::{MAX_TAG, MAX_TEMPLATE_NAME, TemplateError};
use jiffy_sandbox_manager::QuotaRefusal;
use std::io;

/// Error of a builder operation.
#[derive(Debug, thiserror::Error)]
pub enum BuilderError {
    /// Invalid template name.
    #[error(
        "`{0}` cannot name a template: use at most {MAX_TEMPLATE_NAME} letters, digits, `.`, `_` and \
         `-`, starting with a letter or digit; add a tag of at most {MAX_TAG} as `name:tag`"
    )]
    Name(String),
    /// Too many tags.
    #[error("a build has at most {MAX_TAGS} tags")]
    Tags,
    /// Name of a stock template.
    #[error("the name `{0}` is taken: choose another")]
    Taken(String),
    /// Reserved name: an id, or one that builds use internally.
    #[error(
        "`{0}` cannot be chosen as a name: ids and templates that builds make for themselves look so"
    )]
    Reserved(String),
    /// Too many builds that were not started.
    #[error(
        "{MAX_WAITING_BUILDS} builds of this key wait to be started: start or cancel one; each is \
         given up {} minutes after it was asked for",
        WAITING_BUILD_TIMEOUT.as_secs() / 60
    )]
    Waiting,
    /// Unknown template.
    #[error("template `{0}` does not exist")]
    UnknownTemplate(String),
    /// Unknown build.
    #[error("build `{build}` of template `{template}` does not exist")]
    UnknownBuild {
        /// Template.
        template: String,
        /// Build.
        build: String,
    },
    /// The build was started before.
    #[error("build {0} was started already: ask for another")]
    Started(String),
    /// Invalid build description.
    #[error("{0}")]
    Spec(String),
    /// The owner's quota is exhausted.
    #[error(transparent)]
    Quota(#[from] QuotaRefusal),
    /// Error of the database.
    #[error(transparent)]
    Records(#[from] RecordError),
    /// Error of an upload.
    #[error(transparent)]
    Upload(#[from] UploadError),
    /// Error of the image store.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// No random bytes.
    #[error(transparent)]
    Entropy(#[from] IdentityError),
    /// Error of the data directory.
    #[error("cannot use the directory of uploads: {0}")]
    Directory(io::Error),
}
