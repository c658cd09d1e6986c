//! [`import_owned`]: adds the secrets and webhooks of a host to the tables of its fleet.

use super::{secrets, webhooks};
use jiffy_fleet::tables::{TableError, Tables};
use jiffy_fleet_core::record::{RowContent, SecretRow, Table, WebhookRow};
use jiffy_secrets::{HostKey, MAX_SECRETS, OwnSecrets, SecretError};
use jiffy_webhooks::{MAX_WEBHOOKS, WebhookError, Webhooks};
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// Result of an import.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImportedObjects {
    /// Number of new secrets.
    pub secrets: usize,
    /// Number of new webhooks.
    pub webhooks: usize,
    /// Objects that remain on this host only, with the reason.
    pub skipped: Vec<String>,
}

/// Failure of an import.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The secrets of the host cannot be read.
    #[error(transparent)]
    Secrets(#[from] SecretError),
    /// The webhooks of the host cannot be read.
    #[error(transparent)]
    Webhooks(#[from] WebhookError),
    /// The tables cannot be changed.
    #[error(transparent)]
    Tables(#[from] TableError),
    /// The task that reads the databases has failed.
    #[error("the import was interrupted")]
    Interrupted,
}

/// Adds the secrets of the data directory `home`, and the webhooks of this host, to the tables of
/// its fleet. Objects that are in the tables already are not changed, so that an import can be
/// repeated. `key` is the key of the secrets of the fleet.
///
/// # Errors
/// [`ImportError`]. Rows that were added before remain.
pub async fn import_owned(
    home: &Path,
    key: &HostKey,
    host_webhooks: &Webhooks,
    tables: &Tables,
) -> Result<ImportedObjects, ImportError> {
    let (home, key, host_webhooks) = (home.to_owned(), key.clone(), host_webhooks.clone());
    let read = move || -> Result<_, ImportError> {
        Ok((OwnSecrets::read(&home, &key)?, host_webhooks.own()?))
    };
    let read = tokio::task::spawn_blocking(read).await;
    let (own_secrets, own_webhooks) = read.map_err(|_| ImportError::Interrupted)??;
    let mut imported = ImportedObjects::default();
    for name in own_secrets.unreadable {
        imported.skip("secret", &name, "it cannot be decrypted");
    }
    for name in own_webhooks.unreadable {
        imported.skip("webhook", &name, "its secret cannot be decrypted");
    }
    let mut existing = Existing::of(tables);
    let mut rows = Vec::new();
    for stored in own_secrets.secrets {
        let name = stored.secret.name.clone();
        match existing.add_secret(secrets::row_of(stored)) {
            Ok(Some(row)) => {
                imported.secrets += 1;
                rows.push(row);
            }
            Ok(None) => {}
            Err(reason) => imported.skip("secret", &name, reason),
        }
    }
    for stored in own_webhooks.webhooks {
        let name = stored.webhook.name.clone();
        match existing.add_webhook(webhooks::row_of(stored)) {
            Ok(Some(row)) => {
                imported.webhooks += 1;
                rows.push(row);
            }
            Ok(None) => {}
            Err(reason) => imported.skip("webhook", &name, reason),
        }
    }
    if !rows.is_empty() {
        tables.import(rows).await?;
    }
    Ok(imported)
}

impl ImportedObjects {
    fn skip(&mut self, kind: &str, name: &str, reason: &str) {
        self.skipped.push(format!("{kind} `{name}`: {reason}"));
    }
}

/// Objects of the fleet, and objects that are added to them.
#[derive(Default)]
struct Existing {
    ids: HashSet<String>,
    /// Owners and names of secrets.
    names: HashSet<(Option<String>, String)>,
    /// Number of objects of each owner.
    counts: HashMap<(Table, Option<String>), usize>,
}

/// Row to be added. `None` if the fleet has it already.
type Added = Result<Option<RowContent>, &'static str>;

impl Existing {
    fn of(tables: &Tables) -> Self {
        let mut existing = Self::default();
        let rows = [Table::Secrets, Table::Webhooks].map(|table| tables.rows(table));
        for row in rows.iter().flatten() {
            if let Some(secret) = row.as_secret() {
                existing.count(Table::Secrets, &secret.owner, &secret.id);
                let name = (secret.owner.clone(), secret.name.clone());
                existing.names.insert(name);
            }
            if let Some(webhook) = row.as_webhook() {
                existing.count(Table::Webhooks, &webhook.owner, &webhook.id);
            }
        }
        existing
    }

    fn add_secret(&mut self, row: SecretRow) -> Added {
        if self.ids.contains(&row.id) {
            return Ok(None);
        }
        if !self.names.insert((row.owner.clone(), row.name.clone())) {
            return Err("the fleet has another secret with this name and owner");
        }
        if self.is_full(Table::Secrets, &row.owner, MAX_SECRETS) {
            return Err("its owner has the maximum number of secrets in the fleet");
        }
        self.count(Table::Secrets, &row.owner, &row.id);
        Ok(Some(RowContent::Secret(row)))
    }

    fn add_webhook(&mut self, row: WebhookRow) -> Added {
        if self.ids.contains(&row.id) {
            return Ok(None);
        }
        if self.is_full(Table::Webhooks, &row.owner, MAX_WEBHOOKS) {
            return Err("its owner has the maximum number of webhooks in the fleet");
        }
        self.count(Table::Webhooks, &row.owner, &row.id);
        Ok(Some(RowContent::Webhook(row)))
    }

    fn count(&mut self, table: Table, owner: &Option<String>, id: &str) {
        self.ids.insert(id.to_owned());
        *self.counts.entry((table, owner.clone())).or_default() += 1;
    }

    fn is_full(&self, table: Table, owner: &Option<String>, max: usize) -> bool {
        let count = self.counts.get(&(table, owner.clone()));
        count.is_some_and(|count| *count >= max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{FleetSecrets, FleetWebhooks};
    use crate::keys::tests::fleet::Fleet;
    use jiffy_api_types::LifecycleEventType;
    use jiffy_secrets::{NewSecret, Secrets};
    use jiffy_webhooks::NewWebhook;
    use std::sync::Arc;
    use zeroize::Zeroizing;

    fn secret(name: &str, value: &str) -> NewSecret {
        NewSecret {
            name: name.to_owned(),
            value: Zeroizing::new(value.to_owned()),
            metadata: Default::default(),
        }
    }

    fn webhook(name: &str) -> NewWebhook {
        NewWebhook {
            name: name.to_owned(),
            url: "https://a.example/".to_owned(),
            is_enabled: true,
            events: LifecycleEventType::NAMES.map(|(_, event)| event).to_vec(),
            secret: Zeroizing::new("signed".to_owned()),
        }
    }

    #[test]
    fn secrets_and_webhooks_of_a_host_are_imported_once_and_those_of_the_fleet_remain() {
        let fleet = Fleet::start();
        let home = tempfile::tempdir().unwrap();
        // The host before it becomes a member.
        let host = Secrets::open(home.path()).unwrap();
        for (owner, name) in [("", "token"), ("", "taken"), ("key1", "token")] {
            host.create(owner, &secret(name, "of host")).unwrap();
        }
        let alone = Webhooks::open(home.path()).unwrap();
        let first = alone.create("key1", &webhook("first"), 0).unwrap();
        drop((host, alone));
        let runtime = fleet.enter();
        let [tables, other] = fleet.tables();
        let key = HostKey::of_fleet(&[7; 32], home.path()).unwrap();
        let elsewhere = HostKey::of_fleet(&[7; 32], fleet.home()).unwrap();
        let shared = Arc::new(FleetSecrets::new(other.clone()));
        let secrets = Secrets::shared(elsewhere.clone(), shared);
        drop(runtime);
        secrets.create("", &secret("taken", "of fleet")).unwrap();
        let runtime = fleet.enter();
        let webhooks = |home: &Path, key: HostKey, number| {
            let shared = Arc::new(FleetWebhooks::new(tables.clone()));
            Webhooks::shared(home, key, number, shared).unwrap()
        };
        let own = webhooks(home.path(), key.clone(), 1);
        let there = webhooks(fleet.home(), elsewhere, 2);
        drop(runtime);
        own.begin_import();
        // The webhook is not lost before the import, although the fleet does not have it.
        assert_eq!(own.list("key1").unwrap(), std::slice::from_ref(&first));
        let imported = fleet.import_owned(home.path(), &key, &own);
        assert_eq!((imported.secrets, imported.webhooks), (2, 1));
        let skipped = &imported.skipped[..];
        assert!(matches!(skipped, [text] if text.starts_with("secret `taken`: the fleet has")));
        own.finish_import();
        let value = |owner: &str, name: &str| secrets.value(owner, name).unwrap().unwrap();
        assert_eq!(value("", "token").as_str(), "of host");
        assert_eq!(value("key1", "token").as_str(), "of host");
        assert_eq!(value("", "taken").as_str(), "of fleet");
        for host in [&own, &there] {
            assert_eq!(host.list("key1").unwrap(), std::slice::from_ref(&first));
        }
        let again = fleet.import_owned(home.path(), &key, &own);
        assert_eq!((again.secrets, again.webhooks), (0, 0));
        // A webhook that is removed on another host is removed here.
        there.remove("key1", &first.id).unwrap();
        assert!(own.list("key1").unwrap().is_empty());
    }
}
