//! Movement of the bytes of a connection.

use super::own_waker::OwnPolls;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use tokio::task::AbortHandle;

type Moving = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Moves the bytes of a connection. Dropped, it closes the connection.
pub(crate) enum ConnectionDriver {
    /// The task that waits for an answer moves them meanwhile: no other is woken for a request.
    Inline(Moving, OwnPolls),
    /// A task moves them at any time: bodies of requests go on while an answer is not read.
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

/// A task that ends with this.
pub(crate) struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ConnectionDriver {
    /// Drives a connection inline.
    pub(crate) fn new(moving: impl Future<Output = ()> + Send + 'static) -> Self {
        Self::Inline(Box::pin(moving), OwnPolls::new())
    }

    /// Polls `work`, which needs the connection's bytes, and moves them for it.
    pub(crate) fn poll_with<T>(
        &mut self,
        context: &mut Context<'_>,
        mut work: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let Self::Inline(moving, polls) = self else {
            return work(context);
        };
        let mut has_ended = false;
        let polled = polls.poll(context, |context| {
            if let Poll::Ready(done) = work(context) {
                return Poll::Ready(done);
            }
            has_ended = has_ended || moving.as_mut().poll(context).is_ready();
            work(context)
        });
        if has_ended {
            *self = Self::Ended;
        }
        polled
    }

    /// Hands the connection to a task, unless one has it.
    pub(crate) fn spawn(&mut self) {
        *self = match std::mem::replace(self, Self::Ended) {
            Self::Inline(moving, _) => {
                let task = tokio::spawn(moving);
                Self::Spawned(AbortOnDrop(task.abort_handle()))
            }
            other => other,
        };
    }

    /// True if the other side has closed the connection, as far as that is known by now.
    pub(crate) fn has_ended(&mut self) -> bool {
        if let Self::Inline(moving, _) = self
            && moving
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_ready()
        {
            *self = Self::Ended;
        }
        match self {
            Self::Inline(..) => false,
            Self::Spawned(task) => task.0.is_finished(),
            Self::Ended => true,
        }
    }

    /// Waits for `work`, which needs the connection's bytes.
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
    async fn a_task_that_moves_a_connection_goes_on_when_another_request_is_sent_on_it() {
        let (told, hears) = oneshot::channel();
        let (tell, asked) = oneshot::channel::<()>();
        let mut driver = ConnectionDriver::new(async {
            let _ = asked.await;
            let _ = told.send(());
        });
        driver.spawn();
        tokio::task::yield_now().await;
        driver.spawn();
        assert!(!driver.has_ended());
        tell.send(()).unwrap();
        hears.await.unwrap();
    }
}
