//! Errors of secrets.

use crate::secret::{
    MAX_METADATA_BYTES, MAX_METADATA_ENTRIES, MAX_METADATA_NAME, MAX_METADATA_VALUE,
    MAX_SECRET_NAME, MAX_SECRET_VALUE, MAX_SECRETS,
};
use jiffy_database::OpenError;
use jiffy_engine_api::IdentityError;
use std::io;
use std::path::PathBuf;

/// Errors of reading or changing secrets.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// SQLite failed.
    #[error("the secrets in {} cannot be used: {source}; check that the disk is writable and not full, and restore a damaged file from a backup", path.display())]
    Database {
        /// Path of the database.
        path: PathBuf,
        /// Cause.
        source: rusqlite::Error,
    },
    /// A file operation failed.
    #[error("cannot use {}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The database cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A value cannot be decrypted.
    #[error(
        "the secret `{0}` cannot be decrypted: the file `secrets-key` of the data directory was \
         replaced, or the record is damaged; set the value again"
    )]
    Sealed(String),
    /// Random bytes are not available.
    #[error(transparent)]
    Entropy(#[from] IdentityError),
    /// The name is invalid.
    #[error(
        "`{0}` is not a name for a secret: use 1 to {MAX_SECRET_NAME} letters, digits, `-`, `_` and \
         `.`, not starting with `sec_`"
    )]
    Name(String),
    /// The value is invalid. The value is not part of the message.
    #[error(
        "the value of the secret is invalid: use 1 to {MAX_SECRET_VALUE} bytes of UTF-8 without control \
         characters and without spaces at the ends"
    )]
    Value,
    /// The metadata is too large.
    #[error(
        "`metadata` is too large: at most {MAX_METADATA_ENTRIES} entries with names of \
         {MAX_METADATA_NAME} and values of {MAX_METADATA_VALUE} bytes, {MAX_METADATA_BYTES} bytes in \
         total"
    )]
    Metadata,
    /// The owner has a secret with this name.
    #[error("a secret named `{0}` exists: replace its value, or choose another name")]
    Exists(String),
    /// The owner has the maximum number of secrets.
    #[error("the key has {MAX_SECRETS} secrets, which is the maximum: remove one first")]
    Full,
    /// The owner has no such secret.
    #[error(
        "secret `{0}` does not exist; `jiffy secret ls` and `GET /secrets` list the secrets of this key"
    )]
    Unknown(String),
    /// Another caller has changed the secret at the same time.
    #[error("the secret `{0}` was changed at the same time: try again")]
    Changed(String),
    /// The hosts that share the secrets cannot read or change them.
    #[error("{reason}")]
    Shared {
        /// Reason.
        reason: String,
        /// True if the call may succeed later.
        is_temporary: bool,
    },
}
