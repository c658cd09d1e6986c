//! Entries of directories.
//!
//! The *catalog* is the database with the names and attributes of a volume's files. An entry
//! connects a name in a directory with a *node*: a file, directory or link, identified by a number.

use super::nodes::{COLUMNS, attributes};
use super::{Catalog, failed};
use crate::attributes::Attributes;
use nix::errno::Errno;
use rusqlite::{Connection, OptionalExtension, params};

/// Entry of a directory.
#[derive(Debug, Clone)]
pub(crate) struct DirectoryEntry {
    /// Position, which grows with later entries.
    pub(crate) position: u64,
    /// Name.
    pub(crate) name: Vec<u8>,
    /// Attributes. The size of a file is in its content.
    pub(crate) attributes: Attributes,
}

/// An entry that was looked up by name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    /// Position of the entry.
    pub(crate) position: u64,
    /// Attributes. The size of a file is in its content.
    pub(crate) attributes: Attributes,
}

impl Catalog {
    /// Looks up `name` in a directory.
    pub(crate) fn lookup(
        connection: &Connection,
        parent: u64,
        name: &[u8],
    ) -> Result<Option<Found>, Errno> {
        let parent = i64::try_from(parent).map_err(|_| Errno::ESTALE)?;
        let mut statement = connection
            .prepare_cached(&format!(
                "SELECT e.position, {COLUMNS} FROM entries e JOIN nodes n ON n.id = e.node
                    WHERE e.parent = ?1 AND e.name = ?2"
            ))
            .map_err(failed)?;
        let found = statement.query_row(params![parent, name], |row| {
            Ok(Found {
                position: row.get(0)?,
                attributes: attributes(row, 1)?,
            })
        });
        found.optional().map_err(failed)
    }

    /// Returns at most `limit` entries of a directory after a position.
    pub(crate) fn list(
        connection: &Connection,
        parent: u64,
        after: u64,
        limit: usize,
    ) -> Result<Vec<DirectoryEntry>, Errno> {
        let after = i64::try_from(after).unwrap_or(i64::MAX);
        let mut statement = connection
            .prepare_cached(&format!(
                "SELECT e.position, e.name, {COLUMNS} FROM entries e JOIN nodes n ON n.id = e.node
                    WHERE e.parent = ?1 AND e.position > ?2 ORDER BY e.position LIMIT ?3"
            ))
            .map_err(failed)?;
        let found = statement.query_map(params![parent, after, limit], |row| {
            Ok(DirectoryEntry {
                position: row.get(0)?,
                name: row.get(1)?,
                attributes: attributes(row, 2)?,
            })
        });
        let found = found.map_err(failed)?;
        found.collect::<rusqlite::Result<Vec<_>>>().map_err(failed)
    }

    /// Returns whether a directory has no entries.
    pub(crate) fn is_empty(connection: &Connection, parent: u64) -> Result<bool, Errno> {
        let mut statement = connection
            .prepare_cached("SELECT EXISTS (SELECT 1 FROM entries WHERE parent = ?1)")
            .map_err(failed)?;
        let has: bool = statement
            .query_row(params![parent], |row| row.get(0))
            .map_err(failed)?;
        Ok(!has)
    }

    /// Adds an entry to a directory that has no entry with this name.
    pub(crate) fn add_entry(
        connection: &Connection,
        parent: u64,
        name: &[u8],
        node: u64,
    ) -> Result<(), Errno> {
        let mut statement = connection
            .prepare_cached("INSERT INTO entries (parent, name, node) VALUES (?1, ?2, ?3)")
            .map_err(failed)?;
        statement
            .execute(params![parent, name, node])
            .map_err(failed)?;
        Self::touch(connection, parent)
    }

    /// Removes an entry.
    pub(crate) fn remove_entry(
        connection: &Connection,
        parent: u64,
        position: u64,
    ) -> Result<(), Errno> {
        let mut statement = connection
            .prepare_cached("DELETE FROM entries WHERE position = ?1")
            .map_err(failed)?;
        statement.execute(params![position]).map_err(failed)?;
        Self::touch(connection, parent)
    }

    /// Lets an entry refer to another node.
    pub(crate) fn set_entry(
        connection: &Connection,
        position: u64,
        node: u64,
    ) -> Result<(), Errno> {
        let mut statement = connection
            .prepare_cached("UPDATE entries SET node = ?2 WHERE position = ?1")
            .map_err(failed)?;
        statement.execute(params![position, node]).map_err(failed)?;
        Ok(())
    }
}
