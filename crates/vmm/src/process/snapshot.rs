//! Snapshots, as the event loop takes them: stop, read, fork, go on.

use super::{SLOT_COPIED, Vm, micros, watch};
use crate::error::VmmError;
use crate::machine::Descriptors;
use crate::machine::bus::lock;
use crate::snapshot::child::Child;
use crate::snapshot::hashes::Hashes;
use crate::snapshot::layers::Layer;
use crate::snapshot::linear::Linear;
use crate::snapshot::output::Output;
use crate::snapshot::scan::{Pages, scan};
use crate::snapshot::writer::{LARGE_LAYER_CHUNKS, Source, Writer};
use crate::virtio::blk::Block;
use jiffy_proto::layer::{DISK_BLOCK, LayerIndex, MEMORY_CHUNK, UnitSet};
use jiffy_proto::snapshot::{
    AfterSnapshot, FreezePhases, MAX_LIVE_LAYERS, SnapshotConfig, SnapshotReport,
};
use jiffy_proto::vm::{Event, FdIndex, StopCause};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Instant;

/// A snapshot whose memory is being written while the guest runs on.
pub(super) struct Copying {
    id: String,
    child: Child,
    files: MemoryFiles,
    report: SnapshotReport,
    began: Instant,
    disks: Vec<usize>,
    /// What failed beside the child.
    failure: Option<VmmError>,
    hashes: Option<Hashes>,
}

impl Copying {
    /// Gives the snapshot up.
    pub fn cancel(&self) {
        self.child.cancel();
    }
}

/// A snapshot that is complete and can still be undone.
pub(super) struct Undecided {
    pub id: String,
    disks: Vec<usize>,
}

struct MemoryFiles {
    layer: File,
    /// The layer's file, past the page cache.
    direct: Option<File>,
    index: File,
}

/// Where the rest goes, and an overlay for each disk.
struct Files {
    memory: MemoryFiles,
    state: File,
    pagemap: Option<File>,
    disks: Vec<(File, File)>,
}

/// A machine that was stopped and read.
struct Frozen {
    state: Vec<u8>,
    candidates: UnitSet,
    /// Disks by device number, and where their layer's index goes.
    disks: Vec<(usize, LayerIndex, File)>,
}

impl Frozen {
    /// Writes everything but memory.
    fn write(&self, state: &File) -> Result<(), VmmError> {
        let failed = |e: io::Error| VmmError::host("writing the snapshot's state", e);
        state.write_all_at(&self.state, 0).map_err(failed)?;
        for (_, index, file) in &self.disks {
            file.write_all_at(&index.encode(), 0).map_err(failed)?;
        }
        Ok(())
    }

    /// Bytes that its layers, indexes and state have together at most: every chunk that may have changed is stored.
    fn most_bytes(&self, chunks_of_memory: u64) -> u64 {
        let chunks = self.candidates.count().saturating_mul(MEMORY_CHUNK.into());
        let index = LayerIndex::encoded_len(chunks_of_memory) as u64;
        let disks = self.disks.iter().map(|(_, index, _)| {
            let blocks = index.stored.count().saturating_mul(DISK_BLOCK.into());
            blocks.saturating_add(index.encode().len() as u64)
        });
        let state = self.state.len() as u64;
        disks.fold(chunks + index + state, u64::saturating_add)
    }

    fn devices(&self) -> Vec<usize> {
        self.disks.iter().map(|(device, ..)| *device).collect()
    }
}

impl Vm {
    pub(super) fn on_snapshot(&mut self, config: &SnapshotConfig, fds: Vec<OwnedFd>) {
        let was_running = self.running;
        match self.snapshot(config, fds) {
            Ok(None) => {}
            Ok(Some(report)) => {
                self.link.send(&Event::Snapshotted(report), &[]);
                if config.then == AfterSnapshot::Stop {
                    self.cause = Some(StopCause::Requested);
                }
            }
            Err(e) => {
                if was_running {
                    self.resume();
                }
                self.report_failure(&e);
            }
        }
    }

    fn report_failure(&self, error: &VmmError) {
        let reason = error.to_string();
        let needed_bytes = match error {
            VmmError::SnapshotTooLarge { needed, .. } => Some(*needed),
            _ => None,
        };
        let failed = Event::SnapshotFailed {
            reason,
            needed_bytes,
        };
        self.link.send(&failed, &[]);
    }

    /// `None` when memory is still being written.
    fn snapshot(
        &mut self,
        config: &SnapshotConfig,
        fds: Vec<OwnedFd>,
    ) -> Result<Option<SnapshotReport>, VmmError> {
        let began = Instant::now();
        let files = self.take_files(config, &mut Descriptors::new(fds))?;
        self.settle(true)?;
        self.thaw(Vec::new())?;
        let linear = Linear::new(&self.machine.memory)?;

        let stopped = Instant::now();
        self.pause();
        // Until memory is forked, or written: devices, disks and memory are of one moment.
        let quiet = self.disks.quiet();
        let mut report = SnapshotReport {
            cpu: self.machine.shape.cpu.clone(),
            vcpus: self.machine.shape.vcpus,
            ..SnapshotReport::default()
        };
        report.phases.pause_us = micros(stopped);
        let frozen = self.freeze(
            files.disks,
            files.pagemap.as_ref(),
            &linear,
            &mut report.phases,
        )?;
        report.candidates = frozen.candidates.count();
        if let Some(most) = config.max_bytes {
            let needed = frozen.most_bytes(linear.chunks());
            if needed > most {
                self.thaw(frozen.devices())?;
                return Err(VmmError::SnapshotTooLarge { needed, most });
            }
        }

        let copying = Instant::now();
        // Of a VM that ends there is no next snapshot to compare.
        let goes_on = config.then == AfterSnapshot::Resume;
        let large = report.candidates >= LARGE_LAYER_CHUNKS;
        let direct = files.memory.direct.as_ref().filter(|_| large);
        let hashes = match direct {
            // What there is no memory for is compared by reading it.
            Some(_) if goes_on => Hashes::new(linear.chunks()).ok(),
            _ => None,
        };
        let source = Source {
            linear: &linear,
            layers: &self.machine.layers,
            candidates: &frozen.candidates,
            hashes: hashes.as_ref(),
        };
        let output = Output::new(&files.memory.layer, direct);
        let mut writer = Writer::new(source, output, &files.memory.index);
        if goes_on {
            let mut keep = vec![
                files.memory.layer.as_raw_fd(),
                files.memory.index.as_raw_fd(),
            ];
            keep.extend(files.memory.direct.as_ref().map(AsRawFd::as_raw_fd));
            keep.extend(self.machine.layers.descriptors());
            let child = Child::start(&mut writer, &keep);
            let child = child.or_else(|e| self.thaw(frozen.devices()).and(Err(e)))?;
            report.phases.copy_us = micros(copying);
            drop(quiet);
            self.resume();
            report.stopped_us = micros(stopped);
            let slot = self.machine.poller.slot(SLOT_COPIED);
            let watched = watch(&slot, child.pidfd.as_fd());
            let failure = frozen.write(&files.state).and(watched).err();
            self.copying = Some(Copying {
                id: config.id.clone(),
                child,
                files: files.memory,
                report,
                began,
                disks: frozen.devices(),
                failure,
                hashes,
            });
            return Ok(None);
        }
        let written = writer
            .write()
            .map_err(|e| VmmError::host("writing memory", e));
        let index = writer.index();
        let written = written.and_then(|()| frozen.write(&files.state));
        written.or_else(|e| self.thaw(frozen.devices()).and(Err(e)))?;
        report.phases.copy_us = micros(copying);
        report.stopped_us = micros(stopped);
        let id = config.id.clone();
        let disks = frozen.devices();
        self.undecided = Some(Undecided { id, disks });
        Ok(Some(self.complete(
            report,
            began,
            files.memory,
            index,
            None,
        )))
    }

    fn take_files(
        &self,
        config: &SnapshotConfig,
        fds: &mut Descriptors,
    ) -> Result<Files, VmmError> {
        if self.copying.is_some() {
            return Err(VmmError::Config(
                "another snapshot of this sandbox is still being written".to_owned(),
            ));
        }
        if self.machine.layers.len() >= MAX_LIVE_LAYERS {
            return Err(VmmError::Config(format!(
                "this sandbox was snapshotted {MAX_LIVE_LAYERS} times without being paused or rolled back: pause and resume it"
            )));
        }
        let disks = self.writable_disks().len();
        if config.disks.len() != disks {
            return Err(VmmError::Config(format!(
                "{} overlays for {disks} writable disks",
                config.disks.len()
            )));
        }
        let mut take = |fd: FdIndex, what: &str| fds.take(fd, what).map(File::from);
        Ok(Files {
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

    fn writable_disks(&self) -> Vec<usize> {
        let devices = self.machine.devices.iter().enumerate();
        devices
            .filter(|(_, device)| lock(device).peek(Block::writable) == Some(true))
            .map(|(at, _)| at)
            .collect()
    }

    /// Reads the stopped machine. On failure the disks are as before.
    fn freeze(
        &mut self,
        disks: Vec<(File, File)>,
        pagemap: Option<&File>,
        linear: &Linear,
        phases: &mut FreezePhases,
    ) -> Result<Frozen, VmmError> {
        let reading = Instant::now();
        let state = self.machine.save(&self.vcpus)?.encode()?;
        phases.state_us = micros(reading);
        let scanning = Instant::now();
        let candidates = match pagemap {
            Some(file) => scan(file, linear, Pages::Private)
                .map_err(|e| VmmError::host("looking for written pages", e))?,
            None => UnitSet::full(linear.chunks()),
        };
        phases.scan_us = micros(scanning);
        let mut frozen = Frozen {
            state,
            candidates,
            disks: Vec::new(),
        };
        for (at, (overlay, index_file)) in self.writable_disks().into_iter().zip(disks) {
            let Some(device) = self.machine.devices.get(at) else {
                continue;
            };
            let result = lock(device).poke(|block: &mut Block| block.freeze(overlay));
            match result {
                Some(Ok(index)) => frozen.disks.push((at, index, index_file)),
                Some(Err(e)) => {
                    self.thaw(frozen.devices())?;
                    return Err(VmmError::host("preparing a disk's new overlay", e));
                }
                None => {}
            }
        }
        Ok(frozen)
    }

    /// Undoes freezing of `disks`, and of those where that failed before.
    fn thaw(&mut self, disks: Vec<usize>) -> Result<(), VmmError> {
        self.unsettled.extend(disks);
        while let Some(&at) = self.unsettled.last() {
            if let Some(device) = self.machine.devices.get(at) {
                lock(device)
                    .poke(Block::thaw)
                    .unwrap_or(Ok(()))
                    .map_err(|e| {
                        VmmError::host("joining a disk's overlays after a failed snapshot", e)
                    })?;
            }
            self.unsettled.pop();
        }
        Ok(())
    }

    /// The child that wrote memory is done.
    pub(super) fn on_copied(&mut self) {
        let Some(copying) = self.copying.take() else {
            return;
        };
        // Closing the descriptor also takes it out of the event loop.
        let written = copying.child.finish();
        let written = match copying.failure {
            Some(e) => Err(e),
            None => written,
        };
        let index = written.and_then(|()| self.read_index(&copying.files.index));
        match index {
            Ok(index) => {
                let (files, hashes) = (copying.files, copying.hashes);
                let report = self.complete(copying.report, copying.began, files, index, hashes);
                let (id, disks) = (copying.id, copying.disks);
                self.undecided = Some(Undecided { id, disks });
                self.link.send(&Event::Snapshotted(report), &[]);
            }
            Err(e) => {
                // What cannot be joined now is tried again before the next snapshot; the disks work as they are.
                let _ = self.thaw(copying.disks);
                self.report_failure(&e);
            }
        }
        self.answer_recall();
    }

    /// Decides whether the last snapshot happened. On failure the memory below is as before it, and the disks are put back before
    /// the next one.
    pub(super) fn settle(&mut self, happened: bool) -> Result<(), VmmError> {
        match self.undecided.take() {
            Some(snapshot) if !happened => {
                self.machine.layers.pop();
                self.thaw(snapshot.disks)
            }
            _ => Ok(()),
        }
    }

    fn read_index(&self, file: &File) -> Result<LayerIndex, VmmError> {
        let failed = |e: io::Error| VmmError::host("reading the memory index", e);
        let linear = Linear::new(&self.machine.memory)?;
        let mut bytes = vec![0; LayerIndex::encoded_len(linear.chunks())];
        file.read_exact_at(&mut bytes, 0).map_err(failed)?;
        LayerIndex::decode(&bytes, MEMORY_CHUNK, linear.bytes())
            .map_err(|e| VmmError::host("reading the memory index", e))
    }

    /// The snapshot is what lies below the VM from now on.
    fn complete(
        &mut self,
        mut report: SnapshotReport,
        began: Instant,
        files: MemoryFiles,
        index: LayerIndex,
        hashes: Option<Hashes>,
    ) -> SnapshotReport {
        report.stored = index.stored.count();
        report.zero = index.zero.count();
        report.total_us = micros(began);
        self.machine.layers.push(Layer {
            file: files.layer,
            index,
            hashes,
        });
        report
    }

    /// Writes which chunks are present; returns how many.
    pub(super) fn working_set(
        &self,
        index: FdIndex,
        pagemap: FdIndex,
        fds: Vec<OwnedFd>,
    ) -> Result<u64, VmmError> {
        let mut fds = Descriptors::new(fds);
        let file = File::from(fds.take(index, "working set")?);
        let pagemap = File::from(fds.take(pagemap, "pagemap")?);
        let linear = Linear::new(&self.machine.memory)?;
        let failed = |e: &dyn std::fmt::Display| VmmError::host("recording the working set", e);
        let set = LayerIndex {
            stored: scan(&pagemap, &linear, Pages::Present).map_err(|e| failed(&e))?,
            ..LayerIndex::empty(MEMORY_CHUNK, linear.bytes())
        };
        file.write_all_at(&set.encode(), 0)
            .map_err(|e| failed(&e))?;
        Ok(set.stored.count())
    }
}
