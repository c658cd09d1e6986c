//! Access of a member to the etcd cluster that stores the fleet's records.

use super::MemberFiles;
use crate::SetupError;
use crate::records::EtcdSettings;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// etcd cluster of the records. Certificates and passwords are files of the data directory.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdAccess {
    /// URL of the cluster.
    pub url: String,
    /// User, if the authentication of etcd is enabled.
    #[serde(default)]
    pub user: Option<String>,
}

impl EtcdAccess {
    /// Returns the settings of a client with the files of the data directory.
    ///
    /// # Errors
    /// [`SetupError::Records`] if the URL is malformed.
    pub fn settings(&self, home: &Path) -> Result<EtcdSettings, SetupError> {
        let [ca, certificate, key, password] = MemberFiles::of(home).etcd;
        let existing = |path: PathBuf| path.exists().then_some(path);
        Ok(EtcdSettings {
            ca: existing(ca),
            identity: existing(certificate).zip(existing(key)),
            user: self.user.clone().map(|user| (user, password)),
            ..EtcdSettings::new(self.url.parse()?)
        })
    }
}
