//! Disk space that an import may take.

use super::ImportError;
use std::fmt;
use std::sync::Arc;

/// Answers a request for so many bytes in all, or refuses it with a sentence for the caller.
type Ask = dyn Fn(u64) -> Result<(), String> + Send + Sync;

/// Disk space that an import may take, asked for as it becomes known how much that is.
#[derive(Clone, Default)]
pub struct DiskBudget(Option<Arc<Ask>>);

impl DiskBudget {
    /// A budget that `ask` knows: it is called with the bytes that the import needs in all.
    pub fn new(ask: impl Fn(u64) -> Result<(), String> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(ask)))
    }

    /// Fails unless there is room for `bytes` in all.
    pub(super) fn need(&self, bytes: u64) -> Result<(), ImportError> {
        let asked = self.0.as_ref().map_or(Ok(()), |ask| ask(bytes));
        asked.map_err(|message| ImportError::Budget { message })
    }
}

impl fmt::Debug for DiskBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.0.is_some() {
            "asked"
        } else {
            "unlimited"
        };
        f.debug_tuple("DiskBudget").field(&kind).finish()
    }
}
