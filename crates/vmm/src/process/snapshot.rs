//! Snapshots in the event loop: pause the guest, read its state, write the memory or fork a writer,
//! resume.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *chunk* is 64 KiB of memory or of a disk. A *private* page of the guest
//! belongs to this process alone, because the guest has written it or the VMM has copied it. To
//! *freeze* a disk is to turn its writes into a layer and to direct further writes to a new
//! overlay. A *thaw* undoes this. The *controller* is the process that drives this VMM: the daemon.
//! A *captured* snapshot is completed even if the controller disconnects or the guest ends
//! (`captured.rs`). `Machine::captured`, however, are the guest's private pages at the time of the
//! newest snapshot.

mod outputs;

use super::frozen_machine::FrozenMachine;
use super::{SLOT_BACKGROUND_COPY, Vm, micros, watch};
use crate::error::VmmError;
use crate::machine::ReceivedFds;
use crate::machine::bus::lock;
use crate::snapshot::chunk_hashes::ChunkHashes;
use crate::snapshot::layer_output::LayerOutput;
use crate::snapshot::layer_writer::{LARGE_LAYER_PAGES, LayerSource, LayerWriter};
use crate::snapshot::linear_memory::LinearMemory;
use crate::snapshot::memory_layers::MemoryLayer;
use crate::snapshot::pagemap_scan::{PageFilter, scan_pagemap};
use crate::snapshot::revert_memory::CapturedPages;
use crate::snapshot::writer_process::WriterProcess;
use crate::snapshot::written_pages;
use crate::virtio::blk::Block;
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, UnitSet};
use jiffy_proto::snapshot::{AfterSnapshot, SnapshotConfig, SnapshotDecision, SnapshotReport};
use jiffy_proto::vm::{Event, FdIndex, StopCause};
use outputs::MemoryFiles;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Maximum number of pages that may differ for which the VMM begins to write memory while the guest
/// is paused: 32 MiB. A fork would let the guest resume a few milliseconds earlier. But it copies
/// all page tables, and each page that the guest writes next is copied as well. For so few pages,
/// this takes more processor time than writing them.
const MAX_PAUSED_PAGES: u64 = 8192;
/// Maximum time of this write, which usually takes 5 to 15 ms. A forked process writes the rest
/// while the guest runs: the guest must not wait for a slow disk. A shorter time would end while
/// other snapshots occupy the processors, and the fork would delay them further.
const MAX_PAUSED_WRITE: Duration = Duration::from_millis(50);

/// Snapshot whose memory a forked process writes while the guest runs.
pub(super) struct BackgroundCopy {
    pub id: String,
    /// True if the snapshot is completed even if the controller disconnects or the guest ends.
    pub captured: bool,
    child: WriterProcess,
    files: MemoryFiles,
    report: SnapshotReport,
    began: Instant,
    /// Numbers of the frozen disks, which are thawed if the snapshot fails.
    disks: Vec<usize>,
    /// Error outside the writer process.
    failure: Option<VmmError>,
    hashes: Option<ChunkHashes>,
    /// Guest's private pages at the time of the pause.
    private_pages: Option<UnitSet>,
    /// True if writes since the pause are tracked.
    tracked: bool,
}

impl BackgroundCopy {
    /// Kills the writer process. The snapshot then fails.
    pub fn cancel(&self) {
        self.child.cancel();
    }
}

/// Complete snapshot that can still be aborted.
pub(super) struct PreparedSnapshot {
    pub id: String,
    /// Report of a captured snapshot, for a controller that has not received it.
    pub report: Option<SnapshotReport>,
    disks: Vec<usize>,
}

impl Vm {
    /// Takes a snapshot, and reports the result. After a failure, the guest continues.
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

    /// Reports to the controller that a snapshot failed. If the snapshot exceeds the limit on its
    /// size, the message also has the needed bytes.
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

    /// Takes a snapshot. Returns `None` if a background copy of memory was started.
    fn snapshot(
        &mut self,
        config: &SnapshotConfig,
        fds: Vec<OwnedFd>,
    ) -> Result<Option<SnapshotReport>, VmmError> {
        let began = Instant::now();
        let files = self.take_files(config, &mut ReceivedFds::new(fds))?;
        // A new snapshot implies that the controller accepted the last one.
        self.commit_or_abort(SnapshotDecision::Commit)?;
        self.thaw(Vec::new())?;
        let linear = LinearMemory::new(&self.machine.memory)?;
        let stopped = Instant::now();
        self.pause();
        // The disks are paused until memory is forked or written, so that devices, disks and memory
        // are consistent.
        let paused_disks = self.disks.pause();
        // No disk is in use now, so deferred folds succeed.
        self.fold_layers();
        let mut report = SnapshotReport {
            cpu: self.machine.shape.cpu.clone(),
            vcpus: self.machine.shape.vcpus,
            ..SnapshotReport::default()
        };
        report.phases.pause_us = micros(stopped);
        let frozen = if config.disk_only {
            let disks = self.freeze_disks(files.disks)?;
            FrozenMachine::of_disks(disks, linear.bytes())
        } else {
            let pagemap = files.pagemap.as_ref();
            self.freeze(files.disks, pagemap, &linear, &mut report.phases)?
        };
        report.candidates = frozen.candidates.count();
        if let Some((set, pagemap)) = files.working_set.as_ref().zip(files.pagemap.as_ref()) {
            // Ignore the error: the snapshot is valid without this set, but slower to restore.
            let _ = write_touched(set, pagemap, &linear);
        }
        if let Some(limit) = config.max_bytes {
            let needed = frozen.max_bytes(linear.chunks());
            if needed > limit {
                self.thaw(frozen.devices())?;
                return Err(VmmError::SnapshotTooLarge { needed, limit });
            }
        }

        let copying = Instant::now();
        let resumes = config.then == AfterSnapshot::Resume && !config.disk_only;
        // Count the pages that may differ, not the candidate chunks: a candidate may have few of
        // these pages.
        let large = frozen.pages.count() >= LARGE_LAYER_PAGES;
        let direct = files.memory.direct.as_ref().filter(|_| large);
        let hashes = match direct {
            // Direct I/O bypasses the page cache, so the next snapshot compares hashes. Without
            // hashes (after an error), it reads the layer's file. If the VM stops, no snapshot
            // follows.
            Some(_) if resumes => ChunkHashes::new(linear.chunks()).ok(),
            _ => None,
        };
        let source = LayerSource {
            linear: &linear,
            layers: &self.machine.layers,
            candidates: &frozen.candidates,
            pages: &frozen.pages,
            hashes: hashes.as_ref(),
        };
        let output = LayerOutput::new(&files.memory.layer, direct);
        let mut writer = LayerWriter::new(source, output, &files.memory.index);
        let failed = |e| VmmError::host("writing memory", e);
        // A captured snapshot is reported before its memory is written.
        let few = !config.captured && frozen.pages.count() <= MAX_PAUSED_PAGES;
        let written = if !resumes {
            writer.write().map(|()| true).map_err(failed)
        } else if few {
            let deadline = copying + MAX_PAUSED_WRITE;
            writer.write_until(deadline).map_err(failed)
        } else {
            Ok(false)
        };
        let written = match written {
            Ok(written) => written,
            Err(e) => {
                drop(writer);
                self.thaw(frozen.devices())?;
                return Err(e);
            }
        };
        if !written {
            let mut inherited_fds = vec![
                files.memory.layer.as_raw_fd(),
                files.memory.index.as_raw_fd(),
            ];
            inherited_fds.extend(files.memory.direct.as_ref().map(AsRawFd::as_raw_fd));
            inherited_fds.extend(self.machine.layers.descriptors());
            let child = WriterProcess::start(&mut writer, &inherited_fds)
                .or_else(|e| self.thaw(frozen.devices()).and(Err(e)))?;
            self.machine.protected = true;
            let private_pages = frozen.private_pages.as_ref();
            let tracked = self.track_writes(files.pagemap.as_ref(), &linear, private_pages);
            // Without an event of its exit, the snapshot would never complete.
            let slot = self.machine.poller.slot(SLOT_BACKGROUND_COPY);
            watch(&slot, child.pidfd.as_fd())
                .inspect_err(|_| child.cancel())
                .or_else(|e| self.thaw(frozen.devices()).and(Err(e)))?;
            report.phases.copy_us = micros(copying);
            drop(paused_disks);
            self.resume();
            report.stopped_us = micros(stopped);
            // The guest runs: an error from here on fails the snapshot after the writer's exit.
            let failure = frozen.write(&files.state).err();
            if config.captured && failure.is_none() {
                let stopped_us = report.stopped_us;
                self.link.send(&Event::Captured { stopped_us }, &[]);
            }
            let disks = frozen.devices();
            self.background_copy = Some(BackgroundCopy {
                id: config.id.clone(),
                captured: config.captured,
                child,
                files: files.memory,
                report,
                began,
                disks,
                failure,
                hashes,
                private_pages: frozen.private_pages,
                tracked,
            });
            return Ok(None);
        }
        let index = writer.index();
        let written = frozen.write(&files.state);
        written.or_else(|e| self.thaw(frozen.devices()).and(Err(e)))?;
        report.phases.copy_us = micros(copying);
        let disks = frozen.devices();
        if resumes {
            let private_pages = frozen.private_pages;
            let pagemap = files.pagemap.as_ref();
            let tracked = self.track_writes(pagemap, &linear, private_pages.as_ref());
            self.machine.protected |= tracked;
            self.set_captured(&files.memory, private_pages, tracked);
        } else if !config.disk_only {
            // The pages of this snapshot are not tracked.
            self.machine.captured = None;
        }
        if config.then == AfterSnapshot::Resume {
            drop(paused_disks);
            self.resume();
        }
        report.stopped_us = micros(stopped);
        self.prepared = Some(PreparedSnapshot {
            id: config.id.clone(),
            report: None,
            disks,
        });
        let report = self.complete(report, began, files.memory, index, None);
        Ok(Some(report))
    }

    /// Records the private pages of the guest at the time of the snapshot in `files`.
    fn set_captured(&mut self, files: &MemoryFiles, private: Option<UnitSet>, tracked: bool) {
        let captured_pages = |pages| CapturedPages::new(&files.layer, pages, tracked).ok();
        // Ignore an error: a rollback to this snapshot then maps more memory.
        self.machine.captured = private.and_then(captured_pages);
    }

    /// Write-protects the `private` pages of the paused guest, so that writes since this snapshot
    /// can be found. Returns whether that is possible.
    fn track_writes(
        &mut self,
        pagemap: Option<&File>,
        linear: &LinearMemory,
        private: Option<&UnitSet>,
    ) -> bool {
        let Some(tracker) = &self.machine.write_tracker else {
            return false;
        };
        // From here on, writes since the former snapshot cannot be found. If this snapshot fails,
        // no page counts as unwritten.
        self.machine.captured = None;
        let (Some(pagemap), Some(private)) = (pagemap, private) else {
            return false;
        };
        // Ignore the error: the next snapshot then compares all private pages.
        tracker.protect(pagemap, linear, private).is_ok()
    }

    /// Thaws `disks`, and disks that could not be thawed before.
    pub(super) fn thaw(&mut self, disks: Vec<usize>) -> Result<(), VmmError> {
        self.disks_to_thaw.extend(disks);
        while let Some(&at) = self.disks_to_thaw.last() {
            if let Some(device) = self.machine.devices.get(at) {
                lock(device)
                    .device_mut(Block::thaw)
                    .unwrap_or(Ok(()))
                    .map_err(|e| {
                        VmmError::host("joining a disk's overlays after a failed snapshot", e)
                    })?;
            }
            self.disks_to_thaw.pop();
        }
        Ok(())
    }

    /// Completes or fails the snapshot whose writer process has exited.
    pub(super) fn on_background_copy(&mut self) {
        let Some(background_copy) = self.background_copy.take() else {
            return;
        };
        // Closing the descriptor also removes it from the event loop.
        let written = background_copy.child.finish();
        let written = match background_copy.failure {
            Some(e) => Err(e),
            None => written,
        };
        let index = written.and_then(|()| self.read_index(&background_copy.files.index));
        match index {
            Ok(index) => {
                let (files, hashes) = (background_copy.files, background_copy.hashes);
                let private_pages = background_copy.private_pages;
                self.set_captured(&files, private_pages, background_copy.tracked);
                let report = self.complete(
                    background_copy.report,
                    background_copy.began,
                    files,
                    index,
                    hashes,
                );
                self.prepared = Some(PreparedSnapshot {
                    id: background_copy.id,
                    report: background_copy.captured.then(|| report.clone()),
                    disks: background_copy.disks,
                });
                self.link.send(&Event::Snapshotted(report), &[]);
            }
            Err(e) => {
                // Ignore the error: such disks work, and are thawed before the next snapshot.
                let _ = self.thaw(background_copy.disks);
                self.report_failure(&e);
            }
        }
        self.send_reattach_state();
        // If the guest ended during the copy, the VM ends now.
        self.cause = self.cause.take().or_else(|| self.ended_cause.take());
    }

    /// Commits or aborts the last snapshot. If aborting fails, the memory layers are as before the
    /// snapshot, and the disks are thawed before the next snapshot.
    pub(super) fn commit_or_abort(&mut self, decision: SnapshotDecision) -> Result<(), VmmError> {
        match self.prepared.take() {
            Some(snapshot) if decision == SnapshotDecision::Abort => {
                self.machine.layers.pop();
                self.machine.captured = None;
                self.thaw(snapshot.disks)
            }
            _ => Ok(()),
        }
    }

    /// Reads the index that the writer process has written.
    fn read_index(&self, file: &File) -> Result<LayerIndex, VmmError> {
        let failed = |e: io::Error| VmmError::host("reading the memory index", e);
        let linear = LinearMemory::new(&self.machine.memory)?;
        let limit = LayerIndex::encoded_len(linear.chunks()) as u64;
        let index = LayerIndex::read(file, limit).map_err(|e| failed(e.into()))?;
        let index = index.of(MEMORY_CHUNK, linear.bytes());
        index.map_err(|e| failed(io::Error::other(e)))
    }

    /// Makes the snapshot the VM's newest memory layer.
    fn complete(
        &mut self,
        mut report: SnapshotReport,
        began: Instant,
        files: MemoryFiles,
        index: LayerIndex,
        hashes: Option<ChunkHashes>,
    ) -> SnapshotReport {
        report.stored = index.stored.count();
        report.zero = index.zero.count();
        report.total_us = micros(began);
        self.machine.layers.push(MemoryLayer {
            file: files.layer,
            index,
            hashes,
        });
        report
    }

    /// Writes the sets of present chunks and written pages. Returns the number of chunks.
    pub(super) fn working_set(
        &self,
        index: FdIndex,
        pagemap: FdIndex,
        written: FdIndex,
        fds: Vec<OwnedFd>,
    ) -> Result<u64, VmmError> {
        let mut fds = ReceivedFds::new(fds);
        let file = File::from(fds.take(index, "working set")?);
        let pagemap = File::from(fds.take(pagemap, "pagemap")?);
        let pages = File::from(fds.take(written, "written pages")?);
        let linear = LinearMemory::new(&self.machine.memory)?;
        let failed = |e: &dyn std::fmt::Display| VmmError::host("recording the working set", e);
        written_pages::write(&pages, &pagemap, &linear).map_err(|e| failed(&e))?;
        write_touched(&file, &pagemap, &linear).map_err(|e| failed(&e))
    }
}

/// Writes the index of the chunks with a present page to `file`. Returns their number.
fn write_touched(file: &File, pagemap: &File, linear: &LinearMemory) -> io::Result<u64> {
    let set = LayerIndex {
        stored: scan_pagemap(pagemap, linear, PageFilter::Present)?,
        ..LayerIndex::empty(MEMORY_CHUNK, linear.bytes())
    };
    set.write(file)?;
    Ok(set.stored.count())
}
