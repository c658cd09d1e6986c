//! [`FleetSecrets`]: secrets of API keys in a fleet, a table that each host holds in memory. A
//! change is acknowledged when the other hosts have received it.

use super::TableChanges;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiffy_fleet::tables::{Action, Changed, TableError, Tables};
use jiffy_fleet_core::record::{Row, SecretRow, Table, UnknownFields};
use jiffy_secrets::{SealedValue, Secret, SecretError, SharedSecrets, StoredSecret};

/// Secrets of a fleet.
#[derive(Debug)]
pub struct FleetSecrets(TableChanges);

impl FleetSecrets {
    /// Uses the tables of a fleet. Must be called in a runtime with several threads.
    #[must_use]
    pub fn new(tables: Tables) -> Self {
        Self(TableChanges::new(tables))
    }

    /// Makes a change of the secret `name`.
    fn change(&self, name: &str, action: Action) -> Result<Changed, SecretError> {
        let changed = self.0.change(action);
        changed.map_err(|e| match e {
            TableError::Unknown(_) => SecretError::Unknown(name.to_owned()),
            TableError::Exists(_) => SecretError::Exists(name.to_owned()),
            TableError::Changed(_) => SecretError::Changed(name.to_owned()),
            e => unavailable(&e),
        })
    }
}

/// Returns the owner in a row. `None` for the owner of the fleet.
fn owner_of(owner: &str) -> Option<&str> {
    Some(owner).filter(|owner| !owner.is_empty())
}

fn unavailable(error: &TableError) -> SecretError {
    SecretError::Shared {
        reason: error.to_string(),
        is_temporary: error.is_temporary(),
    }
}

fn secret_of(row: &SecretRow) -> Secret {
    Secret {
        id: row.id.clone(),
        name: row.name.clone(),
        version: row.version,
        metadata: row.metadata.clone(),
        created_ms: row.created_ms,
        updated_ms: row.updated_ms,
    }
}

pub(super) fn row_of(stored: StoredSecret) -> SecretRow {
    let StoredSecret {
        owner,
        secret,
        value,
    } = stored;
    SecretRow {
        id: secret.id,
        owner: owner_of(&owner).map(str::to_owned),
        name: secret.name,
        version: secret.version,
        value: STANDARD.encode(value),
        metadata: secret.metadata,
        created_ms: secret.created_ms,
        updated_ms: secret.updated_ms,
        unknown: UnknownFields::new(),
    }
}

impl SharedSecrets for FleetSecrets {
    fn of_owner(&self, owner: &str) -> Result<Vec<Secret>, SecretError> {
        let rows = self.0.tables.rows(Table::Secrets);
        let rows = rows.iter().filter_map(|row| row.as_secret());
        let own = rows.filter(|row| row.owner.as_deref() == owner_of(owner));
        Ok(own.map(secret_of).collect())
    }

    fn value(&self, owner: &str, name: &str) -> Result<Option<SealedValue>, SecretError> {
        let tables = &self.0.tables;
        // Another host may have removed the secret, or replaced its value.
        tables.check_contact().map_err(|e| unavailable(&e))?;
        let row = tables.secret(owner_of(owner), name);
        let Some(row) = row.as_deref().and_then(Row::as_secret) else {
            return Ok(None);
        };
        let sealed = STANDARD.decode(&row.value);
        let sealed = sealed.map_err(|_| SecretError::Sealed(name.to_owned()))?;
        Ok(Some((row.id.clone(), row.version, sealed)))
    }

    fn create(&self, created: StoredSecret) -> Result<(), SecretError> {
        let row = row_of(created);
        let name = row.name.clone();
        self.change(&name, Action::CreateSecret(row)).map(drop)
    }

    fn replace(&self, changed: StoredSecret) -> Result<(), SecretError> {
        let row = row_of(changed);
        let name = row.name.clone();
        self.change(&name, Action::ReplaceSecret(row)).map(drop)
    }

    fn remove(&self, ids: Vec<String>) -> Result<(), SecretError> {
        match self.change("", Action::RemoveSecrets(ids)) {
            // An earlier attempt, or another caller, has removed the secrets.
            Ok(_) | Err(SecretError::Unknown(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ApiError;
    use crate::keys::tests::fleet::Fleet;
    use jiffy_secrets::{HostKey, MAX_SECRETS, NewSecret, Secrets};
    use std::sync::Arc;
    use std::time::Duration;
    use zeroize::Zeroizing;

    fn new(name: &str, value: &str) -> NewSecret {
        NewSecret {
            name: name.to_owned(),
            value: Zeroizing::new(value.to_owned()),
            metadata: [("team".to_owned(), "b".to_owned())].into(),
        }
    }

    /// Returns the secrets as each member of a fleet sees them.
    fn members(fleet: &Fleet) -> [Secrets; 2] {
        let _runtime = fleet.enter();
        fleet.tables().map(|tables| {
            let key = HostKey::of_fleet(&[7; 32], fleet.home()).unwrap();
            Secrets::shared(key, Arc::new(FleetSecrets::new(tables)))
        })
    }

    #[test]
    fn a_secret_of_one_member_is_used_by_all_until_one_removes_it() {
        let fleet = Fleet::start();
        let [one, two] = members(&fleet);
        let made = two.create("a", &new("API-Token", "first")).unwrap();
        let value = |of: &Secrets| of.value("a", "api-token").unwrap().unwrap();
        for secrets in [&one, &two] {
            assert_eq!(secrets.get("a", "api-TOKEN").unwrap(), made);
            assert_eq!(value(secrets).as_str(), "first");
            let all = secrets.list("a", None, 9).unwrap();
            assert_eq!(all, std::slice::from_ref(&made));
            assert!(secrets.list("a", Some("api-token"), 9).unwrap().is_empty());
            // The secret belongs to one owner.
            assert!(secrets.value("b", "api-token").unwrap().is_none());
            let foreign = secrets.get("b", &made.id);
            assert!(matches!(foreign, Err(SecretError::Unknown(_))));
            assert!(secrets.list("", None, 9).unwrap().is_empty());
        }
        let twice = one.create("a", &new("api-token", "x"));
        assert!(matches!(twice, Err(SecretError::Exists(_))));
        let changed = one.update("a", &made.id, "second", None).unwrap();
        assert_eq!((changed.version, &changed.metadata), (2, &made.metadata));
        assert_eq!(value(&two).as_str(), "second");
        // The owner of the hosts has secrets of its own.
        one.create("", &new("api-token", "own")).unwrap();
        two.remove("a", "api-token").unwrap();
        assert!(one.value("a", "api-token").unwrap().is_none());
        let again = one.remove("a", "api-token");
        assert!(matches!(again, Err(SecretError::Unknown(_))));
        assert_eq!(two.remove_all("").unwrap().len(), 1);
        assert!(one.value("", "api-token").unwrap().is_none());
    }

    #[test]
    fn a_member_without_contact_uses_no_secret() {
        let fleet = Fleet::start();
        let [one, _] = members(&fleet);
        one.create("a", &new("token", "first")).unwrap();
        fleet.cut();
        fleet.lose_records();
        // Another member may have removed the secret meanwhile.
        fleet.advance(Duration::from_secs(61));
        let lost = one.value("a", "token").unwrap_err();
        assert!(matches!(
            &lost,
            SecretError::Shared {
                is_temporary: true,
                ..
            }
        ));
        let lost: ApiError = lost.into();
        assert_eq!(lost.error_code, "fleet_unavailable");
    }

    #[test]
    fn hosts_and_fleets_have_the_same_limit() {
        assert_eq!(jiffy_fleet_core::record::MAX_OWNER_SECRETS, MAX_SECRETS);
    }
}
