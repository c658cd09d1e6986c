//! Distribution of one stream of frames to several readers.
//!
//! Each reader has a small queue; the writer must stop while any queue is full, so a slow reader
//! slows the process down and costs no memory. Without readers frames are dropped.

use bytes::Bytes;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// A queue with this many bytes or more is full. One more frame (43 KiB) may be on top.
const QUEUE_FULL_BYTES: usize = 64 * 1024;

/// The writing side.
#[derive(Default)]
pub struct FrameHub {
    inner: RefCell<HubState>,
}

#[derive(Default)]
struct HubState {
    readers: Vec<HubReader>,
    next_id: u64,
    writer: Option<Waker>,
}

struct HubReader {
    id: u64,
    queue: VecDeque<Bytes>,
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
    /// Returns true if there is a reader.
    pub fn has_readers(&self) -> bool {
        !self.inner.borrow().readers.is_empty()
    }

    /// Ready when every queue has room.
    pub fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.inner.borrow_mut();
        if inner.readers.iter().all(|r| r.bytes < QUEUE_FULL_BYTES) {
            return Poll::Ready(());
        }
        inner.writer = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Gives a frame to every reader.
    pub fn publish(&self, frame: &Bytes) {
        for reader in &mut self.inner.borrow_mut().readers {
            reader.push(frame.clone());
        }
    }

    /// Publishes the last frame to every reader.
    pub fn close(&self, last: &Bytes) {
        for reader in &mut self.inner.borrow_mut().readers {
            reader.closed = true;
            reader.push(last.clone());
        }
    }

    /// Gives one reader its last frame.
    pub fn close_one(&self, id: u64, last: Bytes) {
        let mut inner = self.inner.borrow_mut();
        if let Some(reader) = inner.readers.iter_mut().find(|r| r.id == id) {
            reader.closed = true;
            reader.push(last);
        }
        inner.wake_writer();
    }
}

/// The reading side of a [`FrameHub`] inside `T`.
pub struct Subscription<T: AsRef<FrameHub>> {
    hub: Rc<T>,
    id: u64,
}

impl<T: AsRef<FrameHub>> Subscription<T> {
    /// A new reader that sees `first` and then all that is published from now on.
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

    /// For [`FrameHub::close_one`].
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The next frame; `None` after the last.
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
        if was_full && reader.bytes < QUEUE_FULL_BYTES {
            inner.wake_writer();
        }
        Poll::Ready(Some(frame))
    }
}

impl<T: AsRef<FrameHub>> Drop for Subscription<T> {
    fn drop(&mut self) {
        let mut inner = (*self.hub).as_ref().inner.borrow_mut();
        inner.readers.retain(|r| r.id != self.id);
        inner.wake_writer();
    }
}
