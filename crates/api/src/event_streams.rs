//! Streams of events (server-sent events, `text/event-stream`): a client receives the events of its
//! sandboxes as they are recorded. After a lost connection, it continues with the id of its last
//! event.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::events::{EventSelection, advance};
use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use jiffy_api_types::{DroppedEntries, EventPage};
use jiffy_event_log::EntryId;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};

/// Media type of a stream.
pub(crate) const EVENT_STREAM: &str = "text/event-stream";
/// Maximum number of streams of a host.
const MAX_STREAMS: usize = 1000;
/// Maximum number of streams of a key.
const MAX_STREAMS_OF_OWNER: usize = 100;
/// Maximum number of scans of files at the same time.
const MAX_SCANS: usize = 2;
/// Interval of messages on a stream without events, so that proxies do not close it.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Streams of a host.
#[derive(Debug)]
pub(crate) struct EventStreams {
    /// Permits to read files of a log.
    pub scans: Semaphore,
    /// Number of open streams by owner. `None` is the host's owner.
    by_owner: Mutex<HashMap<Option<String>, usize>>,
    /// True when the daemon stops.
    is_ended: watch::Sender<bool>,
}

impl Default for EventStreams {
    fn default() -> Self {
        Self {
            scans: Semaphore::new(MAX_SCANS),
            by_owner: Mutex::default(),
            is_ended: watch::Sender::new(false),
        }
    }
}

/// Open stream. It counts until it is dropped.
#[derive(Debug)]
struct StreamPermit {
    streams: Arc<EventStreams>,
    owner: Option<String>,
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut by_owner = self.streams.by_owner.lock();
        if let Some(count) = by_owner.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                by_owner.remove(&self.owner);
            }
        }
    }
}

impl EventStreams {
    /// Ends all streams and waiting requests.
    pub fn end(&self) {
        self.is_ended.send_replace(true);
    }

    /// Returns a receiver that becomes true when a shutdown ends all streams.
    pub fn ended(&self) -> watch::Receiver<bool> {
        self.is_ended.subscribe()
    }

    /// Counts a new stream of a key. Fails at the limits of the key and of the host.
    fn open(self: &Arc<Self>, owner: Option<String>) -> Result<StreamPermit, ApiError> {
        let mut by_owner = self.by_owner.lock();
        let total: usize = by_owner.values().sum();
        if total >= MAX_STREAMS {
            return Err(ApiError::host_busy(
                "the host serves too many event streams",
            ));
        }
        let count = by_owner.entry(owner.clone()).or_default();
        if *count >= MAX_STREAMS_OF_OWNER {
            let message = format!("the key has {MAX_STREAMS_OF_OWNER} event streams: close one");
            return Err(ApiError::too_many("max_exchanges", message));
        }
        *count += 1;
        drop(by_owner);
        Ok(StreamPermit {
            streams: self.clone(),
            owner,
        })
    }
}

/// Message of a stream.
fn message(name: &str, id: Option<&str>, data: &impl Serialize) -> String {
    let mut text = String::new();
    if let Some(id) = id {
        // Writing to a text does not fail.
        let _ = writeln!(text, "id: {id}");
    }
    let data = serde_json::to_string(data).unwrap_or_default();
    let _ = write!(text, "event: {name}\ndata: {data}\n\n");
    text
}

/// Returns the messages of a page.
fn messages(page: &EventPage, gap: Option<&DroppedEntries>) -> String {
    let gap = gap.map(|dropped| message("gap", None, dropped));
    let events = page.events.iter();
    let events = events.map(|event| message(event.kind.name(), Some(&event.id), event));
    gap.into_iter().chain(events).collect()
}

/// Page of new events.
#[derive(Debug)]
pub struct FollowedEvents {
    /// Events in their order, and the id with which the client resumes.
    pub page: EventPage,
    /// Events that the client cannot receive any longer.
    pub gap: Option<DroppedEntries>,
}

/// Follows the events that a caller sees. It counts as an open stream until it is dropped.
pub struct EventFollower {
    app: App,
    caller: Caller,
    selection: EventSelection,
    /// Id with which the client resumes, until the first page was read.
    resumed: Option<EntryId>,
    /// True if another member of the fleet forwarded the call: only events of this host are read.
    is_forwarded: bool,
    _permit: StreamPermit,
}

impl EventFollower {
    /// Returns the next events, or an empty page after a time without events. `None` if the key of
    /// the caller is not in force any longer, if the daemon stops, or after an error, which the
    /// client receives when it reconnects.
    pub async fn next(&mut self) -> Option<FollowedEvents> {
        let key = self.caller.owner_id();
        let keys = self.app.keys.clone();
        let mut is_ended = self.app.event_streams.ended();
        tokio::select! {
            () = keys.until_invalid(key.as_deref()) => None,
            _ = is_ended.wait_for(|ended| *ended) => None,
            followed = self.read() => followed,
        }
    }

    /// Reads the next page of events, and detects events that were removed since the last one.
    async fn read(&mut self) -> Option<FollowedEvents> {
        // If the log does not know the client's last event, the log was removed since. All events
        // of the new log are then new to the client.
        let feed = self.app.sandboxes.events();
        let lost = self.resumed.take().filter(|id| feed.is_unknown(id));
        if lost.is_some() {
            self.selection.page.after = None;
        }
        let read = self
            .app
            .events(&self.caller, &self.selection, self.is_forwarded);
        let (page, _) = read.await.ok()?;
        advance(&mut self.selection.page, page.next.as_deref());
        let lost = lost.map(|id| DroppedEntries {
            count: None,
            until: crate::wire::moment(id.time_us / 1000),
        });
        let gap = lost.or_else(|| page.dropped.clone());
        Some(FollowedEvents { page, gap })
    }
}

impl App {
    /// Ends all streams of events and requests that wait for events, for a shutdown.
    pub fn end_event_streams(&self) {
        self.event_streams.end();
    }

    /// Follows the events that a caller sees, after the event with the id `after`, or from now on.
    ///
    /// # Errors
    /// 400 if the id is invalid, 429 if the key has too many streams, 503 if the host has too many.
    pub fn follow_events(
        &self,
        caller: Caller,
        after: Option<&str>,
    ) -> Result<EventFollower, ApiError> {
        let resumed = after.map(str::parse).transpose();
        let resumed = resumed.map_err(|e| ApiError::invalid(format!("`after` is invalid: {e}")))?;
        let selection = EventSelection::of_all(&caller);
        self.follow(caller, selection, resumed, false)
    }

    /// Starts to follow the events that `selection` selects: from the event after `resumed` (the id
    /// that a client received last), or from now on. With `is_forwarded`, only events of this host
    /// are read.
    fn follow(
        &self,
        caller: Caller,
        mut selection: EventSelection,
        resumed: Option<EntryId>,
        is_forwarded: bool,
    ) -> Result<EventFollower, ApiError> {
        let permit = self.event_streams.open(caller.owner_id())?;
        if resumed.is_some() {
            selection.page.after.clone_from(&resumed);
        }
        let is_new = selection.page.after.is_none() && selection.page.since_us == 0;
        if is_new {
            // A new stream begins with the next event.
            let now_us = jiffy_engine_api::now_ms().saturating_mul(1000);
            selection.page.since_us = now_us;
            selection.page.after = self.sandboxes.events().newest();
        }
        selection.wait = KEEP_ALIVE;
        Ok(EventFollower {
            app: self.clone(),
            caller,
            selection,
            resumed,
            is_forwarded,
            _permit: permit,
        })
    }

    /// Returns the response that streams events. With `resumed`, the stream continues after this
    /// event. With `is_forwarded`, only events of this host are read.
    pub(crate) fn stream_events(
        &self,
        caller: Caller,
        selection: EventSelection,
        resumed: Option<EntryId>,
        is_forwarded: bool,
    ) -> Result<Response, ApiError> {
        let follower = self.follow(caller, selection, resumed, is_forwarded)?;
        // Send the first field at once, so that the client knows that the stream is open.
        let head = futures_util::future::ready(Bytes::from_static(b"retry: 1000\n\n"));
        let rest = stream::unfold(follower, async |mut follower| {
            let followed = follower.next().await?;
            let mut text = messages(&followed.page, followed.gap.as_ref());
            if text.is_empty() {
                text.push_str(": no events\n\n");
            }
            Some((Bytes::from(text), follower))
        });
        let chunks = futures_util::StreamExt::chain(stream::once(head), rest);
        let chunks = futures_util::StreamExt::map(chunks, Ok::<_, Infallible>);
        let headers = [(CONTENT_TYPE, EVENT_STREAM), (CACHE_CONTROL, "no-store")];
        Ok((headers, Body::from_stream(chunks)).into_response())
    }
}
