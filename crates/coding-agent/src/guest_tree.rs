//! Listing of the project directory in the sandbox. The guest is not trusted: paths are checked,
//! and numbers are only compared.

use crate::tree::{LinkTarget, ListedFile, ListedKind, Listing, MODE_BITS, Stamp};
use crate::tree_path::TreePath;
use anyhow::Context;
use jiffy_agent_client::{TreeEntry, TreeEntryKind};

/// Converts the entries that the agent reported. Fails for an invalid path.
pub fn listing(entries: Vec<TreeEntry>) -> anyhow::Result<Listing> {
    let convert = |entry: TreeEntry| {
        let path = TreePath::new(&entry.path).context("the sandbox reported an invalid path")?;
        let (kind, mode) = match entry.kind {
            TreeEntryKind::File => (ListedKind::File, entry.mode & MODE_BITS),
            TreeEntryKind::Directory => (ListedKind::Directory, entry.mode & MODE_BITS),
            TreeEntryKind::Symlink => (ListedKind::Symlink(LinkTarget(entry.target)), 0),
        };
        let stamp = Stamp {
            size: entry.size,
            mtime: entry.mtime,
            ctime: entry.ctime,
            inode: entry.inode,
        };
        Ok((path, ListedFile { kind, mode, stamp }))
    };
    entries.into_iter().map(convert).collect()
}
