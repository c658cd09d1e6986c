//! Creation, removal and renaming of entries.
//!
//! The *catalog* is the database with the names and attributes. A *node* is a file, directory or
//! link, identified by a number as in FUSE.

use super::{PERMISSIONS, ROOT, Volume};
use crate::attributes::{Attributes, Creation};
use crate::catalog::{Catalog, Found};
use nix::errno::Errno;
use nix::libc;
use rusqlite::Connection;

/// Maximum length of a name in bytes.
pub const MAX_NAME: usize = 255;
/// Maximum length of the target of a symbolic link in bytes.
const MAX_TARGET: usize = 4095;
/// Maximum number of names of a node.
const MAX_LINKS: u32 = 65_000;

/// Behaviour of a rename if the new name exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenameMode {
    /// Replaces the other node.
    Replace,
    /// Fails.
    NoReplace,
    /// Exchanges both nodes.
    Exchange,
}

/// Returns an error unless `name` can be the name of an entry.
fn check_name(name: &[u8]) -> Result<(), Errno> {
    if name.len() > MAX_NAME {
        return Err(Errno::ENAMETOOLONG);
    }
    let is_reserved = matches!(name, b"" | b"." | b"..");
    if is_reserved || name.contains(&b'/') || name.contains(&0) {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// Returns a directory in which entries can be created. A removed directory has no links.
fn live_directory(connection: &Connection, node: u64) -> Result<Attributes, Errno> {
    let found = Catalog::directory(connection, node)?;
    if found.links == 0 {
        Err(Errno::ENOENT)
    } else {
        Ok(found)
    }
}

/// Returns whether `node` is `ancestor` or lies below it.
fn is_below(connection: &Connection, mut node: u64, ancestor: u64) -> Result<bool, Errno> {
    loop {
        if node == ancestor {
            return Ok(true);
        }
        if node == ROOT {
            return Ok(false);
        }
        node = Catalog::parent(connection, node)?;
    }
}

impl Volume {
    /// Creates a node. A symbolic link has a `target`.
    pub fn create(
        &self,
        parent: u64,
        name: &[u8],
        mut new: Creation,
        target: Option<&[u8]>,
    ) -> Result<Attributes, Errno> {
        check_name(name)?;
        if target.is_some_and(|target| target.is_empty() || target.len() > MAX_TARGET) {
            return Err(Errno::ENAMETOOLONG);
        }
        let kind = new.mode & libc::S_IFMT;
        let kinds = [
            libc::S_IFREG,
            libc::S_IFDIR,
            libc::S_IFLNK,
            libc::S_IFIFO,
            libc::S_IFSOCK,
            libc::S_IFCHR,
            libc::S_IFBLK,
        ];
        if !kinds.contains(&kind) || (kind == libc::S_IFLNK) != target.is_some() {
            return Err(Errno::EINVAL);
        }
        new.mode = kind | (new.mode & PERMISSIONS);
        self.usage.add_node()?;
        let created = self.create_charged(parent, name, new, target);
        if created.is_err() {
            self.usage.remove_node(0);
        }
        created
    }

    /// Creates a file, directory or link after its quota was charged.
    fn create_charged(
        &self,
        parent: u64,
        name: &[u8],
        mut new: Creation,
        target: Option<&[u8]>,
    ) -> Result<Attributes, Errno> {
        let is_directory = new.mode & libc::S_IFMT == libc::S_IFDIR;
        let is_file = new.mode & libc::S_IFMT == libc::S_IFREG;
        let mut catalog = self.catalog.lock();
        let node = catalog.new_number()?;
        let mut has_content = false;
        let created = catalog.change(|connection| {
            let directory = live_directory(connection, parent)?;
            if Catalog::lookup(connection, parent, name)?.is_some() {
                return Err(Errno::EEXIST);
            }
            if directory.mode & libc::S_ISGID != 0 {
                new.gid = directory.gid;
                new.mode |= if is_directory { libc::S_ISGID } else { 0 };
            }
            let links = if is_directory { 2 } else { 1 };
            Catalog::add_node(connection, node, &new, links, parent, target)?;
            Catalog::add_entry(connection, parent, name, node)?;
            if is_directory {
                Catalog::add_links(connection, parent, 1)?;
            }
            if is_file {
                self.contents.create(node)?;
                has_content = true;
            }
            Catalog::node(connection, node)
        });
        drop(catalog);
        match created {
            Ok(created) => self.complete(created, target.map(<[u8]>::len)),
            Err(e) => {
                if has_content {
                    self.contents.remove(node);
                }
                Err(e)
            }
        }
    }

    /// Creates a regular file without a name. It is removed when its client stops using it, unless
    /// it gets a name.
    pub fn create_unnamed(&self, new: &Creation) -> Result<Attributes, Errno> {
        self.usage.add_node()?;
        let create = || {
            let mut catalog = self.catalog.lock();
            let node = catalog.new_number()?;
            self.contents.create(node)?;
            let new = Creation {
                mode: libc::S_IFREG | (new.mode & PERMISSIONS),
                ..*new
            };
            catalog.change(|connection| {
                Catalog::add_node(connection, node, &new, 0, ROOT, None)?;
                Catalog::node(connection, node)
            })
        };
        let created = create().inspect_err(|_| self.usage.remove_node(0))?;
        self.complete(created, None)
    }

    /// Adds a name to a node. Replaces a file with this name if `replaces`.
    pub fn link(
        &self,
        node: u64,
        parent: u64,
        name: &[u8],
        replaces: bool,
    ) -> Result<Attributes, Errno> {
        check_name(name)?;
        let link = |connection: &Connection| {
            let found = Catalog::node(connection, node)?;
            if found.is_directory() {
                return Err(Errno::EPERM);
            }
            if found.links >= MAX_LINKS {
                return Err(Errno::EMLINK);
            }
            live_directory(connection, parent)?;
            let mut replaced = None;
            if let Some(old) = Catalog::lookup(connection, parent, name)? {
                if !replaces {
                    return Err(Errno::EEXIST);
                }
                if old.attributes.is_directory() {
                    return Err(Errno::EISDIR);
                }
                Catalog::remove_entry(connection, parent, old.position)?;
                replaced = self.unlink_node(connection, old.attributes.node)?;
            }
            Catalog::add_entry(connection, parent, name, node)?;
            Catalog::add_links(connection, node, 1)?;
            Ok((Catalog::node(connection, node)?, replaced))
        };
        let (linked, replaced) = self.catalog.lock().change(link)?;
        self.finish_removal(replaced);
        self.completed(linked)
    }

    /// Removes one name of a node in a transaction. Returns the node if it must be removed.
    fn unlink_node(&self, connection: &Connection, node: u64) -> Result<Option<u64>, Errno> {
        let links = Catalog::add_links(connection, node, -1)?;
        Ok((links == 0).then_some(node))
    }

    /// Removes a node that has lost its last name, unless a client uses it.
    fn finish_removal(&self, node: Option<u64>) {
        if let Some(node) = node
            && let Err(e) = self.remove_if_unused(node)
        {
            tracing::warn!(node, error = %e, "cannot remove a file without a name");
        }
    }

    /// Removes the name of a node that is not a directory.
    pub fn unlink(&self, parent: u64, name: &[u8]) -> Result<(), Errno> {
        let unlink = |connection: &Connection| {
            let found = existing(connection, parent, name)?;
            if found.attributes.is_directory() {
                return Err(Errno::EISDIR);
            }
            Catalog::remove_entry(connection, parent, found.position)?;
            self.unlink_node(connection, found.attributes.node)
        };
        let removed = self.catalog.lock().change(unlink)?;
        self.finish_removal(removed);
        Ok(())
    }

    /// Removes an empty directory.
    pub fn remove_directory(&self, parent: u64, name: &[u8]) -> Result<(), Errno> {
        let remove = |connection: &Connection| {
            let found = existing(connection, parent, name)?;
            if !found.attributes.is_directory() {
                return Err(Errno::ENOTDIR);
            }
            remove_directory(connection, parent, &found)?;
            Ok(found.attributes.node)
        };
        let removed = self.catalog.lock().change(remove)?;
        self.finish_removal(Some(removed));
        Ok(())
    }

    /// Renames an entry.
    pub fn rename(
        &self,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        mode: RenameMode,
    ) -> Result<(), Errno> {
        check_name(from.1)?;
        check_name(to.1)?;
        let rename = |connection: &Connection| {
            live_directory(connection, to.0)?;
            let source = existing(connection, from.0, from.1)?;
            let target = Catalog::lookup(connection, to.0, to.1)?;
            if mode == RenameMode::Exchange {
                let target = target.ok_or(Errno::ENOENT)?;
                exchange(connection, (from.0, &source), (to.0, &target))?;
                return Ok(None);
            }
            let node = source.attributes;
            if node.is_directory() && is_below(connection, to.0, node.node)? {
                return Err(Errno::EINVAL);
            }
            let mut removed = None;
            if let Some(target) = target {
                if mode == RenameMode::NoReplace {
                    return Err(Errno::EEXIST);
                }
                // Two names of one file: a rename does nothing (rename(2)).
                if target.attributes.node == node.node {
                    return Ok(None);
                }
                match (node.is_directory(), target.attributes.is_directory()) {
                    (true, true) => {
                        remove_directory(connection, to.0, &target)?;
                        removed = Some(target.attributes.node);
                    }
                    (true, false) => return Err(Errno::ENOTDIR),
                    (false, true) => return Err(Errno::EISDIR),
                    (false, false) => {
                        Catalog::remove_entry(connection, to.0, target.position)?;
                        removed = self.unlink_node(connection, target.attributes.node)?;
                    }
                }
            }
            Catalog::remove_entry(connection, from.0, source.position)?;
            Catalog::add_entry(connection, to.0, to.1, node.node)?;
            // Only set the time of the last change: the node has another name.
            Catalog::add_links(connection, node.node, 0)?;
            if node.is_directory() {
                move_directory(connection, node.node, from.0, to.0)?;
            }
            Ok(removed)
        };
        let removed = self.catalog.lock().change(rename)?;
        self.finish_removal(removed);
        Ok(())
    }
}

/// Returns the entry with this name.
fn existing(connection: &Connection, parent: u64, name: &[u8]) -> Result<Found, Errno> {
    Catalog::directory(connection, parent)?;
    Catalog::lookup(connection, parent, name)?.ok_or(Errno::ENOENT)
}

/// Removes the entry of an empty directory, which has no links afterwards.
fn remove_directory(connection: &Connection, parent: u64, found: &Found) -> Result<(), Errno> {
    let node = found.attributes;
    if !Catalog::is_empty(connection, node.node)? {
        return Err(Errno::ENOTEMPTY);
    }
    Catalog::remove_entry(connection, parent, found.position)?;
    Catalog::add_links(connection, node.node, -i64::from(node.links))?;
    Catalog::add_links(connection, parent, -1)?;
    Ok(())
}

/// Records the new parent of a directory.
fn move_directory(connection: &Connection, node: u64, from: u64, to: u64) -> Result<(), Errno> {
    if from != to {
        Catalog::set_parent(connection, node, to)?;
        Catalog::add_links(connection, from, -1)?;
        Catalog::add_links(connection, to, 1)?;
    }
    Ok(())
}

/// Exchanges the nodes of two entries.
fn exchange(
    connection: &Connection,
    (from, source): (u64, &Found),
    (to, target): (u64, &Found),
) -> Result<(), Errno> {
    let (a, b) = (source.attributes, target.attributes);
    let is_cyclic = (a.is_directory() && is_below(connection, to, a.node)?)
        || (b.is_directory() && is_below(connection, from, b.node)?);
    if is_cyclic {
        return Err(Errno::EINVAL);
    }
    Catalog::set_entry(connection, source.position, b.node)?;
    Catalog::set_entry(connection, target.position, a.node)?;
    for (node, old, new) in [(a, from, to), (b, to, from)] {
        Catalog::touch(connection, old)?;
        // Only set the time of the last change.
        Catalog::add_links(connection, node.node, 0)?;
        if node.is_directory() {
            move_directory(connection, node.node, old, new)?;
        }
    }
    Ok(())
}
