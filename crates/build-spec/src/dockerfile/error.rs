//! Errors and warnings about a Dockerfile.

use std::fmt;

/// Error of a Dockerfile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {instruction}{}{problem}", if instruction.is_empty() { "" } else { ": " })]
pub struct DockerfileError {
    /// Line from 1.
    pub line: u32,
    /// Instruction (`RUN`, `COPY`, …); empty if there is none.
    pub instruction: String,
    /// The problem, and a remedy.
    pub problem: String,
}

/// Accepted instruction with a different effect than in Docker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DockerfileWarning {
    /// Line from 1, if it concerns one.
    pub line: Option<u32>,
    /// `HEALTHCHECK`, …
    pub instruction: String,
    /// The difference.
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
