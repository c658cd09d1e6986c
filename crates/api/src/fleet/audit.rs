//! Audit log of all members of a fleet, merged by the ids of the entries.

use super::Fleet;
use super::forward::{BufferedCall, Purpose};
use super::merged_log::{LogPage, add_parameter, merge, page_uri, read};
use crate::app::App;
use crate::audit_pages::AuditSelection;
use crate::caller::Caller;
use crate::error::ApiError;
use axum::http::{Method, Uri};
use jiffy_api_types::{AuditEntry, AuditPage};
use jiffy_engine_api::now_ms;

impl Fleet {
    /// Merges the audit logs of all members. Returns the members without an answer.
    pub(crate) async fn audit(
        &self,
        app: &App,
        caller: &Caller,
        selection: &AuditSelection,
    ) -> Result<(AuditPage, Vec<String>), ApiError> {
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
            app.local_audit(caller, selection),
            self.send_to_all(&call, read::<AuditPage>)
        );
        let (mut pages, mut missing) = (vec![part(own?)], Vec::new());
        for (member, _, page) in others {
            match page {
                Some(page) => pages.push(part(page)),
                None => missing.push(member.to_string()),
            }
        }
        missing.sort();
        let merged = merge(pages, |entry| &entry.id, &selection.page, now_ms());
        let page = AuditPage {
            entries: merged.entries,
            next: merged.next,
            more: merged.more,
            dropped: merged.dropped,
        };
        Ok((page, missing))
    }
}

fn part(page: AuditPage) -> LogPage<AuditEntry> {
    LogPage {
        entries: page.entries,
        next: page.next,
        more: page.more,
        dropped: page.dropped,
    }
}

/// Returns the request that selects the entries.
fn uri(selection: &AuditSelection) -> Result<Uri, ApiError> {
    let AuditSelection { page, filter, .. } = selection;
    let mut uri = page_uri("/audit", page);
    for (name, value) in [
        ("keyID", &filter.key),
        ("sandboxID", &filter.sandbox),
        ("address", &filter.address),
        ("call", &filter.call),
    ] {
        if let Some(value) = value {
            add_parameter(&mut uri, name, value);
        }
    }
    if filter.rejected {
        add_parameter(&mut uri, "rejected", "true");
    }
    let uri = uri.parse();
    uri.map_err(|_| ApiError::invalid("the selection of entries is invalid"))
}
