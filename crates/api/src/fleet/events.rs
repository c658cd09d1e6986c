//! Events of all members of a fleet, merged by their ids.

use super::Fleet;
use super::forward::{BufferedCall, Purpose};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::events::EventSelection;
use crate::wire::moment;
use axum::body::to_bytes;
use axum::http::{Method, Uri};
use axum::response::Response;
use jiffy_api_types::{DroppedEntries, EventPage};
use jiffy_engine_api::now_ms;
use jiffy_event_log::{EntryId, Order, SandboxChoice};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

/// Maximum size of the answer of a member.
const MAX_PAGE_BYTES: usize = 16 << 20;
/// Age from which events are part of a merged page, in milliseconds. A member may answer before it
/// has recorded an event whose time is earlier than an event of another member.
const SETTLED_MS: u64 = 2000;
/// Name that precedes the names of all hosts.
const FIRST_HOST: &str = "0";

impl Fleet {
    /// Merges the events of all members. Returns the members without an answer.
    pub(crate) async fn events(
        &self,
        app: &App,
        caller: &Caller,
        selection: &EventSelection,
    ) -> Result<(EventPage, Vec<String>), ApiError> {
        let call = BufferedCall {
            method: Method::GET,
            uri: uri(selection)?,
            headers: selection.credentials.clone(),
            body: Default::default(),
            caller: caller.clone(),
            client: None,
            purpose: Purpose::Part,
            placement: None,
        };
        let (own, others) = tokio::join!(
            app.local_events(caller, selection),
            self.send_to_all(&call, read)
        );
        let (mut pages, mut missing) = (vec![own?], Vec::new());
        for (member, _, page) in others {
            match page {
                Some(page) => pages.push(page),
                None => missing.push(member.to_string()),
            }
        }
        missing.sort();
        Ok((merge(pages, selection, now_ms()), missing))
    }
}

/// Returns the request that selects the events.
fn uri(selection: &EventSelection) -> Result<Uri, ApiError> {
    let EventSelection { page, filter, .. } = selection;
    let order = match page.order {
        Order::Ascending => "asc",
        Order::Descending => "desc",
    };
    let mut uri = format!("/events?limit={}&order={order}", page.limit);
    for (name, id) in [("after", &page.after), ("before", &page.before)] {
        if let Some(id) = id {
            uri += &format!("&{name}={id}");
        }
    }
    if page.since_us > 0 {
        let since = moment(page.since_us / 1000).to_string();
        uri += &format!("&since={}", utf8_percent_encode(&since, NON_ALPHANUMERIC));
    }
    if let Some(SandboxChoice::Exact(id) | SandboxChoice::Prefix(id)) = &filter.sandbox {
        uri += &format!("&sandboxID={}", utf8_percent_encode(id, NON_ALPHANUMERIC));
    }
    let types: Vec<_> = filter.types.iter().map(|kind| kind.name()).collect();
    if !types.is_empty() {
        uri += &format!("&types={}", types.join(","));
    }
    let uri = uri.parse();
    uri.map_err(|_| ApiError::invalid("the selection of events is invalid"))
}

/// Returns the page of a member. `None` if the member did not answer with a page.
async fn read(response: Response) -> Option<EventPage> {
    if !response.status().is_success() {
        return None;
    }
    let body = to_bytes(response.into_body(), MAX_PAGE_BYTES).await.ok()?;
    serde_json::from_slice(&body).ok()
}

/// Merges pages by the ids of their events. An event is part of the merged page only if all pages
/// reach its id.
fn merge(pages: Vec<EventPage>, selection: &EventSelection, now_ms: u64) -> EventPage {
    let query = &selection.page;
    let parse = |id: &String| id.parse::<EntryId>().ok();
    let more = pages.iter().any(|page| page.more);
    let ends = pages.iter().filter(|page| page.more);
    let ends = ends.filter_map(|page| page.next.as_ref().and_then(parse));
    let nexts: Vec<EntryId> = pages
        .iter()
        .filter_map(|p| p.next.as_ref().and_then(parse))
        .collect();
    let dropped = pages.iter().filter_map(|page| page.dropped.clone());
    let dropped = dropped.reduce(|one, other| DroppedEntries {
        count: one
            .count
            .zip(other.count)
            .map(|(one, other)| one.saturating_add(other)),
        until: if one.until.0 > other.until.0 {
            one.until
        } else {
            other.until
        },
    });
    let settled = EntryId {
        time_us: now_ms.saturating_sub(SETTLED_MS).saturating_mul(1000),
        host: FIRST_HOST.into(),
    };
    let end = match query.order {
        Order::Ascending => ends.min().map_or(settled.clone(), |end| end.min(settled)),
        Order::Descending => ends.max().unwrap_or(EntryId {
            time_us: 0,
            host: FIRST_HOST.into(),
        }),
    };
    let events = pages.into_iter().flat_map(|page| page.events);
    let events = events.filter_map(|event| Some((parse(&event.id)?, event)));
    let mut events: Vec<_> = match query.order {
        Order::Ascending => events.filter(|(id, _)| *id <= end).collect(),
        Order::Descending => events.filter(|(id, _)| *id >= end).collect(),
    };
    events.sort_by(|(one, _), (other, _)| match query.order {
        Order::Ascending => one.cmp(other),
        Order::Descending => other.cmp(one),
    });
    events.dedup_by(|(one, _), (other, _)| one == other);
    let is_cut = events.len() > query.limit;
    events.truncate(query.limit);
    let next = match query.order {
        _ if is_cut => events.last().map(|(id, _)| id.clone()),
        Order::Ascending if more => Some(end).max(query.after.clone()),
        Order::Ascending => nexts
            .into_iter()
            .max()
            .map(|next| next.min(end))
            .max(query.after.clone()),
        Order::Descending if more => Some(end),
        Order::Descending => nexts.into_iter().min(),
    };
    EventPage {
        events: events.into_iter().map(|(_, event)| event).collect(),
        next: next.map(|id| id.to_string()),
        more: more || is_cut,
        dropped,
    }
}
