//! Connections of sandboxes, also those from before they last slept.

use jiffy_engine_api::{ConnectionLog, ConnectionRecords};
use std::sync::Arc;

/// Connections of earlier guests of a sandbox.
#[derive(Default)]
pub(crate) struct ConnectionHistory {
    past: ConnectionRecords,
    /// That of the guest before this one, which may still be ending.
    last: Option<Arc<dyn ConnectionLog>>,
}

impl ConnectionHistory {
    /// Another guest of the sandbox has gone.
    pub fn add(&mut self, log: Arc<dyn ConnectionLog>) {
        if let Some(last) = self.last.replace(log) {
            self.past.extend(last.read());
        }
    }

    /// Removes all, as the record is no longer served.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the earlier connections, and where the last ones can be read, in order.
    pub fn all(&self) -> (ConnectionRecords, Option<Arc<dyn ConnectionLog>>) {
        (self.past.clone(), self.last.clone())
    }
}
