//! Secrets of API keys. A value can be written, but no call of the API returns it. A value is only
//! added to requests of sandboxes, by rules that name the secret.
//!
//! [`Secrets`] stores them in `<home>/secrets.db`, encrypted with the key of the host
//! ([`HostKey`]), or uses secrets that several hosts share ([`SharedSecrets`]). [`HeaderTemplate`]
//! is the value of a header that refers to secrets.

mod database;
mod error;
mod header_template;
mod host_key;
mod own_secrets;
mod secret;
mod secrets;
mod shared;

pub use error::SecretError;
pub use header_template::{HeaderTemplate, TemplateError};
pub use host_key::HostKey;
pub use own_secrets::OwnSecrets;
pub use secret::{
    MAX_METADATA_BYTES, MAX_METADATA_ENTRIES, MAX_METADATA_NAME, MAX_METADATA_VALUE,
    MAX_SECRET_NAME, MAX_SECRET_VALUE, MAX_SECRETS, NewSecret, Secret,
};
pub use secrets::Secrets;
pub use shared::{SealedValue, SharedSecrets, StoredSecret};
