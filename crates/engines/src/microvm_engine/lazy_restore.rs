//! Restore from snapshots whose memory has not all arrived.

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

/// Source of memory that has not arrived.
#[derive(Debug, Clone)]
pub struct LazyStore {
    /// The store and its cache.
    pub remote: Arc<RemoteStore>,
    /// Fetcher for guests.
    pub fetcher: Arc<FetcherProcess>,
    /// Time for which a guest waits for a chunk.
    pub timeout: Duration,
}

/// Layer of a lineage that has not all arrived.
struct LayerWithHoles {
    number: u32,
    origin: LayerOrigin,
    present: LayerIndex,
}

impl LazyStore {
    /// Starts the fetcher anew when it has died, as long as this exists.
    pub(crate) fn watch(&self) {
        let fetcher: Weak<FetcherProcess> = Arc::downgrade(&self.fetcher);
        tokio::spawn(async move {
            while let Some(fetcher) = fetcher.upgrade() {
                if let Err(e) = fetcher.ensure() {
                    tracing::warn!("cannot start the fetcher: {e}");
                }
                drop(fetcher);
                tokio::time::sleep(FETCHER_WATCH_INTERVAL).await;
            }
        });
    }

    /// Returns true if this host can restore lazily from the snapshots in `snapshots`.
    fn works_with(&self, snapshots: &Path) -> bool {
        let device = |path: &Path| fs::metadata(path).map(|found| found.dev()).ok();
        let one_device = device(snapshots) == device(self.remote.cache.dir());
        one_device && open_userfaultfd().is_ok()
    }

    /// Chunks of the layer of `snapshot` that are here; none: all of them, which is noted.
    fn look(
        &self,
        number: u32,
        snapshot: &Snapshot,
    ) -> Result<Option<LayerWithHoles>, EngineError> {
        let Some(missing) = snapshot.missing().map_err(EngineError::failed)? else {
            return Ok(None);
        };
        let origin = LayerOrigin::decode(&missing.origin).map_err(EngineError::failed)?;
        let bytes = snapshot.manifest().memory.bytes;
        let layer = self.remote.cache.layer_of(&origin.layer, bytes);
        let layer = layer.map_err(EngineError::failed)?;
        if !layer.is_pinned_by(&snapshot.pin()).unwrap_or(false) {
            return Err(lost(snapshot));
        }
        let memory = snapshot.memory().map_err(EngineError::failed)?;
        let mut present = read_index(&memory.index).map_err(EngineError::failed)?;
        let stored = present.stored.clone();
        let written = layer.present().map_err(EngineError::failed)?;
        present.stored = both(&stored, &written);
        if present.stored == stored {
            // Complete only when a boot of the host would find it so.
            layer.settle().map_err(EngineError::failed)?;
            let settled = layer.settled().map_err(EngineError::failed)?;
            if both(&stored, &settled) == stored {
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
        let looked = looked.map(|(number, snapshot)| self.look(number, snapshot));
        looked.filter_map(Result::transpose).collect()
    }

    /// Prepares a restore from `lineage`: its VMM is granted the layers that have holes.
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
            let present = index_file(&hole.present).map_err(failed("index of what has arrived"))?;
            layers.push((hole.number, present));
            granted.push(GrantedLayer {
                number: hole.number,
                origin: hole.origin,
            });
        }
        let grant = FetchGrant {
            layers: granted,
            prefetch: lineage.snapshots().iter().any(Snapshot::wants_all),
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
            if let Some(hole) = self.look(0, snapshot)? {
                let fetched = self.remote.fetch_layer(&hole.origin).await;
                fetched.map_err(EngineError::failed)?;
                if self.look(0, snapshot)?.is_some() {
                    return Err(lost(snapshot));
                }
            }
        }
        Ok(())
    }
}

impl MicroVmEngine {
    /// Restores guests also from snapshots whose memory has not all arrived. Must be called inside
    /// a tokio runtime.
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

    /// Prepares a restore from `lineage`; none: all of its memory is here.
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

    pub(super) fn want_all_memory(&self, id: &str) -> Result<(), EngineError> {
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        let mut wanted = lineage.snapshots().iter().map(Snapshot::want_all);
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

    /// Place of the missing memory of snapshot `id`; none: all of it is here.
    pub(super) fn missing_of(&self, id: &str) -> Result<Option<String>, EngineError> {
        if !self.shared.store.is_incomplete(id) {
            return Ok(None);
        }
        let lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        let Some((lazy, newest)) = self.lazy.as_ref().zip(lineage.newest()) else {
            return Err(without_store(&lineage));
        };
        let hole = lazy.look(0, newest)?;
        Ok(hole.map(|hole| hole.origin.encode()))
    }
}

fn open_userfaultfd() -> io::Result<File> {
    File::options().read(true).write(true).open(USERFAULTFD)
}

/// Units of `set` whose bits are set in `bitmap`: unit `n` at bit `n % 8` of byte `n / 8`.
fn both(set: &UnitSet, bitmap: &[u8]) -> UnitSet {
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
            "what had arrived of snapshot {} was removed from the cache (store/layers): remove the \
             snapshot from this host, and it is fetched anew",
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
        let present = both(&set, &[0b1001, 0, 0, 0, 0, 0, 0, 0, 0b10_0000]);
        assert_eq!(present.iter().collect::<Vec<_>>(), [0, 3, 69]);
        assert_eq!(both(&set, &[]).count(), 0);
    }
}
