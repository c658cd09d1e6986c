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
        "`{0}` is not a valid template name: use at most {MAX_TEMPLATE_NAME} letters, digits, \
         `.`, `_` and `-`. Add a tag of at most {MAX_TAG} characters as `name:tag`"
    )]
    Name(String),
    /// Too many tags.
    #[error("too many tags: a build may have at most {MAX_TAGS}")]
    Tags,
    /// Name of a stock template. Only the host's version may have this name.
    #[error("`{0}` is the name of a stock template: choose another name")]
    Taken(String),
    /// Name that looks like an id, or that builds use internally.
    #[error(
        "`{0}` is reserved: names that look like ids or internal templates are not allowed; choose another name"
    )]
    Reserved(String),
    /// Name of another template of the owner.
    #[error("`{0}` is the name of another template: choose another name, or remove that template")]
    NameInUse(String),
    /// A build of the template waits or runs.
    #[error("a build of template `{0}` has not finished: wait for it or cancel it")]
    Building(String),
    /// Too many builds that were not started.
    #[error(
        "too many builds of this key wait to be started (at most {MAX_WAITING_BUILDS}): start or cancel one; \
         each expires {} minutes after its request",
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
    #[error("build {0} was already started: request a new build")]
    Started(String),
    /// The build waits for its start or has ended.
    #[error("build {0} is not running")]
    NotRunning(String),
    /// A request for connections to an SSH agent that the build was not started with, or one of too
    /// many requests.
    #[error(
        "the build was started without the SSH agent `{0}`, or too many requests wait for its connections"
    )]
    SshAgent(String),
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
    #[error("cannot use the directory of uploads in the data directory: {0}")]
    Directory(io::Error),
}
