//! [`ConnectionTasks`]: the tasks of a listener's connections, and their shutdown in two steps.
//! First, no new requests are accepted. After the drain time, remaining tasks are aborted.

use std::future::Future;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

/// Tasks of a listener's connections, and the signals that stop them.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectionTasks {
    tracker: TaskTracker,
    stopping: CancellationToken,
    aborted: CancellationToken,
}

impl ConnectionTasks {
    /// Runs `work` until it completes or the drain time is over.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let aborted = self.aborted.clone();
        self.tracker.spawn(async move {
            let _ = aborted.run_until_cancelled(work).await;
        });
    }

    /// Runs `work` to completion, for tasks that watch [`Self::stopping`] and [`Self::aborted`].
    pub(crate) fn track(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.tracker.spawn(work);
    }

    /// Waits for the signal that no new requests are accepted.
    pub(crate) async fn stopping(&self) {
        self.stopping.cancelled().await;
    }

    /// Waits for the signal that the drain time is over.
    pub(crate) async fn aborted(&self) {
        self.aborted.cancelled().await;
    }

    /// Passes the items of a queue to `serve` until `shutdown` or the end of the queue. `serve`
    /// starts the task of a connection. Waits at most `drain` for all tasks, then aborts the
    /// remaining ones.
    pub(crate) async fn serve_queue<T>(
        &self,
        mut queue: mpsc::Receiver<T>,
        drain: Duration,
        shutdown: impl Future<Output = ()>,
        mut serve: impl FnMut(T),
    ) {
        let mut shutdown = std::pin::pin!(shutdown);
        loop {
            let item = tokio::select! {
                item = queue.recv() => item,
                () = &mut shutdown => break,
            };
            let Some(item) = item else { break };
            serve(item);
        }
        // Connections that arrive from now on are closed.
        drop(queue);
        self.finish(drain).await;
    }

    /// Waits at most `drain` for all tasks, then aborts the remaining ones.
    pub(crate) async fn finish(&self, drain: Duration) {
        self.stopping.cancel();
        // `wait` completes only on a closed tracker without tasks.
        self.tracker.close();
        if timeout(drain, self.tracker.wait()).await.is_err() {
            debug!("aborting in-flight requests");
            self.aborted.cancel();
            self.tracker.wait().await;
        }
    }
}
