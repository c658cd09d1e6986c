//! Retries of operations while the host has too few free resources, such as memory.

use super::super::log::BuildLog;
use jiffy_sandbox_manager::{ErrorKind, OperationError};
use std::time::{Duration, Instant};

/// Delay before a retry if the error specifies none.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// Minimum interval between two log lines about one wait.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Retries of one operation that starts a guest or writes a snapshot.
pub(super) struct Patience<'a> {
    log: &'a BuildLog,
    /// Time after which the retries end.
    limit: Duration,
    began: Instant,
    /// Time of the last line in the log about the waiting.
    logged: Option<Instant>,
}

impl<'a> Patience<'a> {
    /// Creates the retries of an operation. They end after `limit`.
    pub(super) fn new(log: &'a BuildLog, limit: Duration) -> Self {
        Self {
            log,
            limit,
            began: Instant::now(),
            logged: None,
        }
    }

    /// Waits before a retry. Returns false if `error` is not a shortage of host resources, or if
    /// the time limit is reached. Logs the reason for waiting.
    pub(super) async fn pause(&mut self, error: &OperationError) -> bool {
        if error.kind() != ErrorKind::Busy {
            return false;
        }
        // The host knows best when resources become free.
        let delay = error.retry_after().unwrap_or(RETRY_DELAY);
        if self.began.elapsed().saturating_add(delay) > self.limit {
            return false;
        }
        // Log at most once per interval. A comparison with the last message would not detect
        // repetitions, because the numbers in the message change with each attempt.
        if self.logged.is_none_or(|at| at.elapsed() > LOG_INTERVAL) {
            self.log
                .info(None, &format!("waiting for the host: {error}"));
            self.logged = Some(Instant::now());
        }
        tokio::time::sleep(delay).await;
        true
    }
}
