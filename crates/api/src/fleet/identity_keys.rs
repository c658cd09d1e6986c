//! [`FleetIdentityKeys`]: the keys of a fleet that sign identity tokens, a table that each host
//! holds in memory. A change is acknowledged when the other hosts have received it.

use super::TableChanges;
use jiffy_fleet::tables::{Action, TableError, Tables};
use jiffy_fleet_core::record::{IdentityKey, IdentityRow, Row, RowKey, UnknownFields};
use jiffy_identity::{IdentityError, SharedIdentityKeys, StoredKey};

/// Keys of a fleet that sign identity tokens.
#[derive(Debug)]
pub struct FleetIdentityKeys(TableChanges);

impl FleetIdentityKeys {
    /// Uses the tables of a fleet. Must be called in a runtime with several threads.
    #[must_use]
    pub fn new(tables: Tables) -> Self {
        Self(TableChanges::new(tables))
    }
}

fn unavailable(error: &TableError) -> IdentityError {
    IdentityError::Shared {
        reason: error.to_string(),
        is_temporary: error.is_temporary(),
    }
}

impl SharedIdentityKeys for FleetIdentityKeys {
    fn read(&self) -> Result<(u64, Vec<StoredKey>), IdentityError> {
        let tables = &self.0.tables;
        // Before the tables are loaded, the fleet may have keys that this host does not know.
        if tables.number() == 0 {
            return Err(unavailable(&TableError::Disconnected(None)));
        }
        let row = tables.row(&RowKey::Identity);
        let Some(row) = row.as_deref().and_then(Row::as_identity) else {
            return Ok((0, Vec::new()));
        };
        let keys = row.keys.iter().map(|key| StoredKey {
            created_s: key.created_s,
            sealed: key.sealed.clone(),
        });
        Ok((row.version, keys.collect()))
    }

    fn replace(&self, version: u64, keys: Vec<StoredKey>) -> Result<bool, IdentityError> {
        let keys = keys.into_iter().map(|key| IdentityKey {
            created_s: key.created_s,
            sealed: key.sealed,
        });
        let row = IdentityRow {
            version,
            keys: keys.collect(),
            unknown: UnknownFields::new(),
        };
        match self.0.change(Action::ReplaceIdentity(row)) {
            Ok(_) => Ok(true),
            Err(TableError::Changed(_)) => Ok(false),
            Err(error) => Err(unavailable(&error)),
        }
    }

    fn check_contact(&self) -> Result<(), IdentityError> {
        let checked = self.0.tables.check_contact();
        checked.map_err(|error| unavailable(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::tests::fleet::Fleet;
    use crate::keys::{Limits, Scope};
    use jiffy_engine_api::Workload;
    use jiffy_identity::TokenIssuer;
    use jiffy_secrets::HostKey;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn members_publish_the_same_keys_and_sign_while_they_have_contact() {
        let fleet = Fleet::start();
        // The tables of a fleet have a record from its start on.
        let keys = fleet.keys();
        keys.create("a", Scope::Read, Limits::default()).unwrap();
        let homes = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let runtime = fleet.enter();
        let tables = fleet.tables();
        let [one, two] = [0, 1].map(|i| {
            let home = homes[i].path();
            let key = HostKey::of_fleet(&[7; 32], home).unwrap();
            let shared = Arc::new(FleetIdentityKeys::new(tables[i].clone()));
            TokenIssuer::of_fleet(home, key, "https://a.example".parse().unwrap(), shared)
        });
        drop(runtime);
        // Both members create the first keys at the same time.
        let [first, second] = std::thread::scope(|scope| {
            let threads = [&one, &two].map(|issuer| scope.spawn(move || issuer.public_keys()));
            threads.map(|thread| thread.join().unwrap().unwrap())
        });
        assert_eq!(first, second);
        let row = tables[1].row(&RowKey::Identity).unwrap();
        assert_eq!(row.as_identity().unwrap().version, 1);
        let workload = Workload {
            sandbox: "sandbox1".to_owned(),
            owner: None,
            template: "base".to_owned(),
            tokens: Default::default(),
        };
        one.token(&workload, "sts.example").unwrap();
        fleet.cut();
        fleet.lose_records();
        fleet.advance(Duration::from_secs(61));
        let lost = one.token(&workload, "sts.example").unwrap_err();
        assert!(matches!(
            lost,
            IdentityError::Shared {
                is_temporary: true,
                ..
            }
        ));
        assert_eq!(one.public_keys().unwrap(), first);
    }
}
