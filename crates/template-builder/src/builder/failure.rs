//! Failures of builds.

use super::records::FailureReason;
use jiffy_agent_client::ClientError;

/// Why a build failed.
#[derive(Debug)]
pub struct BuildFailure {
    pub message: String,
    /// Where; filled in by whoever knows.
    pub step: Option<String>,
}

impl BuildFailure {
    pub fn of(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            step: None,
        }
    }

    /// An error with what it comes from.
    pub fn because(error: &dyn std::error::Error) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        Self::of(message)
    }

    /// The agent did not do what it was asked.
    pub fn agent(what: &str, error: ClientError) -> Self {
        Self::of(format!("cannot {what}: {error}"))
    }

    pub fn at(self, step: &str) -> Self {
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
