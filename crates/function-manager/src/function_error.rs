//! Failures of calls on functions.

use crate::module_digest::{DigestError, ModuleDigest};
use crate::owner::MAX_NAME_BYTES;
use crate::request_body::BoxError;
use crate::tenant_process::ProcessError;
use jiffy_proto::function::{LimitError, MAX_FUNCTIONS, MAX_MODULE_BYTES};
use std::path::Path;
use std::time::Duration;

/// Failure of a call on functions.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// The host has no program for functions.
    #[error("this host runs no functions: the program jiffy-functions is not installed")]
    NotInstalled,
    /// No such function.
    #[error("function `{0}` does not exist")]
    NotFound(String),
    /// No such version.
    #[error("version {version} of function `{name}` does not exist any more; it has {kept}")]
    NoVersion {
        /// Function.
        name: String,
        /// Version that was asked for.
        version: u64,
        /// Versions that there are.
        kept: String,
    },
    /// A name that no function may have.
    #[error("a function's name has 1 to {MAX_NAME_BYTES} characters of a-z, 0-9 and single dashes")]
    Name,
    /// A setting out of its range.
    #[error("{0}")]
    Setting(String),
    /// A limit out of its range.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// Too many functions.
    #[error("{MAX_FUNCTIONS} functions are there, and no more may be: remove some")]
    TooMany,
    /// Module above the limit.
    #[error("the module is larger than {} MiB", MAX_MODULE_BYTES >> 20)]
    TooLarge,
    /// The budget of the owner has no room for the module or its machine code.
    #[error("{0}")]
    NoRoom(BoxError),
    /// No such module of the owner.
    #[error("module {0} of yours does not exist on this host, nor in a store that it shares")]
    NoModule(ModuleDigest),
    /// Module that is not as it was put into the store.
    #[error("the module {0} in the store is damaged; deploy it from its file")]
    ModuleDamaged(ModuleDigest),
    /// The store cannot be used now; with the time after which it may be.
    #[error("the store that hosts share cannot be used now; try again later")]
    StoreUnavailable(Duration),
    /// The store failed or refused. The host's log has the reason.
    #[error("the module cannot be fetched from the store; the log of the host says why")]
    Store,
    /// Request with a body above the function's limit.
    #[error("The body of the request is larger than the function accepts")]
    RequestTooLarge,
    /// A module that does not compile or start. The message is its author's.
    #[error("{0}")]
    Module(String),
    /// The owner's process cannot be started or reached now.
    #[error("functions cannot run now: {0}")]
    Unavailable(String),
    /// Files of the host.
    #[error("{path}: {source}")]
    File {
        /// Path.
        path: String,
        /// Reason.
        source: std::io::Error,
    },
}

impl FunctionError {
    /// Failure of a file.
    pub(crate) fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.display().to_string();
        move |source| Self::File { path, source }
    }
}

impl From<DigestError> for FunctionError {
    fn from(error: DigestError) -> Self {
        Self::Setting(error.to_string())
    }
}

impl From<ProcessError> for FunctionError {
    fn from(error: ProcessError) -> Self {
        match error {
            ProcessError::Refused(message) | ProcessError::Compile(message) => {
                Self::Module(message)
            }
            ProcessError::NoRoom(refusal) => Self::NoRoom(refusal),
            ProcessError::Start(_) | ProcessError::Control(_) => {
                Self::Unavailable(error.to_string())
            }
        }
    }
}
