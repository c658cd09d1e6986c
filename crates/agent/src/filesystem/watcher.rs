//! Two ways to follow a directory: a stream, and a watcher that is polled.

use super::message::Event;
use super::watch::Watch;
use crate::body::Source;
use crate::boot::identity::random_id;
use crate::rpc::{Code, RpcError, frame};
use crate::sys;
use bytes::Bytes;
use serde_json::json;
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, Sleep, sleep};

/// Most watchers that wait to be polled. Each holds an inotify instance, of which the kernel gives out 128.
const MAX_WATCHERS: usize = 100;
/// Most events one poll brings; the kernel queues further ones (16,384) and drops what is beyond.
const MAX_EVENTS: usize = 10_000;

/// Watchers by id. Nobody waits for their events: the kernel keeps them until the next poll.
#[derive(Default)]
pub struct Watchers {
    by_id: RefCell<HashMap<String, Watch>>,
}

impl Watchers {
    /// Keeps a watch under a new id.
    pub fn create(&self, watch: Watch) -> Result<String, RpcError> {
        let mut watchers = self.by_id.borrow_mut();
        if watchers.len() >= MAX_WATCHERS {
            return Err(RpcError::new(
                Code::ResourceExhausted,
                format!("there are {MAX_WATCHERS} watchers already, remove some"),
            ));
        }
        let id = random_id().map_err(|e| RpcError::io("cannot name the watcher", &e))?;
        watchers.insert(id.clone(), watch);
        Ok(id)
    }

    /// Events since the last call.
    pub fn take(&self, id: &str) -> Result<Vec<Event>, RpcError> {
        let mut watchers = self.by_id.borrow_mut();
        let watch = watchers.get_mut(id).ok_or_else(|| unknown(id))?;
        let mut events = Vec::new();
        while events.len() < MAX_EVENTS {
            match watch.read() {
                Ok(more) => events.extend(more),
                Err(_) => break,
            }
        }
        Ok(events)
    }

    /// Ends a watcher.
    pub fn remove(&self, id: &str) -> Result<(), RpcError> {
        let removed = self.by_id.borrow_mut().remove(id);
        removed.map(drop).ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &str) -> RpcError {
    RpcError::new(Code::NotFound, format!("watcher '{id}' not found"))
}

/// The response stream of `WatchDir`.
pub struct WatchStream {
    watch: AsyncFd<Watch>,
    started: bool,
    ended: bool,
    interval: Duration,
    idle: Pin<Box<Sleep>>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl WatchStream {
    /// Streams the events of a watch.
    pub fn new(watch: Watch, interval: Duration, timeout: Option<Duration>) -> io::Result<Self> {
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

impl Source for WatchStream {
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
            let error = RpcError::new(Code::DeadlineExceeded, "the stream ran into its timeout");
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
