//! Deliveries in the database. A delivery is one event for one webhook: it is queued, repeated
//! after a failure, or abandoned.

use crate::WebhookError;
use crate::webhooks::Webhooks;
use jiffy_engine_api::now_ms;
use rusqlite::{Row, Transaction, TransactionBehavior, params};
use std::time::Duration;

/// Maximum number of pending deliveries of a webhook. Further events are counted as dropped.
const MAX_PENDING: u64 = 10_000;
/// Maximum number of failed deliveries of a webhook. Older ones are removed.
const MAX_FAILED: u64 = 1_000;
/// Time for which a delivery is repeated.
const MAX_AGE: Duration = Duration::from_secs(24 * 3600);
/// Time after the creation of an event for which a failed delivery is retained.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 3600);
/// Delay before the first repetition. It doubles with each further one.
const FIRST_DELAY_MS: u64 = 1_000;
/// Maximum delay between repetitions.
const MAX_DELAY_MS: u64 = 3_600_000;
/// Maximum length of a stored error in bytes.
const MAX_ERROR_BYTES: usize = 300;
/// Value of the column `state`.
const PENDING: i64 = 0;
const FAILED: i64 = 1;

/// State of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryState {
    /// The delivery will be sent, or sent again.
    Pending,
    /// The delivery failed for 24 hours, and is not sent again.
    Failed,
}

/// Delivery that has not succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// Id of the delivery.
    pub id: u64,
    /// Id of the event.
    pub event: String,
    /// Type of the event.
    pub kind: String,
    /// Sandbox of the event.
    pub sandbox: String,
    /// State.
    pub state: DeliveryState,
    /// Number of failed attempts.
    pub attempts: u32,
    /// Time at which the delivery was queued, in milliseconds since 1970.
    pub created_ms: u64,
    /// Time of the next attempt in milliseconds since 1970. `None` for a failed delivery.
    pub next_ms: Option<u64>,
    /// Reason of the last failure.
    pub error: Option<String>,
}

/// Delivery of an event that is queued.
pub(crate) struct NewDelivery {
    pub webhook: String,
    pub sandbox: String,
    pub event: String,
    pub kind: &'static str,
    pub body: String,
}

/// Delivery that can be sent now.
#[derive(Debug, Clone)]
pub(crate) struct DueDelivery {
    pub id: u64,
    pub webhook: String,
    pub sandbox: String,
    pub body: String,
    pub attempts: u32,
    pub created_ms: u64,
}

/// Reads a delivery from a row.
fn delivery(row: &Row<'_>) -> rusqlite::Result<Delivery> {
    let state = match row.get(4)? {
        PENDING => DeliveryState::Pending,
        _ => DeliveryState::Failed,
    };
    let next_ms: u64 = row.get(7)?;
    Ok(Delivery {
        id: row.get(0)?,
        event: row.get(1)?,
        kind: row.get(2)?,
        sandbox: row.get(3)?,
        state,
        attempts: row.get(5)?,
        created_ms: row.get(6)?,
        next_ms: (state == DeliveryState::Pending).then_some(next_ms),
        error: row.get(8)?,
    })
}

/// Returns the number of pending deliveries of a webhook. `None` if the webhook does not exist.
fn count(tx: &Transaction<'_>, webhook: &str) -> rusqlite::Result<Option<u64>> {
    tx.query_row(
        "SELECT (SELECT count(*) FROM deliveries WHERE webhook = ?1 AND state = 0)
            FROM webhooks WHERE id = ?1",
        params![webhook],
        |row| row.get(0),
    )
    .map(Some)
    .or_else(|e| match e {
        rusqlite::Error::QueryReturnedNoRows => Ok(None),
        other => Err(other),
    })
}

impl Webhooks {
    /// Returns at most `limit` deliveries of a webhook of `owner` that have not succeeded, newest
    /// first, with ids below `before`.
    pub fn deliveries(
        &self,
        owner: &str,
        webhook: &str,
        state: Option<DeliveryState>,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Vec<Delivery>, WebhookError> {
        self.get(owner, webhook)?;
        let connection = self.0.database.lock();
        let state = state.map(|state| match state {
            DeliveryState::Pending => PENDING,
            DeliveryState::Failed => FAILED,
        });
        let before = before.map_or(i64::MAX, |id| i64::try_from(id).unwrap_or(i64::MAX));
        let select = || {
            let mut statement = connection.prepare_cached(
                "SELECT id, event, kind, sandbox, state, attempts, created_ms, next_ms, error
                    FROM deliveries
                    WHERE webhook = ?1 AND (?2 IS NULL OR state = ?2) AND id < ?3
                    ORDER BY id DESC LIMIT ?4",
            )?;
            let all = statement.query_map(params![webhook, state, before, limit], delivery)?;
            all.collect::<rusqlite::Result<Vec<_>>>()
        };
        select().map_err(|e| self.0.database.failed(e))
    }

    /// Returns the time of the last event that was queued. `None` if none was queued.
    pub(crate) fn position(&self) -> Result<Option<u64>, WebhookError> {
        let statement = "SELECT max(time_us) FROM position";
        let found = (self.0.database.lock()).query_row(statement, [], |row| row.get(0));
        found.map_err(|e| self.0.database.failed(e))
    }

    /// Queues deliveries, and records that all events up to `position` are queued.
    pub(crate) fn queue(
        &self,
        deliveries: &[NewDelivery],
        position: u64,
    ) -> Result<(), WebhookError> {
        let failed = |e| self.0.database.failed(e);
        let now = now_ms();
        let first = self
            .0
            .fleet
            .as_ref()
            .map_or(0, |fleet| fleet.first_delivery(now));
        let mut connection = self.0.database.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let tx = tx.map_err(failed)?;
        for new in deliveries {
            // A removed webhook has no count.
            let Some(pending) = count(&tx, &new.webhook).map_err(failed)? else {
                continue;
            };
            if pending >= MAX_PENDING {
                let statement = "UPDATE webhooks SET dropped = dropped + 1 WHERE id = ?1";
                tx.execute(statement, params![new.webhook])
                    .map_err(failed)?;
                continue;
            }
            tx.execute(
                "INSERT INTO deliveries (id, webhook, sandbox, event, kind, body, created_ms,
                    next_ms)
                    VALUES (max(?7, 1 + coalesce(
                        (SELECT seq FROM sqlite_sequence WHERE name = 'deliveries'), 0)),
                        ?1, ?2, ?3, ?4, ?5, ?6, ?6)",
                params![
                    new.webhook,
                    new.sandbox,
                    new.event,
                    new.kind,
                    new.body,
                    now,
                    first
                ],
            )
            .map_err(failed)?;
        }
        tx.execute("DELETE FROM position", []).map_err(failed)?;
        tx.execute("INSERT INTO position VALUES (?1)", params![position])
            .map_err(failed)?;
        tx.commit().map_err(failed)?;
        drop(connection);
        if !deliveries.is_empty() {
            self.0.queued.notify_one();
        }
        Ok(())
    }

    /// Returns deliveries that can be sent now: the first one of each sandbox, and at most
    /// `per_webhook` of each webhook.
    pub(crate) fn due(&self, per_webhook: usize) -> Result<Vec<DueDelivery>, WebhookError> {
        let connection = self.0.database.lock();
        let select = || {
            // The first pending delivery of a sandbox delays all others of this sandbox.
            let mut statement = connection.prepare_cached(
                "SELECT id, webhook, sandbox, body, attempts, created_ms FROM (
                    SELECT d.*, row_number() OVER (PARTITION BY d.webhook ORDER BY d.next_ms, d.id)
                            AS rank
                        FROM deliveries d
                        JOIN (SELECT min(id) AS first FROM deliveries WHERE state = 0
                            GROUP BY webhook, sandbox) ON d.id = first
                        JOIN webhooks w ON w.id = d.webhook
                        WHERE w.enabled = 1 AND d.next_ms <= ?1
                ) WHERE rank <= ?2 ORDER BY next_ms, id",
            )?;
            let all = statement.query_map(params![now_ms(), per_webhook], |row| {
                Ok(DueDelivery {
                    id: row.get(0)?,
                    webhook: row.get(1)?,
                    sandbox: row.get(2)?,
                    body: row.get(3)?,
                    attempts: row.get(4)?,
                    created_ms: row.get(5)?,
                })
            })?;
            all.collect::<rusqlite::Result<Vec<_>>>()
        };
        select().map_err(|e| self.0.database.failed(e))
    }

    /// Returns the time of the next attempt of a pending delivery, in milliseconds since 1970.
    pub(crate) fn next_attempt(&self) -> Result<Option<u64>, WebhookError> {
        let found = self.0.database.lock().query_row(
            "SELECT min(next_ms) FROM deliveries d JOIN webhooks w ON w.id = d.webhook
                WHERE state = 0 AND enabled = 1",
            [],
            |row| row.get(0),
        );
        found.map_err(|e| self.0.database.failed(e))
    }

    /// Removes a delivery that has succeeded.
    pub(crate) fn on_success(&self, id: u64) -> Result<(), WebhookError> {
        let statement = "DELETE FROM deliveries WHERE id = ?1";
        let removed = (self.0.database.lock()).execute(statement, params![id]);
        removed.map_err(|e| self.0.database.failed(e)).map(drop)
    }

    /// Records a failed attempt. The delivery is sent again after a delay, or fails after 24 hours.
    pub(crate) fn on_failure(&self, due: &DueDelivery, error: &str) -> Result<(), WebhookError> {
        let now = now_ms();
        let is_over = now.saturating_sub(due.created_ms) >= millis(MAX_AGE);
        let next_ms = now.saturating_add(delay_ms(due.attempts));
        let mut end = error.len().min(MAX_ERROR_BYTES);
        while !error.is_char_boundary(end) {
            end -= 1;
        }
        let connection = self.0.database.lock();
        let record =
            || {
                connection.execute(
                "UPDATE deliveries SET attempts = attempts + 1, next_ms = ?2, state = ?3, error = ?4
                    WHERE id = ?1",
                params![due.id, next_ms, i64::from(is_over), &error[..end]],
            )?;
                if is_over {
                    connection.execute(
                    "DELETE FROM deliveries WHERE webhook = ?1 AND state = 1 AND (created_ms < ?2
                        OR id <= (SELECT id FROM deliveries WHERE webhook = ?1 AND state = 1
                            ORDER BY id DESC LIMIT 1 OFFSET ?3))",
                    params![due.webhook, now.saturating_sub(millis(RETENTION)), MAX_FAILED],
                )?;
                }
                Ok(())
            };
        record().map_err(|e| self.0.database.failed(e))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the delay after a number of failed attempts: at least half of the doubled delay. The
/// rest is random, so that the deliveries to a server that was down do not arrive at once.
fn delay_ms(attempts: u32) -> u64 {
    let doubled = FIRST_DELAY_MS.saturating_mul(1_u64.checked_shl(attempts).unwrap_or(u64::MAX));
    let longest = doubled.min(MAX_DELAY_MS);
    let mut random = [0; 4];
    // Without random numbers, the delay is the maximum.
    let share = match getrandom::fill(&mut random) {
        Ok(()) => u64::from(u32::from_le_bytes(random)),
        Err(_) => u64::from(u32::MAX),
    };
    longest / 2 + (longest / 2).saturating_mul(share) / u64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_an_hour() {
        for (attempts, longest) in [(0, 1_000), (1, 2_000), (11, 2_048_000), (40, 3_600_000)] {
            let delay = delay_ms(attempts);
            assert!(
                (longest / 2..=longest).contains(&delay),
                "{attempts}: {delay}"
            );
        }
        assert!((1_800_000..=3_600_000).contains(&delay_ms(u32::MAX)));
    }
}
