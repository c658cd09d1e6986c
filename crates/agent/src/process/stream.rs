//! [`EventStream`]: the response stream of `Start` and `Connect`, with output and exit of a
//! process.

use super::frame_hub::Subscription;
use super::table::GuestProcess;
use crate::body::BodySource;
use crate::rpc::{RpcCode, RpcError, frame};
use bytes::Bytes;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};

/// Keepalive event: a frame without flags, with the length 26 (0x1a).
const KEEPALIVE: &[u8] = b"\0\0\0\0\x1a{\"event\":{\"keepalive\":{}}}";

/// Stream of a process's events to one reader.
pub struct EventStream {
    subscription: Subscription<GuestProcess>,
    /// Interval of keepalive events while the process writes no output.
    interval: Duration,
    /// Timer of the next keepalive event. Created when the stream waits for the first time.
    idle: Option<Pin<Box<Sleep>>>,
    /// Timer of the request's timeout.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Set after the last event was sent.
    ended: bool,
}

impl EventStream {
    /// Streams the subscription's frames. Sends a keepalive event after each `interval` without a
    /// frame, and ends the stream after `timeout`.
    pub fn new(
        subscription: Subscription<GuestProcess>,
        interval: Duration,
        timeout: Option<Duration>,
    ) -> Self {
        Self {
            subscription,
            interval,
            idle: None,
            deadline: timeout.map(|t| Box::pin(sleep(t))),
            ended: false,
        }
    }
}

impl BodySource for EventStream {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        // Frames have priority over the timeout, so that queued output is not lost.
        if let Poll::Ready(frame) = self.subscription.poll_next(cx) {
            if let Some(idle) = &mut self.idle {
                idle.as_mut().reset(Instant::now() + self.interval);
            }
            return Poll::Ready(frame.map(Ok));
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            self.ended = true;
            let error = RpcError::new(RpcCode::DeadlineExceeded, "the stream ran into its timeout");
            return Poll::Ready(Some(Ok(frame::end(Some(&error)))));
        }
        let interval = self.interval;
        let idle = self.idle.get_or_insert_with(|| Box::pin(sleep(interval)));
        if idle.as_mut().poll(cx).is_ready() {
            idle.as_mut().reset(Instant::now() + interval);
            // This poll registers the task for the next keepalive event.
            let _ = idle.as_mut().poll(cx);
            return Poll::Ready(Some(Ok(Bytes::from_static(KEEPALIVE))));
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_proto::agent::MAX_KEEPALIVE_BYTES;

    /// Size of the length and the ends of line around a short chunk.
    const CHUNK_BYTES: usize = 6;

    #[test]
    fn keepalives_are_smaller_than_all_other_events() {
        assert!(KEEPALIVE.len() + CHUNK_BYTES <= MAX_KEEPALIVE_BYTES);
        for field in ["pty", "stdout", "stderr"] {
            let output = frame::data_event(field, b"a");
            assert!(output.len() + CHUNK_BYTES > MAX_KEEPALIVE_BYTES);
        }
    }
}
