//! Listings of directories in replies to the FUSE requests READDIR and READDIRPLUS. The *catalog*
//! of a volume is its database of nodes and names.
//!
//! An entry of READDIR is a `fuse_dirent`: a header of 24 bytes and the name, padded to a multiple
//! of 8 bytes. In an entry of READDIRPLUS, a `fuse_entry_out` of 128 bytes with the attributes of
//! the file precedes the `fuse_dirent`.

use crate::abi::FieldsMut;
use crate::attributes::Attributes;
use crate::volume::Volume;
use nix::errno::Errno;

/// Entries that are read from the catalog at once.
const BATCH: usize = 128;
/// Offsets of `.` and `..`. Entries of the catalog follow.
const SELF_OFFSET: u64 = 1;
const PARENT_OFFSET: u64 = 2;

/// Appends an entry, unless `out` would then exceed `limit` bytes. Returns whether the entry was
/// appended. `with_attributes` is `None` for READDIR. For READDIRPLUS, it is `Some(true)`, or
/// `Some(false)` for an entry whose attributes are replaced by zeroes.
fn append(
    out: &mut Vec<u8>,
    limit: usize,
    entry: (&[u8], u64),
    found: &Attributes,
    with_attributes: Option<bool>,
) -> bool {
    let (name, offset) = entry;
    let padded = (24 + name.len()).next_multiple_of(8);
    let total = padded + if with_attributes.is_some() { 128 } else { 0 };
    if out.len() + total > limit {
        return false;
    }
    match with_attributes {
        Some(true) => out.put_entry(found),
        // Node 0: the client does not receive attributes of `.` and `..`.
        Some(false) => out.resize(out.len() + 128, 0),
        None => {}
    }
    let start = out.len();
    out.put_u64(found.node);
    out.put_u64(offset);
    out.put_u32(u32::try_from(name.len()).unwrap_or(0));
    // Type of the file, in the upper bits of the mode.
    out.put_u32(found.mode >> 12);
    out.extend_from_slice(name);
    out.resize(start + padded, 0);
    true
}

/// Appends entries after `offset` to `out`, which may grow to `limit` bytes. With `plus`
/// (READDIRPLUS), entries have attributes, and the client holds a reference to each returned node
/// until it sends FORGET. Calls `returned` with each of these nodes, so that the caller can count
/// the reference.
pub(crate) fn list(
    volume: &Volume,
    node: u64,
    mut offset: u64,
    out: &mut Vec<u8>,
    limit: usize,
    plus: bool,
    mut returned: impl FnMut(u64),
) -> Result<(), Errno> {
    let directory = volume.attributes(node)?;
    if !directory.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    let dots: [(u64, &[u8]); 2] = [(SELF_OFFSET, b"."), (PARENT_OFFSET, b"..")];
    for (next, name) in dots {
        if offset < next {
            let shown = Attributes {
                node: if next == SELF_OFFSET {
                    node
                } else {
                    volume.parent(node)?
                },
                ..directory
            };
            if !append(out, limit, (name, next), &shown, plus.then_some(false)) {
                return Ok(());
            }
            offset = next;
        }
    }
    loop {
        let batch = volume.list(node, offset - PARENT_OFFSET, BATCH)?;
        let is_last = batch.len() < BATCH;
        for entry in batch {
            offset = entry.position.saturating_add(PARENT_OFFSET);
            let found = if plus {
                volume.entry_attributes(&entry)?
            } else {
                entry.attributes
            };
            let entry = (entry.name.as_slice(), offset);
            if !append(out, limit, entry, &found, plus.then_some(true)) {
                return Ok(());
            }
            if plus {
                returned(found.node);
            }
        }
        if is_last {
            return Ok(());
        }
    }
}
