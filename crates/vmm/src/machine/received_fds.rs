//! Descriptors received with a request. Each is taken at most once.

use crate::error::VmmError;
use jiffy_proto::vm::FdIndex;
use std::os::fd::OwnedFd;

/// File descriptors by position.
#[derive(Debug)]
pub struct ReceivedFds(Vec<Option<OwnedFd>>);

impl ReceivedFds {
    /// Wraps descriptors in the order in which they were sent.
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }

    /// Takes a descriptor. `what` names it in errors.
    pub fn take(&mut self, index: FdIndex, what: &str) -> Result<OwnedFd, VmmError> {
        self.0
            .get_mut(usize::from(index.0))
            .and_then(Option::take)
            .ok_or_else(|| {
                VmmError::Config(format!(
                    "descriptor {} for the {what} was not sent, or was named twice",
                    index.0
                ))
            })
    }

    /// Duplicates a descriptor that will be taken later.
    pub fn copy(&self, index: FdIndex, what: &'static str) -> Result<OwnedFd, VmmError> {
        match self.0.get(usize::from(index.0)) {
            Some(Some(fd)) => fd.try_clone().map_err(|e| VmmError::host(what, e)),
            _ => Err(VmmError::Config(format!(
                "descriptor {} for the {what} was not sent",
                index.0
            ))),
        }
    }
}
