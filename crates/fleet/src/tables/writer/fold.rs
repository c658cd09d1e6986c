//! Fold: moves rows from the index to the parts of the tables. The index is the record to which
//! each commit adds its changed rows; a part is a record with some of the rows of a table. Without
//! folds, the index would grow without limit.
//!
//! The parts are written first, then the index without these rows. If the writer fails in between,
//! the rows are in both, which is harmless.

use super::super::load::{CONCURRENCY, part_key, read_part};
use super::super::{Shared, TableError};
use super::Writer;
use crate::records::Outcome;
use jiffy_fleet_core::record::{Row, Table, TablePart};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Maximum number of attempts if another writer changes the part at the same time.
const ATTEMPTS: usize = 4;

impl Writer {
    /// Rewrites the parts of all pending rows, and removes the rows from the index.
    pub(super) async fn fold(&mut self) -> Result<(), TableError> {
        let own = self.shared.peers.own();
        let held = self.held.as_ref().ok_or(TableError::NotWriter(own))?;
        let mut index = held.index.clone();
        let keys = index.pending.iter().map(Row::key);
        let parts: BTreeSet<(Table, u8)> = keys.map(|key| (key.table(), key.part())).collect();
        let permits = Arc::new(Semaphore::new(CONCURRENCY));
        let mut writes = JoinSet::new();
        for &(table, part) in &parts {
            let rows = self.shared.state.read().rows_of(table, part);
            let content =
                TablePart::new(self.shared.fleet.clone(), table, part, index.number, rows);
            let (shared, permits) = (self.shared.clone(), permits.clone());
            writes.spawn(async move {
                let _permit = permits.acquire_owned().await;
                write_part(&shared, content).await
            });
        }
        while let Some(written) = writes.join_next().await {
            written.map_err(|_| TableError::Unsettled)??;
        }
        // No row changes, so the number of commits stays the same.
        for (table, part) in parts {
            index.fold(table, part);
        }
        let write = self.replacement(&index)?;
        let replaced = self.replace_index(index, &write).await;
        if replaced.is_err() {
            self.held = None;
        }
        replaced.map(drop)
    }
}

/// Writes a part, unless it already contains these commits. A part of a former writer, which had
/// fewer commits, is replaced.
async fn write_part(shared: &Shared, content: TablePart) -> Result<(), TableError> {
    let (table, part) = (content.table, content.part);
    let key = part_key(table, part)?;
    for _ in 0..ATTEMPTS {
        let current = read_part(&shared.records, &shared.fleet, table, part).await?;
        // `folded` is the number of the last commit that a part includes.
        let write = match &current {
            Some((newer, _)) if newer.folded > content.folded => {
                return Err(TableError::NotWriter(shared.peers.own()));
            }
            // An earlier fold has written the part, but not the index.
            Some((same, _)) if same.folded == content.folded => return Ok(()),
            Some((_, record)) => shared.records.replace(&key, content.encode()?, record)?,
            None => shared.records.create(&key, content.encode()?)?,
        };
        if let Outcome::Done(_) = shared.settle(&write).await? {
            return Ok(());
        }
    }
    Err(TableError::NotWriter(shared.peers.own()))
}
