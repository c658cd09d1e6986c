//! Pages of the usage of keys, from this host or from all hosts of a fleet.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::events::credentials;
use crate::lookup::short;
use crate::query::Query;
use axum::http::HeaderMap;
use jiff::civil::Date;
use jiffy_api_types::{DailyUsage, UsagePage};
use jiffy_sandbox_manager::{Day, DayUsage, UsageQuery};
use std::collections::HashMap;

/// Maximum and default number of rows of a page.
pub(crate) const MAX_ROWS: usize = 1000;
pub(crate) const DEFAULT_ROWS: usize = 100;
/// Maximum length of the id or name of a key in bytes.
pub(crate) const MAX_KEY: usize = 256;
/// Maximum length of a position: a day, a dot and the id of a key.
pub(crate) const MAX_CURSOR: usize = 128;
/// Days before the last day of a selection without a first day.
const DEFAULT_DAYS: u32 = 29;
/// Name of the host's owner in requests.
const HOST_OWNER: &str = "owner";

/// Usage that a request selects.
#[derive(Debug, Clone)]
pub(crate) struct UsageSelection {
    pub query: UsageQuery,
    /// Headers with the key of the caller, for requests to other hosts of a fleet.
    pub credentials: HeaderMap,
}

impl UsageSelection {
    /// Parses the parameters of `GET /usage`.
    pub fn parse(
        app: &App,
        caller: &Caller,
        query: &Query,
        headers: &HeaderMap,
    ) -> Result<Self, ApiError> {
        let to = day(query, "to")?.unwrap_or_else(|| app.sandboxes.usage().today());
        let from = day(query, "from")?;
        let limit = query.number("limit", 1..=MAX_ROWS as u64)?;
        Ok(Self {
            query: UsageQuery {
                owner: owner(app, caller, query.get("key"))?,
                from: from.unwrap_or(Day(to.0.saturating_sub(DEFAULT_DAYS))),
                to,
                after: query.get("after").map(position).transpose()?,
                limit: limit.map_or(DEFAULT_ROWS, |n| usize::try_from(n).unwrap_or(MAX_ROWS)),
            },
            credentials: credentials(headers),
        })
    }
}

/// Returns the owner whose usage is selected. `None` selects all owners.
fn owner(app: &App, caller: &Caller, key: Option<&str>) -> Result<Option<String>, ApiError> {
    let own = caller.owner_id();
    if !caller.is_admin() {
        // The same answer whether or not another key exists.
        if key.is_some_and(|key| own.as_deref() != Some(key)) {
            return Err(ApiError::forbidden(
                "the usage of another key requires a key with the scope `admin`",
            ));
        }
        return Ok(Some(own.unwrap_or_default()));
    }
    let Some(key) = key else {
        return Ok(None);
    };
    if key == HOST_OWNER {
        return Ok(Some(String::new()));
    }
    if key.len() > MAX_KEY {
        return Err(ApiError::invalid(format!(
            "`key` has more than {MAX_KEY} bytes"
        )));
    }
    // Includes revoked keys, whose usage remains.
    let keys = app.keys.list();
    let keys = keys.map_err(|e| ApiError::internal(e.to_string()))?;
    if keys.iter().any(|known| known.id == key) {
        return Ok(Some(key.to_owned()));
    }
    let mut named = keys.into_iter().filter(|known| known.name == key);
    match (named.next(), named.next()) {
        (Some(only), None) => Ok(Some(only.id)),
        (Some(_), Some(_)) => Err(ApiError::invalid(format!(
            "several keys have the name `{}`: use the id of a key",
            short(key)
        ))),
        (None, _) => Err(ApiError::not_found(
            "key_not_found",
            format!("key `{}` does not exist", short(key)),
        )),
    }
}

/// First day of the count of [`Day`].
const EPOCH: Date = jiff::civil::date(1970, 1, 1);

/// Parses a day.
fn day(query: &Query, name: &str) -> Result<Option<Day>, ApiError> {
    let Some(text) = query.get(name) else {
        return Ok(None);
    };
    let day = parse_day(text).map(Some);
    day.ok_or_else(|| ApiError::invalid(format!("`{name}` must be a day, like 2026-01-31")))
}

fn parse_day(text: &str) -> Option<Day> {
    // The form is fixed: a longer text may have a time, which has no effect.
    let date: Date = Some(text).filter(|text| text.len() == 10)?.parse().ok()?;
    let days = date.since(EPOCH).ok()?.get_days();
    u32::try_from(days).ok().map(Day)
}

/// Returns a day as text. Days beyond the year 9999 are the last one.
pub(crate) fn day_text(day: Day) -> String {
    let days = jiff::Span::new().try_days(day.0);
    let date = days.and_then(|days| EPOCH.checked_add(days));
    date.unwrap_or(Date::MAX).to_string()
}

/// Parses the position after a page.
fn position(text: &str) -> Result<(Day, String), ApiError> {
    let position = text.split_once('.').and_then(|(day, owner)| {
        let is_owner =
            owner.len() <= MAX_CURSOR && owner.bytes().all(|c| c.is_ascii_alphanumeric());
        Some((parse_day(day)?, is_owner.then(|| owner.to_owned())?))
    });
    position.ok_or_else(|| ApiError::invalid("`after` is not the `next` of a page"))
}

/// Returns the position after a row.
pub(crate) fn position_after(row: &DailyUsage) -> String {
    format!("{}.{}", row.date, row.key_id.as_deref().unwrap_or_default())
}

/// Returns a row in its wire format.
fn wire(row: DayUsage) -> DailyUsage {
    let amounts = row.amounts;
    DailyUsage {
        date: day_text(row.day),
        key_id: row.owner,
        key_name: None,
        sandbox_seconds: amounts.sandbox_ms as f64 / 1e3,
        cpu_seconds: amounts.cpu_us as f64 / 1e6,
        memory_gib_seconds: amounts.memory_mib_ms as f64 / 1024e3,
        stored_gib_seconds: amounts.stored_kib_s as f64 / f64::from(1 << 20),
        stored_bytes: amounts.max_stored_bytes,
        sent_bytes: amounts.sent_bytes,
        function_requests: amounts.function_requests,
    }
}

impl App {
    /// Reads a page of the usage on this host.
    pub(crate) async fn local_usage(&self, query: &UsageQuery) -> Result<UsagePage, ApiError> {
        let (ledger, query) = (self.sandboxes.usage().clone(), query.clone());
        let read = tokio::task::spawn_blocking(move || ledger.page(&query)).await;
        let read = read.map_err(|e| ApiError::internal(e.to_string()))?;
        let read = read.map_err(|e| ApiError::internal(e.to_string()))?;
        let usage: Vec<DailyUsage> = read.rows.into_iter().map(wire).collect();
        let last = usage.last().filter(|_| read.more);
        Ok(UsagePage {
            next: last.map(position_after),
            usage,
            missing_hosts: Vec::new(),
        })
    }

    /// Reads a page of the usage, of all hosts of a fleet unless another host has forwarded the
    /// request. Returns the hosts without an answer.
    pub(crate) async fn usage_page(
        &self,
        caller: &Caller,
        selection: &UsageSelection,
        is_forwarded: bool,
    ) -> Result<(UsagePage, Vec<String>), ApiError> {
        let fleet = self.fleet.as_ref().filter(|_| !is_forwarded);
        let (mut page, missing) = match fleet {
            Some(fleet) => fleet.usage(self, caller, selection).await?,
            None => (self.local_usage(&selection.query).await?, Vec::new()),
        };
        self.add_key_names(caller, &mut page)?;
        page.missing_hosts.clone_from(&missing);
        Ok((page, missing))
    }

    /// Adds the names of keys, also of revoked ones.
    fn add_key_names(&self, caller: &Caller, page: &mut UsagePage) -> Result<(), ApiError> {
        let names: HashMap<String, String> = match caller.key() {
            Some(key) if !caller.is_admin() => [(key.id.clone(), key.name.clone())].into(),
            _ => {
                let keys = self.keys.list();
                let keys = keys.map_err(|e| ApiError::internal(e.to_string()))?;
                keys.into_iter().map(|key| (key.id, key.name)).collect()
            }
        };
        for row in &mut page.usage {
            let name = row.key_id.as_ref().and_then(|id| names.get(id));
            row.key_name = name.cloned();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_parsed_and_printed() {
        for text in ["1970-01-01", "2024-02-29", "2026-11-29", "9999-12-31"] {
            assert_eq!(day_text(parse_day(text).unwrap()), text);
        }
        for text in [
            "",
            "2026-13-01",
            "2026-1-1",
            "1969-12-31",
            "2026-11-29T00:00:00Z",
            "x",
        ] {
            assert_eq!(parse_day(text), None, "{text}");
        }
        assert_eq!(day_text(Day(u32::MAX)), "9999-12-31");
    }

    #[test]
    fn positions_are_parsed_and_others_rejected() {
        let (day, owner) = position("2026-11-29.k1").unwrap();
        assert_eq!((day_text(day), owner.as_str()), ("2026-11-29".into(), "k1"));
        assert_eq!(position("2026-11-29.").unwrap().1, "");
        for text in ["2026-11-29", "x.k", "2026-11-29.a'b", "."] {
            assert!(position(text).is_err(), "{text}");
        }
    }
}
