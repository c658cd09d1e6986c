//! Distribution of one stream of frames to several readers.
//!
//! Each reader has a small queue. The writer must wait while any queue is full, so that a slow
//! reader slows the process down without using memory. Without readers, frames are dropped.

use bytes::Bytes;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Size in bytes at which a queue is full. One more frame may exceed it: at most 43 KiB, which is a
/// chunk of 32 KiB in base64.
const QUEUE_FULL_BYTES: usize = 64 * 1024;

/// Writing side of the distribution.
#[derive(Default)]
pub struct FrameHub {
    /// A `RefCell` suffices: all tasks of the agent run on one thread.
    inner: RefCell<HubState>,
}

#[derive(Default)]
struct HubState {
    readers: Vec<HubReader>,
    next_id: u64,
    /// Task that publishes frames. Set while it waits for a queue.
    writer: Option<Waker>,
}

struct HubReader {
    id: u64,
    queue: VecDeque<Bytes>,
    /// Total size of the queued frames.
    bytes: usize,
    waker: Option<Waker>,
    closed: bool,
}

impl HubState {
    fn wake_writer(&mut self) {
        if let Some(waker) = self.writer.take() {
            waker.wake();
        }
    }
}

impl HubReader {
    fn push(&mut self, frame: Bytes) {
        self.bytes += frame.len();
        self.queue.push_back(frame);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl FrameHub {
    /// Returns whether there is a reader.
    pub fn has_readers(&self) -> bool {
        !self.inner.borrow().readers.is_empty()
    }

    /// Ready when no queue is full.
    pub fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.inner.borrow_mut();
        if inner.readers.iter().all(|r| r.bytes < QUEUE_FULL_BYTES) {
            return Poll::Ready(());
        }
        inner.writer = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Adds a frame to the queue of every reader.
    pub fn publish(&self, frame: &Bytes) {
        for reader in &mut self.inner.borrow_mut().readers {
            reader.push(frame.clone());
        }
    }

    /// Adds the last frame to the queue of every reader.
    pub fn close(&self, last: &Bytes) {
        for reader in &mut self.inner.borrow_mut().readers {
            // Added even to a full queue, because no further frame follows.
            reader.closed = true;
            reader.push(last.clone());
        }
    }

    /// Adds the last frame to the queue of one reader.
    pub fn close_one(&self, id: u64, last: Bytes) {
        let mut inner = self.inner.borrow_mut();
        if let Some(reader) = inner.readers.iter_mut().find(|r| r.id == id) {
            reader.closed = true;
            reader.push(last);
        }
        inner.wake_writer();
    }
}

/// Reading side of a [`FrameHub`] in a `T`.
pub struct Subscription<T: AsRef<FrameHub>> {
    hub: Rc<T>,
    id: u64,
}

impl<T: AsRef<FrameHub>> Subscription<T> {
    /// Creates a reader that receives `first` and then all frames that are published from now on.
    pub fn new(hub: &Rc<T>, first: Bytes) -> Self {
        let mut inner = (**hub).as_ref().inner.borrow_mut();
        let id = inner.next_id;
        inner.next_id += 1;
        inner.readers.push(HubReader {
            id,
            bytes: first.len(),
            queue: VecDeque::from([first]),
            waker: None,
            closed: false,
        });
        drop(inner);
        Self {
            hub: Rc::clone(hub),
            id,
        }
    }

    /// Returns the id for [`FrameHub::close_one`].
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the next frame, or `None` after the last frame.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let mut inner = (*self.hub).as_ref().inner.borrow_mut();
        let Some(reader) = inner.readers.iter_mut().find(|r| r.id == self.id) else {
            return Poll::Ready(None);
        };
        let Some(frame) = reader.queue.pop_front() else {
            if reader.closed {
                return Poll::Ready(None);
            }
            reader.waker = Some(cx.waker().clone());
            return Poll::Pending;
        };
        let was_full = reader.bytes >= QUEUE_FULL_BYTES;
        reader.bytes -= frame.len();
        // Woken only when the queue stops being full, not after each frame.
        if was_full && reader.bytes < QUEUE_FULL_BYTES {
            inner.wake_writer();
        }
        Poll::Ready(Some(frame))
    }
}

impl<T: AsRef<FrameHub>> Drop for Subscription<T> {
    fn drop(&mut self) {
        let mut inner = (*self.hub).as_ref().inner.borrow_mut();
        // The writer may have waited for this reader only.
        inner.readers.retain(|r| r.id != self.id);
        inner.wake_writer();
    }
}
