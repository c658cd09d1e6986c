//! Webhooks that the hosts of a fleet share. The database of each host has a copy of them, from
//! which the host sends the events of its own sandboxes.

use super::{FleetState, context, text_of, unknown};
use crate::shared::StoredWebhook;
use crate::webhook::{MAX_WEBHOOKS, WebhookUpdate};
use crate::webhooks::Webhooks;
use crate::{Webhook, WebhookError};
use jiffy_api_types::LifecycleEventType;
use rusqlite::{TransactionBehavior, params};
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// Ids of deliveries per millisecond. The ids of all hosts are in the order of time, and programs
/// with floating-point numbers can represent them.
const IDS_PER_MS: u64 = 1 << 11;

impl FleetState {
    /// Returns the lowest id for a delivery that is queued at a time in milliseconds since 1970.
    pub fn first_delivery(&self, now_ms: u64) -> u64 {
        let host = u64::from(self.host) % IDS_PER_MS;
        now_ms.saturating_mul(IDS_PER_MS).saturating_add(host)
    }
}

impl Webhooks {
    /// Adds a webhook to the webhooks of the fleet.
    pub(super) fn create_shared(&self, created: StoredWebhook) -> Result<Webhook, WebhookError> {
        let fleet = self.fleet()?;
        let all = fleet.webhooks.all()?;
        let own = all.iter().filter(|other| other.owner == created.owner);
        if own.count() >= MAX_WEBHOOKS {
            return Err(WebhookError::Full);
        }
        let webhook = created.webhook.clone();
        fleet.webhooks.create(StoredWebhook {
            since_us: since(created.since_us),
            ..created
        })?;
        self.copy(fleet)?;
        Ok(webhook)
    }

    /// Changes a webhook of the fleet. `events` are the checked types of events.
    pub(super) fn update_shared(
        &self,
        fleet: &FleetState,
        owner: &str,
        id: &str,
        (update, events): (&WebhookUpdate, Option<Vec<LifecycleEventType>>),
        newest_us: u64,
    ) -> Result<Webhook, WebhookError> {
        let mut all = fleet.webhooks.all()?.into_iter();
        let found = all.find(|stored| stored.owner == owner && stored.webhook.id == id);
        let mut changed = found.ok_or_else(|| unknown(id))?;
        let was_enabled = changed.webhook.is_enabled;
        update.apply(&mut changed.webhook, events);
        if changed.webhook.is_enabled && !was_enabled {
            changed.since_us = since(newest_us);
        }
        if let Some(secret) = &update.secret {
            changed.secret = self.0.key.seal(&context(id), secret.as_bytes())?;
        }
        changed.version = changed.version.saturating_add(1);
        fleet.webhooks.replace(changed)?;
        self.copy(fleet)?;
        self.get(owner, id)
    }

    /// Removes webhooks of the fleet.
    pub(super) fn remove_shared(
        &self,
        fleet: &FleetState,
        ids: Vec<String>,
    ) -> Result<(), WebhookError> {
        if ids.is_empty() {
            return Ok(());
        }
        fleet.webhooks.remove(ids)?;
        self.copy(fleet)
    }

    fn fleet(&self) -> Result<&FleetState, WebhookError> {
        let fleet = self.0.fleet.as_ref();
        fleet.ok_or_else(|| WebhookError::Shared {
            reason: "this host is not a member of a fleet".to_owned(),
            is_temporary: false,
        })
    }

    /// Returns a receiver of the number of the fleet's webhooks. `None` for one host.
    pub(super) fn shared_number(&self) -> Option<watch::Receiver<u64>> {
        let fleet = self.0.fleet.as_ref();
        fleet.map(|fleet| fleet.webhooks.number())
    }

    /// Returns whether the webhooks of the fleet are newer than the copy in the database.
    pub(super) fn has_outdated_copy(&self) -> bool {
        self.0.fleet.as_ref().is_some_and(|fleet| {
            if fleet.is_importing.load(Ordering::SeqCst) {
                return false;
            }
            let number = *fleet.webhooks.number().borrow();
            number != *fleet.copied.lock()
        })
    }

    /// Copies the webhooks of the fleet to the database if they have changed since the last copy.
    pub(super) fn copy_changed(&self) -> Result<(), WebhookError> {
        match &self.0.fleet {
            Some(fleet) if self.has_outdated_copy() => self.copy(fleet),
            _ => Ok(()),
        }
    }

    /// Copies the webhooks of the fleet to the database. Removes all others with their deliveries.
    fn copy(&self, fleet: &FleetState) -> Result<(), WebhookError> {
        let mut copied = fleet.copied.lock();
        // Read the number first: a later change causes another copy.
        let number = *fleet.webhooks.number().borrow();
        // Before this host knows the webhooks, the copy of the former daemon remains. During an
        // import, the webhooks of this host remain.
        if number == 0 || fleet.is_importing.load(Ordering::SeqCst) {
            return Ok(());
        }
        let all = fleet.webhooks.all()?;
        let failed = |e| self.0.database.failed(e);
        let mut connection = self.0.database.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let tx = tx.map_err(failed)?;
        let existing: HashSet<&str> = all.iter().map(|s| s.webhook.id.as_str()).collect();
        let known = {
            let mut statement = tx.prepare("SELECT id FROM webhooks").map_err(failed)?;
            let ids = statement.query_map([], |row| row.get(0)).map_err(failed)?;
            ids.collect::<rusqlite::Result<Vec<String>>>()
        };
        for id in known.map_err(failed)? {
            if !existing.contains(id.as_str()) {
                tx.execute("DELETE FROM webhooks WHERE id = ?1", params![id])
                    .map_err(failed)?;
            }
        }
        for stored in &all {
            let webhook = &stored.webhook;
            tx.execute(
                "INSERT INTO webhooks (id, owner, name, url, enabled, events, secret, created_ms,
                    since_us) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
                    ON CONFLICT (id) DO UPDATE SET name = ?3, url = ?4, enabled = ?5, events = ?6,
                        secret = ?7, since_us = ?9",
                params![
                    webhook.id,
                    stored.owner,
                    webhook.name,
                    webhook.url,
                    webhook.is_enabled,
                    text_of(&webhook.events),
                    stored.secret,
                    webhook.created_ms,
                    stored.since_us
                ],
            )
            .map_err(failed)?;
        }
        tx.commit().map_err(failed)?;
        drop(connection);
        *copied = number;
        self.0.changes.fetch_add(1, Ordering::SeqCst);
        // Deliveries of a webhook that was enabled can be sent again.
        self.0.queued.notify_one();
        Ok(())
    }
}

/// Returns the time after which all hosts send events. Each host compares it with the times of its
/// own events, so the newest event of this host is not sufficient.
fn since(newest_us: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |time| {
        u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
    });
    newest_us.max(now)
}
