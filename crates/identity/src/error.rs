//! Errors of identity tokens.

use jiffy_engine_api::IdentityError as EntropyError;
use jiffy_secrets::SecretError;
use std::io;
use std::path::PathBuf;

/// Errors of issuing tokens and of the keys that sign them.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file with the keys cannot be read or written.
    #[error("cannot use the keys of identity tokens in {}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The file with the keys is damaged, or belongs to another host.
    #[error(
        "the keys of identity tokens in {} cannot be decrypted: the file or `secrets-key` of the \
         data directory was replaced; remove the file to create new keys",
        path.display()
    )]
    Damaged {
        /// Path of the file.
        path: PathBuf,
    },
    /// A key cannot be created, or cannot sign.
    #[error("the key of identity tokens cannot be used: no random numbers, or the key is invalid")]
    Key,
    /// A key cannot be encrypted.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// Random bytes are not available.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
    /// The hosts that share the keys cannot read or change them.
    #[error("{reason}")]
    Shared {
        /// Reason.
        reason: String,
        /// True if the call may succeed later.
        is_temporary: bool,
    },
    /// The template has a name that a subject cannot contain.
    #[error("the template `{0}` cannot be part of the subject of a token")]
    Subject(String),
}
