//! [`OperationTimes`]: durations of one operation and of its steps. The API, logs and metrics show
//! them.

use jiffy_api_types::{OperationStep, OperationSteps, SandboxSteps};
use jiffy_engine_api::steps::StepDuration;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Duration of an operation and of its steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperationTimes {
    /// Name of the operation.
    pub operation: &'static str,
    /// Duration of the whole operation. At least the sum of the steps, which do not overlap.
    pub duration: Duration,
    /// Steps, in the order of their ends.
    pub steps: Box<[StepDuration]>,
}

impl OperationTimes {
    pub(crate) fn new(
        operation: &'static str,
        duration: Duration,
        steps: Vec<StepDuration>,
    ) -> Self {
        Self {
            operation,
            duration,
            // A boxed slice, since the times of every sandbox stay in memory.
            steps: steps.into(),
        }
    }
}

/// Durations of operations on one sandbox since the daemon started.
#[derive(Debug, Clone, Default)]
pub struct SandboxTimes {
    /// Create. `None` if an earlier daemon created the sandbox.
    pub create: Option<Arc<OperationTimes>>,
    /// Last operation that has ended.
    pub last: Option<Arc<OperationTimes>>,
}

impl From<&OperationTimes> for OperationSteps {
    fn from(times: &OperationTimes) -> Self {
        let steps = times.steps.iter().map(|step| OperationStep {
            step: step.name.to_owned(),
            ms: milliseconds(step.duration),
        });
        Self {
            operation: times.operation.to_owned(),
            ms: milliseconds(times.duration),
            steps: steps.collect(),
        }
    }
}

impl From<SandboxTimes> for SandboxSteps {
    fn from(times: SandboxTimes) -> Self {
        Self {
            create: times.create.as_deref().map(OperationSteps::from),
            last: times.last.as_deref().map(OperationSteps::from),
        }
    }
}

/// Returns `duration` in milliseconds, truncated to whole microseconds.
fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}

/// Steps as the log shows them: `admission=0.012 restore=3.401`, in milliseconds.
pub(crate) struct StepList<'a>(pub &'a [StepDuration]);

impl fmt::Display for StepList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, step) in self.0.iter().enumerate() {
            let space = if n == 0 { "" } else { " " };
            let ms = step.duration.as_secs_f64() * 1000.0;
            write!(f, "{space}{}={ms:.3}", step.name)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_listed_with_milliseconds() {
        let step = |name, us| StepDuration {
            name,
            duration: Duration::from_micros(us),
        };
        let steps = [step("admission", 12), step("restore", 3401)];
        let list = StepList(&steps).to_string();
        assert_eq!(list, "admission=0.012 restore=3.401");
        assert_eq!(StepList(&[]).to_string(), "");
    }
}
