//! Connection records of a sandbox's earlier guests. A rollback or resume replaces the guest, and
//! the API still shows the connections of the guests before.

use jiffy_engine_api::{ConnectionLog, ConnectionRecords};
use std::sync::Arc;

/// Connections of earlier guests of a sandbox.
#[derive(Default)]
pub(crate) struct ConnectionHistory {
    /// Connections of all guests before the previous one.
    past: ConnectionRecords,
    /// Log of the previous guest, which may still be stopping and add connections.
    last: Option<Arc<dyn ConnectionLog>>,
}

impl ConnectionHistory {
    /// Adds the log of a guest that was replaced or removed.
    pub fn add(&mut self, log: Arc<dyn ConnectionLog>) {
        // The guest before the previous one has stopped, so its log is complete.
        if let Some(last) = self.last.replace(log) {
            self.past.extend(last.read());
        }
    }

    /// Removes all connections. They are not served for killed sandboxes.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the connections of earlier guests, and the log of the previous guest, which
    /// continues them.
    pub fn all(&self) -> (ConnectionRecords, Option<Arc<dyn ConnectionLog>>) {
        (self.past.clone(), self.last.clone())
    }
}
