//! Pages of the audit log, from this host or from all hosts of a fleet.

use crate::app::App;
use crate::audit::READ_CALL;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::events::{advance, credentials, page_and_wait, unreadable};
use crate::query::Query;
use crate::wire::event::{audited, dropped};
use axum::http::HeaderMap;
use jiffy_api_types::AuditPage;
use jiffy_event_log::{AuditFilter, AuditLog, Order, PageQuery};
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Maximum length of a filter in bytes.
pub(crate) const MAX_FILTER: usize = 256;
/// Minimum interval at which a waiting request reads the log: each read scans a file.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// Entries that a request selects.
#[derive(Debug, Clone)]
pub(crate) struct AuditSelection {
    pub page: PageQuery,
    pub filter: AuditFilter,
    /// Time for which the request waits for the first entry.
    pub wait: Duration,
    /// Headers with the key of the caller, for requests to other hosts of a fleet.
    pub credentials: HeaderMap,
}

impl AuditSelection {
    /// Parses the parameters of `GET /audit`.
    pub fn parse(query: &Query, headers: &HeaderMap) -> Result<Self, ApiError> {
        let (page, wait) = page_and_wait(query)?;
        let text = |name: &str| match query.get(name) {
            Some(text) if text.len() > MAX_FILTER => Err(ApiError::invalid(format!(
                "`{name}` has more than {MAX_FILTER} bytes"
            ))),
            text => Ok(text.map(str::to_owned)),
        };
        Ok(Self {
            page,
            filter: AuditFilter {
                key: text("keyID")?,
                sandbox: text("sandboxID")?,
                address: text("address")?,
                call: text("call")?,
                rejected: query.flag("rejected")?,
            },
            wait,
            credentials: credentials(headers),
        })
    }
}

/// Returns whether a page has entries of calls other than reads of the audit log. Reads that wait
/// for entries are answered only then. Otherwise, a client that follows the log would be answered
/// at once, because its previous read has added an entry to the log.
pub(crate) fn has_other_calls(page: &AuditPage) -> bool {
    page.entries.iter().any(|entry| entry.call != READ_CALL)
}

impl App {
    fn audit_log(&self) -> Result<AuditLog, ApiError> {
        let log = self.audit.clone();
        log.ok_or_else(|| ApiError::unsupported("this host has no audit log"))
    }

    /// Reads a page of the audit log of this host.
    pub(crate) async fn local_audit(
        &self,
        caller: &Caller,
        selection: &AuditSelection,
    ) -> Result<AuditPage, ApiError> {
        let log = self.audit_log()?;
        let AuditSelection { page, filter, .. } = selection.clone();
        // If the page is empty, the next page begins where this one began. If this page began at
        // the oldest entry, the next page begins after the newest entry. The newest entry is
        // determined before the scan, so that entries that are written during the scan are not
        // skipped.
        let unchanged = match page.order {
            Order::Ascending => page.after.clone().or_else(|| log.newest()),
            Order::Descending => page.before.clone(),
        };
        // A scan reads files of up to 32 MiB, so the number of concurrent scans is limited.
        let permit = self.event_streams.scans.acquire().await;
        let read = tokio::task::spawn_blocking(move || log.page(&page, &filter)).await;
        drop(permit);
        let read = read.map_err(|e| ApiError::internal(e.to_string()))?;
        let read = read.map_err(unreadable)?;
        Ok(AuditPage {
            entries: read.entries.into_iter().map(audited).collect(),
            next: read.next.or(unchanged).map(|id| id.to_string()),
            more: read.more,
            dropped: read.dropped.map(|entries| dropped(caller, entries)),
        })
    }

    /// Reads a page of the audit log, from all hosts of a fleet unless another host has forwarded
    /// the request. Waits for the first entry if the selection requests this. `is_forwarded` states
    /// that another host has forwarded it.
    pub(crate) async fn audit_page(
        &self,
        caller: &Caller,
        mut selection: AuditSelection,
        is_forwarded: bool,
    ) -> Result<(AuditPage, Vec<String>), ApiError> {
        let end = Instant::now() + selection.wait;
        let fleet = self.fleet.as_ref().filter(|_| !is_forwarded);
        let mut newest = self.audit_log()?.subscribe();
        let mut is_ended = self.event_streams.ended();
        loop {
            newest.borrow_and_update();
            let start = Instant::now();
            let (page, missing) = match fleet {
                Some(fleet) => fleet.audit(self, caller, &selection).await?,
                None => (self.local_audit(caller, &selection).await?, Vec::new()),
            };
            let is_over = Instant::now() >= end || *is_ended.borrow();
            if has_other_calls(&page) || page.more || is_over {
                return Ok((page, missing));
            }
            // If the page contains only reads of the audit log, the same range is read again, so
            // that these entries are returned together with the next entry of another call.
            if page.entries.is_empty() {
                advance(&mut selection.page, page.next.as_deref());
            }
            let changed = async {
                sleep_until(start + READ_INTERVAL).await;
                if fleet.is_none() {
                    // A receiver exists as long as its log.
                    let _ = newest.changed().await;
                }
            };
            let _ = timeout_at(end, async {
                tokio::select! {
                    _ = is_ended.changed() => {}
                    () = changed => {}
                }
            })
            .await;
        }
    }
}
