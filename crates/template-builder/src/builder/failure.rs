//! Failures of builds, as reported to the author of the template.

use super::records::FailureReason;
use jiffy_agent_client::ClientError;

/// Failure of a build, reported to the author of the template.
#[derive(Debug)]
pub struct BuildFailure {
    pub message: String,
    /// Failed step. `None` until a caller sets the step.
    pub step: Option<String>,
}

impl BuildFailure {
    pub fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            step: None,
        }
    }

    /// Creates a failure with the message of `error` and of its causes.
    pub fn from_error(error: &dyn std::error::Error) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            // Authors of templates see only this message, and not the chain of causes.
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        Self::new(message)
    }

    /// Creates the failure of a request to the agent.
    pub fn agent(what: &str, error: ClientError) -> Self {
        Self::new(format!("cannot {what}: {error}"))
    }

    /// Sets the failed step, unless it is already set.
    pub fn at_step(self, step: &str) -> Self {
        let step = self.step.or_else(|| Some(step.to_owned()));
        Self { step, ..self }
    }
}

impl From<BuildFailure> for FailureReason {
    fn from(failure: BuildFailure) -> Self {
        Self {
            message: failure.message,
            step: failure.step,
        }
    }
}
