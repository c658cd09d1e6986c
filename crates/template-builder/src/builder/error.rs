//! Errors of the template builder.

use super::records::RecordError;
use super::uploads::UploadError;
use super::{MAX_TAGS, MAX_WAITING_BUILDS, WAITING_BUILD_TIMEOUT};
use jiffy_host::{IdentityError, QuotaRefusal};
use jiffy_image::{BuildError, TemplateError};
use std::io;

/// Why the builder does not do what it is asked.
#[derive(Debug, thiserror::Error)]
pub enum BuilderError {
    /// Not a name.
    #[error(
        "`{0}` cannot name a template: use a-z, 0-9, `.`, `_` and `-`, starting with a letter or digit, at most 63, and `name:tag` for a tag"
    )]
    Name(String),
    /// Too many.
    #[error("a build has at most {MAX_TAGS} tags")]
    Tags,
    /// Of a stock template.
    #[error("the name `{0}` is taken: choose another")]
    Taken(String),
    /// Ids, and names of templates that builds make for themselves.
    #[error(
        "`{0}` cannot be chosen as a name: ids and templates that builds make for themselves look so"
    )]
    Reserved(String),
    /// Too many that were not started.
    #[error(
        "{MAX_WAITING_BUILDS} builds of this key wait to be started: start or cancel one; each is given up {} minutes after it was asked for",
        WAITING_BUILD_TIMEOUT.as_secs() / 60
    )]
    Waiting,
    /// No such template.
    #[error("there is no template `{0}`")]
    UnknownTemplate(String),
    /// No such build.
    #[error("template `{template}` has no build `{build}`")]
    UnknownBuild {
        /// Template.
        template: String,
        /// Build.
        build: String,
    },
    /// It has begun already.
    #[error("build {0} was started already: ask for another")]
    Started(String),
    /// What is to be built makes no sense.
    #[error("{0}")]
    Spec(String),
    /// The owner's budget has no room.
    #[error(transparent)]
    Quota(#[from] QuotaRefusal),
    /// The records.
    #[error(transparent)]
    BuildRecords(#[from] RecordError),
    /// Uploads.
    #[error(transparent)]
    IncomingUpload(#[from] UploadError),
    /// Templates.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// Their tags.
    #[error(transparent)]
    Tag(#[from] BuildError),
    /// No random bytes.
    #[error(transparent)]
    Entropy(#[from] IdentityError),
    /// The data directory.
    #[error("cannot use the directory of uploads: {0}")]
    Directory(io::Error),
}
