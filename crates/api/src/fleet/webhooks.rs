//! Webhooks of API keys in a fleet: a table that each host holds in memory ([`FleetWebhooks`]), and
//! the deliveries of all hosts. Each host sends the events of its own sandboxes.

use super::forward::{BufferedCall, Purpose};
use super::{Fleet, TableChanges};
use crate::caller::Caller;
use crate::page::NEXT;
use axum::body::to_bytes;
use axum::http::{HeaderMap, Method, Uri};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiffy_api_types::{LifecycleEventType, WebhookDelivery};
use jiffy_fleet::tables::{Action, Changed, TableError, Tables};
use jiffy_fleet_core::record::{Table, UnknownFields, WebhookRow};
use jiffy_webhooks::{SharedWebhooks, StoredWebhook, Webhook, WebhookError};
use tokio::sync::watch;

/// Maximum size of the deliveries that a host returns.
const MAX_DELIVERIES_BYTES: usize = 4 << 20;

/// Webhooks of a fleet.
#[derive(Debug)]
pub struct FleetWebhooks(TableChanges);

impl FleetWebhooks {
    /// Uses the tables of a fleet. Must be called in a runtime with several threads.
    #[must_use]
    pub fn new(tables: Tables) -> Self {
        Self(TableChanges::new(tables))
    }

    /// Makes a change of the webhook `id`.
    fn change(&self, id: &str, action: Action) -> Result<Changed, WebhookError> {
        let changed = self.0.change(action);
        changed.map_err(|e| match e {
            TableError::Unknown(_) => WebhookError::Unknown(id.to_owned()),
            TableError::Changed(_) => WebhookError::Changed(id.to_owned()),
            e => WebhookError::Shared {
                reason: e.to_string(),
                is_temporary: e.is_temporary(),
            },
        })
    }
}

/// Returns a webhook. Types of events that this version does not know are omitted.
fn stored_of(row: &WebhookRow) -> Option<StoredWebhook> {
    let all = LifecycleEventType::NAMES.into_iter();
    let is_selected = |name: &str| row.events.iter().any(|event| event == name);
    Some(StoredWebhook {
        owner: row.owner.clone().unwrap_or_default(),
        webhook: Webhook {
            id: row.id.clone(),
            name: row.name.clone(),
            url: row.url.clone(),
            is_enabled: row.enabled,
            events: all
                .filter(|(name, _)| is_selected(name))
                .map(|(_, kind)| kind)
                .collect(),
            created_ms: row.created_ms,
            dropped: 0,
        },
        secret: STANDARD.decode(&row.secret).ok()?,
        since_us: row.since_us,
        version: row.version,
    })
}

pub(super) fn row_of(stored: StoredWebhook) -> WebhookRow {
    let webhook = stored.webhook;
    let events = webhook.events.iter().map(|event| event.name().to_owned());
    WebhookRow {
        id: webhook.id,
        owner: Some(stored.owner).filter(|owner| !owner.is_empty()),
        name: webhook.name,
        url: webhook.url,
        enabled: webhook.is_enabled,
        events: events.collect(),
        secret: STANDARD.encode(stored.secret),
        version: stored.version,
        created_ms: webhook.created_ms,
        since_us: stored.since_us,
        unknown: UnknownFields::new(),
    }
}

impl SharedWebhooks for FleetWebhooks {
    fn all(&self) -> Result<Vec<StoredWebhook>, WebhookError> {
        let rows = self.0.tables.rows(Table::Webhooks);
        let rows = rows.iter().filter_map(|row| row.as_webhook());
        Ok(rows.filter_map(stored_of).collect())
    }

    fn number(&self) -> watch::Receiver<u64> {
        self.0.tables.subscribe()
    }

    fn create(&self, created: StoredWebhook) -> Result<(), WebhookError> {
        let row = row_of(created);
        let id = row.id.clone();
        self.change(&id, Action::CreateWebhook(row)).map(drop)
    }

    fn replace(&self, changed: StoredWebhook) -> Result<(), WebhookError> {
        let row = row_of(changed);
        let id = row.id.clone();
        self.change(&id, Action::ReplaceWebhook(row)).map(drop)
    }

    fn remove(&self, ids: Vec<String>) -> Result<(), WebhookError> {
        match self.change("", Action::RemoveWebhooks(ids)) {
            // An earlier attempt, or another caller, has removed the webhooks.
            Ok(_) | Err(WebhookError::Unknown(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Page of deliveries, newest first, and whether there are older ones.
pub(crate) type DeliveryPage = (Vec<WebhookDelivery>, bool);

impl Fleet {
    /// Merges the page `own` of this host with the pages that all other hosts return for `uri`.
    /// Returns the hosts without an answer.
    pub(crate) async fn webhook_deliveries(
        &self,
        caller: &Caller,
        (uri, credentials): (&Uri, HeaderMap),
        own: DeliveryPage,
        limit: usize,
    ) -> (DeliveryPage, Vec<String>) {
        let call = BufferedCall {
            method: Method::GET,
            uri: uri.clone(),
            headers: credentials,
            body: Default::default(),
            caller: caller.clone(),
            client: None,
            // The answers of all members are merged.
            purpose: Purpose::Part,
            placement: None,
        };
        let (mut pages, mut missing) = (vec![own], Vec::new());
        for (member, _, page) in self.send_to_all(&call, read).await {
            match page {
                Some(page) => pages.push(page),
                None => missing.push(member.to_string()),
            }
        }
        missing.sort();
        (merge(pages, limit), missing)
    }
}

/// Returns the page of a host. `None` if the host did not answer with a page.
async fn read(response: Response) -> Option<DeliveryPage> {
    if !response.status().is_success() {
        return None;
    }
    let has_more = response.headers().contains_key(NEXT);
    let body = to_bytes(response.into_body(), MAX_DELIVERIES_BYTES);
    let deliveries = serde_json::from_slice(&body.await.ok()?).ok()?;
    Some((deliveries, has_more))
}

/// Merges pages by the ids of deliveries, which are in the order of time on all hosts. A delivery
/// is part of the merged page only if all incomplete pages reach its id.
fn merge(pages: Vec<DeliveryPage>, limit: usize) -> DeliveryPage {
    let mut has_more = pages.iter().any(|(_, has_more)| *has_more);
    let incomplete = pages.iter().filter(|(_, has_more)| *has_more);
    let ends = incomplete.filter_map(|(deliveries, _)| deliveries.last());
    let end = ends.map(|last| last.id).max().unwrap_or(0);
    let all = pages.into_iter().flat_map(|(deliveries, _)| deliveries);
    let mut merged: Vec<_> = all.filter(|delivery| delivery.id >= end).collect();
    merged.sort_by_key(|delivery| std::cmp::Reverse(delivery.id));
    has_more |= merged.len() > limit;
    merged.truncate(limit);
    (merged, has_more)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::tests::fleet::Fleet;
    use jiffy_api_types::{Moment, WebhookDeliveryState};
    use jiffy_secrets::HostKey;
    use jiffy_webhooks::{MAX_WEBHOOKS, NewWebhook, WebhookUpdate, Webhooks};
    use std::sync::Arc;
    use zeroize::Zeroizing;

    fn new() -> NewWebhook {
        NewWebhook {
            name: "hook".to_owned(),
            url: "https://hooks.example/a".to_owned(),
            is_enabled: true,
            events: vec![LifecycleEventType::Killed],
            secret: Zeroizing::new("secret-of-signatures".to_owned()),
        }
    }

    #[test]
    fn a_webhook_of_one_member_is_known_to_all_until_one_removes_it() {
        let fleet = Fleet::start();
        let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let mut tables = fleet.tables().into_iter();
        let [one, two] = [&homes[0], &homes[1]].map(|home| {
            let _runtime = fleet.enter();
            let key = HostKey::of_fleet(&[7; 32], home.path()).unwrap();
            let shared = Arc::new(FleetWebhooks::new(tables.next().unwrap()));
            Webhooks::shared(home.path(), key, 1, shared).unwrap()
        });
        let made = two.create("a", &new(), 0).unwrap();
        for webhooks in [&one, &two] {
            assert_eq!(webhooks.list("a").unwrap(), std::slice::from_ref(&made));
            assert!(webhooks.list("").unwrap().is_empty());
            let foreign = webhooks.get("b", &made.id);
            assert!(matches!(foreign, Err(WebhookError::Unknown(_))));
        }
        let update = WebhookUpdate {
            is_enabled: Some(false),
            ..WebhookUpdate::default()
        };
        let changed = one.update("a", &made.id, &update, 0).unwrap();
        assert!(!changed.is_enabled);
        assert_eq!(two.get("a", &made.id).unwrap(), changed);
        let foreign = one.remove("b", &made.id);
        assert!(matches!(foreign, Err(WebhookError::Unknown(_))));
        two.remove("a", &made.id).unwrap();
        assert!(one.list("a").unwrap().is_empty());
        one.remove_all("a").unwrap();
    }

    #[test]
    fn hosts_and_fleets_have_the_same_limit() {
        assert_eq!(jiffy_fleet_core::record::MAX_OWNER_WEBHOOKS, MAX_WEBHOOKS);
    }

    fn delivery(id: u64) -> WebhookDelivery {
        WebhookDelivery {
            id,
            event_id: String::new(),
            event_type: LifecycleEventType::Killed,
            sandbox_id: String::new(),
            state: WebhookDeliveryState::Pending,
            attempts: 0,
            created_at: Moment(String::new()),
            next_attempt_at: None,
            error: None,
        }
    }

    #[test]
    fn pages_of_deliveries_are_merged_without_gaps() {
        let page = |ids: &[u64], has_more| (ids.iter().map(|id| delivery(*id)).collect(), has_more);
        let ids = |(page, has_more): DeliveryPage| {
            let ids: Vec<u64> = page.iter().map(|delivery| delivery.id).collect();
            (ids, has_more)
        };
        let all = vec![page(&[9, 4], false), page(&[7, 3], false)];
        assert_eq!(ids(merge(all.clone(), 4)), (vec![9, 7, 4, 3], false));
        assert_eq!(ids(merge(all, 3)), (vec![9, 7, 4], true));
        // The second host has more deliveries between 7 and 4.
        let cut = vec![page(&[9, 4], false), page(&[8, 7], true)];
        assert_eq!(ids(merge(cut, 4)), (vec![9, 8, 7], true));
        assert_eq!(ids(merge(vec![page(&[], false)], 4)), (vec![], false));
    }
}
