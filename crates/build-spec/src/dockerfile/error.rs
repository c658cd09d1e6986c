//! Errors and warnings about a Dockerfile.

use std::fmt;

/// Error of a Dockerfile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {instruction}{}{problem}", if instruction.is_empty() { "" } else { ": " })]
pub struct DockerfileError {
    /// Line number, starting at 1.
    pub line: u32,
    /// Instruction (`RUN`, `COPY`, …). Empty if the error concerns no instruction.
    pub instruction: String,
    /// Problem, and a remedy.
    pub problem: String,
}

/// Warning about an accepted instruction with a different effect than in Docker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DockerfileWarning {
    /// Line number, starting at 1. `None` if the warning concerns no line.
    pub line: Option<u32>,
    /// Instruction (`HEALTHCHECK`, …).
    pub instruction: String,
    /// Difference to Docker.
    pub message: String,
}

impl fmt::Display for DockerfileWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        write!(f, "{}: {}", self.instruction, self.message)
    }
}
