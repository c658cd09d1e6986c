//! Import of the keys and template names of a host that joins, or on which a fleet starts.

use super::{Action, TableError, Tables};
use jiffy_fleet_core::record::{MAX_IMPORT_ROWS, RowContent};

/// Size of the encoded rows of one change above which the next row belongs to the next change.
const MAX_CHANGE_BYTES: usize = 256 << 10;

/// Result of an import.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Imported {
    /// Number of rows.
    pub rows: usize,
}

/// Returns the changes that import all rows.
#[must_use]
pub fn import_actions(rows: Vec<RowContent>) -> Vec<Action> {
    let mut actions = Vec::new();
    let (mut batch, mut bytes) = (Vec::new(), 0);
    for row in rows {
        bytes += serde_json::to_vec(&row).map_or(0, |row| row.len());
        batch.push(row);
        if bytes > MAX_CHANGE_BYTES || batch.len() == MAX_IMPORT_ROWS {
            actions.push(Action::Import(std::mem::take(&mut batch)));
            bytes = 0;
        }
    }
    if !batch.is_empty() {
        actions.push(Action::Import(batch));
    }
    actions
}

impl Tables {
    /// Imports rows. Rows that exist already are an error, and the changes before them remain.
    ///
    /// # Errors
    /// [`TableError::Exists`] with the first row that exists, or the error of the change.
    pub async fn import(&self, rows: Vec<RowContent>) -> Result<Imported, TableError> {
        let count = rows.len();
        for action in import_actions(rows) {
            self.change(action).await?;
        }
        Ok(Imported { rows: count })
    }
}
