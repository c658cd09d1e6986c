//! Driver of a connection's I/O: hyper's connection future, polled inline by the waiting task or by
//! a task of its own.

use super::own_waker::OwnPolls;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use tokio::task::AbortHandle;

type ConnectionIo = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Drives the I/O of a connection. Dropping this value closes the connection.
pub(crate) enum ConnectionDriver {
    /// The task that waits for a response drives the connection, so that no other task is woken.
    Inline(ConnectionIo, OwnPolls),
    /// A separate task drives the connection, so that bodies of requests are sent while no response
    /// is read.
    Spawned(AbortOnDrop),
    /// The connection has ended.
    Ended,
}

impl fmt::Debug for ConnectionDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inline(..) => "Inline",
            Self::Spawned(_) => "Spawned",
            Self::Ended => "Ended",
        })
    }
}

/// Task that is aborted when this value is dropped.
pub(crate) struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ConnectionDriver {
    /// Creates a driver that runs inline.
    pub(crate) fn new(io: impl Future<Output = ()> + Send + 'static) -> Self {
        Self::Inline(Box::pin(io), OwnPolls::new())
    }

    /// Polls `work`, which depends on the connection's I/O, and drives the connection.
    pub(crate) fn poll_with<T>(
        &mut self,
        context: &mut Context<'_>,
        mut work: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let Self::Inline(io, polls) = self else {
            return work(context);
        };
        let mut has_ended = false;
        let polled = polls.poll(context, |context| {
            if let Poll::Ready(done) = work(context) {
                return Poll::Ready(done);
            }
            // Poll I/O only if the work is still pending, and then give the work the new data. A
            // future that has ended must not be polled again.
            has_ended = has_ended || io.as_mut().poll(context).is_ready();
            work(context)
        });
        if has_ended {
            *self = Self::Ended;
        }
        polled
    }

    /// Moves the connection to a separate task, unless it already has one.
    pub(crate) fn spawn(&mut self) {
        // The future must be moved out of `self` to be spawned.
        *self = match std::mem::replace(self, Self::Ended) {
            Self::Inline(io, _) => {
                let task = tokio::spawn(io);
                Self::Spawned(AbortOnDrop(task.abort_handle()))
            }
            other => other,
        };
    }

    /// Returns true if the peer is known to have closed the connection.
    pub(crate) fn has_ended(&mut self) -> bool {
        if let Self::Inline(io, _) = self
            // A poll performs pending I/O and detects a closed connection. No wake-up is needed,
            // because each later wait polls the connection again.
            && io
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_ready()
        {
            *self = Self::Ended;
        }
        match self {
            Self::Inline(..) => false,
            // The task ends when the connection is closed.
            Self::Spawned(task) => task.0.is_finished(),
            Self::Ended => true,
        }
    }

    /// Waits for `work`, which depends on the connection's I/O.
    pub(crate) async fn drive<F: Future>(&mut self, work: F) -> F::Output {
        let mut work = pin!(work);
        poll_fn(|context| self.poll_with(context, |context| work.as_mut().poll(context))).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn a_spawned_driver_continues_when_another_request_is_sent() {
        let (finished, is_finished) = oneshot::channel();
        let (start, is_started) = oneshot::channel::<()>();
        let mut driver = ConnectionDriver::new(async {
            let _ = is_started.await;
            let _ = finished.send(());
        });
        driver.spawn();
        tokio::task::yield_now().await;
        driver.spawn();
        assert!(!driver.has_ended());
        start.send(()).unwrap();
        is_finished.await.unwrap();
    }
}
