//! [`OwnWebhooks`]: webhooks in the database of a host that becomes a member of a fleet. The fleet
//! imports them.

use super::{Webhooks, context, webhook};
use crate::WebhookError;
use crate::database::Database;
use crate::shared::StoredWebhook;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

/// Webhooks in the database of a host.
#[derive(Debug, Default)]
pub struct OwnWebhooks {
    /// Webhooks, whose secrets are encrypted with the key of the fleet. They receive the events
    /// from now on.
    pub webhooks: Vec<StoredWebhook>,
    /// Names of webhooks whose secrets cannot be decrypted.
    pub unreadable: Vec<String>,
}

impl OwnWebhooks {
    /// Returns the names of the webhooks in the data directory `home`. Creates no file.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn names(home: &Path) -> Result<Vec<String>, WebhookError> {
        if !Database::path(home).exists() {
            return Ok(Vec::new());
        }
        let database = Database::open(home)?;
        Ok(stored(&database)?
            .into_iter()
            .map(|stored| stored.webhook.name)
            .collect())
    }
}

impl Webhooks {
    /// Retains the webhooks of this host, which its fleet does not have yet, until
    /// [`Self::finish_import`]. Without this call they are removed, together with their deliveries.
    pub fn begin_import(&self) {
        self.set_importing(true);
    }

    /// Called when the fleet has the webhooks of this host.
    pub fn finish_import(&self) {
        self.set_importing(false);
        // The next event, or the next call, copies the webhooks of the fleet.
        self.0.queued.notify_one();
    }

    fn set_importing(&self, is_importing: bool) {
        if let Some(fleet) = &self.0.fleet {
            fleet.is_importing.store(is_importing, Ordering::SeqCst);
        }
    }

    /// Returns the webhooks in the database of this host.
    ///
    /// # Errors
    /// If the database cannot be read, or a secret cannot be encrypted.
    pub fn own(&self) -> Result<OwnWebhooks, WebhookError> {
        let mut own = OwnWebhooks::default();
        for mut stored in stored(&self.0.database)? {
            let context = context(&stored.webhook.id);
            let Some(plain) = self.0.key.open_sealed(&context, &stored.secret) else {
                own.unreadable.push(stored.webhook.name);
                continue;
            };
            stored.secret = self.0.key.seal(&context, &plain)?;
            own.webhooks.push(stored);
        }
        Ok(own)
    }
}

fn stored(database: &Database) -> Result<Vec<StoredWebhook>, WebhookError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |time| {
        u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
    });
    let connection = database.lock();
    let select = || {
        let mut statement = connection.prepare_cached(
            "SELECT id, name, url, enabled, events, created_ms, 0, owner, secret, since_us
                FROM webhooks ORDER BY created_ms, id",
        )?;
        let all = statement.query_map([], |row| {
            Ok(StoredWebhook {
                webhook: webhook(row)?,
                owner: row.get(7)?,
                secret: row.get(8)?,
                // Earlier events of the other hosts do not belong to the webhook.
                since_us: now.max(row.get(9)?),
                version: 1,
            })
        })?;
        all.collect::<rusqlite::Result<Vec<_>>>()
    };
    select().map_err(|e| database.failed(e))
}
