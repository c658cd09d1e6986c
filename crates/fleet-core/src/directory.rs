//! Directory: host, state and revision of each sandbox of a shard (a part of the fleet's
//! sandboxes), in the memory of the coordinator. Members report their sandboxes ([`RowMessage`]). A
//! member that receives a request for a sandbox of another host looks up the host here. The
//! directory is not stored: a new coordinator receives all rows again.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. Each
//! replacement of the head increments its *revision*. A sandbox has a head from the first time that
//! its snapshot is in the shared store. The *owner* is the member that runs the sandbox. The *home*
//! has its files while no member owns it.
//!
//! A row occupies 24 bytes: 16 of the hash, and 8 with revision, host, state and a mark (`table.rs`
//! explains it). The rows are in 256 hash tables that grow by an eighth each time, so that at most
//! a quarter of the memory is unused at any number of sandboxes.

mod stream;
mod table;

pub use stream::{MAX_ROWS_PER_MESSAGE, RowChange, RowMessage, RowReceiver, RowRequest, RowSender};

use crate::ids::{MAX_REVISION, MemberId, Revision};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use table::{Meta, Table};

/// Maximum number of hosts that a directory distinguishes. A row has 13 bits for its host.
const MAX_HOSTS: usize = 1 << 13;
/// Number of tables.
const TABLES: usize = 256;

/// Hash of a sandbox id, keyed by the secret of the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SandboxHash(#[serde(with = "crate::ids::hex")] pub [u8; 16]);

impl SandboxHash {
    /// Returns the upper and the lower half of the hash.
    fn words(self) -> (u64, u64) {
        let value = u128::from_be_bytes(self.0);
        ((value >> 64) as u64, value as u64)
    }

    fn of_words(high: u64, low: u64) -> Self {
        Self((u128::from(high) << 64 | u128::from(low)).to_be_bytes())
    }
}

/// State of a sandbox in the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowState {
    /// Runs on its host, which is the owner.
    Running,
    /// Paused, and the snapshot is not in the store. The host is the owner.
    Paused,
    /// Paused, and the snapshot is in the store. The host is the home, and the sandbox has no
    /// owner.
    Stored,
}

/// Row of a sandbox, as its host reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Hash of the sandbox id.
    pub hash: SandboxHash,
    /// Revision of the head. Zero if the sandbox has no head.
    pub revision: Revision,
    /// State.
    pub state: RowState,
}

/// Place of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Located {
    /// Host of the sandbox.
    pub host: MemberId,
    /// Revision of the head. Zero if the sandbox has no head.
    pub revision: Revision,
    /// State.
    pub state: RowState,
}

impl Located {
    /// Returns the member that owns the sandbox. `None` if the sandbox is paused and stored.
    #[must_use]
    pub fn owner(&self) -> Option<MemberId> {
        (self.state != RowState::Stored).then_some(self.host)
    }
}

/// Error of a row that was not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DirectoryError {
    /// More hosts than the directory distinguishes.
    #[error("the directory has the maximum of {MAX_HOSTS} hosts: remove hosts that have left")]
    TooManyHosts,
    /// The revision exceeds [`MAX_REVISION`].
    #[error("the reported {0} is out of range")]
    Revision(Revision),
}

/// Member with its number of rows.
#[derive(Debug, Clone, Copy, Default)]
struct Host {
    id: Option<MemberId>,
    rows: u64,
}

/// Rows of all sandboxes of a shard.
#[derive(Debug)]
pub struct Directory {
    tables: Vec<Table>,
    hosts: Vec<Host>,
    /// Short numbers of members, by which rows refer to them.
    numbers: HashMap<MemberId, u16>,
}

impl Default for Directory {
    fn default() -> Self {
        Self::new()
    }
}

impl Directory {
    /// Creates an empty directory.
    #[must_use]
    pub fn new() -> Self {
        Self {
            tables: (0..TABLES).map(|_| Table::default()).collect(),
            hosts: Vec::new(),
            numbers: HashMap::new(),
        }
    }

    /// Returns the number of sandboxes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tables.iter().map(Table::len).sum()
    }

    /// Returns whether the directory has no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of rows of a host.
    #[must_use]
    pub fn rows_of(&self, host: MemberId) -> u64 {
        self.numbers
            .get(&host)
            .map_or(0, |&number| self.hosts[usize::from(number)].rows)
    }

    /// Returns the bytes of heap memory that the rows occupy.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.tables.iter().map(Table::heap_bytes).sum::<usize>()
            + self.tables.capacity() * size_of::<Table>()
            + self.hosts.capacity() * size_of::<Host>()
    }

    /// Returns the place of a sandbox. `None` if no member has reported it.
    #[must_use]
    pub fn find(&self, hash: SandboxHash) -> Option<Located> {
        let (high, low) = hash.words();
        let meta = self.tables[table_of(high)].get(high, low)?;
        let host = self.hosts.get(usize::from(meta.host()))?.id?;
        Some(Located {
            host,
            revision: Revision(meta.revision()),
            state: meta.state()?,
        })
    }

    /// Stores a row that a host reports. A report is ignored if its revision is lower than the
    /// current one, or equal to the revision of another host: the sandbox has moved. The revision
    /// of a sandbox that was never stored is zero, so its row cannot be replaced by a row of
    /// another host with this revision.
    ///
    /// # Errors
    /// [`DirectoryError`] if the row cannot be stored. The directory is unchanged then.
    pub fn put(&mut self, host: MemberId, row: &Row) -> Result<(), DirectoryError> {
        if row.revision.0 > MAX_REVISION {
            return Err(DirectoryError::Revision(row.revision));
        }
        let number = self.number(host)?;
        let (high, low) = row.hash.words();
        let table = &mut self.tables[table_of(high)];
        let meta = Meta::new(row.state, number, row.revision.0);
        match table.get(high, low) {
            // Each move increments the revision.
            Some(current) if current.host() != number && current.revision() >= meta.revision() => {
                return Ok(());
            }
            Some(current) if current.revision() > meta.revision() => {
                // The host reports an older revision, for example in a list that is being replayed.
                // The current row stays. The mark prevents its removal by [`Self::finish_list`].
                table.put(high, low, current.with_mark(true));
                return Ok(());
            }
            Some(current) => self.hosts[usize::from(current.host())].rows -= 1,
            None => {}
        }
        self.hosts[usize::from(number)].rows += 1;
        table.put(high, low, meta);
        Ok(())
    }

    /// Removes the row of a sandbox if the row belongs to this host. Returns whether it was
    /// removed.
    pub fn remove(&mut self, host: MemberId, hash: SandboxHash) -> bool {
        let Some(&number) = self.numbers.get(&host) else {
            return false;
        };
        let (high, low) = hash.words();
        let table = &mut self.tables[table_of(high)];
        if table
            .get(high, low)
            .is_none_or(|meta| meta.host() != number)
        {
            return false;
        }
        table.remove(high, low);
        self.hosts[usize::from(number)].rows -= 1;
        true
    }

    /// Removes all rows of a host, which has left the fleet. Reads all rows of the directory.
    pub fn remove_host(&mut self, host: MemberId) {
        let Some(number) = self.numbers.remove(&host) else {
            return;
        };
        for table in &mut self.tables {
            table.retain(|meta| meta.host() != number);
        }
        self.hosts[usize::from(number)] = Host::default();
    }

    /// Starts a full list of a host's rows: rows that are not reported before
    /// [`Self::finish_list`] will be removed. Returns whether the host has rows already. Reads all
    /// rows of the directory in this case.
    fn start_list(&mut self, host: MemberId) -> Result<bool, DirectoryError> {
        let number = self.number(host)?;
        let has_rows = self.hosts[usize::from(number)].rows > 0;
        if has_rows {
            for table in &mut self.tables {
                table.clear_marks(number);
            }
        }
        Ok(has_rows)
    }

    /// Removes all rows of a host that the list since [`Self::start_list`] did not contain. Reads
    /// all rows of the directory.
    fn finish_list(&mut self, host: MemberId) {
        let Some(&number) = self.numbers.get(&host) else {
            return;
        };
        let mut removed = 0;
        for table in &mut self.tables {
            removed += table.retain(|meta| meta.host() != number || meta.mark());
        }
        self.hosts[usize::from(number)].rows -= removed;
    }

    /// Returns all rows of a host. Reads all rows of the directory.
    pub fn rows(&self, host: MemberId) -> impl Iterator<Item = Row> {
        let number = self.numbers.get(&host).copied();
        self.tables
            .iter()
            .flat_map(Table::iter)
            .filter(move |(_, _, meta)| Some(meta.host()) == number)
            .filter_map(|(high, low, meta)| {
                Some(Row {
                    hash: SandboxHash::of_words(high, low),
                    revision: Revision(meta.revision()),
                    state: meta.state()?,
                })
            })
    }

    /// Returns the number of a host in the rows, and assigns a number to a new host.
    fn number(&mut self, host: MemberId) -> Result<u16, DirectoryError> {
        if let Some(&number) = self.numbers.get(&host) {
            return Ok(number);
        }
        let free = self.hosts.iter().position(|entry| entry.id.is_none());
        let index = free.unwrap_or(self.hosts.len());
        if index == MAX_HOSTS {
            return Err(DirectoryError::TooManyHosts);
        }
        if index == self.hosts.len() {
            self.hosts.push(Host::default());
        }
        self.hosts[index].id = Some(host);
        self.numbers.insert(host, index as u16);
        Ok(index as u16)
    }
}

/// Returns the table of a hash.
fn table_of(high: u64) -> usize {
    (high >> 56) as usize
}
