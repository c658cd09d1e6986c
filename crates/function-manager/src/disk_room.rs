//! Space on the host's disk for files of an owner.

use crate::request_body::BoxError;
use parking_lot::Mutex;
use std::fmt::Debug;
use std::sync::Arc;

/// Space in the budget of an owner.
pub trait DiskRoom: Debug + Send {
    /// Reserves `bytes` more for as long as this value exists. The owner reads the error.
    fn grow(&mut self, bytes: u64) -> Result<(), BoxError>;
}

/// Space that a deployment reserves before it writes. Clones share it. Unlimited by default.
#[derive(Debug, Clone, Default)]
pub struct DeployRoom(Option<Arc<Mutex<dyn DiskRoom>>>);

impl DeployRoom {
    /// Space in the budget of an owner.
    pub fn limited(room: impl DiskRoom + 'static) -> Self {
        Self(Some(Arc::new(Mutex::new(room))))
    }

    /// Reserves `bytes` more.
    pub(crate) fn grow(&self, bytes: u64) -> Result<(), BoxError> {
        match &self.0 {
            Some(room) => room.lock().grow(bytes),
            None => Ok(()),
        }
    }
}
