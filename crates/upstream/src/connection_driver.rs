//! Movement of the bytes of a connection.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use tokio::task::AbortHandle;

type Moving = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Moves the bytes of a connection. Dropped, it closes the connection.
pub enum ConnectionDriver {
    /// The task that waits for an answer moves them meanwhile: no other is woken for a request.
    Inline(Moving),
    /// A task moves them at any time: bodies of requests go on while an answer is not read.
    Spawned(AbortOnDrop),
    /// The connection has ended.
    Ended,
}

impl fmt::Debug for ConnectionDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inline(_) => "Inline",
            Self::Spawned(_) => "Spawned",
            Self::Ended => "Ended",
        })
    }
}

/// A task that ends with this.
pub struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ConnectionDriver {
    /// Drives a connection inline.
    pub fn new(moving: impl Future<Output = ()> + Send + 'static) -> Self {
        Self::Inline(Box::pin(moving))
    }

    /// Moves what there is to move, and wakes `context` for more.
    pub fn poll(&mut self, context: &mut Context<'_>) {
        if let Self::Inline(moving) = self
            && moving.as_mut().poll(context).is_ready()
        {
            *self = Self::Ended;
        }
    }

    /// Hands the connection to a task, unless one has it.
    pub fn spawn(&mut self) {
        *self = match std::mem::replace(self, Self::Ended) {
            Self::Inline(moving) => {
                let task = tokio::spawn(moving);
                Self::Spawned(AbortOnDrop(task.abort_handle()))
            }
            other => other,
        };
    }

    /// True if the other side has closed the connection, as far as that is known by now.
    pub fn has_ended(&mut self) -> bool {
        self.poll(&mut Context::from_waker(Waker::noop()));
        match self {
            Self::Inline(_) => false,
            Self::Spawned(task) => task.0.is_finished(),
            Self::Ended => true,
        }
    }

    /// Waits for `work`, which needs the connection's bytes.
    pub async fn drive<F: Future>(&mut self, work: F) -> F::Output {
        let mut work = pin!(work);
        poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(done);
            }
            self.poll(context);
            work.as_mut().poll(context)
        })
        .await
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
