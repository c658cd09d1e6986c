//! Audit log of all members of a fleet. The member that receives the call requests the entries of
//! each member, and merges them by their ids.
//!
//! A *member* is a host of the fleet.

use super::Fleet;
use super::merged_log::{LogPage, PageOfLog, add_parameter, page_uri};
use crate::app::App;
use crate::audit_pages::AuditSelection;
use crate::caller::Caller;
use crate::error::ApiError;
use jiffy_api_types::{AuditEntry, AuditPage};

impl Fleet {
    /// Merges the audit logs of all members. Returns a page, and the members that did not answer.
    pub(crate) async fn audit(
        &self,
        app: &App,
        caller: &Caller,
        selection: &AuditSelection,
    ) -> Result<(AuditPage, Vec<String>), ApiError> {
        let uri = uri(selection);
        let call = (&*uri, &selection.credentials);
        let own = app.local_audit(caller, selection);
        self.merged(caller, call, &selection.page, own).await
    }
}

impl PageOfLog for AuditPage {
    type Entry = AuditEntry;

    fn into_page(self) -> LogPage<AuditEntry> {
        LogPage {
            entries: self.entries,
            next: self.next,
            more: self.more,
            dropped: self.dropped,
        }
    }

    fn from_page(page: LogPage<AuditEntry>) -> Self {
        Self {
            entries: page.entries,
            next: page.next,
            more: page.more,
            dropped: page.dropped,
        }
    }

    fn id(entry: &AuditEntry) -> &String {
        &entry.id
    }
}

/// Returns the request that selects the entries.
fn uri(selection: &AuditSelection) -> String {
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
    uri
}
