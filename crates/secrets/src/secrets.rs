//! [`Secrets`]: the secrets of all API keys, encrypted. The secrets of one host are in
//! `<home>/secrets.db`. The hosts of a fleet share their secrets.

use crate::database::Database;
use crate::host_key::HostKey;
use crate::secret::{ID_PREFIX, MAX_SECRETS, check_metadata, check_value, checked_name};
use crate::shared::{SharedSecrets, StoredSecret};
use crate::{NewSecret, Secret, SecretError};
use jiffy_engine_api::{new_id, now_ms};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use zeroize::Zeroizing;

/// Secrets of one host, or of a fleet. Clones share the storage. Methods that change secrets block,
/// and so do all methods on one host.
#[derive(Debug, Clone)]
pub struct Secrets {
    key: HostKey,
    storage: Storage,
}

/// Place in which the secrets are stored.
#[derive(Debug, Clone)]
enum Storage {
    Database(Arc<Database>),
    Shared(Arc<dyn SharedSecrets>),
}

/// Returns the context of an encrypted value: it cannot be moved to another owner or secret, and
/// not be replaced by an earlier value.
pub(crate) fn context(owner: &str, id: &str, version: u64) -> String {
    format!("secret {owner} {id} {version}")
}

impl Secrets {
    /// Opens or creates the secrets of the data directory `home`.
    pub fn open(home: &Path) -> Result<Self, SecretError> {
        let key = HostKey::open(home)?;
        let database = Database::open(home)?;
        Ok(Self {
            key,
            storage: Storage::Database(Arc::new(database)),
        })
    }

    /// Uses the secrets of a fleet. `key` is a key of the fleet.
    #[must_use]
    pub fn shared(key: HostKey, secrets: Arc<dyn SharedSecrets>) -> Self {
        Self {
            key,
            storage: Storage::Shared(secrets),
        }
    }

    /// Returns the key with which the secrets are encrypted.
    #[must_use]
    pub fn host_key(&self) -> &HostKey {
        &self.key
    }

    /// Stores a new secret of `owner`, which is empty for the owner of the host.
    pub fn create(&self, owner: &str, new: &NewSecret) -> Result<Secret, SecretError> {
        let name = checked_name(&new.name)?;
        check_value(&new.value)?;
        check_metadata(&new.metadata)?;
        let now = now_ms();
        let secret = Secret {
            id: format!("{ID_PREFIX}{}", new_id()?),
            name,
            version: 1,
            metadata: new.metadata.clone(),
            created_ms: now,
            updated_ms: now,
        };
        let context = context(owner, &secret.id, secret.version);
        let value = self.key.seal(&context, new.value.as_bytes())?;
        let created = StoredSecret {
            owner: owner.to_owned(),
            secret,
            value,
        };
        match &self.storage {
            Storage::Database(database) => database.create(&created)?,
            Storage::Shared(shared) => {
                let existing = shared.of_owner(owner)?;
                if existing.iter().any(|s| s.name == created.secret.name) {
                    return Err(SecretError::Exists(created.secret.name));
                }
                if existing.len() >= MAX_SECRETS {
                    return Err(SecretError::Full);
                }
                shared.create(created.clone())?;
            }
        }
        Ok(created.secret)
    }

    /// Replaces the value of a secret of `owner`, and the metadata if given. `which` is an id or a
    /// name.
    pub fn update(
        &self,
        owner: &str,
        which: &str,
        value: &str,
        metadata: Option<&BTreeMap<String, String>>,
    ) -> Result<Secret, SecretError> {
        check_value(value)?;
        metadata.map(check_metadata).transpose()?;
        let change = |secret: &mut Secret| {
            secret.version = secret.version.saturating_add(1);
            // The time of the last change never decreases, also if the clock was set back.
            secret.updated_ms = now_ms().max(secret.updated_ms);
            if let Some(metadata) = metadata {
                secret.metadata.clone_from(metadata);
            }
            let context = context(owner, &secret.id, secret.version);
            self.key.seal(&context, value.as_bytes())
        };
        match &self.storage {
            Storage::Database(database) => database.update(owner, which, change),
            Storage::Shared(shared) => {
                let mut secret = self.get(owner, which)?;
                let value = change(&mut secret)?;
                shared.replace(StoredSecret {
                    owner: owner.to_owned(),
                    secret: secret.clone(),
                    value,
                })?;
                Ok(secret)
            }
        }
    }

    /// Returns a secret of `owner`. `which` is an id or a name.
    pub fn get(&self, owner: &str, which: &str) -> Result<Secret, SecretError> {
        let found = match &self.storage {
            Storage::Database(database) => database.get(owner, which)?,
            Storage::Shared(shared) => {
                let which = which.to_ascii_lowercase();
                let mut all = shared.of_owner(owner)?.into_iter();
                all.find(|secret| secret.id == which || secret.name == which)
            }
        };
        found.ok_or_else(|| unknown(which))
    }

    /// Returns at most `limit` secrets of `owner` in the order of their names, after the name
    /// `after`.
    pub fn list(
        &self,
        owner: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<Secret>, SecretError> {
        let after = after.unwrap_or_default();
        match &self.storage {
            Storage::Database(database) => database.list(owner, after, limit),
            Storage::Shared(shared) => {
                let mut all = shared.of_owner(owner)?;
                all.retain(|secret| secret.name.as_str() > after);
                all.sort_by(|a, b| a.name.cmp(&b.name));
                all.truncate(limit);
                Ok(all)
            }
        }
    }

    /// Removes a secret of `owner`. `which` is an id or a name. Returns the removed secret.
    pub fn remove(&self, owner: &str, which: &str) -> Result<Secret, SecretError> {
        match &self.storage {
            Storage::Database(database) => {
                let removed = database.remove(owner, which)?;
                removed.ok_or_else(|| unknown(which))
            }
            Storage::Shared(shared) => {
                let secret = self.get(owner, which)?;
                shared.remove(vec![secret.id.clone()])?;
                Ok(secret)
            }
        }
    }

    /// Removes all secrets of `owner`. Returns them.
    pub fn remove_all(&self, owner: &str) -> Result<Vec<Secret>, SecretError> {
        match &self.storage {
            Storage::Database(database) => database.remove_all(owner),
            Storage::Shared(shared) => {
                let all = shared.of_owner(owner)?;
                if !all.is_empty() {
                    shared.remove(all.iter().map(|secret| secret.id.clone()).collect())?;
                }
                Ok(all)
            }
        }
    }

    /// Returns the value of the secret of `owner` with this name. `None` if the secret does not
    /// exist.
    pub fn value(&self, owner: &str, name: &str) -> Result<Option<Zeroizing<String>>, SecretError> {
        let name = name.to_ascii_lowercase();
        let stored = match &self.storage {
            Storage::Database(database) => database.value(owner, &name)?,
            Storage::Shared(shared) => shared.value(owner, &name)?,
        };
        let Some((id, version, sealed)) = stored else {
            return Ok(None);
        };
        let plain = self.key.open_sealed(&context(owner, &id, version), &sealed);
        let value = plain.and_then(|plain| {
            let text = std::str::from_utf8(&plain).ok()?;
            Some(Zeroizing::new(text.to_owned()))
        });
        value.map(Some).ok_or(SecretError::Sealed(name))
    }
}

pub(crate) fn unknown(which: &str) -> SecretError {
    let shown: String = which.chars().take(crate::MAX_SECRET_NAME).collect();
    SecretError::Unknown(shown.escape_debug().to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn new(name: &str, value: &str) -> NewSecret {
        NewSecret {
            name: name.to_owned(),
            value: Zeroizing::new(value.to_owned()),
            metadata: BTreeMap::new(),
        }
    }

    #[test]
    fn secrets_are_found_by_their_owner_only_and_persist() {
        let home = tempfile::tempdir().unwrap();
        let secrets = Secrets::open(home.path()).unwrap();
        let made = secrets.create("a", &new("API-Token", "one")).unwrap();
        assert_eq!((made.name.as_str(), made.version), ("api-token", 1));
        assert!(made.id.starts_with(ID_PREFIX));
        secrets.create("b", &new("api-token", "other")).unwrap();
        let twice = secrets.create("a", &new("api-token", "x"));
        assert!(matches!(twice, Err(SecretError::Exists(_))));
        assert!(matches!(
            secrets.get("b", &made.id),
            Err(SecretError::Unknown(_))
        ));
        let changed = secrets.update("a", &made.id, "two", None).unwrap();
        assert_eq!(changed.version, 2);
        drop(secrets);
        let secrets = Secrets::open(home.path()).unwrap();
        assert_eq!(secrets.get("a", "API-TOKEN").unwrap(), changed);
        let value = |owner: &str| secrets.value(owner, "api-token").unwrap();
        assert_eq!(value("a").unwrap().as_str(), "two");
        assert_eq!(value("b").unwrap().as_str(), "other");
        secrets.remove("a", "api-token").unwrap();
        assert!(value("a").is_none());
        assert_eq!(secrets.remove_all("b").unwrap().len(), 1);
        assert!(value("b").is_none());
    }

    #[test]
    fn values_are_encrypted_on_disk_and_cannot_be_exchanged() {
        let home = tempfile::tempdir().unwrap();
        let secrets = Secrets::open(home.path()).unwrap();
        let value = "value-that-must-not-be-found-on-disk";
        secrets.create("a", &new("one", value)).unwrap();
        secrets.create("b", &new("two", "its own value")).unwrap();
        for entry in std::fs::read_dir(home.path()).unwrap() {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            let found = bytes.windows(value.len()).any(|w| w == value.as_bytes());
            assert!(!found);
        }
        let exchange = "UPDATE secrets SET value = (SELECT value FROM secrets WHERE name = 'one')
            WHERE name = 'two'";
        let file = rusqlite::Connection::open(home.path().join("secrets.db")).unwrap();
        file.execute(exchange, []).unwrap();
        assert!(matches!(
            secrets.value("b", "two"),
            Err(SecretError::Sealed(_))
        ));
    }

    #[test]
    fn names_values_and_their_number_are_bounded() {
        let home = tempfile::tempdir().unwrap();
        let secrets = Secrets::open(home.path()).unwrap();
        for name in [
            "",
            "a b",
            "a/b",
            "sec_x",
            "SEC_x",
            "é",
            "a\n",
            &"a".repeat(129),
        ] {
            let made = secrets.create("a", &new(name, "x"));
            assert!(matches!(made, Err(SecretError::Name(_))), "{name}");
        }
        for value in ["", "a\r\nb", "a\0b", "a\n", " a", &"a".repeat(8193)] {
            let made = secrets.create("a", &new("n", value));
            assert!(matches!(made, Err(SecretError::Value)), "{value:?}");
        }
        for number in 0..MAX_SECRETS {
            secrets
                .create("a", &new(&format!("n{number}"), "x"))
                .unwrap();
        }
        let more = secrets.create("a", &new("more", "x"));
        assert!(matches!(more, Err(SecretError::Full)));
        secrets.create("b", &new("more", "x")).unwrap();
        // Names are ordered as texts: only `n99` follows `n98`.
        let page = secrets.list("a", Some("n98"), 3).unwrap();
        assert_eq!(page.len(), 1);
    }
}
