//! Credentials for registries: a password, or credentials of a cloud from which the puller obtains
//! a password that expires. The *puller* is the confined process that downloads images from
//! registries.

use serde::{Deserialize, Serialize};
use std::fmt;

/// User and password for a registry.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// User name.
    pub user: String,
    /// Password.
    pub password: String,
}

impl fmt::Debug for Credentials {
    // The password must not appear in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Credentials").field(&self.user).finish()
    }
}

/// Authentication to a registry.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RegistryLogin {
    /// User and password.
    Password(Credentials),
    /// Access key for Amazon ECR.
    Aws {
        /// Access key id.
        access_key_id: String,
        /// Secret access key.
        secret_access_key: String,
        /// Region, such as `eu-west-1`.
        region: String,
        /// URL of the API that returns passwords.
        endpoint: String,
    },
    /// Key of a service account for Google Artifact Registry.
    Gcp {
        /// Key file in JSON.
        service_account: String,
    },
}

impl fmt::Debug for RegistryLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Password(credentials) => credentials.fmt(f),
            Self::Aws { access_key_id, .. } => f.debug_tuple("Aws").field(access_key_id).finish(),
            Self::Gcp { .. } => f.write_str("Gcp"),
        }
    }
}
