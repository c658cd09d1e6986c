//! Runs blocking calls on separate threads.

use crate::function_error::FunctionError;

/// Runs `work` on a thread for blocking calls.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FunctionError> + Send + 'static,
) -> Result<T, FunctionError> {
    let joined = tokio::task::spawn_blocking(work).await;
    // The task panicked or the runtime shuts down.
    joined.unwrap_or_else(|e| Err(FunctionError::Unavailable(e.to_string())))
}
