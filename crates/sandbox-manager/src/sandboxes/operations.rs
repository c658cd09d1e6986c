//! Operations in flight. Each operation runs to its end, is counted and logged, and a daemon that
//! shuts down waits for it.

use super::{OperationError, Sandboxes};
use crate::operation_error::ErrorKind;
use crate::operation_times::{OperationTimes, StepList};
use jiffy_api_types::SandboxState;
use jiffy_engine_api::steps::OperationSteps;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tracing::Instrument;

/// Time after which a client that is rejected during a shutdown should retry.
const RETRY_AFTER_SHUTDOWN: Duration = Duration::from_secs(2);

/// Operations in flight.
#[derive(Default)]
pub(super) struct Operations {
    in_flight: watch::Sender<usize>,
    /// Set during shutdown: new operations are rejected.
    is_closing: AtomicBool,
}

/// Operation in flight, which a shutdown waits for.
pub(super) struct OperationGuard(watch::Sender<usize>);

impl Drop for OperationGuard {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

impl Operations {
    /// Counts an operation that is in flight, even during a shutdown.
    pub fn count(&self) -> OperationGuard {
        // The channel's lock orders this increment with the read in `finish`.
        self.in_flight.send_modify(|n| *n += 1);
        OperationGuard(self.in_flight.clone())
    }

    /// Counts an operation that is about to start.
    ///
    /// # Errors
    /// Fails during shutdown.
    pub fn begin(&self) -> Result<OperationGuard, OperationError> {
        // The operation is counted before `is_closing` is read, and `finish` sets `is_closing`
        // before it reads the count. Thus either this operation is rejected, or the shutdown waits
        // for it.
        let operation = self.count();
        if self.is_closing() {
            return Err(OperationError::Busy {
                what: "the daemon is shutting down".to_owned(),
                retry_after: RETRY_AFTER_SHUTDOWN,
            });
        }
        Ok(operation)
    }

    /// Returns true during shutdown.
    pub fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::SeqCst)
    }

    /// Rejects new operations and waits until those in flight have ended, at most `limit`. Returns
    /// whether they have.
    async fn finish(&self, limit: Duration) -> bool {
        self.is_closing.store(true, Ordering::SeqCst);
        let mut in_flight = self.in_flight.subscribe();
        let idle = in_flight.wait_for(|n| *n == 0);
        tokio::time::timeout(limit, idle).await.is_ok()
    }
}

impl Sandboxes {
    /// Runs an operation on sandbox `id` to its end even if its caller stops waiting, counts it,
    /// and logs the result. `id` is empty for a create, and for the fetch of a snapshot. Errors and
    /// ids are logged, but never the arguments: environments and tokens are secret. Fails during
    /// shutdown.
    pub(super) async fn perform<T: Send + 'static>(
        &self,
        name: &'static str,
        id: &str,
        work: impl Future<Output = Result<T, OperationError>> + Send + 'static,
    ) -> Result<T, OperationError> {
        let span = tracing::info_span!(
            "operation",
            operation = name,
            sandbox = tracing::field::Empty,
            error = tracing::field::Empty,
        );
        if !id.is_empty() {
            span.record("sandbox", id);
        }
        // The task owns everything that it uses, since it may outlive its caller.
        let (this, id) = (self.clone(), id.to_owned());
        // Futures of operations are large. Without this, each frame below has a copy.
        let work = Box::pin(work);
        let recorder = OperationSteps::new();
        let observed = async move {
            let started_at = Instant::now();
            let _operation = this.0.operations.begin()?;
            // Every operation is a use of its sandbox, from its start to its end.
            if let Some(uses) = this.uses_of(&id) {
                uses.record();
            }
            let result = recorder.clone().scope(work).await;
            let result = result.map_err(|e| this.error_of_killed(name, &id, e));
            let took = started_at.elapsed();
            let ms = took.as_secs_f64() * 1000.0;
            let outcome = match &result {
                Ok(_) => "ok",
                Err(e) => e.kind().name(),
            };
            this.0.metrics.operation(name, outcome, took);
            let times = OperationTimes::new(name, took, recorder.take());
            // Failed operations count too: their steps show where they failed.
            this.0.metrics.steps(&times);
            let steps = StepList(&times.steps);
            match &result {
                Ok(_) => tracing::info!(outcome, ms, %steps, "completed an operation"),
                Err(e) => {
                    tracing::warn!(outcome, ms, %steps, error = %e, "an operation failed");
                    tracing::Span::current().record("error", outcome);
                }
            }
            // A create has no id, and stores its own times.
            let entry = this.0.entries.lock().get(id.as_str()).cloned();
            if let Some(entry) = entry {
                entry.uses().record();
                entry.set_last_operation(times);
            }
            result
        };
        detached(observed.instrument(span)).await
    }

    /// Replaces `error` of an operation on sandbox `id` by the state of the sandbox if the sandbox
    /// was killed meanwhile. The operation lost its guest, which is not a fault of the host.
    fn error_of_killed(
        &self,
        operation: &'static str,
        id: &str,
        error: OperationError,
    ) -> OperationError {
        if id.is_empty() || error.kind() != ErrorKind::Failed {
            return error;
        }
        let entry = self.0.entries.lock().get(id).cloned();
        let is_alive = entry.is_some_and(|entry| {
            !entry.is_ending() && entry.record().state != SandboxState::Killed
        });
        if is_alive {
            return error;
        }
        tracing::debug!(%error, "an operation failed because its sandbox was killed");
        OperationError::State {
            operation,
            id: id.to_owned(),
            state: SandboxState::Killed,
        }
    }

    /// Rejects new operations and waits until those in flight have ended, at most `limit`. Returns
    /// whether they have.
    pub async fn finish(&self, limit: Duration) -> bool {
        let is_idle = self.0.operations.finish(limit).await;
        if !is_idle {
            tracing::warn!("timed out waiting for operations in flight");
        }
        is_idle
    }
}

/// Runs `work` to its end even if its caller stops waiting.
pub(super) async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, OperationError>> + Send + 'static,
) -> Result<T, OperationError> {
    match tokio::spawn(work).await {
        Ok(result) => result,
        // The task panicked, or the runtime is shutting down.
        Err(e) => Err(OperationError::Lost(e.to_string())),
    }
}
