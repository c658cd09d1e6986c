//! Tasks of a listener's connections.

use std::future::Future;
use std::time::Duration;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

/// Tasks of a listener's connections, and the signals that end them.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectionTasks {
    tracker: TaskTracker,
    stopping: CancellationToken,
    aborted: CancellationToken,
}

impl ConnectionTasks {
    /// Runs until it ends or the time for ending is over.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let aborted = self.aborted.clone();
        self.tracker.spawn(async move {
            let _ = aborted.run_until_cancelled(work).await;
        });
    }

    /// Runs until it ends: for tasks that watch [`Self::stopping`] and [`Self::aborted`].
    pub(crate) fn track(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.tracker.spawn(work);
    }

    /// No new requests are wanted.
    pub(crate) async fn stopping(&self) {
        self.stopping.cancelled().await;
    }

    /// The time for ending is over.
    pub(crate) async fn aborted(&self) {
        self.aborted.cancelled().await;
    }

    /// Lets everything end within `drain` and cuts the rest.
    pub(crate) async fn finish(&self, drain: Duration) {
        self.stopping.cancel();
        self.tracker.close();
        if timeout(drain, self.tracker.wait()).await.is_err() {
            debug!("cutting what is still under way");
            self.aborted.cancel();
            self.tracker.wait().await;
        }
    }
}
