//! Lazy restores: guests start from snapshots whose memory is not completely stored on this host.

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
    number: u32,
    origin: LayerOrigin,
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
                drop(fetcher);
                tokio::time::sleep(FETCHER_WATCH_INTERVAL).await;
            }
        });
    }

    /// Returns whether this host can restore lazily from the snapshots in the directory
    /// `snapshots`.
    fn works_with(&self, snapshots: &Path) -> bool {
        let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev()).ok();
        let one_device = device(snapshots) == device(self.remote.cache.dir());
        one_device && open_userfaultfd().is_ok()
    }

    /// Returns the layer of `snapshot` with the chunks that are stored on this host. `None` if all
    /// are stored; the snapshot is then marked complete.
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
        if !layer.is_pinned_by(&snapshot.pin()).unwrap_or(false) {
            return Err(lost(snapshot));
        }
        let memory = snapshot.memory().map_err(EngineError::failed)?;
        let mut present = read_index(&memory.index).map_err(EngineError::failed)?;
        let stored = present.stored.clone();
        let written = layer.present().map_err(EngineError::failed)?;
        present.stored = intersection(&stored, &written);
        if present.stored == stored {
            // Mark it complete only if all chunks are also durable, so that they survive a power
            // failure.
            layer.persist().map_err(EngineError::failed)?;
            let durable = layer.persisted().map_err(EngineError::failed)?;
            if intersection(&stored, &durable) == stored {
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

    fn holes(&self, lineage: &Lineage) -> Result<Vec<LayerWithHoles>, EngineError> {
        let looked = (0..).zip(lineage.snapshots());
        let looked = looked.map(|(number, snapshot)| self.incomplete_layer(number, snapshot));
        looked.filter_map(Result::transpose).collect()
    }

    /// Prepares a restore from `lineage` that grants the VMM access to the incomplete layers.
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
        let grant = FetchGrant {
            layers: granted,
            prefetch: lineage.snapshots().iter().any(Snapshot::is_all_requested),
        };
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
            if let Some(hole) = self.incomplete_layer(0, snapshot)? {
                let fetched = self.remote.fetch_layer(&hole.origin).await;
                fetched.map_err(EngineError::failed)?;
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

    pub(super) fn request_all_memory(&self, id: &str) -> Result<(), EngineError> {
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        let mut wanted = lineage.snapshots().iter().map(Snapshot::request_all);
        wanted.try_for_each(|wanted| wanted.map_err(EngineError::failed))
    }

    /// Fetches the missing memory of snapshot `id` and its ancestors.
    pub(super) async fn complete(&self, id: &str) -> Result<(), EngineError> {
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        match &self.lazy {
            _ if lineage.is_complete() => Ok(()),
            Some(lazy) => lazy.complete(lineage.snapshots()).await,
            None => Err(without_store(&lineage)),
        }
    }

    /// Fetches the missing memory of snapshot `id`.
    pub(super) async fn complete_one(&self, id: &str) -> Result<(), EngineError> {
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        let newest = lineage.snapshots().split_last();
        match (&self.lazy, newest) {
            (Some(lazy), Some((newest, _))) => lazy.complete(std::slice::from_ref(newest)).await,
            _ => Err(without_store(&lineage)),
        }
    }

    /// Returns the location of the missing memory of snapshot `id`. `None` if no memory is missing.
    pub(super) fn missing_of(&self, id: &str) -> Result<Option<String>, EngineError> {
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
    let words: Vec<u64> = words.zip(set.words()).map(|(a, b)| a & b).collect();
    UnitSet::from_words(set.units(), &words)
}

fn index_file(index: &LayerIndex) -> io::Result<File> {
    let file = File::from(memfd_create("present", MFdFlags::MFD_CLOEXEC)?);
    file.write_all_at(&index.encode(), 0)?;
    Ok(file)
}

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
