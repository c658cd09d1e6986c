//! [`TableChanges`]: changes of the tables of a fleet by callers that block.

use jiffy_fleet::tables::{Action, Changed, TableError, Tables};
use std::sync::mpsc;
use tokio::runtime::{Handle, RuntimeFlavor};

/// Tables of a fleet, with the runtime in which changes are sent to other hosts.
#[derive(Debug)]
pub(crate) struct TableChanges {
    pub tables: Tables,
    runtime: Handle,
}

impl TableChanges {
    /// Uses the runtime of the caller, which must have several threads.
    pub fn new(tables: Tables) -> Self {
        Self {
            tables,
            runtime: Handle::current(),
        }
    }

    /// Makes a change, and blocks until its result is known. Must not be called in a runtime with
    /// one thread.
    pub fn change(&self, action: Action) -> Result<Changed, TableError> {
        let (answer, result) = mpsc::sync_channel(1);
        let tables = self.tables.clone();
        self.runtime.spawn(async move {
            // The caller waits until it is answered.
            let _ = answer.send(tables.change(action).await);
        });
        let wait = || result.recv().unwrap_or(Err(TableError::Unsettled));
        // A worker thread of the runtime passes its other tasks to another thread before it waits.
        let is_worker = Handle::try_current()
            .is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread);
        if is_worker {
            tokio::task::block_in_place(wait)
        } else {
            wait()
        }
    }
}
