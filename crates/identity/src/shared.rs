//! [`SharedIdentityKeys`]: keys that several hosts share, such as the hosts of a fleet.

use crate::{IdentityError, StoredKey};
use std::fmt;

/// Keys of identity tokens that several hosts share. All of them have all keys in memory.
pub trait SharedIdentityKeys: fmt::Debug + Send + Sync {
    /// Returns the version of the keys, and the keys, oldest first. The version is 0 if there are
    /// no keys yet. Does not block.
    ///
    /// # Errors
    /// [`IdentityError::Shared`] if this host does not know the keys.
    fn read(&self) -> Result<(u64, Vec<StoredKey>), IdentityError>;

    /// Replaces keys whose version is one lower than `version`. Returns false if another host has
    /// replaced them. Blocks until the other hosts have received the keys.
    ///
    /// # Errors
    /// [`IdentityError::Shared`] if the keys cannot be changed.
    fn replace(&self, version: u64, keys: Vec<StoredKey>) -> Result<bool, IdentityError>;

    /// Checks that this host may sign tokens.
    ///
    /// # Errors
    /// [`IdentityError::Shared`] if this host had no contact with the others: the API key that owns
    /// a sandbox may have been revoked.
    fn check_contact(&self) -> Result<(), IdentityError>;
}
