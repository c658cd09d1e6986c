//! Pages of logs of all members of a fleet, merged by the ids of their entries.

use crate::wire::moment;
use axum::body::to_bytes;
use axum::response::Response;
use jiffy_api_types::DroppedEntries;
use jiffy_event_log::{EntryId, Order, PageQuery};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::DeserializeOwned;

/// Maximum size of the answer of a member.
const MAX_PAGE_BYTES: usize = 16 << 20;
/// Age from which entries are part of a merged page, in milliseconds. A member may answer before it
/// has recorded an entry whose time is earlier than an entry of another member.
const SETTLED_MS: u64 = 2000;
/// Name that precedes the names of all hosts.
const FIRST_HOST: &str = "0";

/// Page of a log of a member or of all members.
pub(super) struct LogPage<T> {
    pub entries: Vec<T>,
    pub next: Option<String>,
    pub more: bool,
    pub dropped: Option<DroppedEntries>,
}

/// Returns the request for a page of the log at `path`.
pub(super) fn page_uri(path: &str, page: &PageQuery) -> String {
    let order = match page.order {
        Order::Ascending => "asc",
        Order::Descending => "desc",
    };
    let mut uri = format!("{path}?limit={}&order={order}", page.limit);
    for (name, id) in [("after", &page.after), ("before", &page.before)] {
        if let Some(id) = id {
            uri += &format!("&{name}={id}");
        }
    }
    if page.since_us > 0 {
        add_parameter(&mut uri, "since", &moment(page.since_us / 1000).to_string());
    }
    uri
}

/// Adds a parameter to the query of a request.
pub(super) fn add_parameter(uri: &mut String, name: &str, value: &str) {
    *uri += &format!("&{name}={}", utf8_percent_encode(value, NON_ALPHANUMERIC));
}

/// Returns the page of a member. `None` if the member did not answer with a page.
pub(super) async fn read<P: DeserializeOwned>(response: Response) -> Option<P> {
    if !response.status().is_success() {
        return None;
    }
    let body = to_bytes(response.into_body(), MAX_PAGE_BYTES).await.ok()?;
    serde_json::from_slice(&body).ok()
}

/// Merges pages by the ids of their entries. An entry is part of the merged page only if all pages
/// reach its id.
pub(super) fn merge<T>(
    pages: Vec<LogPage<T>>,
    id: impl Fn(&T) -> &String,
    query: &PageQuery,
    now_ms: u64,
) -> LogPage<T> {
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
    let entries = pages.into_iter().flat_map(|page| page.entries);
    let entries = entries.filter_map(|entry| Some((parse(id(&entry))?, entry)));
    let mut entries: Vec<_> = match query.order {
        Order::Ascending => entries.filter(|(id, _)| *id <= end).collect(),
        Order::Descending => entries.filter(|(id, _)| *id >= end).collect(),
    };
    entries.sort_by(|(one, _), (other, _)| match query.order {
        Order::Ascending => one.cmp(other),
        Order::Descending => other.cmp(one),
    });
    entries.dedup_by(|(one, _), (other, _)| one == other);
    let is_cut = entries.len() > query.limit;
    entries.truncate(query.limit);
    let next = match query.order {
        _ if is_cut => entries.last().map(|(id, _)| id.clone()),
        Order::Ascending if more => Some(end).max(query.after.clone()),
        Order::Ascending => nexts
            .into_iter()
            .max()
            .map(|next| next.min(end))
            .max(query.after.clone()),
        Order::Descending if more => Some(end),
        Order::Descending => nexts.into_iter().min(),
    };
    LogPage {
        entries: entries.into_iter().map(|(_, entry)| entry).collect(),
        next: next.map(|id| id.to_string()),
        more: more || is_cut,
        dropped,
    }
}
