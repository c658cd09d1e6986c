//! Durations of the steps of an operation, such as the start of a VMM, for logs and measurements.
//!
//! An operation runs in the scope of a recorder ([`OperationSteps::scope`]). Each step holds the
//! guard returned by [`begin`]. Without a recorder in scope, a step costs nothing. At most one step
//! of an operation is recorded at a time: a nested step is part of the outer step. The durations of
//! all steps therefore sum to at most the duration of the operation.

use parking_lot::Mutex;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::Span;

/// Maximum number of steps recorded for one operation. Later steps are not recorded.
pub const MAX_STEPS: usize = 32;
/// Number of steps of a typical operation, for which memory is allocated in advance.
const USUAL_STEPS: usize = 12;

tokio::task_local! {
    // Task-local variables are not inherited by spawned tasks: see `OperationSteps::current`.
    static CURRENT: OperationSteps;
    static REQUEST: Arc<ServedRequest>;
}

/// Request of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedRequest {
    /// Id of the request. `None` if the listener assigned none.
    pub id: Option<Arc<str>>,
    /// Id of the caller's API key. `None` for the host's owner.
    pub caller: Option<Arc<str>>,
}

/// Duration of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepDuration {
    /// Name of the step.
    pub name: &'static str,
    /// Duration.
    pub duration: Duration,
}

/// Recorder of the steps of one operation. Clones record to the same operation.
#[derive(Debug, Clone)]
pub struct OperationSteps(Arc<Recorder>);

/// Recorded steps of one operation.
#[derive(Debug)]
struct Recorder {
    /// Request that the operation serves. `None` for operations of the daemon itself.
    request: Option<Arc<ServedRequest>>,
    state: Mutex<RecorderState>,
}

/// Steps so far.
#[derive(Debug)]
struct RecorderState {
    /// Set while a step is in progress. Nested steps are not recorded.
    is_in_step: bool,
    steps: Vec<StepDuration>,
}

impl Default for OperationSteps {
    fn default() -> Self {
        Self::new()
    }
}

impl OperationSteps {
    /// Returns a recorder without steps that belongs to the current request.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Recorder {
            request: request(),
            state: Mutex::new(RecorderState {
                is_in_step: false,
                steps: Vec::with_capacity(USUAL_STEPS),
            }),
        }))
    }

    /// Returns the recorder in scope, for a task that is spawned by the operation.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Clone::clone).ok()
    }

    /// Runs `work` with this recorder in scope.
    pub async fn scope<T>(self, work: impl Future<Output = T>) -> T {
        CURRENT.scope(self, work).await
    }

    /// Returns the completed steps in the order of completion.
    #[must_use]
    pub fn list(&self) -> Vec<StepDuration> {
        self.0.state.lock().steps.clone()
    }

    /// Returns the completed steps in the order of completion, and removes them.
    #[must_use]
    pub fn take(&self) -> Vec<StepDuration> {
        std::mem::take(&mut self.0.state.lock().steps)
    }
}

/// Runs `work` with `request` as the current request.
pub async fn serve_request<T>(request: ServedRequest, work: impl Future<Output = T>) -> T {
    REQUEST.scope(Arc::new(request), work).await
}

/// Returns the request that the current task serves.
#[must_use]
pub fn request() -> Option<Arc<ServedRequest>> {
    // The request of a spawned task is found in its recorder, and the request of other code in
    // `REQUEST`.
    CURRENT
        .try_with(|steps| steps.0.request.clone())
        .unwrap_or_else(|_| REQUEST.try_with(Clone::clone).ok())
}

/// Returns the id of the client request that the current task serves.
#[must_use]
pub fn request_id() -> Option<Arc<str>> {
    request()?.id.clone()
}

/// Starts a step of the current operation. The step ends when the guard is dropped.
#[must_use]
pub fn begin(name: &'static str) -> StepGuard {
    // A nested step finds the flag set and gets no recorder.
    let recorder = OperationSteps::current().filter(|steps| {
        let mut state = steps.0.state.lock();
        !std::mem::replace(&mut state.is_in_step, true)
    });
    StepGuard(recorder.map(|recorder| Step::new(recorder, name)))
}

/// Guard of a step in progress. It may be held across awaits.
#[derive(Debug)]
pub struct StepGuard(Option<Step>);

impl StepGuard {
    /// Ends the step and starts the next one.
    pub fn next(&mut self, name: &'static str) {
        if let Some(step) = &mut self.0 {
            step.record();
            *step = Step::new(step.recorder.clone(), name);
        }
    }
}

impl Drop for StepGuard {
    fn drop(&mut self) {
        if let Some(step) = &self.0 {
            // Record the step before the flag is cleared, so that the steps are recorded in order.
            step.record();
            step.recorder.0.state.lock().is_in_step = false;
        }
    }
}

/// Step in progress.
#[derive(Debug)]
struct Step {
    recorder: OperationSteps,
    name: &'static str,
    began: Instant,
    _span: Span,
}

impl Step {
    fn new(recorder: OperationSteps, name: &'static str) -> Self {
        Self {
            recorder,
            name,
            began: Instant::now(),
            // The span has the level `debug`, which logs do not contain by default. At the default
            // level, the log has a single line with the durations of all steps.
            _span: tracing::debug_span!("step", step = name),
        }
    }

    /// Adds the duration of the step so far to its operation.
    fn record(&self) {
        let mut state = self.recorder.0.state.lock();
        // Limit the number: an operation with loops could record any number of steps.
        if state.steps.len() < MAX_STEPS {
            state.steps.push(StepDuration {
                name: self.name,
                duration: self.began.elapsed(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(steps: &OperationSteps) -> Vec<&'static str> {
        steps.take().into_iter().map(|step| step.name).collect()
    }

    #[tokio::test]
    async fn steps_are_recorded_in_order_and_sum_to_at_most_the_whole() {
        let steps = OperationSteps::new();
        let began = Instant::now();
        let work = async {
            let mut step = begin("one");
            tokio::task::yield_now().await;
            step.next("two");
            drop(step);
            let _step = begin("three");
        };
        steps.clone().scope(work).await;
        let whole = began.elapsed();
        let taken = steps.take();
        let sum: Duration = taken.iter().map(|step| step.duration).sum();
        assert!(sum <= whole, "{sum:?} of {whole:?}");
        let names: Vec<_> = taken.iter().map(|step| step.name).collect();
        assert_eq!(names, ["one", "two", "three"]);
    }

    #[tokio::test]
    async fn a_step_inside_another_is_part_of_it() {
        let steps = OperationSteps::new();
        let work = async {
            let _outer = begin("outer");
            let mut inner = begin("inner");
            inner.next("next");
        };
        steps.clone().scope(work).await;
        assert_eq!(names(&steps), ["outer"]);
    }

    #[tokio::test]
    async fn a_spawned_task_records_to_the_operation_that_scopes_it() {
        let steps = OperationSteps::new();
        let work = async {
            let current = OperationSteps::current().unwrap();
            let without = tokio::spawn(async { drop(begin("lost")) });
            without.await.unwrap();
            let task = current.scope(async { drop(begin("spawned")) });
            tokio::spawn(task).await.unwrap();
        };
        steps.clone().scope(work).await;
        assert_eq!(names(&steps), ["spawned"]);
    }

    #[tokio::test]
    async fn the_number_of_steps_is_bounded() {
        let steps = OperationSteps::new();
        let work = async { (0..MAX_STEPS + 5).for_each(|_| drop(begin("again"))) };
        steps.clone().scope(work).await;
        assert_eq!(steps.take().len(), MAX_STEPS);
    }

    #[tokio::test]
    async fn a_cancelled_step_is_recorded_and_the_next_can_begin() {
        let steps = OperationSteps::new();
        let work = async {
            let waits = async {
                let _step = begin("cancelled");
                std::future::pending::<()>().await;
            };
            // The timeout drops the future, and with it the step.
            let _ = tokio::time::timeout(Duration::from_millis(1), waits).await;
            let _step = begin("next");
        };
        steps.clone().scope(work).await;
        assert_eq!(names(&steps), ["cancelled", "next"]);
    }

    #[tokio::test]
    async fn an_operation_has_the_id_of_its_request() {
        drop(begin("without a recorder"));
        assert_eq!(request_id(), None);
        let work = async {
            let steps = OperationSteps::new();
            tokio::spawn(steps.scope(async { request_id() }))
                .await
                .unwrap()
        };
        let request = ServedRequest {
            id: Some("r1".into()),
            caller: None,
        };
        let id = serve_request(request, work).await;
        assert_eq!(id.as_deref(), Some("r1"));
    }
}
