//! Reads new events of the event log, and queues a delivery for each webhook that selects the
//! event.

use crate::WebhookError;
use crate::connect::Connect;
use crate::webhooks::deliveries::NewDelivery;
use crate::webhooks::{Subscription, Webhooks};
use jiffy_api_types::{EventType, LifecycleEvent, LifecycleEventType};
use jiffy_event_log::{EntryId, Event, EventFeed, EventFilter, Order, PageQuery};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// Number of events that are read at once.
const PAGE_EVENTS: usize = 500;
/// Delay after an error.
const ERROR_DELAY: Duration = Duration::from_secs(5);
/// Maximum age of the stored position, while there are webhooks. It bounds the events that are read
/// again after a restart.
const POSITION_AGE: Duration = Duration::from_secs(60);

/// Converts an event to the form of a delivery. `None` if clients do not know its type.
pub type EventForm = fn(EntryId, Event) -> Option<LifecycleEvent>;

impl Webhooks {
    /// Delivers the events of `feed`. Never returns.
    pub async fn run(self, feed: EventFeed, form: EventForm, connect: Arc<dyn Connect>) {
        tokio::join!(self.queue_all(&feed, form), self.send_all(connect));
    }

    /// Queues the events of the log. Never returns.
    async fn queue_all(&self, feed: &EventFeed, form: EventForm) {
        let mut newest = feed.subscribe();
        let mut shared = self.shared_number();
        let mut queue = Queue {
            webhooks: self,
            feed,
            form,
            subscriptions: None,
            position: None,
            stored: None,
        };
        loop {
            newest.borrow_and_update();
            if let Err(e) = queue.advance().await {
                tracing::error!(error = %e, "cannot queue events for webhooks");
                sleep(ERROR_DELAY).await;
                continue;
            }
            tokio::select! {
                // Fails only without a feed, which does not happen while `feed` exists.
                changed = newest.changed() => if changed.is_err() {
                    return;
                },
                () = change_of(&mut shared) => {}
            }
        }
    }
}

/// Waits for a change of the webhooks of the fleet. Never returns for one host.
async fn change_of(number: &mut Option<watch::Receiver<u64>>) {
    let is_changed = match number {
        Some(number) => number.changed().await.is_ok(),
        None => false,
    };
    if !is_changed {
        std::future::pending().await
    }
}

/// Position in the log.
struct Queue<'a> {
    webhooks: &'a Webhooks,
    feed: &'a EventFeed,
    form: EventForm,
    /// Enabled webhooks, and the number of changes when they were read. An event of a host without
    /// webhooks costs no access to the database.
    subscriptions: Option<(u64, Arc<[Subscription]>)>,
    /// Time of the last event that was examined. `None` before the first one.
    position: Option<u64>,
    /// Time at which the position was stored.
    stored: Option<Instant>,
}

impl Queue<'_> {
    /// Queues all further events.
    async fn advance(&mut self) -> Result<(), WebhookError> {
        loop {
            // Read this time before the webhooks: events after the creation of a webhook are later.
            // The time is the limit of this round.
            let newest = self.feed.newest().map_or(0, |id| id.time_us);
            let subscriptions = self.subscriptions().await?;
            let Some(oldest) = subscriptions.iter().map(|s| s.since_us).min() else {
                self.position = Some(newest);
                return Ok(());
            };
            let after = match self.position {
                Some(position) => position,
                None => {
                    let stored = self.webhooks.blocking(|w| w.position()).await?;
                    // Events before all webhooks are not read. If the position is later than the
                    // newest event, the log was removed.
                    stored.filter(|at| *at <= newest).unwrap_or(0).max(oldest)
                }
            };
            if after >= newest {
                self.position = Some(newest);
                return Ok(());
            }
            let (entries, position, more) = self.read(after, newest).await?;
            let deliveries = self.deliveries(&subscriptions, entries)?;
            let is_old = self.stored.is_none_or(|at| at.elapsed() >= POSITION_AGE);
            if !deliveries.is_empty() || is_old {
                let queue = move |w: &Webhooks| w.queue(&deliveries, position);
                self.webhooks.blocking(queue).await?;
                self.stored = Some(Instant::now());
            }
            self.position = Some(position);
            if !more {
                return Ok(());
            }
        }
    }

    /// Returns the enabled webhooks.
    async fn subscriptions(&mut self) -> Result<Arc<[Subscription]>, WebhookError> {
        // An event after the creation of a webhook on another host must find this webhook.
        if self.webhooks.has_outdated_copy() {
            self.webhooks.blocking(|w| w.copy_changed()).await?;
        }
        let changes = self.webhooks.0.changes.load(Ordering::SeqCst);
        match &self.subscriptions {
            Some((known, subscriptions)) if *known == changes => Ok(subscriptions.clone()),
            _ => {
                let read = self.webhooks.blocking(|w| w.subscriptions()).await?;
                let read: Arc<[Subscription]> = read.into();
                self.subscriptions = Some((changes, read.clone()));
                Ok(read)
            }
        }
    }

    /// Reads a page of the events after `after` and up to `newest`. The second value is the time up
    /// to which events were read, and the third is true if there are more.
    async fn read(
        &self,
        after: u64,
        newest: u64,
    ) -> Result<(Vec<(EntryId, Event)>, u64, bool), WebhookError> {
        let id = |time_us| EntryId {
            time_us,
            host: self.feed.host().clone(),
        };
        let query = PageQuery {
            after: Some(id(after)),
            before: Some(id(newest.saturating_add(1))),
            order: Order::Ascending,
            limit: PAGE_EVENTS,
            ..PageQuery::default()
        };
        let kinds = LifecycleEventType::NAMES.into_iter();
        let types: Vec<EventType> = kinds.flat_map(|(_, kind)| kind.types()).copied().collect();
        let filter = EventFilter {
            types,
            ..EventFilter::default()
        };
        let feed = self.feed.clone();
        let page = self.webhooks.blocking(move |_| {
            let page = feed.page(&query, &filter);
            page.map_err(|e| WebhookError::Log(e.to_string()))
        });
        let page = page.await?;
        let position = match &page.next {
            Some(next) if page.more => next.time_us.min(newest),
            _ => newest,
        };
        Ok((page.entries, position, page.more))
    }

    /// Returns a delivery for each event and each webhook that selects the event.
    fn deliveries(
        &self,
        subscriptions: &[Subscription],
        entries: Vec<(EntryId, Event)>,
    ) -> Result<Vec<NewDelivery>, WebhookError> {
        let mut deliveries = Vec::new();
        for (id, event) in entries {
            let (time_us, owner) = (event.time_us, event.owner.clone().unwrap_or_default());
            let Some(event) = (self.form)(id, event) else {
                continue;
            };
            let mut body = None;
            for webhook in subscriptions {
                let is_selected = webhook.owner == owner
                    && webhook.since_us < time_us
                    && webhook.events.contains(&event.kind);
                if !is_selected {
                    continue;
                }
                let body = match &body {
                    Some(body) => body,
                    None => {
                        let text = serde_json::to_string(&event);
                        body.insert(text.map_err(|e| WebhookError::Log(e.to_string()))?)
                    }
                };
                deliveries.push(NewDelivery {
                    webhook: webhook.id.clone(),
                    sandbox: event.sandbox_id.clone(),
                    event: event.id.clone(),
                    kind: event.kind.name(),
                    body: body.clone(),
                });
            }
        }
        Ok(deliveries)
    }
}
