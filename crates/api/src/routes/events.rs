//! Calls that read events.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::event_streams::EVENT_STREAM;
use crate::events::{EventSelection, MAX_EVENTS, advance, credentials};
use crate::fleet::{Forwarded, INCOMPLETE};
use crate::lookup::Liveness;
use crate::query::Query;
use crate::wire::event::lifecycle;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use jiffy_api_types::{Event, LifecycleEvent, LifecycleEventType};
use jiffy_event_log::{EntryId, EventFilter, Order, PageQuery, SandboxChoice};
use std::time::Duration;

/// Maximum and default number of events in E2B's form.
pub(crate) const MAX_LIFECYCLE_EVENTS: u64 = 100;
const DEFAULT_LIFECYCLE_EVENTS: u64 = 10;
/// Maximum number of events in E2B's form that can be skipped.
pub(crate) const MAX_LIFECYCLE_OFFSET: u64 = 900;

/// `GET /events`: a page, or a stream for clients that accept `text/event-stream`.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    forwarded: Option<Extension<Forwarded>>,
    query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let selection = EventSelection::parse(&app, &caller, &query, &headers)?;
    let is_forwarded = forwarded.is_some() || query.get("host").is_some();
    if accepts_stream(&headers) {
        let resumed = last_event(&headers)?;
        return app.stream_events(caller, selection, resumed, is_forwarded);
    }
    let (page, missing) = app.events(&caller, &selection, is_forwarded).await?;
    respond(Json(page), &query, &missing)
}

/// `GET /events/sandboxes`: events of all visible sandboxes in E2B's form.
pub(super) async fn lifecycle_events(
    State(app): State<App>,
    caller: Caller,
    forwarded: Option<Extension<Forwarded>>,
    query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let selection = lifecycle_selection(&caller, &query, &headers, None)?;
    lifecycle_page(&app, &caller, &query, selection, forwarded.is_some()).await
}

/// `GET /events/sandboxes/{sandboxID}`: events of a sandbox in E2B's form.
pub(super) async fn lifecycle_events_of(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    forwarded: Option<Extension<Forwarded>>,
    query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let unknown = app.sandbox(&caller, &id, Liveness::IncludingBroken).err();
    let sandbox = app.event_sandbox(&caller, &id)?;
    let is_forwarded = forwarded.is_some();
    let selection = lifecycle_selection(&caller, &query, &headers, Some(sandbox))?;
    let mut any = selection.clone();
    any.filter.types.clear();
    any.page.limit = 1;
    // The events of a removed sandbox remain. Without events, a sandbox of another key and a
    // sandbox that never existed have the same answer.
    if let Some(unknown) = unknown
        && read_all(&app, &caller, any, is_forwarded)
            .await?
            .0
            .is_empty()
    {
        return Err(unknown);
    }
    lifecycle_page(&app, &caller, &query, selection, is_forwarded).await
}

/// Returns the number of events to skip, and the maximum number of events.
fn lifecycle_range(query: &Query) -> Result<(usize, usize), ApiError> {
    let limit = query.number("limit", 1..=MAX_LIFECYCLE_EVENTS)?;
    let offset = query.number("offset", 0..=MAX_LIFECYCLE_OFFSET)?;
    let count = |n: u64| usize::try_from(n).unwrap_or(MAX_EVENTS);
    Ok((
        count(offset.unwrap_or(0)),
        count(limit.unwrap_or(DEFAULT_LIFECYCLE_EVENTS)),
    ))
}

/// Returns the selection of events for a request in E2B's form. Such a request has no page token:
/// `offset` skips the newest or oldest events.
fn lifecycle_selection(
    caller: &Caller,
    query: &Query,
    headers: &HeaderMap,
    sandbox: Option<SandboxChoice>,
) -> Result<EventSelection, ApiError> {
    let (offset, limit) = lifecycle_range(query)?;
    let types = query.words("types", &LifecycleEventType::NAMES)?;
    let types = types.unwrap_or(LifecycleEventType::NAMES.map(|(_, kind)| kind).to_vec());
    let types = types.iter().flat_map(|kind| kind.types());
    let order = if query.flag("orderAsc")? {
        Order::Ascending
    } else {
        Order::Descending
    };
    Ok(EventSelection {
        page: PageQuery {
            order,
            // The events to skip are read too: the hosts of a fleet do not know which they are.
            limit: offset + limit,
            ..PageQuery::default()
        },
        filter: EventFilter {
            owner: caller.owner_scope().map(str::to_owned),
            sandbox,
            types: types.copied().collect(),
        },
        wait: Duration::ZERO,
        credentials: credentials(headers),
    })
}

/// Reads the first events of a selection, and the hosts without an answer.
async fn read_all(
    app: &App,
    caller: &Caller,
    mut selection: EventSelection,
    is_forwarded: bool,
) -> Result<(Vec<Event>, Vec<String>), ApiError> {
    let (mut events, mut missing) = (Vec::new(), Vec::new());
    loop {
        let (page, absent) = app.events(caller, &selection, is_forwarded).await?;
        advance(&mut selection.page, page.next.as_deref());
        missing.extend(absent);
        events.extend(page.events);
        // A page of rare events may be empty before the end of the log.
        if !page.more || events.len() >= selection.page.limit {
            missing.sort();
            missing.dedup();
            return Ok((events, missing));
        }
    }
}

async fn lifecycle_page(
    app: &App,
    caller: &Caller,
    query: &Query,
    selection: EventSelection,
    is_forwarded: bool,
) -> Result<Response, ApiError> {
    let (offset, limit) = lifecycle_range(query)?;
    let (events, missing) = read_all(app, caller, selection, is_forwarded).await?;
    let events = events.into_iter().skip(offset).take(limit);
    let events: Vec<LifecycleEvent> = events.filter_map(lifecycle).collect();
    respond(Json(events), query, &missing)
}

/// Returns a response that names the hosts without an answer.
pub(super) fn respond(
    body: impl IntoResponse,
    query: &Query,
    missing: &[String],
) -> Result<Response, ApiError> {
    let names = missing.join(",");
    if query.flag("complete")? && !names.is_empty() {
        let message = format!("hosts without an answer: {names}");
        return Err(ApiError::fleet_unavailable(message));
    }
    let mut response = body.into_response();
    if !names.is_empty()
        && let Ok(value) = HeaderValue::from_str(&names)
    {
        response.headers_mut().insert(INCOMPLETE, value);
    }
    Ok(response)
}

fn accepts_stream(headers: &HeaderMap) -> bool {
    let accept = headers.get_all(header::ACCEPT).iter();
    let mut accept = accept.filter_map(|value| value.to_str().ok());
    accept.any(|value| {
        value
            .split(',')
            .any(|kind| kind.trim().starts_with(EVENT_STREAM))
    })
}

/// Returns the id of the last event that a client received.
fn last_event(headers: &HeaderMap) -> Result<Option<EntryId>, ApiError> {
    let Some(value) = headers.get("last-event-id") else {
        return Ok(None);
    };
    let text = value.to_str().unwrap_or_default();
    if text.is_empty() {
        return Ok(None);
    }
    let id = text.parse().map(Some);
    id.map_err(|e| ApiError::invalid(format!("`Last-Event-ID` is {e}")))
}
