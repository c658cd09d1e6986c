//! Streams (`WatchDir`) and polled watchers (`CreateWatcher`): two ways to receive the events of a
//! directory.

use super::message::FilesystemEvent;
use super::watch::{DirectoryWatch, WatchDescriptor};
use crate::body::BodySource;
use crate::rpc::{RpcCode, RpcError, frame};
use crate::sys;
use crate::workers::{CallClass, CallError, Progress, Workers};
use bytes::Bytes;
use serde_json::json;
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, mpsc};
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep, sleep};

/// Maximum number of polled watchers. Each holds an inotify instance, of which most kernels allow
/// 128 per user.
const MAX_WATCHERS: usize = 100;
/// Maximum number of events that a polled watcher stores. Later events are dropped, and the next
/// poll reports the loss.
const MAX_QUEUED_EVENTS: usize = 10_000;
/// Maximum number of bytes of events that a polled watcher stores.
const MAX_QUEUED_BYTES: usize = 8 << 20;
/// Maximum number of reads whose events are queued for a stream. The kernel queues later events.
const MAX_QUEUED_READS: usize = 4;

/// A watch whose events a worker reads. The worker also watches new directories and describes
/// entries.
struct EventReader {
    workers: Workers,
    /// `None` while a worker uses the watch. Remains `None` if this worker is stuck.
    watch: Option<DirectoryWatch>,
}

/// Events of one read from the kernel's queue.
struct ReadEvents {
    events: Vec<FilesystemEvent>,
    /// Reason for missing events.
    loss: Option<String>,
}

impl EventReader {
    fn new(workers: &Workers, watch: DirectoryWatch) -> Self {
        Self {
            workers: workers.clone(),
            watch: Some(watch),
        }
    }

    /// Reads queued events. Returns `None` if there are none.
    async fn read(&mut self) -> Result<Option<ReadEvents>, RpcError> {
        let what = "cannot read the events of a watcher";
        let failed = |e: &io::Error| RpcError::io(what, e);
        let mut watch = self.watch.take().ok_or_else(|| CallError::Failed {
            what: what.to_owned(),
        })?;
        let work = move |progress: &Progress| {
            let events = watch.read(progress);
            (watch, events)
        };
        let (mut watch, events) = self.workers.run(CallClass::Files, what, work).await?;
        let loss = watch.take_loss();
        // The watch is back only if the worker completed. A stuck worker still has the watch.
        self.watch = Some(watch);
        match events {
            Ok(events) => Ok(Some(ReadEvents { events, loss })),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(failed(&e)),
        }
    }
}

/// Waits until there are events. The caller must then read until no event is left.
async fn readable(descriptor: &AsyncFd<WatchDescriptor>) -> io::Result<()> {
    // The event loop is edge-triggered: only a new event makes the descriptor ready again.
    descriptor.readable().await?.clear_ready();
    Ok(())
}

/// Returns the error that informs the client about missing events.
fn loss_error(message: String) -> RpcError {
    RpcError::new(RpcCode::ResourceExhausted, message)
}

/// Watchers by id.
#[derive(Default)]
pub struct Watchers {
    /// Watchers by the id that the client received.
    by_id: RefCell<HashMap<String, PolledWatcher>>,
}

/// A watcher that is polled. Its events are read immediately, because a new directory below it is
/// watched only after the event of its creation was read.
struct PolledWatcher {
    /// Events, for polls and for the task.
    shared: Rc<SharedWatch>,
    /// Task that reads events.
    task: AbortHandle,
}

impl Drop for PolledWatcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// State that the calls on a watcher share.
struct SharedWatch {
    reader: Mutex<EventReader>,
    queue: RefCell<EventQueue>,
}

impl SharedWatch {
    /// Moves all events from the kernel's queue to the watcher's queue.
    async fn read_all(&self) -> Result<(), RpcError> {
        let mut reader = self.reader.lock().await;
        while let Some(read) = reader.read().await? {
            self.queue.borrow_mut().add(read);
        }
        Ok(())
    }
}

/// Events that wait for a poll.
#[derive(Default)]
struct EventQueue {
    events: Vec<FilesystemEvent>,
    bytes: usize,
    /// Reason for missing events since the last report of a loss.
    loss: Option<String>,
}

impl EventQueue {
    /// Queues events that were read from the kernel. If the queue is full, drops them and records
    /// the loss, which the next answer reports.
    fn add(&mut self, read: ReadEvents) {
        if let Some(loss) = read.loss {
            self.loss.get_or_insert(loss);
        }
        for event in read.events {
            // Repeated events are merged, as the kernel does in its queue.
            let last = self.events.last_mut();
            if let Some(last) = last.filter(|l| (&l.name, l.kind) == (&event.name, event.kind)) {
                *last = event;
                continue;
            }
            let bytes = event.weight();
            if self.events.len() >= MAX_QUEUED_EVENTS || self.bytes + bytes > MAX_QUEUED_BYTES {
                self.loss.get_or_insert(format!(
                    "events of this watcher were lost: more than {MAX_QUEUED_EVENTS} events or {} \
                     MiB waited; list the directory, and poll more often",
                    MAX_QUEUED_BYTES >> 20
                ));
                continue;
            }
            self.bytes += bytes;
            self.events.push(event);
        }
    }

    /// Returns the events since the last call. Before a loss is reported, the stored events are
    /// returned.
    fn take(&mut self) -> Result<Vec<FilesystemEvent>, RpcError> {
        if self.events.is_empty()
            && let Some(loss) = self.loss.take()
        {
            return Err(loss_error(loss));
        }
        // The queue is empty after the events are taken.
        self.bytes = 0;
        Ok(std::mem::take(&mut self.events))
    }
}

impl Watchers {
    /// Registers a watch under a new id, and starts to read its events.
    pub fn create(&self, workers: &Workers, watch: DirectoryWatch) -> Result<String, RpcError> {
        let mut watchers = self.by_id.borrow_mut();
        if watchers.len() >= MAX_WATCHERS {
            return Err(RpcError::new(
                RpcCode::ResourceExhausted,
                format!("there are {MAX_WATCHERS} watchers already, remove some"),
            ));
        }
        let id = sys::random_id().map_err(|e| RpcError::io("cannot name the watcher", &e))?;
        let descriptor = sys::register(watch.descriptor(), Interest::READABLE)
            .map_err(|e| RpcError::io("cannot watch", &e))?;
        let shared = Rc::new(SharedWatch {
            reader: Mutex::new(EventReader::new(workers, watch)),
            queue: RefCell::default(),
        });
        let reading = Rc::clone(&shared);
        let task = tokio::task::spawn_local(async move {
            // Ignore the error: a poll fails as well and reports it.
            while readable(&descriptor).await.is_ok() && reading.read_all().await.is_ok() {}
        });
        let task = task.abort_handle();
        watchers.insert(id.clone(), PolledWatcher { shared, task });
        Ok(id)
    }

    /// Returns the events since the last call, including the events in the kernel's queue.
    pub async fn take(&self, id: &str) -> Result<Vec<FilesystemEvent>, RpcError> {
        let watcher = self.by_id.borrow().get(id).map(|w| Rc::clone(&w.shared));
        let shared = watcher.ok_or_else(|| unknown_watcher(id))?;
        // Read in a separate task, so that the watch is not lost if the client disconnects.
        let reading = Rc::clone(&shared);
        let read = tokio::task::spawn_local(async move { reading.read_all().await }).await;
        read.map_err(|e| RpcError::new(RpcCode::Internal, e.to_string()))??;
        shared.queue.borrow_mut().take()
    }

    /// Removes a watcher.
    pub fn remove(&self, id: &str) -> Result<(), RpcError> {
        let removed = self.by_id.borrow_mut().remove(id);
        removed.map(drop).ok_or_else(|| unknown_watcher(id))
    }
}

/// Returns the error for an id without a watcher.
fn unknown_watcher(id: &str) -> RpcError {
    RpcError::new(RpcCode::NotFound, format!("watcher '{id}' not found"))
}

/// Response stream of `WatchDir`. It ends with an error if events are missing.
pub struct WatchStream {
    /// Frames of events, or the error that ends the stream.
    frames: mpsc::Receiver<Result<Bytes, RpcError>>,
    task: AbortHandle,
    /// Set after the `start` event was sent.
    started: bool,
    /// Set after the last frame was sent.
    ended: bool,
    /// Interval of keepalive events while no event occurs.
    interval: Duration,
    /// Timer of the next keepalive event.
    idle: Pin<Box<Sleep>>,
    /// Timer of the request's timeout.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Drop for WatchStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl WatchStream {
    /// Streams the events of a watch.
    pub fn new(
        workers: &Workers,
        watch: DirectoryWatch,
        interval: Duration,
        timeout: Option<Duration>,
    ) -> io::Result<Self> {
        let descriptor = sys::register(watch.descriptor(), Interest::READABLE)?;
        let (sender, frames) = mpsc::channel(MAX_QUEUED_READS);
        let mut reader = EventReader::new(workers, watch);
        let task = tokio::task::spawn_local(async move {
            if let Err(e) = send_events(&descriptor, &mut reader, &sender).await {
                // Ignore the error: the stream may have ended meanwhile.
                let _ = sender.send(Err(e)).await;
            }
        });
        Ok(Self {
            frames,
            task: task.abort_handle(),
            started: false,
            ended: false,
            interval,
            idle: Box::pin(sleep(interval)),
            deadline: timeout.map(|t| Box::pin(sleep(t))),
        })
    }

    /// Ends the stream with an error.
    fn end(&mut self, error: &RpcError) -> Poll<Option<io::Result<Bytes>>> {
        self.ended = true;
        Poll::Ready(Some(Ok(frame::end(Some(error)))))
    }
}

/// Sends events until the stream ends or events are missing.
async fn send_events(
    descriptor: &AsyncFd<WatchDescriptor>,
    reader: &mut EventReader,
    sender: &mpsc::Sender<Result<Bytes, RpcError>>,
) -> Result<(), RpcError> {
    loop {
        readable(descriptor)
            .await
            .map_err(|e| RpcError::io("cannot watch", &e))?;
        while let Some(read) = reader.read().await? {
            let events = read.events.iter();
            let frames: Vec<Bytes> = events
                .map(|event| frame::message(&json!({ "filesystem": event })))
                // The events of one read are sent as one chunk, so that the queue holds few large
                // items.
                .collect();
            if !frames.is_empty() && sender.send(Ok(frames.concat().into())).await.is_err() {
                return Ok(());
            }
            if let Some(loss) = read.loss {
                return Err(loss_error(loss));
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
        // Check the deadline before the events, which may follow each other without a pause.
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            let e = RpcError::new(RpcCode::DeadlineExceeded, "the stream ran into its timeout");
            return self.end(&e);
        }
        match self.frames.poll_recv(cx) {
            Poll::Ready(Some(Ok(frames))) => {
                self.idle.as_mut().reset(Instant::now() + self.interval);
                return Poll::Ready(Some(Ok(frames)));
            }
            Poll::Ready(Some(Err(e))) => return self.end(&e),
            Poll::Ready(None) => {
                let e = RpcError::new(RpcCode::Internal, "the watch ended unexpectedly");
                return self.end(&e);
            }
            Poll::Pending => {}
        }
        if self.idle.as_mut().poll(cx).is_ready() {
            self.idle.as_mut().reset(Instant::now() + self.interval);
            // This poll registers the task for the new deadline.
            let _ = self.idle.as_mut().poll(cx);
            return Poll::Ready(Some(Ok(frame::message(&json!({ "keepalive": {} })))));
        }
        Poll::Pending
    }
}
