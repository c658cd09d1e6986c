//! Two ways to follow a directory: a stream, and a watcher that is polled.

use super::message::FilesystemEvent;
use super::watch::DirectoryWatch;
use crate::body::BodySource;
use crate::rpc::{RpcCode, RpcError, frame};
use crate::sys;
use bytes::Bytes;
use serde_json::json;
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep, sleep};

/// Most watchers that wait to be polled. Each holds an inotify instance, of which the kernel allows
/// 128.
const MAX_WATCHERS: usize = 100;
/// Most events that wait for a poll, per watcher; later ones are dropped, and the next poll reports
/// the loss.
const MAX_QUEUED_EVENTS: usize = 10_000;
/// Most bytes that waiting events take, per watcher.
const MAX_QUEUED_BYTES: usize = 8 << 20;

/// Watchers by id.
#[derive(Default)]
pub struct Watchers {
    by_id: RefCell<HashMap<String, PolledWatcher>>,
}

/// A watcher that is polled. Its events are read as they come, since a directory made beneath it is
/// seen into only from the moment its event is read.
struct PolledWatcher {
    queue: Rc<RefCell<EventQueue>>,
    reader: AbortHandle,
}

impl Drop for PolledWatcher {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Events that wait for a poll.
struct EventQueue {
    watch: AsyncFd<DirectoryWatch>,
    events: Vec<FilesystemEvent>,
    bytes: usize,
    /// Events were dropped since the last report of a loss.
    lost: bool,
}

impl EventQueue {
    fn new(watch: DirectoryWatch) -> io::Result<Self> {
        Ok(Self {
            watch: sys::register(watch, Interest::READABLE)?,
            events: Vec::new(),
            bytes: 0,
            lost: false,
        })
    }

    /// Reads all events that the kernel has queued; pending until there are more.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        loop {
            let mut ready = match std::task::ready!(self.watch.poll_read_ready_mut(cx)) {
                Ok(ready) => ready,
                Err(e) => return Poll::Ready(e),
            };
            match ready.try_io(|watch| watch.get_mut().read()) {
                Ok(Ok(events)) => self.keep(events),
                Ok(Err(e)) => return Poll::Ready(e),
                Err(_would_block) => {}
            }
        }
    }

    fn keep(&mut self, events: Vec<FilesystemEvent>) {
        self.lost |= self.watch.get_mut().take_overflow();
        for event in events {
            // The kernel merges repeated events in its queue; so does this.
            let last = self.events.last_mut();
            if let Some(last) = last.filter(|l| (&l.name, l.kind) == (&event.name, event.kind)) {
                *last = event;
                continue;
            }
            let bytes = event.weight();
            if self.events.len() >= MAX_QUEUED_EVENTS || self.bytes + bytes > MAX_QUEUED_BYTES {
                self.lost = true;
                continue;
            }
            self.bytes += bytes;
            self.events.push(event);
        }
    }

    /// Events since the last call, also those that the reader has not come to yet.
    fn take(&mut self) -> Result<Vec<FilesystemEvent>, RpcError> {
        while let Ok(events) = self.watch.get_mut().read() {
            self.keep(events);
        }
        // Events first, then the report that some were lost.
        if self.events.is_empty() && std::mem::take(&mut self.lost) {
            return Err(RpcError::new(
                RpcCode::ResourceExhausted,
                format!(
                    "events of this watcher were lost: more than {MAX_QUEUED_EVENTS} events or {} MiB waited; \
                     list the directory, and ask more often",
                    MAX_QUEUED_BYTES >> 20
                ),
            ));
        }
        self.bytes = 0;
        Ok(std::mem::take(&mut self.events))
    }
}

impl Watchers {
    /// Keeps a watch under a new id, and reads its events from now on.
    pub fn create(&self, watch: DirectoryWatch) -> Result<String, RpcError> {
        let mut watchers = self.by_id.borrow_mut();
        if watchers.len() >= MAX_WATCHERS {
            return Err(RpcError::new(
                RpcCode::ResourceExhausted,
                format!("there are {MAX_WATCHERS} watchers already, remove some"),
            ));
        }
        let id = sys::random_id().map_err(|e| RpcError::io("cannot name the watcher", &e))?;
        let queue = EventQueue::new(watch).map_err(|e| RpcError::io("cannot watch", &e))?;
        let queue = Rc::new(RefCell::new(queue));
        let read = queue.clone();
        let reader = tokio::task::spawn_local(async move {
            let _ended = poll_fn(|cx| read.borrow_mut().poll_read(cx)).await;
        });
        let reader = reader.abort_handle();
        watchers.insert(id.clone(), PolledWatcher { queue, reader });
        Ok(id)
    }

    /// Events since the last call.
    pub fn take(&self, id: &str) -> Result<Vec<FilesystemEvent>, RpcError> {
        let watchers = self.by_id.borrow();
        let watcher = watchers.get(id).ok_or_else(|| unknown(id))?;
        let mut queue = watcher.queue.borrow_mut();
        queue.take()
    }

    /// Ends a watcher.
    pub fn remove(&self, id: &str) -> Result<(), RpcError> {
        let removed = self.by_id.borrow_mut().remove(id);
        removed.map(drop).ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &str) -> RpcError {
    RpcError::new(RpcCode::NotFound, format!("watcher '{id}' not found"))
}

/// The response stream of `WatchDir`.
pub struct WatchStream {
    watch: AsyncFd<DirectoryWatch>,
    started: bool,
    ended: bool,
    interval: Duration,
    idle: Pin<Box<Sleep>>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl WatchStream {
    /// Streams the events of a watch.
    pub fn new(
        watch: DirectoryWatch,
        interval: Duration,
        timeout: Option<Duration>,
    ) -> io::Result<Self> {
        Ok(Self {
            watch: sys::register(watch, Interest::READABLE)?,
            started: false,
            ended: false,
            interval,
            idle: Box::pin(sleep(interval)),
            deadline: timeout.map(|t| Box::pin(sleep(t))),
        })
    }

    fn poll_events(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        loop {
            let mut ready = std::task::ready!(self.watch.poll_read_ready_mut(cx))?;
            let Ok(events) = ready.try_io(|watch| watch.get_mut().read()) else {
                continue;
            };
            let frames: Vec<Bytes> = events?
                .iter()
                .map(|event| frame::message(&json!({ "filesystem": event })))
                .collect();
            if !frames.is_empty() {
                return Poll::Ready(Ok(frames.concat().into()));
            }
        }
    }
}

impl BodySource for WatchStream {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if !self.started {
            self.started = true;
            return Poll::Ready(Some(Ok(frame::message(&json!({ "start": {} })))));
        }
        if let Poll::Ready(frames) = self.poll_events(cx) {
            self.idle.as_mut().reset(Instant::now() + self.interval);
            return Poll::Ready(Some(frames));
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            self.ended = true;
            let error = RpcError::new(RpcCode::DeadlineExceeded, "the stream ran into its timeout");
            return Poll::Ready(Some(Ok(frame::end(Some(&error)))));
        }
        if self.idle.as_mut().poll(cx).is_ready() {
            self.idle.as_mut().reset(Instant::now() + self.interval);
            // Registers the new time.
            let _ = self.idle.as_mut().poll(cx);
            return Poll::Ready(Some(Ok(frame::message(&json!({ "keepalive": {} })))));
        }
        Poll::Pending
    }
}
