//! [`DiskQuota`]: disk quota of an owner for modules and machine code. The daemon implements it.

use crate::request_body::BoxError;
use parking_lot::Mutex;
use std::fmt::Debug;
use std::sync::Arc;

/// Disk quota of an owner.
pub trait DiskQuota: Debug + Send {
    /// Reserves `bytes` more until this value is dropped. The owner receives the error.
    fn grow(&mut self, bytes: u64) -> Result<(), BoxError>;
}

/// Quota from which a deployment reserves space before it writes. Clones share the quota. Defaults
/// to unlimited.
#[derive(Debug, Clone, Default)]
pub struct DeployQuota(Option<Arc<Mutex<dyn DiskQuota>>>);

impl DeployQuota {
    /// Uses the quota of an owner.
    pub fn limited(quota: impl DiskQuota + 'static) -> Self {
        Self(Some(Arc::new(Mutex::new(quota))))
    }

    /// Reserves `bytes` more.
    pub(crate) fn grow(&self, bytes: u64) -> Result<(), BoxError> {
        match &self.0 {
            Some(quota) => quota.lock().grow(bytes),
            None => Ok(()),
        }
    }
}
