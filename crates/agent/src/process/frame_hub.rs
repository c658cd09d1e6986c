//! Distribution of one stream of frames to several readers.
//!
//! Each reader has a small queue. The writer must wait while any queue is full, so that a slow
//! reader slows the process down without using memory. Without readers, frames are dropped.
//!
//! A *frame* is one message of a stream: a part of the output of a process, or its exit. It is
//! encoded once for all readers.

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

/// Readers of the frames of a process.
#[derive(Default)]
struct HubState {
    readers: Vec<HubReader>,
    /// Number of the next reader.
    next_id: u64,
    /// Task that publishes frames. Set while it waits for a queue.
    writer: Option<Waker>,
}

/// Client that reads the frames, with its queue.
struct HubReader {
    id: u64,
    queue: VecDeque<Bytes>,
    /// Total size of the queued frames.
    bytes: usize,
    /// Task of the reader. Set while it waits for a frame.
    waker: Option<Waker>,
    /// True if the last frame was queued.
    closed: bool,
}

impl HubState {
    /// Iterates over the readers whose last frame was not queued yet.
    fn open_readers(&mut self) -> impl Iterator<Item = &mut HubReader> {
        self.readers.iter_mut().filter(|reader| !reader.closed)
    }

    /// Wakes the writer if it waits for a queue.
    fn wake_writer(&mut self) {
        if let Some(waker) = self.writer.take() {
            waker.wake();
        }
    }
}

impl HubReader {
    /// Queues a frame, and wakes the reader if it waits.
    fn push(&mut self, frame: Bytes) {
        self.bytes += frame.len();
        self.queue.push_back(frame);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl FrameHub {
    /// Returns whether there is a reader that has not received its last frame.
    pub fn has_readers(&self) -> bool {
        self.inner.borrow().readers.iter().any(|r| !r.closed)
    }

    /// Ready when no queue is full. Closed queues receive no more frames.
    pub fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.inner.borrow_mut();
        let mut open = inner.readers.iter().filter(|r| !r.closed);
        if open.all(|r| r.bytes < QUEUE_FULL_BYTES) {
            return Poll::Ready(());
        }
        inner.writer = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Adds a frame to the queue of every reader.
    pub fn publish(&self, frame: &Bytes) {
        for reader in self.inner.borrow_mut().open_readers() {
            reader.push(frame.clone());
        }
    }

    /// Adds the last frame to the queue of every reader.
    pub fn close(&self, last: &Bytes) {
        for reader in self.inner.borrow_mut().open_readers() {
            reader.closed = true;
            // Add the frame even to a full queue, because no further frame follows.
            reader.push(last.clone());
        }
    }

    /// Adds the last frame to the queue of one reader.
    pub fn close_one(&self, id: u64, last: Bytes) {
        let mut inner = self.inner.borrow_mut();
        if let Some(reader) = inner.open_readers().find(|r| r.id == id) {
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
        // The writer is woken only when the queue stops being full, not after each frame.
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
        // The writer may have waited for this reader only.
        inner.wake_writer();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Hub(FrameHub);

    impl AsRef<FrameHub> for Hub {
        fn as_ref(&self) -> &FrameHub {
            &self.0
        }
    }

    #[test]
    fn a_reader_receives_nothing_after_its_last_frame_and_blocks_no_writer() {
        let cx = &mut Context::from_waker(Waker::noop());
        let hub = Rc::new(Hub::default());
        let frame = |text: &'static str| Bytes::from_static(text.as_bytes());
        let mut stalled = Subscription::new(&hub, Bytes::from(vec![0; QUEUE_FULL_BYTES]));
        let mut other = Subscription::new(&hub, frame("start"));
        assert!(hub.0.poll_room(cx).is_pending());
        hub.0.close_one(stalled.id(), frame("timeout"));
        assert!(hub.0.poll_room(cx).is_ready());
        hub.0.publish(&frame("output"));
        hub.0.close(&frame("end"));
        assert!(!hub.0.has_readers());
        hub.0.publish(&frame("output of a child"));
        let mut frames = |reader: &mut Subscription<Hub>| {
            let frames = std::iter::from_fn(|| match reader.poll_next(cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending => panic!("the reader is open"),
            });
            frames.skip(1).collect::<Vec<_>>()
        };
        assert_eq!(frames(&mut stalled), ["timeout"]);
        assert_eq!(frames(&mut other), ["output", "end"]);
    }
}
