//! [`FunctionError`]: errors of calls on functions, which the API converts to responses.

use crate::module_digest::{DigestError, ModuleDigest};
use crate::owner::MAX_NAME_BYTES;
use crate::request_body::BoxError;
use crate::tenant_process::ProcessError;
use jiffy_proto::function::{LimitError, MAX_FUNCTIONS, MAX_MODULE_BYTES};
use std::path::Path;
use std::time::Duration;

/// Error of a call on functions.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// The program `jiffy-functions` is not installed.
    #[error(
        "functions are not available on this host: the program jiffy-functions is not installed"
    )]
    NotInstalled,
    /// The function does not exist.
    #[error("function `{0}` does not exist")]
    NotFound(String),
    /// The version does not exist.
    #[error(
        "version {version} of function `{name}` no longer exists; available versions: {available}"
    )]
    NoVersion {
        /// Name of the function.
        name: String,
        /// Requested version.
        version: u64,
        /// Available versions.
        available: String,
    },
    /// The name is not valid.
    #[error("a function's name has 1 to {MAX_NAME_BYTES} characters of a-z, 0-9 and single dashes")]
    Name,
    /// A setting is out of its range.
    #[error("{0}")]
    Setting(String),
    /// A limit is out of its range.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The owner has too many functions.
    #[error(
        "cannot create a function: the maximum of {MAX_FUNCTIONS} functions is reached; remove a function"
    )]
    TooMany,
    /// The module exceeds the size limit.
    #[error("the module is larger than {} MiB", MAX_MODULE_BYTES >> 20)]
    TooLarge,
    /// The quota of the owner is too small for the module or its machine code.
    #[error("{0}")]
    QuotaExceeded(BoxError),
    /// The owner has no such module.
    #[error(
        "module {0} does not exist on this host or in the shared store, or belongs to another key; deploy it from its file"
    )]
    NoModule(ModuleDigest),
    /// The content of the module in the store does not match its digest.
    #[error("module {0} in the store is damaged; deploy it from its file")]
    ModuleDamaged(ModuleDigest),
    /// The store is temporarily unavailable. The value is the time after which a retry is useful.
    #[error("the shared store is temporarily unavailable; try again later")]
    StoreUnavailable(Duration),
    /// The store failed or denied the request. The host's log contains the reason.
    #[error("cannot fetch the module from the store; see the log of the host for the reason")]
    Store,
    /// The body of a request exceeds the function's limit.
    #[error("The body of the request is larger than the function accepts")]
    RequestTooLarge,
    /// The module does not compile or start. The module's author receives the message.
    #[error("{0}")]
    Module(String),
    /// The owner's process cannot be started or reached.
    #[error("functions are unavailable: {0}")]
    Unavailable(String),
    /// An operation on a file of the host failed.
    #[error("{path}: {source}")]
    File {
        /// Path of the file.
        path: String,
        /// Reason.
        source: std::io::Error,
    },
}

impl FunctionError {
    /// Returns a function that wraps an error of the file at `path`.
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
            // Both messages are about the module, and are meant for its author.
            ProcessError::Refused(message) | ProcessError::Compile(message) => {
                Self::Module(message)
            }
            ProcessError::QuotaExceeded(error) => Self::QuotaExceeded(error),
            ProcessError::Start(_) | ProcessError::Control(_) => {
                Self::Unavailable(error.to_string())
            }
        }
    }
}
