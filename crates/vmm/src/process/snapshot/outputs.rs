//! [`SnapshotOutputs`]: the files to which a snapshot is written. The controller opens them and
//! sends their descriptors with the request.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. An *overlay* receives the writes to a disk after the snapshot. The
//! *controller* is the process that drives this VMM: the daemon.

use super::super::Vm;
use crate::error::VmmError;
use crate::machine::ReceivedFds;
use jiffy_proto::snapshot::{MAX_LIVE_LAYERS, SnapshotConfig};
use jiffy_proto::vm::FdIndex;
use std::fs::File;

/// Files of the memory layer of a snapshot.
pub(super) struct MemoryFiles {
    pub layer: File,
    /// File of the layer opened with `O_DIRECT`.
    pub direct: Option<File>,
    pub index: File,
}

/// Files to which a snapshot is written, with a new overlay and an index per disk.
pub(super) struct SnapshotOutputs {
    pub memory: MemoryFiles,
    pub state: File,
    /// `/proc/PID/pagemap` of this process, which is only read.
    pub pagemap: Option<File>,
    /// Receives the chunks that the guest has touched, for faster restores.
    pub working_set: Option<File>,
    pub disks: Vec<(File, File)>,
}

impl Vm {
    /// Takes the files of a snapshot from the descriptors of a request. Rejects requests that do
    /// not match the machine.
    pub(super) fn take_files(
        &self,
        config: &SnapshotConfig,
        fds: &mut ReceivedFds,
    ) -> Result<SnapshotOutputs, VmmError> {
        if self.background_copy.is_some() {
            return Err(VmmError::Config(
                "another snapshot of this sandbox is still being written".to_owned(),
            ));
        }
        if self.machine.layers.len() >= MAX_LIVE_LAYERS {
            return Err(VmmError::Config(format!(
                "this sandbox was snapshotted {MAX_LIVE_LAYERS} times without being paused or rolled back: pause and resume it"
            )));
        }
        let disks = self.machine.writable_disks.len();
        let overlays = config.disks.len();
        if overlays != disks {
            let reason = format!("{overlays} overlays for {disks} writable disks");
            return Err(VmmError::Config(reason));
        }
        if config.disk_only && config.captured {
            let reason = "a snapshot without memory cannot be captured".to_owned();
            return Err(VmmError::Config(reason));
        }
        let mut take = |fd: FdIndex, what: &str| fds.take(fd, what).map(File::from);
        Ok(SnapshotOutputs {
            memory: MemoryFiles {
                layer: take(config.memory, "memory layer")?,
                direct: config
                    .direct
                    .map(|fd| take(fd, "memory layer"))
                    .transpose()?,
                index: take(config.index, "memory index")?,
            },
            state: take(config.state, "snapshot state")?,
            pagemap: config.pagemap.map(|fd| take(fd, "pagemap")).transpose()?,
            working_set: config
                .working_set
                .map(|fd| take(fd, "working set"))
                .transpose()?,
            disks: config
                .disks
                .iter()
                .map(|disk| {
                    let overlay = take(disk.overlay, "overlay")?;
                    Ok((overlay, take(disk.index, "disk index")?))
                })
                .collect::<Result<_, VmmError>>()?,
        })
    }
}
