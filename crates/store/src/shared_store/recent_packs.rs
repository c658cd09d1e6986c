//! Index of the packs that this host wrote last, in a directory of the host. A push reuses their
//! chunks, so that an interrupted push continues and snapshots with the same parent share data.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys. A *chunk* is 64 KiB of memory or of a disk. A *pack* is an object
//! in the store with many compressed and encrypted chunks.
//!
//! File `<id of the tenant>-<generation>-<id of the pack>` is the encrypted end of a pack: its
//! index and trailer. The directory has at most [`MAX_RECENT_PACKS`] files. The store may lack a
//! pack of the index: the caller must check that it exists.

use crate::data_keys::{DataKeys, hex, to_hex};
use crate::pack::{Entry, MAX_INDEX_BYTES, PackId, TRAILER_BYTES};
use crate::shared_store::pack_index::decode_tail;
use crate::tenant::Tenant;
use std::fs::{self, DirEntry, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Maximum number of packs in the index.
pub(crate) const MAX_RECENT_PACKS: usize = 256;
/// Maximum size in bytes of all files.
const MAX_RECENT_BYTES: u64 = 64 << 20;

/// Index of the packs that this host wrote last.
#[derive(Debug)]
pub(crate) struct RecentPacks<'a> {
    directory: &'a Path,
    tenant: &'a Tenant,
    keys: &'a DataKeys,
}

/// Pack of the index.
pub(crate) struct RecentPack {
    pub id: PackId,
    /// Size of the pack in bytes.
    pub bytes: u64,
    pub entries: Vec<Entry>,
}

impl<'a> RecentPacks<'a> {
    pub fn new(directory: &'a Path, tenant: &'a Tenant, keys: &'a DataKeys) -> Self {
        Self {
            directory,
            tenant,
            keys,
        }
    }

    fn prefix(&self) -> String {
        format!("{}-{}-", to_hex(&self.tenant.id()), self.keys.generation())
    }

    fn path(&self, id: &PackId) -> PathBuf {
        self.directory
            .join(format!("{}{}", self.prefix(), to_hex(id)))
    }

    /// Returns the packs of this tenant and generation, newest first. Removes unreadable files.
    /// Blocks.
    pub fn read(&self) -> Vec<RecentPack> {
        let prefix = self.prefix();
        let mut packs = Vec::new();
        for (_, path, _) in newest_first(self.directory) {
            let name = path.file_name().and_then(|name| name.to_str());
            let id = name.and_then(|name| name.strip_prefix(&prefix));
            let Some(id) = id.and_then(hex::<16>) else {
                continue;
            };
            match self.read_pack(id, &path) {
                Some(pack) => packs.push(pack),
                None => drop(fs::remove_file(&path)),
            }
        }
        packs
    }

    /// Reads the index of a pack from its file, which contains only the end of the pack.
    fn read_pack(&self, id: PackId, path: &Path) -> Option<RecentPack> {
        let mut tail = Vec::new();
        let limit = (MAX_INDEX_BYTES + TRAILER_BYTES) as u64;
        let file = File::open(path).ok()?;
        file.take(limit).read_to_end(&mut tail).ok()?;
        let trailer = tail.len().checked_sub(TRAILER_BYTES)?;
        // A trailer begins with the offset of the index. The file is the pack from this offset on.
        let offset = tail.get(trailer..)?.first_chunk()?;
        let bytes = u64::from_le_bytes(*offset).checked_add(tail.len() as u64)?;
        let entries = decode_tail(self.tenant, self.keys, id, &tail, bytes).ok()?;
        Some(RecentPack { id, bytes, entries })
    }

    /// Adds a pack that is being written to the store. Removes the oldest packs beyond the limits.
    /// Blocks. A failure costs later pushes a repeated upload, so it is only logged.
    pub fn add(&self, id: &PackId, object: &[u8]) {
        let path = self.path(id);
        if let Err(e) = self.write(&path, object) {
            tracing::warn!(path = %path.display(), error = %e, "cannot cache the index of a pack");
        }
        evict(self.directory);
    }

    fn write(&self, path: &Path, object: &[u8]) -> io::Result<()> {
        let tail = tail_of(object).ok_or(io::ErrorKind::InvalidData)?;
        fs::create_dir_all(self.directory)?;
        fs::write(path, tail)
    }

    /// Removes a pack from the index, because the store lacks it or it must not be reused.
    pub fn forget(&self, id: &PackId) {
        // The file does not exist if another host wrote the pack.
        let _ = fs::remove_file(self.path(id));
    }
}

/// Returns index and trailer of a pack.
fn tail_of(object: &[u8]) -> Option<&[u8]> {
    let trailer = object.len().checked_sub(TRAILER_BYTES)?;
    let offset = object.get(trailer..)?.first_chunk()?;
    object.get(usize::try_from(u64::from_le_bytes(*offset)).ok()?..)
}

/// Returns time, path and size of the files in `directory`, newest first.
fn newest_first(directory: &Path) -> Vec<(SystemTime, PathBuf, u64)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries
        .filter_map(|entry: DirEntry| {
            let meta = entry.metadata().ok().filter(fs::Metadata::is_file)?;
            Some((meta.modified().ok()?, entry.path(), meta.len()))
        })
        .collect();
    files.sort_unstable_by(|a, b| b.cmp(a));
    files
}

/// Removes the oldest files beyond the limits, and the directories in which earlier versions of
/// Jiffy cached the indexes of all packs.
fn evict(directory: &Path) {
    let mut bytes = 0;
    for (number, (_, path, size)) in newest_first(directory).into_iter().enumerate() {
        bytes += size;
        if number >= MAX_RECENT_PACKS || bytes > MAX_RECENT_BYTES {
            // Ignore errors here and below: remaining files are removed by the next call.
            let _ = fs::remove_file(path);
        }
    }
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data_keys::Hash;
    use crate::pack::{PackWriter, encode_frame};
    use std::collections::BTreeMap;

    fn pack(keys: &DataKeys, tenant: &Tenant) -> (PackId, bytes::Bytes, Vec<Entry>) {
        let mut writer = PackWriter::new(keys, tenant.id()).unwrap();
        let hash = keys.chunk_hash(b"chunk");
        let frame = encode_frame(keys, &hash, b"chunk").unwrap();
        writer.push(hash, &frame, 5).unwrap();
        let id = writer.id();
        let (object, entries) = writer.finish(keys).unwrap();
        (id, object, entries)
    }

    #[test]
    fn the_index_has_the_newest_packs_of_a_tenant_and_stays_small() {
        let dir = tempfile::tempdir().unwrap();
        let keys = DataKeys::derive(1, &[7; 32]);
        let tenant = |id| Tenant::new("a", [id; 16], BTreeMap::new());
        let (own, other) = (tenant(1), tenant(2));
        fs::create_dir(dir.path().join("indexes-of-an-earlier-version")).unwrap();
        let recent = RecentPacks::new(dir.path(), &own, &keys);
        let (first, object, entries) = pack(&keys, &own);
        recent.add(&first, &object);
        let [found] = &recent.read()[..] else {
            panic!("one pack")
        };
        assert_eq!((found.id, found.bytes), (first, object.len() as u64));
        assert_eq!(found.entries, entries);
        assert_eq!(entries[0].hash, Hash(keys.chunk_hash(b"chunk").0));
        assert!(
            RecentPacks::new(dir.path(), &other, &keys)
                .read()
                .is_empty()
        );
        for _ in 0..MAX_RECENT_PACKS {
            let (id, object, _) = pack(&keys, &own);
            recent.add(&id, &object);
        }
        let ids: Vec<PackId> = recent.read().iter().map(|pack| pack.id).collect();
        assert_eq!(ids.len(), MAX_RECENT_PACKS);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), ids.len());
        // A damaged file is removed.
        fs::write(recent.path(&ids[0]), b"damaged").unwrap();
        recent.forget(&ids[1]);
        assert_eq!(recent.read().len(), MAX_RECENT_PACKS - 2);
        assert!(!recent.path(&ids[0]).exists());
    }
}
