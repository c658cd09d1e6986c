//! Errors of tools. The coding agent receives the text, so each error states the remedy.

use crate::output::cut_text;
use jiffy_agent_client::ClientError;
use jiffy_client::has_error_code;

/// Maximum length of an error in bytes.
const MAX_ERROR_BYTES: usize = 4 * 1024;

/// Error of a tool.
#[derive(Debug)]
pub struct ToolError(String);

/// Result of a tool.
pub type ToolResult<T> = Result<T, ToolError>;

impl ToolError {
    /// Creates an error with a message.
    pub fn new(message: impl AsRef<str>) -> Self {
        // Messages may contain text of a guest.
        Self(cut_text(message.as_ref(), MAX_ERROR_BYTES))
    }

    /// Returns the message.
    pub fn message(&self) -> &str {
        &self.0
    }

    /// Returns the error of a request for sandbox `id`.
    pub fn of_sandbox(id: &str, error: &anyhow::Error) -> Self {
        if has_error_code(error, "sandbox_not_found") {
            return Self::new(format!(
                "sandbox `{id}` does not exist or has ended: list sandboxes with sandbox_list, or \
                 create one with sandbox_create"
            ));
        }
        Self::new(format!("{error:#}"))
    }

    /// Returns the error of a request for a snapshot.
    pub fn of_snapshot(id: &str, snapshot: &str, error: &anyhow::Error) -> Self {
        if has_error_code(error, "snapshot_not_found") {
            return Self::new(format!(
                "snapshot `{snapshot}` does not exist: use an id that the tool snapshot returned"
            ));
        }
        Self::of_sandbox(id, error)
    }

    /// Returns the error of an operation on `path` in a sandbox.
    pub fn of_path(operation: &str, path: &str, error: &ClientError) -> Self {
        let path = cut_text(path, 1024);
        let hint = if error.is_not_found() {
            ": find the path with file_list or file_search"
        } else {
            ""
        };
        Self::new(format!("cannot {operation} `{path}`: {error}{hint}"))
    }
}

impl From<anyhow::Error> for ToolError {
    fn from(error: anyhow::Error) -> Self {
        Self::new(format!("{error:#}"))
    }
}

impl From<ClientError> for ToolError {
    fn from(error: ClientError) -> Self {
        Self::new(error.to_string())
    }
}
