//! Lists of sandboxes, and the description of one sandbox. A *member* is a host of a fleet.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::fleet::Forwarded;
use crate::lookup::Liveness;
use crate::page::{Page, with_next};
use crate::query::Query;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use jiffy_api_types::{ListedSandbox, SandboxDetail};
use jiffy_sandbox_manager::{ListOrder, ListedSandboxes, Sandbox};
use std::collections::BTreeMap;

/// States by which a list can be filtered.
pub(crate) const STATES: [&str; 5] = ["running", "paused", "broken", "creating", "killed"];

/// Filter of a list of sandboxes.
struct Filter {
    states: Vec<&'static str>,
    metadata: BTreeMap<String, String>,
    started_after: Option<i64>,
    template: Option<String>,
    name: Option<String>,
}

impl Filter {
    fn from_query(query: &Query, default_states: &[&'static str]) -> Result<Self, ApiError> {
        let words = STATES.map(|s| (s, s));
        Ok(Self {
            states: query
                .words("state", &words)?
                .unwrap_or(default_states.to_vec()),
            metadata: query.pairs("metadata")?,
            started_after: query.moment("startedAfter")?,
            template: query.get("template").map(str::to_owned),
            name: query.get("name").map(str::to_owned),
        })
    }

    fn matches(&self, record: &Sandbox) -> bool {
        let has = |(k, v): (&String, &String)| record.settings().metadata.get(k) == Some(v);
        // The filter is signed, because a client may send a time before 1970.
        let started = i64::try_from(record.created_ms()).unwrap_or(i64::MAX);
        self.states.contains(&record.state().name())
            && (self.name.is_none() || self.name.as_deref() == record.name())
            && self.metadata.iter().all(has)
            && self.started_after.is_none_or(|after| started >= after)
    }
}

/// Returns the sandboxes that are visible to the caller and match the filter, at most `limit` in
/// `order`. `reaches` excludes sandboxes of earlier pages. A search by name without killed
/// sandboxes ignores `limit` and `order`, since at most one sandbox of each owner has the name.
/// `is_forwarded` states that another host of the fleet has forwarded the call.
fn matching_sandboxes(
    app: &App,
    caller: &Caller,
    filter: &Filter,
    order: &ListOrder,
    limit: usize,
    is_forwarded: bool,
    reaches: impl Fn(&Sandbox) -> bool,
) -> Vec<Sandbox> {
    // The caller may give the name of a template as shown to it, or the complete name.
    let of_template = |r: &Sandbox| match &filter.template {
        Some(t) => *t == r.template() || *t == caller.display_name(r.template()),
        None => true,
    };
    let is_match =
        |r: &Sandbox| caller.sees(r.owner()) && filter.matches(r) && of_template(r) && reaches(r);
    let mut found = match &filter.name {
        // Names of killed sandboxes are not indexed.
        Some(name) if !filter.states.contains(&"killed") => {
            let mut named = app.sandboxes.index().named(name);
            named.retain(|r| is_match(r));
            named
        }
        _ => {
            // Use the smallest index that contains all matching sandboxes. The index by owner
            // contains no killed sandboxes.
            let is_of = |state| filter.states.contains(&state);
            let listed = match caller.owner_scope() {
                _ if filter.states == ["running"] => ListedSandboxes::Running,
                Some(owner) if !is_of("killed") => ListedSandboxes::OfOwner(owner),
                _ => ListedSandboxes::All,
            };
            let index = app.sandboxes.index();
            index.in_order(listed, order, limit, is_match)
        }
    };
    // The member that merges the lists of all members adds the sandboxes of lost hosts.
    if let Some(fleet) = app.fleet.as_ref().filter(|_| !is_forwarded) {
        let is_elsewhere = |r: &Sandbox| app.sandboxes.find(r.id()).is_none();
        found.extend(fleet.lost_in_list(|r| is_elsewhere(r) && is_match(r)));
    }
    found
}

/// `GET /v2/sandboxes`: lists running and paused sandboxes, newest first, in pages.
pub(super) async fn list_v2(
    State(app): State<App>,
    caller: Caller,
    forwarded: Option<Extension<Forwarded>>,
    query: Query,
) -> Result<Response, ApiError> {
    let filter = Filter::from_query(&query, &["running", "paused"])?;
    let page = Page::from_query(&query)?;
    // The position must not contain more of the id than the caller may see.
    let position = |r: &Sandbox| (r.created_ms(), caller.shown_id(r.id()).to_owned());
    let reaches = |r: &Sandbox| page.reaches(&position(r));
    let items = matching_sandboxes(
        &app,
        &caller,
        &filter,
        &page.order(),
        page.fetch_limit(),
        forwarded.is_some(),
        reaches,
    );
    let (items, next) = page.cut(items, position);
    let shown: Vec<ListedSandbox> = items.iter().map(|r| app.listed(&caller, r)).collect();
    Ok(with_next(Json(shown).into_response(), next))
}

/// `GET /sandboxes`: lists all running sandboxes.
pub(super) async fn list_v1(
    State(app): State<App>,
    caller: Caller,
    forwarded: Option<Extension<Forwarded>>,
    query: Query,
) -> Result<Json<Vec<ListedSandbox>>, ApiError> {
    let filter = Filter::from_query(&query, &["running"])?;
    let (order, is_forwarded) = (ListOrder::default(), forwarded.is_some());
    // This version of the call has no pages.
    let all = matching_sandboxes(
        &app,
        &caller,
        &filter,
        &order,
        usize::MAX,
        is_forwarded,
        |_| true,
    );
    Ok(Json(all.iter().map(|r| app.listed(&caller, r)).collect()))
}

/// `GET /sandboxes/{id}`.
pub(super) async fn one(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<SandboxDetail>, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    Ok(Json(app.detail(&caller, &record)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Encodes pairs as E2B's clients do: each part is encoded, then the pairs as a query, then the
    /// query as a parameter value.
    fn quoted(pairs: &BTreeMap<String, String>) -> String {
        let quote = |text: &str| {
            percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC)
                .to_string()
        };
        let parts = pairs
            .iter()
            .map(|(k, v)| format!("{}={}", quote(&quote(k)), quote(&quote(v))));
        quote(&parts.collect::<Vec<_>>().join("&"))
    }

    proptest! {
        #[test]
        fn any_metadata_survives_being_quoted_as_clients_do_it(
            pairs in proptest::collection::btree_map(".{0,20}", ".{0,20}", 1..5),
        ) {
            let query = Query::parse(&format!("metadata={}", quoted(&pairs))).unwrap();
            prop_assert_eq!(query.pairs("metadata").unwrap(), pairs);
        }

        #[test]
        fn any_query_is_understood_or_refused(text in ".{0,200}") {
            let text = format!("state={text}&startedAfter={text}&metadata={text}&{text}");
            if let Ok(query) = Query::parse(&text) {
                let _ = Filter::from_query(&query, &["running"]);
            }
        }
    }
}
