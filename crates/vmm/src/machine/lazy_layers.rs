//! Memory layers of a restore that are not completely stored on this host. Missing chunks are
//! fetched when the guest accesses them. This module takes the layers' descriptors, and starts the
//! thread that fetches missing memory.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *fold* merges two adjacent layers of a snapshot
//! chain into one file on disk while the guest runs. The VMM then closes the file of the lower
//! layer (`super::fold`).

use super::devices::read_layer_index;
use super::received_fds::ReceivedFds;
use crate::error::VmmError;
use crate::snapshot::fault_handler::{self, FaultLayer, FaultSource};
use crate::snapshot::lazy_memory::{LazyLayers, LazyMemory};
use crate::snapshot::linear_memory::LinearMemory;
use crate::snapshot::map_layers::{MappingPlan, map_layers};
use crate::snapshot::memory_layers::MemoryLayers;
use crate::snapshot::userfaultfd::Userfaultfd;
use jiffy_proto::layer::{MEMORY_CHUNK, UnitSet};
use jiffy_proto::snapshot::RestoreConfig;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Incomplete layers of one restore. Empty if all layers are complete.
pub(super) struct LazyLayerSet {
    /// Present chunks, by layer number.
    present: BTreeMap<usize, UnitSet>,
    source: Option<LazySource>,
}

/// Descriptors with which missing memory is detected and fetched.
struct LazySource {
    userfaultfd: OwnedFd,
    listener: OwnedFd,
    timeout: Duration,
}

impl LazyLayerSet {
    /// Takes the descriptors of a configuration.
    pub fn take(config: &RestoreConfig, fds: &mut ReceivedFds) -> Result<Self, VmmError> {
        let mut present = BTreeMap::new();
        let Some(lazy) = &config.lazy else {
            let source = None;
            return Ok(Self { present, source });
        };
        for layer in &lazy.layers {
            let index = read_layer_index(fds, layer.present, "chunks present", MEMORY_CHUNK)?;
            let number =
                usize::try_from(layer.layer).map_err(|e| VmmError::Config(e.to_string()))?;
            if number >= config.memory.len() {
                let reason = format!("there is no memory layer {number}");
                return Err(VmmError::Config(reason));
            }
            present.insert(number, index.stored);
        }
        let source = Some(LazySource {
            userfaultfd: fds.take(lazy.userfaultfd, "/dev/userfaultfd")?,
            listener: fds.take(lazy.listener, "fetcher's listener")?,
            timeout: Duration::from_millis(lazy.timeout_ms),
        });
        Ok(Self { present, source })
    }

    /// Returns whether the layer's file lacks the chunk.
    pub fn is_absent(&self, layer: usize, chunk: u64) -> bool {
        let present = self.present.get(&layer);
        present.is_some_and(|present| !present.contains(chunk))
    }

    /// Maps memory by `plan`, which assigns a layer to each range of memory. If memory is missing,
    /// starts the thread that fetches it. The thread calls `fail` if a fetch fails finally.
    pub fn map(
        mut self,
        plan: &MappingPlan,
        layers: &MemoryLayers,
        linear: &LinearMemory,
        fail: impl FnOnce(VmmError) + Send + 'static,
    ) -> Result<Option<Arc<LazyMemory>>, VmmError> {
        // `plan.later` are the ranges of memory that must be fetched. No thread is needed if newer
        // layers replace all absent chunks.
        let source = self.source.take().filter(|_| !plan.later.is_empty());
        let Some(source) = source else {
            return map_layers(plan, layers, linear).map(|()| None);
        };
        let userfaultfd = Userfaultfd::new(source.userfaultfd.as_fd())
            .map_err(|e| VmmError::host("/dev/userfaultfd", e))?;
        let lazy = LazyLayers {
            layers,
            userfaultfd: &userfaultfd,
        };
        map_layers(plan, &lazy, linear)?;
        // The thread duplicates the descriptors: a later fold closes the file of a layer in the
        // machine, but the thread may still read that file.
        let files = (0..layers.len()).map(|number| {
            let file = layers.file(number).map(|file| file.try_clone());
            let file = file.unwrap_or_else(|| Err(std::io::ErrorKind::NotFound.into()));
            Ok(FaultLayer {
                file: file.map_err(|e| VmmError::host("duplicating a memory layer", e))?,
                present: self.present.remove(&number),
            })
        });
        let source = FaultSource {
            layers: files.collect::<Result<_, VmmError>>()?,
            runs: plan.later.clone(),
            listener: source.listener,
            timeout: source.timeout,
        };
        // `map_layers` has registered all missing ranges, which `LazyMemory` and the thread
        // require.
        let memory = LazyMemory::new(userfaultfd, linear.clone(), plan);
        let memory = Arc::new(memory);
        fault_handler::start(memory.clone(), source, fail)?;
        Ok(Some(memory))
    }
}
