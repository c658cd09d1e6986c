//! [`EventFeed`]: the log of the events of a host. Components record events, and the API reads
//! pages and waits for new ones.

use crate::event::Event;
use crate::id::EntryId;
use crate::log::page::{Order, Page, PageQuery};
use crate::log::{AppendLog, LogError, Retention, now_us};
use jiffy_api_types::EventType;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::watch;

/// Number of recent events in memory, from which streams are served.
const MAX_RECENT: usize = 1024;
/// Host of a feed without files.
const MEMORY_HOST: &str = "memory";

/// Selection of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SandboxChoice {
    /// The sandbox with this id.
    Exact(String),
    /// Sandboxes whose id begins with this text.
    Prefix(String),
}

impl SandboxChoice {
    fn matches(&self, sandbox: Option<&str>) -> bool {
        sandbox.is_some_and(|sandbox| match self {
            Self::Exact(id) => sandbox == id,
            Self::Prefix(prefix) => sandbox.starts_with(prefix),
        })
    }

    /// Returns a text that JSON with this sandbox contains.
    fn text(&self) -> String {
        match self {
            Self::Exact(id) => format!("\"{id}\""),
            Self::Prefix(prefix) => format!("\"{prefix}"),
        }
    }
}

/// Selection of events by content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventFilter {
    /// Only events of objects of this API key. `None` selects all owners.
    pub owner: Option<String>,
    /// Only events of this sandbox.
    pub sandbox: Option<SandboxChoice>,
    /// Only events of these types. Empty selects all types.
    pub types: Vec<EventType>,
}

impl EventFilter {
    fn matches(&self, event: &Event) -> bool {
        let is_owned = self.owner.is_none() || self.owner == event.owner;
        let sandbox = event.sandbox.as_deref();
        let is_sandbox = self.sandbox.as_ref().is_none_or(|s| s.matches(sandbox));
        let is_type = self.types.is_empty() || self.types.contains(&event.kind);
        is_owned && is_sandbox && is_type
    }

    /// Returns texts that all selected entries of the log contain.
    fn texts(&self) -> Vec<String> {
        let owner = self.owner.iter().map(|id| format!("\"{id}\""));
        let sandbox = self.sandbox.iter().map(SandboxChoice::text);
        // Ids consist of letters and digits, which JSON does not escape.
        let is_plain = |text: &String| text.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'"');
        owner.chain(sandbox).filter(is_plain).collect()
    }
}

/// Events of a host: recorded in files, or in memory only. Clones share the feed.
#[derive(Debug, Clone)]
pub struct EventFeed(Arc<Feed>);

/// State of a feed, shared by its clones.
#[derive(Debug)]
struct Feed {
    /// `None` for a feed in memory.
    log: Option<AppendLog>,
    host: Arc<str>,
    recent: Mutex<VecDeque<Event>>,
    /// Time of the newest event, in microseconds since 1970.
    newest: watch::Sender<u64>,
}

impl EventFeed {
    /// Opens or creates the feed in `directory`. `host` is the name of this host in a fleet.
    pub fn open(
        directory: &Path,
        host: Option<&str>,
        retention: Retention,
    ) -> Result<Self, LogError> {
        let log = AppendLog::open(directory, host, retention)?;
        let newest = log.newest().map_or(0, |id| id.time_us);
        Ok(Self(Arc::new(Feed {
            host: log.host().clone(),
            log: Some(log),
            recent: Mutex::default(),
            newest: watch::Sender::new(newest),
        })))
    }

    /// Creates a feed that retains the most recent events in memory only.
    #[must_use]
    pub fn in_memory() -> Self {
        Self(Arc::new(Feed {
            log: None,
            host: MEMORY_HOST.into(),
            recent: Mutex::default(),
            newest: watch::Sender::new(0),
        }))
    }

    /// Name of this host in the ids of events.
    #[must_use]
    pub fn host(&self) -> &Arc<str> {
        &self.0.host
    }

    /// Records an event. An event that cannot be written counts as dropped: the operation that it
    /// describes has happened.
    pub fn append(&self, mut event: Event) {
        // Hold the lock during the write, so that the events in memory have the order of the log.
        let mut recent = self.0.recent.lock();
        let written = match &self.0.log {
            Some(log) => log.append(|time_us| {
                event.time_us = time_us;
                serde_json::to_vec(&event)
            }),
            None => {
                event.time_us = now_us().max(recent.back().map_or(0, |last| last.time_us) + 1);
                Some(event.time_us)
            }
        };
        let Some(time_us) = written else { return };
        if recent.len() >= MAX_RECENT {
            recent.pop_front();
        }
        recent.push_back(event);
        drop(recent);
        self.0.newest.send_replace(time_us);
    }

    /// Returns the id of the newest event. `None` if there was none.
    #[must_use]
    pub fn newest(&self) -> Option<EntryId> {
        let time_us = *self.0.newest.borrow();
        (time_us > 0).then(|| EntryId {
            time_us,
            host: self.0.host.clone(),
        })
    }

    /// Returns the time of the newest event, and its changes.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.newest.subscribe()
    }

    /// Returns whether `id` is later than all events of this host, although this host recorded it:
    /// the log was removed.
    #[must_use]
    pub fn is_unknown(&self, id: &EntryId) -> bool {
        id.host == self.0.host && id.time_us > *self.0.newest.borrow()
    }

    /// Reads a page from memory, if memory has all of its events.
    #[must_use]
    pub fn recent_page(&self, query: &PageQuery, filter: &EventFilter) -> Option<Page<Event>> {
        let recent = self.0.recent.lock();
        let has_all = match (&self.0.log, recent.front()) {
            (None, _) => true,
            // The event before the first one in memory may be in the file only.
            (Some(_), Some(first)) => query
                .after
                .as_ref()
                .is_some_and(|after| after.time_us >= first.time_us),
            (Some(_), None) => query
                .after
                .as_ref()
                .is_some_and(|after| after.time_us >= *self.0.newest.borrow()),
        };
        if !has_all {
            return None;
        }
        let id = |event: &Event| EntryId {
            time_us: event.time_us,
            host: self.0.host.clone(),
        };
        let selected = |event: &&Event| query.contains(&id(event)) && filter.matches(event);
        let take = query.limit.saturating_add(1);
        let events = recent.iter();
        let mut entries: Vec<_> = match query.order {
            Order::Ascending => {
                let events = events.filter(selected).skip(query.offset);
                events.take(take).map(|e| (id(e), e.clone())).collect()
            }
            Order::Descending => {
                let events = events.rev().filter(selected).skip(query.offset);
                events.take(take).map(|e| (id(e), e.clone())).collect()
            }
        };
        let more = entries.len() > query.limit;
        entries.truncate(query.limit);
        let last = entries.last().map(|(id, _)| id.clone());
        let newest = recent.back().map(id);
        let newest = newest.filter(|newest| query.after.as_ref().is_none_or(|id| newest > id));
        let next = match query.order {
            // All events in memory were examined.
            Order::Ascending if !more && query.before.is_none() => newest.or(last),
            _ => last,
        };
        Some(Page {
            entries,
            next,
            more,
            dropped: None,
        })
    }

    /// Reads a page. Blocks.
    pub fn page(&self, query: &PageQuery, filter: &EventFilter) -> Result<Page<Event>, LogError> {
        match (&self.0.log, self.recent_page(query, filter)) {
            (_, Some(page)) => Ok(page),
            (Some(log), None) => log.page(query, &filter.texts(), |event| filter.matches(event)),
            // Unreachable: a feed without files has all events in memory.
            (None, None) => Ok(Page {
                entries: Vec::new(),
                next: None,
                more: false,
                dropped: None,
            }),
        }
    }
}

#[cfg(test)]
mod tests;
