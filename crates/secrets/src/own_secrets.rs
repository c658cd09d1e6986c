//! [`OwnSecrets`]: secrets in the database of a host that becomes a member of a fleet. The fleet
//! imports them.

use crate::database::Database;
use crate::host_key::HostKey;
use crate::secrets::context;
use crate::{SecretError, StoredSecret};
use std::path::Path;

/// Secrets in the database of a host.
#[derive(Debug, Default)]
pub struct OwnSecrets {
    /// Secrets, encrypted with the key of the fleet.
    pub secrets: Vec<StoredSecret>,
    /// Names of secrets that cannot be decrypted.
    pub unreadable: Vec<String>,
}

impl OwnSecrets {
    /// Returns the names of the secrets in the data directory `home`. Creates no file.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn names(home: &Path) -> Result<Vec<String>, SecretError> {
        let all = stored(home)?.into_iter();
        Ok(all.map(|stored| stored.secret.name).collect())
    }

    /// Reads the secrets in the data directory `home`, and encrypts them with the key of the fleet.
    /// `key` also has the former key of the host.
    ///
    /// # Errors
    /// If the database cannot be read, or a secret cannot be encrypted.
    pub fn read(home: &Path, key: &HostKey) -> Result<Self, SecretError> {
        let mut own = Self::default();
        for mut stored in stored(home)? {
            let secret = &stored.secret;
            let context = context(&stored.owner, &secret.id, secret.version);
            match key.open_sealed(&context, &stored.value) {
                Some(plain) => {
                    stored.value = key.seal(&context, &plain)?;
                    own.secrets.push(stored);
                }
                None => own.unreadable.push(secret.name.clone()),
            }
        }
        Ok(own)
    }
}

fn stored(home: &Path) -> Result<Vec<StoredSecret>, SecretError> {
    if !Database::path(home).exists() {
        return Ok(Vec::new());
    }
    Database::open(home)?.all()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{NewSecret, Secrets};
    use zeroize::Zeroizing;

    #[test]
    fn secrets_of_a_host_are_encrypted_with_the_key_of_its_fleet() {
        let home = tempfile::tempdir().unwrap();
        let empty = tempfile::tempdir().unwrap();
        assert!(OwnSecrets::names(empty.path()).unwrap().is_empty());
        assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 0);
        let host = Secrets::open(home.path()).unwrap();
        for (owner, name) in [("", "token"), ("key1", "other")] {
            let new = NewSecret {
                name: name.to_owned(),
                value: Zeroizing::new(format!("value of {name}")),
                metadata: [("team".to_owned(), "a".to_owned())].into(),
            };
            host.create(owner, &new).unwrap();
        }
        let mut names = OwnSecrets::names(home.path()).unwrap();
        names.sort();
        assert_eq!(names, ["other", "token"]);
        let key = HostKey::of_fleet(&[7; 32], home.path()).unwrap();
        let own = OwnSecrets::read(home.path(), &key).unwrap();
        assert!(own.unreadable.is_empty());
        // Another host of the fleet, which does not have the former key, decrypts the secrets.
        let other = HostKey::of_fleet(&[7; 32], empty.path()).unwrap();
        for stored in own.secrets {
            let secret = &stored.secret;
            assert_eq!(host.get(&stored.owner, &secret.id).unwrap(), *secret);
            let context = context(&stored.owner, &secret.id, secret.version);
            let plain = other.open_sealed(&context, &stored.value).unwrap();
            assert_eq!(**plain, *format!("value of {}", secret.name).as_bytes());
        }
        // Secrets of a host whose key was lost.
        let own = OwnSecrets::read(home.path(), &other).unwrap();
        assert_eq!((own.secrets.len(), own.unreadable.len()), (0, 2));
    }
}
