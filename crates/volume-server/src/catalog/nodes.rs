//! Nodes of the catalog.
//!
//! The *catalog* is the database with the names and attributes of a volume's files. A *node* is a
//! file, directory or link, identified by a number as in FUSE.

use super::{Catalog, failed};
use crate::attributes::{Attributes, Creation, Time};
use nix::errno::Errno;
use rusqlite::{Connection, OptionalExtension, Row, params};

/// Columns that [`attributes`] reads by position.
pub(super) const COLUMNS: &str =
    "n.id, n.mode, n.links, n.uid, n.gid, n.device, n.accessed, n.modified, n.changed";

/// Reads attributes from the columns that start at `first`. Size and blocks are 0.
pub(super) fn attributes(row: &Row<'_>, first: usize) -> rusqlite::Result<Attributes> {
    Ok(Attributes {
        node: row.get(first)?,
        mode: row.get(first + 1)?,
        links: row.get(first + 2)?,
        uid: row.get(first + 3)?,
        gid: row.get(first + 4)?,
        device: row.get(first + 5)?,
        size: 0,
        blocks: 0,
        accessed: Time(row.get(first + 6)?),
        modified: Time(row.get(first + 7)?),
        changed: Time(row.get(first + 8)?),
    })
}

impl Catalog {
    /// Returns the attributes of a node. The size of a file is in its content.
    pub(crate) fn node(connection: &Connection, node: u64) -> Result<Attributes, Errno> {
        // SQLite has signed numbers only.
        let node = i64::try_from(node).map_err(|_| Errno::ESTALE)?;
        let mut statement = connection
            .prepare_cached(&format!("SELECT {COLUMNS} FROM nodes n WHERE n.id = ?1"))
            .map_err(failed)?;
        let found = statement.query_row(params![node], |row| attributes(row, 0));
        found.optional().map_err(failed)?.ok_or(Errno::ESTALE)
    }

    /// Returns the attributes of a directory.
    pub(crate) fn directory(connection: &Connection, node: u64) -> Result<Attributes, Errno> {
        let found = Self::node(connection, node)?;
        if found.is_directory() {
            Ok(found)
        } else {
            Err(Errno::ENOTDIR)
        }
    }

    /// Returns the parent of a directory.
    pub(crate) fn parent(connection: &Connection, node: u64) -> Result<u64, Errno> {
        let mut statement = connection
            .prepare_cached("SELECT parent FROM nodes WHERE id = ?1")
            .map_err(failed)?;
        let found = statement
            .query_row(params![node], |row| row.get(0))
            .optional();
        found.map_err(failed)?.ok_or(Errno::ESTALE)
    }

    /// Returns the target of a symbolic link.
    pub(crate) fn target(connection: &Connection, node: u64) -> Result<Vec<u8>, Errno> {
        Self::node(connection, node)?;
        let mut statement = connection
            .prepare_cached("SELECT target FROM nodes WHERE id = ?1")
            .map_err(failed)?;
        let found: Option<Vec<u8>> = statement
            .query_row(params![node], |row| row.get(0))
            .map_err(failed)?;
        found.ok_or(Errno::EINVAL)
    }

    /// Returns the numbers of regular files that have a name, in ascending order.
    pub(crate) fn files(connection: &Connection) -> Result<Vec<u64>, Errno> {
        let (mask, file) = (nix::libc::S_IFMT, nix::libc::S_IFREG);
        let mut statement = connection
            .prepare_cached("SELECT id FROM nodes WHERE mode & ?1 = ?2 AND links > 0 ORDER BY id")
            .map_err(failed)?;
        let all = statement.query_map(params![mask, file], |row| row.get(0));
        all.and_then(Iterator::collect).map_err(failed)
    }

    /// Adds a node. The caller adds its entry, if the node has a name. `links` is the initial
    /// number of links, 2 for a directory (its name, and `.`). `parent` is the directory of the
    /// entry, and `target` the target of a symbolic link.
    pub(crate) fn add_node(
        connection: &Connection,
        node: u64,
        new: &Creation,
        links: u32,
        parent: u64,
        target: Option<&[u8]>,
    ) -> Result<(), Errno> {
        let now = Time::now().0;
        let mut statement = connection
            .prepare_cached(
                "INSERT INTO nodes (id, mode, links, uid, gid, device, parent, accessed, modified,
                    changed, target) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?8, ?8, ?9)",
            )
            .map_err(failed)?;
        let values = params![
            node, new.mode, links, new.uid, new.gid, new.device, parent, now, target
        ];
        statement.execute(values).map_err(failed)?;
        Ok(())
    }

    /// Adds `more`, which may be negative or 0, to the number of names of a node. Sets the time of
    /// the node's last change. Returns the sum.
    pub(crate) fn add_links(connection: &Connection, node: u64, more: i64) -> Result<u32, Errno> {
        let mut statement = connection
            .prepare_cached(
                "UPDATE nodes SET links = max(links + ?2, 0), changed = ?3 WHERE id = ?1
                    RETURNING links",
            )
            .map_err(failed)?;
        let now = Time::now().0;
        let sum = statement.query_row(params![node, more, now], |row| row.get(0));
        sum.optional().map_err(failed)?.ok_or(Errno::ESTALE)
    }

    /// Sets the parent of a directory.
    pub(crate) fn set_parent(connection: &Connection, node: u64, to: u64) -> Result<(), Errno> {
        let mut statement = connection
            .prepare_cached("UPDATE nodes SET parent = ?2 WHERE id = ?1")
            .map_err(failed)?;
        statement.execute(params![node, to]).map_err(failed)?;
        Ok(())
    }

    /// Sets the time of the last change of a directory's content to the present.
    pub(crate) fn touch(connection: &Connection, node: u64) -> Result<(), Errno> {
        let mut statement = connection
            .prepare_cached("UPDATE nodes SET modified = ?2, changed = ?2 WHERE id = ?1")
            .map_err(failed)?;
        statement
            .execute(params![node, Time::now().0])
            .map_err(failed)?;
        Ok(())
    }

    /// Stores permissions, owner and times of a node.
    pub(crate) fn set(connection: &Connection, new: &Attributes) -> Result<(), Errno> {
        let mut statement = connection
            .prepare_cached(
                "UPDATE nodes SET mode = ?2, uid = ?3, gid = ?4, accessed = ?5, modified = ?6,
                    changed = ?7 WHERE id = ?1",
            )
            .map_err(failed)?;
        let (accessed, modified, changed) = (new.accessed.0, new.modified.0, new.changed.0);
        let values = params![
            new.node, new.mode, new.uid, new.gid, accessed, modified, changed
        ];
        statement.execute(values).map_err(failed)?;
        Ok(())
    }

    /// Removes a node without names.
    pub(crate) fn remove_node(connection: &Connection, node: u64) -> Result<(), Errno> {
        let mut statement = connection
            .prepare_cached("DELETE FROM nodes WHERE id = ?1")
            .map_err(failed)?;
        statement.execute(params![node]).map_err(failed)?;
        Ok(())
    }

    /// Returns the nodes without names.
    pub(crate) fn orphans(connection: &Connection) -> Result<Vec<u64>, Errno> {
        let mut statement = connection
            .prepare_cached("SELECT id FROM nodes WHERE links = 0")
            .map_err(failed)?;
        let found = statement.query_map([], |row| row.get(0)).map_err(failed)?;
        found
            .collect::<rusqlite::Result<Vec<u64>>>()
            .map_err(failed)
    }

    /// Returns the number of nodes.
    pub(crate) fn count(connection: &Connection) -> Result<u64, Errno> {
        let count = connection.query_row("SELECT count(*) FROM nodes", [], |row| row.get(0));
        count.map_err(failed)
    }
}
