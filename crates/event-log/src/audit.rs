//! [`AuditLog`]: the calls that a host has answered, with their callers and results.

use crate::id::EntryId;
use crate::log::page::{Entry, Page, PageQuery};
use crate::log::{AppendLog, LogError, Retention};
use crate::rejections::Rejections;
use jiffy_api_types::AuditCaller;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;

/// Maximum number of clients without a key whose rejected calls are counted separately.
const MAX_UNKNOWN_CLIENTS: usize = 100;
/// Maximum number of other clients whose rejected calls are counted separately.
const MAX_KNOWN_CLIENTS: usize = 1000;

/// Call that a host has answered, as the log stores it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditedCall {
    /// Time in microseconds since 1970. The log sets it.
    #[serde(rename = "t")]
    pub time_us: u64,
    /// Kind of the caller.
    pub caller: AuditCaller,
    /// Id of the caller's API key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Id of the console session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Address of the client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Id of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// Method and path, with the names of the parameters.
    pub call: String,
    /// Sandbox in the path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// Other object in the path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// Command that the call started in the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Paths in the sandbox that the call accessed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
    /// Status of the response.
    pub status: u16,
    /// Error code of the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Duration in milliseconds.
    pub ms: u64,
    /// Number of calls that the entry stands for.
    pub count: u64,
}

impl Entry for AuditedCall {
    fn time_us(&self) -> u64 {
        self.time_us
    }
}

impl AuditedCall {
    /// Creates the entry of a call without a known caller.
    #[must_use]
    pub fn new(call: String, status: u16) -> Self {
        Self {
            time_us: 0,
            caller: AuditCaller::Unknown,
            key: None,
            session: None,
            address: None,
            request: None,
            call,
            sandbox: None,
            object: None,
            command: None,
            paths: Vec::new(),
            status,
            error: None,
            ms: 0,
            count: 1,
        }
    }

    /// Returns whether the call was rejected because of its caller, its object or a limit.
    #[must_use]
    pub fn is_rejected(&self) -> bool {
        match self.caller {
            // The agent in the guest answers these calls. It also returns 403 and 404 if a file is
            // not accessible or does not exist.
            AuditCaller::Token => self.status == 429,
            _ => matches!(self.status, 401 | 403 | 404 | 429),
        }
    }
}

/// Selection of calls by content. `None` selects all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Only calls with this API key.
    pub key: Option<String>,
    /// Only calls on this sandbox.
    pub sandbox: Option<String>,
    /// Only calls from this address.
    pub address: Option<String>,
    /// Only calls whose method and path contain this text.
    pub call: Option<String>,
    /// Only rejected calls.
    pub rejected: bool,
}

impl AuditFilter {
    fn matches(&self, call: &AuditedCall) -> bool {
        let is =
            |wanted: &Option<String>, value: &Option<String>| wanted.is_none() || wanted == value;
        let has_text = self
            .call
            .as_ref()
            .is_none_or(|text| call.call.contains(text));
        is(&self.key, &call.key)
            && is(&self.sandbox, &call.sandbox)
            && is(&self.address, &call.address)
            && has_text
            && (!self.rejected || call.is_rejected())
    }

    /// Returns texts that all selected entries of the log contain.
    fn texts(&self) -> Vec<String> {
        let ids = [&self.key, &self.sandbox].into_iter().flatten();
        // Ids consist of letters and digits, which JSON does not escape.
        let ids = ids.filter(|id| id.bytes().all(|c| c.is_ascii_alphanumeric()));
        ids.map(|id| format!("\"{id}\"")).collect()
    }
}

/// Audit log of a host. Clones share the log.
#[derive(Debug, Clone)]
pub struct AuditLog(Arc<Inner>);

/// State of an audit log, shared by its clones.
#[derive(Debug)]
struct Inner {
    log: AppendLog,
    /// Rejected calls with a valid key or of the owner.
    known: Mutex<Rejections>,
    /// Rejected calls without a valid key. They cannot displace the calls of other
    /// callers.
    unknown: Mutex<Rejections>,
    /// Changes with each entry.
    newest: watch::Sender<()>,
}

impl AuditLog {
    /// Opens or creates the log in `directory`. `host` is the name of this host in a fleet. Entries
    /// are removed before the age `retention.max_age` if calls are recorded then.
    pub fn open(
        directory: &Path,
        host: Option<&str>,
        retention: Retention,
    ) -> Result<Self, LogError> {
        let retention = Retention {
            // With a maximum age of `a`, a file contains the entries of `a / 7`. It is removed when
            // its newest entry has the age `a` and the file that is written then is complete. Its
            // oldest entry then has an age of at most `a / 7 + a + a / 7`, which is `9 / 7 * a`.
            max_age: retention.max_age * 7 / 9,
            ..retention
        };
        Ok(Self(Arc::new(Inner {
            log: AppendLog::open(directory, host, retention)?,
            known: Mutex::new(Rejections::new(MAX_KNOWN_CLIENTS)),
            unknown: Mutex::new(Rejections::new(MAX_UNKNOWN_CLIENTS)),
            newest: watch::Sender::default(),
        })))
    }

    /// Records a call. Of many rejected calls of one client, further ones are counted and recorded
    /// as one entry by [`Self::write_counted`].
    pub fn record(&self, call: AuditedCall) {
        if call.is_rejected() {
            let rejections = match call.caller {
                AuditCaller::Unknown => &self.0.unknown,
                _ => &self.0.known,
            };
            let entries = rejections.lock().add(call, Instant::now());
            entries.into_iter().for_each(|call| self.write(call));
        } else {
            self.write(call);
        }
    }

    /// Records the counted calls of periods that are over. With `all`, of all periods.
    pub fn write_counted(&self, all: bool) {
        for rejections in [&self.0.known, &self.0.unknown] {
            let entries = rejections.lock().take_counted(Instant::now(), all);
            entries.into_iter().for_each(|call| self.write(call));
        }
    }

    /// Appends a call to the log, and wakes readers that wait for new calls.
    fn write(&self, mut call: AuditedCall) {
        let written = self.0.log.append(|time_us| {
            call.time_us = time_us;
            serde_json::to_vec(&call)
        });
        if written.is_some() {
            self.0.newest.send_replace(());
        }
    }

    /// Returns the id of the newest entry. `None` if there was none.
    #[must_use]
    pub fn newest(&self) -> Option<EntryId> {
        self.0.log.newest()
    }

    /// Returns a receiver that changes with each entry.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.0.newest.subscribe()
    }

    /// Reads a page. Blocks.
    pub fn page(
        &self,
        query: &PageQuery,
        filter: &AuditFilter,
    ) -> Result<Page<AuditedCall>, LogError> {
        let matches = |call: &AuditedCall| filter.matches(call);
        self.0.log.page(query, &filter.texts(), matches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const RETENTION: Retention = Retention {
        max_bytes: 1 << 20,
        max_age: Duration::from_secs(3600),
    };

    fn call(status: u16, address: &str) -> AuditedCall {
        AuditedCall {
            address: Some(address.to_owned()),
            ..AuditedCall::new("GET /sandboxes".to_owned(), status)
        }
    }

    fn all(log: &AuditLog, filter: &AuditFilter) -> Vec<AuditedCall> {
        let query = PageQuery {
            limit: 10_000,
            ..PageQuery::default()
        };
        let page = log.page(&query, filter).unwrap();
        page.entries.into_iter().map(|(_, call)| call).collect()
    }

    #[test]
    fn a_flood_of_rejections_from_one_address_is_one_entry_with_a_count() {
        let directory = tempfile::tempdir().unwrap();
        let log = AuditLog::open(directory.path(), None, RETENTION).unwrap();
        for _ in 0..5000 {
            log.record(call(401, "192.0.2.1"));
        }
        log.record(call(401, "192.0.2.2"));
        log.record(call(200, "192.0.2.1"));
        log.write_counted(true);
        let of = |address: &str| {
            let filter = AuditFilter {
                address: Some(address.to_owned()),
                rejected: true,
                ..AuditFilter::default()
            };
            all(&log, &filter)
        };
        let flood = of("192.0.2.1");
        // The first calls individually, and the others as one entry.
        assert_eq!(flood.len(), 6);
        assert_eq!(flood[5].count, 4995);
        assert_eq!(of("192.0.2.2").len(), 1);
        // Forget the log without a shutdown, as SIGKILL does.
        std::mem::forget(log);
        let log = AuditLog::open(directory.path(), None, RETENTION).unwrap();
        let calls = all(&log, &AuditFilter::default());
        assert_eq!(calls.iter().map(|call| call.count).sum::<u64>(), 5002);
    }
}
