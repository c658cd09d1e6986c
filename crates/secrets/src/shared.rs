//! [`SharedSecrets`]: secrets that several hosts share, such as the hosts of a fleet.

use crate::{Secret, SecretError};
use std::fmt;

/// Secret with its encrypted value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredSecret {
    /// Id of the API key that owns the secret. Empty for the owner of the hosts.
    pub owner: String,
    /// Secret.
    pub secret: Secret,
    /// Encrypted value.
    pub value: Vec<u8>,
}

/// Id, version and encrypted value of a secret.
pub type SealedValue = (String, u64, Vec<u8>);

/// Secrets that several hosts share. All of them have all secrets in memory. A change blocks until
/// the other hosts have received it.
pub trait SharedSecrets: fmt::Debug + Send + Sync {
    /// Returns the secrets of an owner, in no particular order.
    ///
    /// # Errors
    /// [`SecretError::Shared`] if this host does not know the secrets.
    fn of_owner(&self, owner: &str) -> Result<Vec<Secret>, SecretError>;

    /// Returns the encrypted value of a secret. `name` is in lower case. Does not block.
    ///
    /// # Errors
    /// [`SecretError::Shared`] if this host had no contact with the others: the secret may have
    /// been removed.
    fn value(&self, owner: &str, name: &str) -> Result<Option<SealedValue>, SecretError>;

    /// Adds a secret.
    ///
    /// # Errors
    /// [`SecretError`], also if the owner has a secret with this name or too many secrets.
    fn create(&self, created: StoredSecret) -> Result<(), SecretError>;

    /// Replaces a secret whose version is one lower.
    ///
    /// # Errors
    /// [`SecretError`], also if another caller has changed the secret.
    fn replace(&self, changed: StoredSecret) -> Result<(), SecretError>;

    /// Removes the secrets with these ids. Ids of removed secrets are ignored.
    ///
    /// # Errors
    /// [`SecretError`].
    fn remove(&self, ids: Vec<String>) -> Result<(), SecretError>;
}
