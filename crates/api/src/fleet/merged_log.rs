//! Pages of logs (events, audit) of all members of a fleet, merged by the ids of their entries.
//!
//! A *member* is a host of the fleet.

use super::Fleet;
use super::forward::{BufferedCall, Purpose};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::wire::moment;
use axum::body::to_bytes;
use axum::http::{HeaderMap, Method};
use axum::response::Response;
use jiffy_api_types::DroppedEntries;
use jiffy_engine_api::now_ms;
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
    /// True if there are further entries.
    pub more: bool,
    pub dropped: Option<DroppedEntries>,
}

/// Page of a log as the API returns it.
pub(super) trait PageOfLog: DeserializeOwned + Send + 'static {
    type Entry;

    /// Converts a page of the API to the form that can be merged.
    fn into_page(self) -> LogPage<Self::Entry>;
    /// Converts a merged page to the page that the API returns.
    fn from_page(page: LogPage<Self::Entry>) -> Self;
    /// Returns the id of an entry.
    fn id(entry: &Self::Entry) -> &String;
}

impl Fleet {
    /// Merges the page of this member with the pages that all others return for `uri`, which
    /// requests the page `query`. Returns the members without an answer.
    pub(super) async fn merged<P: PageOfLog>(
        &self,
        caller: &Caller,
        (uri, credentials): (&str, &HeaderMap),
        query: &PageQuery,
        own: impl Future<Output = Result<P, ApiError>>,
    ) -> Result<(P, Vec<String>), ApiError> {
        let uri = uri.parse();
        let call = BufferedCall {
            method: Method::GET,
            uri: uri.map_err(|_| ApiError::invalid("the selection of entries is invalid"))?,
            headers: credentials.clone(),
            body: Default::default(),
            caller: caller.clone(),
            client: None,
            // The answers of all members are merged.
            purpose: Purpose::Part,
            placement: None,
        };
        let (own, others) = tokio::join!(own, self.send_to_all(&call, read::<P>));
        let (mut pages, mut missing) = (vec![own?.into_page()], Vec::new());
        for (member, _, page) in others {
            match page {
                Some(page) => pages.push(page.into_page()),
                None => missing.push(member.to_string()),
            }
        }
        missing.sort();
        let merged = merge(pages, P::id, query, now_ms());
        Ok((P::from_page(merged), missing))
    }
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
fn merge<T>(
    pages: Vec<LogPage<T>>,
    id: impl Fn(&T) -> &String,
    query: &PageQuery,
    now_ms: u64,
) -> LogPage<T> {
    let parse = |id: &String| id.parse::<EntryId>().ok();
    let more = pages.iter().any(|page| page.more);
    // Last ids of the incomplete pages.
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
    // Hosts may still record entries that are newer than this id.
    let settled = EntryId {
        time_us: now_ms.saturating_sub(SETTLED_MS).saturating_mul(1000),
        host: FIRST_HOST.into(),
    };
    // Each page is complete up to this id. Entries beyond it are left to the next page.
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
