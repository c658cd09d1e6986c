//! Usage of keys on all members of a fleet: requests the usage of each member, and adds it by day
//! and key.
//!
//! A *member* is a host of the fleet.

use super::Fleet;
use super::forward::{BufferedCall, Purpose};
use super::merged_log::{add_parameter, read};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::usage::{UsageSelection, day_text, position_after};
use axum::http::Method;
use jiffy_api_types::{DailyUsage, UsagePage};
use std::collections::BTreeMap;

impl Fleet {
    /// Adds the usage on all members. Returns the members without an answer.
    pub(crate) async fn usage(
        &self,
        app: &App,
        caller: &Caller,
        selection: &UsageSelection,
    ) -> Result<(UsagePage, Vec<String>), ApiError> {
        let uri = uri(selection).parse();
        let call = BufferedCall {
            method: Method::GET,
            uri: uri.map_err(|_| ApiError::invalid("the selection of usage is invalid"))?,
            headers: selection.credentials.clone(),
            body: Default::default(),
            caller: caller.clone(),
            client: None,
            // The answers of all members are merged.
            purpose: Purpose::Part,
            placement: None,
        };
        let own = app.local_usage(&selection.query);
        let (own, others) = tokio::join!(own, self.send_to_all(&call, read::<UsagePage>));
        let (mut pages, mut missing) = (vec![own?], Vec::new());
        for (member, _, page) in others {
            match page {
                Some(page) => pages.push(page),
                None => missing.push(member.to_string()),
            }
        }
        missing.sort();
        Ok((merge(pages, selection.query.limit), missing))
    }
}

/// Returns the request that selects the usage.
fn uri(selection: &UsageSelection) -> String {
    let query = &selection.query;
    let (from, to) = (day_text(query.from), day_text(query.to));
    let mut uri = format!("/usage?limit={}&from={from}&to={to}", query.limit);
    if let Some(owner) = &query.owner {
        let owner = if owner.is_empty() { "owner" } else { owner };
        add_parameter(&mut uri, "key", owner);
    }
    if let Some((day, owner)) = &query.after {
        add_parameter(&mut uri, "after", &format!("{}.{owner}", day_text(*day)));
    }
    uri
}

/// Adds the rows of the same day and key. The merged page ends where the first incomplete page
/// ends, so that each row includes all members.
fn merge(pages: Vec<UsagePage>, limit: usize) -> UsagePage {
    let key = |row: &DailyUsage| (row.date.clone(), row.key_id.clone().unwrap_or_default());
    let ends = pages.iter().filter(|page| page.next.is_some());
    // Rows after the end of an incomplete page lack the usage on its host.
    let end = ends.filter_map(|page| page.usage.last().map(key)).min();
    let mut rows: BTreeMap<(String, String), DailyUsage> = BTreeMap::new();
    for row in pages.into_iter().flat_map(|page| page.usage) {
        let position = key(&row);
        if end.as_ref().is_some_and(|end| position > *end) {
            continue;
        }
        match rows.get_mut(&position) {
            Some(sum) => add(sum, &row),
            None => drop(rows.insert(position, row)),
        }
    }
    let more = end.is_some() || rows.len() > limit;
    let usage: Vec<DailyUsage> = rows.into_values().take(limit).collect();
    let last = usage.last().filter(|_| more);
    UsagePage {
        next: last.map(position_after),
        usage,
        missing_hosts: Vec::new(),
    }
}

/// Adds the usage of another member on the same day.
fn add(sum: &mut DailyUsage, row: &DailyUsage) {
    sum.sandbox_seconds += row.sandbox_seconds;
    sum.cpu_seconds += row.cpu_seconds;
    sum.memory_gib_seconds += row.memory_gib_seconds;
    sum.stored_gib_seconds += row.stored_gib_seconds;
    sum.stored_bytes = sum.stored_bytes.saturating_add(row.stored_bytes);
    sum.sent_bytes = sum.sent_bytes.saturating_add(row.sent_bytes);
    sum.function_requests = sum.function_requests.saturating_add(row.function_requests);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the usage of a key on a day. An empty `key` is the owner of the host.
    fn row(date: &str, key: &str, seconds: f64) -> DailyUsage {
        DailyUsage {
            date: date.to_owned(),
            key_id: Some(key.to_owned()).filter(|key| !key.is_empty()),
            key_name: None,
            sandbox_seconds: seconds,
            cpu_seconds: 0.5,
            memory_gib_seconds: seconds,
            stored_gib_seconds: 0.0,
            stored_bytes: u64::MAX / 2,
            sent_bytes: 1,
            function_requests: 2,
        }
    }

    fn page(usage: Vec<DailyUsage>, more: bool) -> UsagePage {
        let next = usage.last().filter(|_| more).map(position_after);
        UsagePage {
            usage,
            next,
            missing_hosts: Vec::new(),
        }
    }

    #[test]
    fn usage_of_a_key_is_the_sum_of_all_hosts() {
        let one = page(
            vec![row("2026-01-01", "", 1.0), row("2026-01-01", "a", 2.0)],
            false,
        );
        let two = page(
            vec![row("2026-01-01", "a", 3.0), row("2026-01-02", "a", 4.0)],
            false,
        );
        let merged = merge(vec![one, two], 10);
        let seconds: Vec<f64> = merged.usage.iter().map(|row| row.sandbox_seconds).collect();
        assert_eq!((seconds, merged.next), (vec![1.0, 5.0, 4.0], None));
        assert_eq!(merged.usage[1].sent_bytes, 2);
    }

    #[test]
    fn merged_pages_neither_lose_nor_repeat_usage() {
        // The first host has further rows after `b`, which may add to `c`.
        let one = page(
            vec![row("2026-01-01", "a", 1.0), row("2026-01-01", "b", 1.0)],
            true,
        );
        let two = page(vec![row("2026-01-01", "c", 1.0)], false);
        let merged = merge(vec![one, two.clone()], 2);
        assert_eq!(merged.usage.len(), 2);
        assert_eq!(merged.next.as_deref(), Some("2026-01-01.b"));
        // All pages are complete, but the merged page is full.
        let one = page(vec![row("2026-01-01", "a", 1.0)], false);
        let merged = merge(vec![one, two], 1);
        assert_eq!(merged.next.as_deref(), Some("2026-01-01.a"));
    }
}
