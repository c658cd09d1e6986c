//! What is wrong with a Dockerfile, and what is only worth a word.

use std::fmt;

/// Why a Dockerfile cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {instruction}{}{problem}", if instruction.is_empty() { "" } else { ": " })]
pub struct DockerfileError {
    /// Line from 1.
    pub line: u32,
    /// `RUN`, `COPY`, …; empty if it is about none.
    pub instruction: String,
    /// What is wrong, and what to do.
    pub problem: String,
}

/// Something that is accepted and does not do what it does elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DockerfileWarning {
    /// Line from 1, if it is about one.
    pub line: Option<u32>,
    /// `HEALTHCHECK`, …
    pub instruction: String,
    /// What does not happen.
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
