//! Lazy restores: guests start from snapshots whose memory is not completely stored on this host.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. A *layer* is the
//! part of a memory or disk that one snapshot stores: the content that differs from its ancestors.
//! A *chunk* is 64 KiB of memory.
//!
//! The VMM requests missing chunks when the guest accesses them (userfaultfd). It requests them
//! from the *fetcher*, a process of this host that downloads chunks from the shared store. A
//! *grant* is a file that permits one VMM to read the layers of its snapshot. Fetched chunks are
//! stored in a cache. A *pin* is a file of a snapshot that prevents the cache from evicting chunks.

use super::MicroVmEngine;
use jiffy_engine_api::EngineError;
use jiffy_microvm_engine::LazyMemory;
use jiffy_proto::layer::{LayerIndex, UnitSet};
use jiffy_snapshot::{Lineage, Snapshot, SnapshotError, read_index};
use jiffy_store::host::{
    FETCHER_WATCH_INTERVAL, FetchGrant, FetcherProcess, GrantedLayer, LayerOrigin, RemoteStore,
};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Device from which a process without privileges obtains a userfaultfd (Linux 6.1).
const USERFAULTFD: &str = "/dev/userfaultfd";

/// Source of memory that is not stored on this host.
#[derive(Debug, Clone)]
pub struct LazyStore {
    /// Remote store and its local cache.
    pub remote: Arc<RemoteStore>,
    /// Process that fetches chunks for guests.
    pub fetcher: Arc<FetcherProcess>,
    /// Timeout of a guest that waits for a chunk.
    pub timeout: Duration,
}

/// Layer of a lineage that is not completely stored on this host.
struct LayerWithHoles {
    /// Position in the memory of the lineage, from 0 for the oldest snapshot.
    number: u32,
    /// Location of the layer in the remote store.
    origin: LayerOrigin,
    /// Index of the chunks that are stored on this host.
    present: LayerIndex,
}

impl LazyStore {
    /// Starts a task that restarts the fetcher process when it exits. The task ends when the
    /// fetcher is dropped.
    pub(crate) fn watch(&self) {
        let fetcher: Weak<FetcherProcess> = Arc::downgrade(&self.fetcher);
        tokio::spawn(async move {
            while let Some(fetcher) = fetcher.upgrade() {
                if let Err(e) = fetcher.ensure() {
                    tracing::warn!(error = %e, "cannot start the fetcher");
                }
                // The task must not keep the fetcher alive while it sleeps.
                drop(fetcher);
                tokio::time::sleep(FETCHER_WATCH_INTERVAL).await;
            }
        });
    }

    /// Returns whether this host can restore lazily from the snapshots in the directory
    /// `snapshots`.
    fn works_with(&self, snapshots: &Path) -> bool {
        let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev()).ok();
        // The cache and the snapshots share files by hard links, which need one file system.
        let one_device = device(snapshots) == device(self.remote.cache.dir());
        one_device && open_userfaultfd().is_ok()
    }

    /// Returns the layer of `snapshot`, at position `number` in its lineage, if some of its chunks
    /// are missing on this host. Returns `None` if no chunk is missing, and marks the snapshot as
    /// complete.
    fn incomplete_layer(
        &self,
        number: u32,
        snapshot: &Snapshot,
    ) -> Result<Option<LayerWithHoles>, EngineError> {
        let Some(missing) = snapshot.missing().map_err(EngineError::failed)? else {
            return Ok(None);
        };
        let origin = LayerOrigin::decode(&missing.origin).map_err(EngineError::failed)?;
        let bytes = snapshot.manifest().memory.bytes;
        let layer = self
            .remote
            .cache
            .layer_of(&origin.layer, bytes)
            .map_err(EngineError::failed)?;
        // Without the pin, the cache may have removed chunks that the snapshot counts as stored.
        if !layer.is_pinned_by(&snapshot.pin()).unwrap_or(false) {
            return Err(lost(snapshot));
        }
        let memory = snapshot.memory().map_err(EngineError::failed)?;
        let mut present = read_index(&memory.index).map_err(EngineError::failed)?;
        let layer_chunks = present.stored.clone();
        let cached_chunks = layer.present().map_err(EngineError::failed)?;
        present.stored = intersection(&layer_chunks, &cached_chunks);
        if present.stored == layer_chunks {
            // Mark the snapshot complete only if all chunks are durable too, so that they survive a
            // power failure.
            layer.persist().map_err(EngineError::failed)?;
            let durable_chunks = layer.persisted().map_err(EngineError::failed)?;
            if intersection(&layer_chunks, &durable_chunks) == layer_chunks {
                snapshot.set_complete().map_err(EngineError::failed)?;
                return Ok(None);
            }
        }
        Ok(Some(LayerWithHoles {
            number,
            origin,
            present,
        }))
    }

    /// Returns the incomplete layers of a lineage. Marks snapshots that have become complete.
    fn holes(&self, lineage: &Lineage) -> Result<Vec<LayerWithHoles>, EngineError> {
        let numbered = (0..).zip(lineage.memory_snapshots());
        let layers = numbered.map(|(number, snapshot)| self.incomplete_layer(number, snapshot));
        layers.filter_map(Result::transpose).collect()
    }

    /// Prepares a restore from `lineage` that grants the VMM access to the incomplete layers.
    /// `None` if no layer is incomplete.
    fn prepare(&self, lineage: &Lineage) -> Result<Option<LazyMemory>, EngineError> {
        let holes = self.holes(lineage)?;
        if holes.is_empty() {
            return Ok(None);
        }
        let failed = |what: &'static str| {
            move |e: io::Error| EngineError::Failed {
                reason: format!("{what}: {e}"),
            }
        };
        // This process opens the userfaultfd, because the jailed VMM cannot open the device.
        let userfaultfd = open_userfaultfd().map_err(failed(USERFAULTFD))?;
        let grants = self.fetcher.grants();
        let socket = grants.listen().map_err(EngineError::failed)?;
        let (mut layers, mut granted) = (Vec::new(), Vec::new());
        for hole in holes {
            let present = index_file(&hole.present)
                .map_err(failed("cannot write the index of the stored chunks"))?;
            layers.push((hole.number, present));
            granted.push(GrantedLayer {
                number: hole.number,
                origin: hole.origin,
            });
        }
        // The grant names the layers that this VMM may read through the fetcher, and no others.
        let grant = FetchGrant {
            layers: granted,
            prefetch: lineage.snapshots().iter().any(Snapshot::is_all_requested),
        };
        // The grant is written before the fetcher is ensured, so that a new process finds it.
        grants.write(&socket, &grant).map_err(EngineError::failed)?;
        self.fetcher.ensure().map_err(EngineError::failed)?;
        Ok(Some(LazyMemory {
            userfaultfd,
            listener: socket.listener,
            layers,
            timeout: self.timeout,
        }))
    }

    /// Fetches the missing memory of `snapshots`.
    async fn complete(&self, snapshots: &[Snapshot]) -> Result<(), EngineError> {
        for snapshot in snapshots {
            // The position in the lineage matters only for a restore.
            if let Some(hole) = self.incomplete_layer(0, snapshot)? {
                let fetched = self.remote.fetch_layer(&hole.origin).await;
                fetched.map_err(EngineError::failed)?;
                // If all chunks are stored, `incomplete_layer` also marks the snapshot as complete.
                if self.incomplete_layer(0, snapshot)?.is_some() {
                    return Err(lost(snapshot));
                }
            }
        }
        Ok(())
    }
}

impl MicroVmEngine {
    /// Enables restores from snapshots whose memory is not completely stored on this host. Must be
    /// called inside a tokio runtime.
    pub fn with_lazy_store(mut self, lazy: Option<LazyStore>) -> Self {
        if let Some(lazy) = &lazy {
            lazy.watch();
        }
        self.lazy = lazy;
        self
    }

    pub(super) fn restores_lazily_here(&self) -> bool {
        let works = |lazy: &LazyStore| lazy.works_with(self.shared.store.root());
        self.lazy.as_ref().is_some_and(works)
    }

    /// Prepares a restore from `lineage`. `None` if all of its memory is stored on this host.
    pub(super) fn missing_memory(
        &self,
        lineage: &Lineage,
    ) -> Result<Option<LazyMemory>, EngineError> {
        match &self.lazy {
            _ if lineage.is_complete() => Ok(None),
            Some(lazy) => lazy.prepare(lineage),
            None => Err(without_store(lineage)),
        }
    }

    /// Marks snapshot `id` and its ancestors, so that the fetcher fetches all of their memory.
    pub(super) fn request_all_memory(&self, id: &str) -> Result<(), EngineError> {
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        let mut requests = lineage.snapshots().iter().map(Snapshot::request_all);
        requests.try_for_each(|request| request.map_err(EngineError::failed))
    }

    /// Fetches the missing memory of snapshot `id` and its ancestors.
    pub(super) async fn complete(&self, id: &str) -> Result<(), EngineError> {
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        match &self.lazy {
            _ if lineage.is_complete() => Ok(()),
            Some(lazy) => lazy.complete(lineage.memory_snapshots()).await,
            None => Err(without_store(&lineage)),
        }
    }

    /// Fetches the missing memory of snapshot `id`, but not of its ancestors.
    pub(super) async fn complete_one(&self, id: &str) -> Result<(), EngineError> {
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        let newest = lineage.snapshots().split_last();
        match (&self.lazy, newest) {
            (Some(lazy), Some((newest, _))) => lazy.complete(std::slice::from_ref(newest)).await,
            _ => Err(without_store(&lineage)),
        }
    }

    /// Returns the location of the missing memory of snapshot `id`. `None` if no memory is missing;
    /// then the snapshot is also marked as complete.
    pub(super) fn missing_of(&self, id: &str) -> Result<Option<String>, EngineError> {
        // A cheap check: nearly all snapshots are complete.
        if !self.shared.store.is_incomplete(id) {
            return Ok(None);
        }
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        let Some((lazy, newest)) = self.lazy.as_ref().zip(lineage.newest()) else {
            return Err(without_store(&lineage));
        };
        let hole = lazy.incomplete_layer(0, newest)?;
        Ok(hole.map(|hole| hole.origin.encode()))
    }
}

fn open_userfaultfd() -> io::Result<File> {
    File::options().read(true).write(true).open(USERFAULTFD)
}

/// Returns the units of `set` whose bits are set in `bitmap`. Unit `n` is bit `n % 8` of byte `n /
/// 8`.
fn intersection(set: &UnitSet, bitmap: &[u8]) -> UnitSet {
    let words = bitmap.chunks(8).map(|bytes| {
        let mut word = [0; 8];
        word.iter_mut()
            .zip(bytes)
            .for_each(|(to, from)| *to = *from);
        u64::from_le_bytes(word)
    });
    // A shorter bitmap ends the iteration: units beyond its end are missing.
    let words: Vec<u64> = words.zip(set.words()).map(|(a, b)| a & b).collect();
    UnitSet::from_words(set.units(), &words)
}

/// Writes an index to an anonymous file, which can be passed to the VMM.
fn index_file(index: &LayerIndex) -> io::Result<File> {
    let file = File::from(memfd_create("present", MFdFlags::MFD_CLOEXEC)?);
    file.write_all_at(&index.encode(), 0)?;
    Ok(file)
}

/// Returns the error for a snapshot whose stored chunks were removed from the cache.
fn lost(snapshot: &Snapshot) -> EngineError {
    EngineError::Failed {
        reason: format!(
            "the stored chunks of snapshot {} were removed from the cache (store/layers): remove the \
             snapshot from this host to fetch it again",
            snapshot.id()
        ),
    }
}

fn without_store(lineage: &Lineage) -> EngineError {
    let id = lineage.newest().map_or("", Snapshot::id).to_owned();
    let incomplete = SnapshotError::Incomplete(id);
    EngineError::Failed {
        reason: format!("{incomplete}; start the daemon with the --store that has it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_present_if_its_bit_is_set() {
        let mut set = UnitSet::empty(70);
        for unit in [0, 3, 64, 69] {
            set.insert(unit);
        }
        let present = intersection(&set, &[0b1001, 0, 0, 0, 0, 0, 0, 0, 0b10_0000]);
        assert_eq!(present.iter().collect::<Vec<_>>(), [0, 3, 69]);
        assert_eq!(intersection(&set, &[]).count(), 0);
    }
}
