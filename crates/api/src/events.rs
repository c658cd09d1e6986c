//! Reads pages of events for callers of the API, from this host or from all hosts of a fleet.

use crate::app::App;
use crate::caller::{Caller, SHORT_ID};
use crate::error::ApiError;
use crate::lookup::Liveness;
use crate::query::Query;
use crate::wire::event::{dropped, event};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderName};
use jiffy_api_types::{EventPage, EventType};
use jiffy_engine_api::is_id;
use jiffy_event_log::{EntryId, EventFilter, LogError, Order, PageQuery, SandboxChoice};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};

/// Maximum number of events of a page.
pub(crate) const MAX_EVENTS: usize = 1000;
/// Default number of events of a page.
pub(crate) const DEFAULT_EVENTS: usize = 100;
/// Maximum time in seconds for which a request waits for further events.
pub(crate) const MAX_EVENT_WAIT_S: u64 = 20;
/// Interval at which a waiting request reads the events of other hosts.
const FLEET_INTERVAL: Duration = Duration::from_secs(1);

/// Events that a request selects.
#[derive(Debug, Clone)]
pub(crate) struct EventSelection {
    pub page: PageQuery,
    pub filter: EventFilter,
    /// Time for which the request waits for the first event.
    pub wait: Duration,
    /// Headers with the key of the caller, for requests to other hosts of a fleet.
    pub credentials: HeaderMap,
}

impl EventSelection {
    /// Selects all events that a caller sees.
    pub fn of_all(caller: &Caller) -> Self {
        Self {
            page: PageQuery {
                limit: MAX_EVENTS,
                ..PageQuery::default()
            },
            filter: EventFilter {
                owner: caller.owner_scope().map(str::to_owned),
                ..EventFilter::default()
            },
            wait: Duration::ZERO,
            credentials: HeaderMap::new(),
        }
    }

    /// Parses the parameters of `GET /events`.
    pub fn parse(
        app: &App,
        caller: &Caller,
        query: &Query,
        headers: &HeaderMap,
    ) -> Result<Self, ApiError> {
        let (page, wait) = page_and_wait(query)?;
        let sandbox = query.get("sandboxID");
        let types = EventType::ALL.map(|kind| (kind.name(), kind));
        Ok(Self {
            page,
            filter: EventFilter {
                owner: caller.owner_scope().map(str::to_owned),
                sandbox: sandbox
                    .map(|id| app.event_sandbox(caller, id))
                    .transpose()?,
                types: query.words("types", &types)?.unwrap_or_default(),
            },
            wait,
            credentials: credentials(headers),
        })
    }
}

/// Returns the headers that authenticate a caller.
pub(crate) fn credentials(headers: &HeaderMap) -> HeaderMap {
    let names = [AUTHORIZATION, HeaderName::from_static("x-api-key")];
    let present = names.into_iter();
    let present = present.filter_map(|name| Some((name.clone(), headers.get(name)?.clone())));
    present.collect()
}

/// Parses the parameters of all logs: a page, and the time for which the request waits.
pub(crate) fn page_and_wait(query: &Query) -> Result<(PageQuery, Duration), ApiError> {
    let orders = [("asc", Order::Ascending), ("desc", Order::Descending)];
    let limit = query.number("limit", 1..=MAX_EVENTS as u64)?;
    let wait = query.number("wait", 0..=MAX_EVENT_WAIT_S)?.unwrap_or(0);
    let since = query.moment("since")?.unwrap_or(0);
    let page = PageQuery {
        after: id(query, "after")?,
        before: id(query, "before")?,
        since_us: u64::try_from(since).unwrap_or(0).saturating_mul(1000),
        order: query.word("order", &orders)?.unwrap_or_default(),
        offset: 0,
        limit: limit.map_or(DEFAULT_EVENTS, |n| usize::try_from(n).unwrap_or(MAX_EVENTS)),
    };
    Ok((page, Duration::from_secs(wait)))
}

/// Selects the entries after a page whose end is `next`.
pub(crate) fn advance(page: &mut PageQuery, next: Option<&str>) {
    let next = next.and_then(|id| id.parse().ok());
    match page.order {
        Order::Ascending => page.after = next.or(page.after.take()),
        Order::Descending => page.before = next.or(page.before.take()),
    }
}

/// Parses the id of an event.
fn id(query: &Query, name: &str) -> Result<Option<EntryId>, ApiError> {
    let id = query.get(name).map(str::parse).transpose();
    id.map_err(|e| ApiError::invalid(format!("`{name}` is invalid: {e}")))
}

/// Returns the error of a log that cannot be read.
pub(crate) fn unreadable(error: LogError) -> ApiError {
    ApiError::internal(error.to_string())
}

impl App {
    /// Returns the sandbox of an event by its id or name. The events of a removed sandbox are found
    /// by its complete id.
    pub(crate) fn event_sandbox(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<SandboxChoice, ApiError> {
        match self.sandbox(caller, id, Liveness::IncludingBroken) {
            Ok(sandbox) => Ok(SandboxChoice::Exact(sandbox.id().to_owned())),
            Err(_) if is_id(id) => Ok(SandboxChoice::Exact(id.to_owned())),
            // Read-only callers know a part of the id only.
            Err(_) if is_short(caller, id) => Ok(SandboxChoice::Prefix(id.to_owned())),
            Err(e) => Err(e),
        }
    }

    /// Reads a page of events of this host.
    pub(crate) async fn local_events(
        &self,
        caller: &Caller,
        selection: &EventSelection,
    ) -> Result<EventPage, ApiError> {
        let feed = self.sandboxes.events();
        let EventSelection { page, filter, .. } = selection;
        let newest = feed.newest();
        let read = match feed.recent_page(page, filter) {
            Some(read) => read,
            None => {
                // A scan reads files of up to 32 MiB, so the number of concurrent scans is limited.
                let permit = self.event_streams.scans.acquire().await;
                let (feed, page, filter) = (feed.clone(), page.clone(), filter.clone());
                let read = tokio::task::spawn_blocking(move || feed.page(&page, &filter)).await;
                drop(permit);
                let read = read.map_err(|e| ApiError::internal(e.to_string()))?;
                read.map_err(unreadable)?
            }
        };
        // If the page is empty, the next page begins where this one began. The newest event is
        // determined before the scan, so that events that are recorded during the scan are not
        // skipped.
        let unchanged = match page.order {
            Order::Ascending => page.after.clone().or(newest),
            Order::Descending => page.before.clone(),
        };
        let next = read.next.or(unchanged);
        Ok(EventPage {
            events: read
                .entries
                .into_iter()
                .map(|entry| event(caller, entry))
                .collect(),
            next: next.map(|id| id.to_string()),
            more: read.more,
            dropped: read.dropped.map(|entries| dropped(caller, entries)),
        })
    }

    /// Reads a page of events, from all hosts of a fleet unless another host has forwarded the
    /// request. Waits for the first event if the selection requests this. `is_forwarded` states
    /// that another host has forwarded it.
    pub(crate) async fn events(
        &self,
        caller: &Caller,
        selection: &EventSelection,
        is_forwarded: bool,
    ) -> Result<(EventPage, Vec<String>), ApiError> {
        let end = Instant::now() + selection.wait;
        let fleet = self.fleet.as_ref().filter(|_| !is_forwarded);
        let mut newest = self.sandboxes.events().subscribe();
        let mut is_ended = self.event_streams.ended();
        let mut selection = selection.clone();
        loop {
            newest.borrow_and_update();
            let (page, missing) = match fleet {
                Some(fleet) => fleet.events(self, caller, &selection).await?,
                None => (self.local_events(caller, &selection).await?, Vec::new()),
            };
            let is_over = Instant::now() >= end || *is_ended.borrow();
            if !page.events.is_empty() || page.more || is_over {
                return Ok((page, missing));
            }
            advance(&mut selection.page, page.next.as_deref());
            // A timeout needs no handling here: the next iteration checks the time.
            let _ = timeout_at(end, async {
                tokio::select! {
                    _ = is_ended.changed() => {}
                    // A receiver exists as long as its feed.
                    _ = newest.changed() => {}
                    () = sleep(FLEET_INTERVAL), if fleet.is_some() => {}
                }
            })
            .await;
        }
    }
}

fn is_short(caller: &Caller, id: &str) -> bool {
    let is_valid = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    caller.is_read_only() && id.len() >= SHORT_ID && id.bytes().all(is_valid)
}
