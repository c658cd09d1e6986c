//! Disk budget of an import.

use super::ImportError;
use std::fmt;
use std::sync::Arc;

/// Reserves a total number of bytes, or rejects the reservation with a message for the caller.
type ReserveFn = dyn Fn(u64) -> Result<(), String> + Send + Sync;

/// Disk budget of an import, unlimited by default. Space is reserved as soon as the size of a part
/// is known.
#[derive(Clone, Default)]
pub struct DiskBudget(Option<Arc<ReserveFn>>);

impl DiskBudget {
    /// Creates a budget that reserves space with `reserve`, which receives the total bytes of the
    /// import.
    pub fn new(reserve: impl Fn(u64) -> Result<(), String> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(reserve)))
    }

    /// Like [`Self::reserve`], but returns an [`ImportError`].
    pub(super) fn need(&self, bytes: u64) -> Result<(), ImportError> {
        self.reserve(bytes)
            .map_err(|message| ImportError::Budget { message })
    }

    /// Ensures that at least `bytes` are reserved for the whole import, including earlier
    /// reservations. Returns a message for the owner if the quota is too small.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<(), String> {
        self.0.as_ref().map_or(Ok(()), |reserve| reserve(bytes))
    }
}

impl fmt::Debug for DiskBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.0.is_some() {
            "limited"
        } else {
            "unlimited"
        };
        f.debug_tuple("DiskBudget").field(&kind).finish()
    }
}
