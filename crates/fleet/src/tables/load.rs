//! Loads the tables from the records: reads the index, and the parts that have changed since. The
//! index is the record that lists the last commits with their rows. The parts are the records that
//! contain all other rows. A *fold* moves rows from the index to their parts.

use super::state::{State, check_folded};
use super::{Shared, TableError};
use crate::records::Record;
use crate::{RecordError, RecordKey, SealedRecords};
use jiffy_fleet_core::FleetId;
use jiffy_fleet_core::record::{Table, TableIndex, TablePart};
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Maximum number of concurrent reads and writes of parts.
pub(super) const CONCURRENCY: usize = 16;

/// Returns the key of the index.
pub(super) fn index_key() -> Result<RecordKey, TableError> {
    Ok("fleet/tables/index".parse()?)
}

/// Returns the key of a part.
pub(super) fn part_key(table: Table, part: u8) -> Result<RecordKey, TableError> {
    Ok(format!("fleet/tables/{table}/{part:02x}").parse()?)
}

/// Reads the index. `None` if the fleet has no tables yet.
pub(super) async fn read_index(
    records: &SealedRecords,
    fleet: &FleetId,
) -> Result<Option<(TableIndex, Record)>, TableError> {
    let Some(record) = records.get(&index_key()?).await? else {
        return Ok(None);
    };
    let index = TableIndex::decode(&record.content, fleet)?;
    Ok(Some((index, record)))
}

/// Reads a part. `None` if it was never written.
pub(super) async fn read_part(
    records: &SealedRecords,
    fleet: &FleetId,
    table: Table,
    part: u8,
) -> Result<Option<(TablePart, Record)>, TableError> {
    let Some(record) = records.get(&part_key(table, part)?).await? else {
        return Ok(None);
    };
    let content = TablePart::decode(&record.content, fleet, table, part)?;
    Ok(Some((content, record)))
}

impl Shared {
    /// Reads the index and the parts that changed. Returns the index with its record. `None` if the
    /// fleet has no tables yet.
    pub(super) async fn load(&self) -> Result<Option<(TableIndex, Record)>, TableError> {
        // Concurrent calls would read the same parts: they wait for this one.
        let _turn = self.loading.lock().await;
        let started = (self.clock)();
        let known = self.state.read().number();
        let Some((index, record)) = read_index(&self.records, &self.fleet).await? else {
            return Ok(None);
        };
        // `known` was read before the index, so an older index means that the store has lost
        // commits. Commits that were pushed since cannot cause it.
        if index.number < known {
            return Err(TableError::Records(RecordError::Regressed {
                record: index_key()?,
                reason: format!("it has {} commits, but {known} were seen", index.number),
            }));
        }
        self.load_parts(&index).await?;
        self.contact.lock().verify(started);
        Ok(Some((index, record)))
    }

    /// Replaces all rows by the rows in the records, which may be older.
    pub(super) async fn reload(&self) -> Result<(), TableError> {
        let _turn = self.loading.lock().await;
        let started = (self.clock)();
        // Without `forget`, a version that is older than the last one read would be an error.
        for table in Table::ALL {
            for part in 0..=u8::MAX {
                self.records.forget(&part_key(table, part)?);
            }
        }
        self.records.forget(&index_key()?);
        let read = read_index(&self.records, &self.fleet).await?;
        let mut state = State::default();
        if let Some((index, _)) = read {
            let parts = self.read_parts(&index, state.outdated(&index)).await?;
            state.apply_index(&index, parts);
        }
        *self.state.write() = state;
        self.contact.lock().verify(started);
        Ok(())
    }

    /// Reads the parts that `index` requires, and applies the index and these parts to the state.
    pub(super) async fn load_parts(&self, index: &TableIndex) -> Result<(), TableError> {
        let outdated = self.state.read().outdated(index);
        let parts = self.read_parts(index, outdated).await?;
        let number = {
            let mut state = self.state.write();
            state.apply_index(index, parts);
            state.number()
        };
        self.announce(number);
        Ok(())
    }

    /// Reads parts of tables, which must contain the commits that `index` requires.
    async fn read_parts(
        &self,
        index: &TableIndex,
        parts: Vec<(Table, u8)>,
    ) -> Result<Vec<TablePart>, TableError> {
        let permits = Arc::new(Semaphore::new(CONCURRENCY));
        let mut reads = JoinSet::new();
        for (table, part) in parts {
            let (records, fleet) = (self.records.clone(), self.fleet.clone());
            let permits = permits.clone();
            let folded = index.folded(table)[usize::from(part)];
            reads.spawn(async move {
                let _permit = permits.acquire_owned().await;
                let read = read_part(&records, &fleet, table, part).await?;
                check_folded(read.map(|(part, _)| part), &part_key(table, part)?, folded)
            });
        }
        let mut parts = Vec::new();
        while let Some(read) = reads.join_next().await {
            parts.push(read.map_err(|_| TableError::Unsettled)??);
        }
        Ok(parts)
    }

    /// Wakes tasks that wait for changes.
    pub(super) fn announce(&self, number: u64) {
        self.number.send_if_modified(|known| {
            let is_new = *known < number;
            *known = number.max(*known);
            is_new
        });
    }
}
