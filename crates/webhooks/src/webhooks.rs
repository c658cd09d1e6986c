//! [`Webhooks`]: the webhooks of one host, or of a fleet of hosts.
//!
//! A *delivery* is an event that must be sent to the URL of a webhook. It is repeated for 24 hours.

mod deliveries;
mod import;
mod queue;
mod sender;
mod sync;

pub use deliveries::{Delivery, DeliveryState};
pub use import::OwnWebhooks;
pub use queue::EventForm;

use crate::WebhookError;
use crate::database::Database;
use crate::shared::{SharedWebhooks, StoredWebhook};
use crate::webhook::{
    MAX_WEBHOOKS, NewWebhook, Webhook, WebhookUpdate, check_name, check_secret, check_url,
    checked_events,
};
use jiffy_api_types::LifecycleEventType;
use jiffy_engine_api::{new_id, now_ms};
use jiffy_secrets::HostKey;
use parking_lot::Mutex;
use rusqlite::{OptionalExtension, Row, TransactionBehavior, params};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::sync::Notify;
use zeroize::Zeroizing;

/// Columns that [`webhook`] reads by position.
const COLUMNS: &str = "id, name, url, enabled, events, created_ms, dropped";

/// Webhooks of one host or of a fleet. Clones share the database. Methods that are not `async`
/// block.
#[derive(Debug, Clone)]
pub struct Webhooks(pub(crate) Arc<Shared>);

/// State of the webhooks, shared by their clones.
#[derive(Debug)]
pub(crate) struct Shared {
    pub database: Database,
    pub key: HostKey,
    /// Number of changes of webhooks since the start.
    pub changes: AtomicU64,
    /// Notified when deliveries were queued, or can be sent again.
    pub queued: Notify,
    /// Webhooks of a fleet, which are copied to the database. `None` for one host.
    pub fleet: Option<FleetState>,
}

/// Webhooks of a fleet.
#[derive(Debug)]
pub(crate) struct FleetState {
    pub webhooks: Arc<dyn SharedWebhooks>,
    /// Number of this host, which is part of the ids of its deliveries.
    pub host: u32,
    /// Number of the webhooks that were copied last.
    pub copied: Mutex<u64>,
    /// True while the fleet does not have the webhooks of this host yet.
    pub is_importing: AtomicBool,
}

/// Webhook whose events are queued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Subscription {
    pub id: String,
    pub owner: String,
    pub events: Vec<LifecycleEventType>,
    /// Time in microseconds since 1970 after which events are delivered: the time of the newest
    /// event when the webhook was created or enabled.
    pub since_us: u64,
}

/// Server of a webhook and the secret of its signatures.
pub(crate) struct Destination {
    pub url: String,
    pub secret: Zeroizing<Vec<u8>>,
}

fn webhook(row: &Row<'_>) -> rusqlite::Result<Webhook> {
    Ok(Webhook {
        id: row.get(0)?,
        name: row.get(1)?,
        url: row.get(2)?,
        is_enabled: row.get(3)?,
        events: events_of(&row.get::<_, String>(4)?),
        created_ms: row.get(5)?,
        dropped: row.get(6)?,
    })
}

/// Parses types of events, separated by commas. This program wrote the text.
fn events_of(text: &str) -> Vec<LifecycleEventType> {
    let all = LifecycleEventType::NAMES.into_iter();
    let is_selected = |name: &str| text.split(',').any(|selected| selected == name);
    all.filter(|(name, _)| is_selected(name))
        .map(|(_, kind)| kind)
        .collect()
}

fn text_of(events: &[LifecycleEventType]) -> String {
    let all = LifecycleEventType::NAMES.into_iter();
    let selected = all.filter(|(_, kind)| events.contains(kind));
    selected.map(|(name, _)| name).collect::<Vec<_>>().join(",")
}

/// Returns the context that is authenticated together with an encrypted secret: the secret of one
/// webhook cannot replace the secret of another.
fn context(id: &str) -> String {
    format!("webhook {id}")
}

impl Webhooks {
    /// Opens or creates the webhooks of the data directory `home`.
    pub fn open(home: &Path) -> Result<Self, WebhookError> {
        Self::with(home, HostKey::open(home)?, None)
    }

    /// Uses the webhooks of a fleet. `key` is a key of the fleet, and `host` the number of this
    /// host. The database contains a copy, and the deliveries of this host.
    pub fn shared(
        home: &Path,
        key: HostKey,
        host: u32,
        webhooks: Arc<dyn SharedWebhooks>,
    ) -> Result<Self, WebhookError> {
        let copied = Mutex::new(0);
        let fleet = FleetState {
            webhooks,
            host,
            copied,
            is_importing: AtomicBool::new(false),
        };
        Self::with(home, key, Some(fleet))
    }

    fn with(home: &Path, key: HostKey, fleet: Option<FleetState>) -> Result<Self, WebhookError> {
        Ok(Self(Arc::new(Shared {
            database: Database::open(home)?,
            key,
            changes: AtomicU64::new(0),
            queued: Notify::new(),
            fleet,
        })))
    }

    /// Stores a new webhook of `owner`, which is empty for the owner of the host. `newest_us` is
    /// the time of the newest event: earlier events are not delivered.
    pub fn create(
        &self,
        owner: &str,
        new: &NewWebhook,
        newest_us: u64,
    ) -> Result<Webhook, WebhookError> {
        check_name(&new.name)?;
        check_url(&new.url)?;
        check_secret(&new.secret)?;
        let created = Webhook {
            id: new_id().map_err(|e| WebhookError::Id(e.to_string()))?,
            name: new.name.clone(),
            url: new.url.clone(),
            is_enabled: new.is_enabled,
            events: checked_events(&new.events)?,
            created_ms: now_ms(),
            dropped: 0,
        };
        let secret = (self.0.key).seal(&context(&created.id), new.secret.as_bytes())?;
        if self.0.fleet.is_some() {
            return self.create_shared(StoredWebhook {
                owner: owner.to_owned(),
                webhook: created,
                secret,
                since_us: newest_us,
                version: 1,
            });
        }
        let failed = |e| self.0.database.failed(e);
        let mut connection = self.0.database.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let tx = tx.map_err(failed)?;
        let count: usize = tx
            .query_row(
                "SELECT count(*) FROM webhooks WHERE owner = ?1",
                params![owner],
                |row| row.get(0),
            )
            .map_err(failed)?;
        if count >= MAX_WEBHOOKS {
            return Err(WebhookError::Full);
        }
        tx.execute(
            "INSERT INTO webhooks (id, owner, name, url, enabled, events, secret, created_ms,
                since_us) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            params![
                created.id,
                owner,
                created.name,
                created.url,
                created.is_enabled,
                text_of(&created.events),
                secret,
                created.created_ms,
                newest_us
            ],
        )
        .map_err(failed)?;
        tx.commit().map_err(failed)?;
        drop(connection);
        self.0.changes.fetch_add(1, Ordering::SeqCst);
        Ok(created)
    }

    /// Changes a webhook of `owner`. `newest_us` is the time of the newest event: a webhook that is
    /// enabled does not receive the events of the time in which it was disabled.
    pub fn update(
        &self,
        owner: &str,
        id: &str,
        update: &WebhookUpdate,
        newest_us: u64,
    ) -> Result<Webhook, WebhookError> {
        update.name.as_deref().map(check_name).transpose()?;
        update.url.as_deref().map(check_url).transpose()?;
        let secret = update.secret.as_ref();
        secret.map(|secret| check_secret(secret)).transpose()?;
        let events = update.events.as_deref().map(checked_events).transpose()?;
        if let Some(fleet) = &self.0.fleet {
            return self.update_shared(fleet, owner, id, (update, events), newest_us);
        }
        let failed = |e| self.0.database.failed(e);
        let mut connection = self.0.database.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let tx = tx.map_err(failed)?;
        let mut changed = find(&tx, owner, id)
            .map_err(failed)?
            .ok_or_else(|| unknown(id))?;
        let was_enabled = changed.is_enabled;
        update.apply(&mut changed, events);
        tx.execute(
            "UPDATE webhooks SET name = ?2, url = ?3, enabled = ?4, events = ?5 WHERE id = ?1",
            params![
                changed.id,
                changed.name,
                changed.url,
                changed.is_enabled,
                text_of(&changed.events)
            ],
        )
        .map_err(failed)?;
        if changed.is_enabled && !was_enabled {
            let statement = "UPDATE webhooks SET since_us = ?2 WHERE id = ?1";
            tx.execute(statement, params![changed.id, newest_us])
                .map_err(failed)?;
        }
        if let Some(secret) = secret {
            let sealed = (self.0.key).seal(&context(&changed.id), secret.as_bytes())?;
            let statement = "UPDATE webhooks SET secret = ?2 WHERE id = ?1";
            tx.execute(statement, params![changed.id, sealed])
                .map_err(failed)?;
        }
        tx.commit().map_err(failed)?;
        drop(connection);
        self.0.changes.fetch_add(1, Ordering::SeqCst);
        self.0.queued.notify_one();
        Ok(changed)
    }

    /// Returns a webhook of `owner`.
    pub fn get(&self, owner: &str, id: &str) -> Result<Webhook, WebhookError> {
        self.copy_changed()?;
        let found = find(&self.0.database.lock(), owner, id);
        let found = found.map_err(|e| self.0.database.failed(e))?;
        found.ok_or_else(|| unknown(id))
    }

    /// Returns the webhooks of `owner` in the order of their creation.
    pub fn list(&self, owner: &str) -> Result<Vec<Webhook>, WebhookError> {
        self.copy_changed()?;
        let connection = self.0.database.lock();
        let select = || {
            let mut statement = connection.prepare_cached(&format!(
                "SELECT {COLUMNS} FROM webhooks WHERE owner = ?1 ORDER BY created_ms, id"
            ))?;
            let all = statement.query_map(params![owner], webhook)?;
            all.collect::<rusqlite::Result<Vec<_>>>()
        };
        select().map_err(|e| self.0.database.failed(e))
    }

    /// Removes a webhook of `owner` and its deliveries.
    pub fn remove(&self, owner: &str, id: &str) -> Result<(), WebhookError> {
        if let Some(fleet) = &self.0.fleet {
            self.get(owner, id)?;
            return self.remove_shared(fleet, vec![id.to_owned()]);
        }
        let statement = "DELETE FROM webhooks WHERE owner = ?1 AND id = ?2";
        let removed = (self.0.database.lock()).execute(statement, params![owner, id]);
        let removed = removed.map_err(|e| self.0.database.failed(e))?;
        self.0.changes.fetch_add(1, Ordering::SeqCst);
        (removed > 0).then_some(()).ok_or_else(|| unknown(id))
    }

    /// Removes all webhooks of `owner` and their deliveries.
    pub fn remove_all(&self, owner: &str) -> Result<(), WebhookError> {
        if let Some(fleet) = &self.0.fleet {
            let all = self.list(owner)?.into_iter();
            return self.remove_shared(fleet, all.map(|webhook| webhook.id).collect());
        }
        let statement = "DELETE FROM webhooks WHERE owner = ?1";
        let removed = (self.0.database.lock()).execute(statement, params![owner]);
        removed.map_err(|e| self.0.database.failed(e))?;
        self.0.changes.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Returns all enabled webhooks.
    pub(crate) fn subscriptions(&self) -> Result<Vec<Subscription>, WebhookError> {
        let connection = self.0.database.lock();
        let select = || {
            let mut statement = connection.prepare_cached(
                "SELECT id, owner, events, since_us FROM webhooks WHERE enabled = 1",
            )?;
            let all = statement.query_map([], |row| {
                Ok(Subscription {
                    id: row.get(0)?,
                    owner: row.get(1)?,
                    events: events_of(&row.get::<_, String>(2)?),
                    since_us: row.get(3)?,
                })
            })?;
            all.collect::<rusqlite::Result<Vec<_>>>()
        };
        select().map_err(|e| self.0.database.failed(e))
    }

    /// Returns the server and the secret of a webhook. `None` if it was removed, or if its secret
    /// was encrypted by another host.
    pub(crate) fn destination(&self, id: &str) -> Result<Option<Destination>, WebhookError> {
        let statement = "SELECT url, secret FROM webhooks WHERE id = ?1";
        let found: Option<(String, Vec<u8>)> = self
            .0
            .database
            .lock()
            .query_row(statement, params![id], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()
            .map_err(|e| self.0.database.failed(e))?;
        Ok(found.and_then(|(url, sealed)| {
            let secret = self.0.key.open_sealed(&context(id), &sealed)?;
            Some(Destination { url, secret })
        }))
    }
}

fn unknown(id: &str) -> WebhookError {
    let shown: String = id.chars().take(64).collect();
    WebhookError::Unknown(shown.escape_debug().to_string())
}

fn find(
    connection: &rusqlite::Connection,
    owner: &str,
    id: &str,
) -> rusqlite::Result<Option<Webhook>> {
    let statement = format!("SELECT {COLUMNS} FROM webhooks WHERE owner = ?1 AND id = ?2");
    let mut statement = connection.prepare_cached(&statement)?;
    statement.query_row(params![owner, id], webhook).optional()
}
