//! Runs blocking calls on separate threads.

use crate::function_error::FunctionError;

/// Runs `work` on a thread for blocking calls.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FunctionError> + Send + 'static,
) -> Result<T, FunctionError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(FunctionError::Unavailable(e.to_string())))
}
