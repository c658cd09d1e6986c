//! Rollback in the event loop: read the snapshot, stop the guest, revert the machine, resume.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *private* page of the guest belongs to this process alone, because the
//! guest has written it or the VMM has copied it. The *greeting* is the first message of the agent,
//! which then receives the identity of its sandbox. A *prepared* snapshot is complete, but neither
//! committed nor aborted.

use super::disk_thread::DisksPaused;
use super::{Vm, micros};
use crate::error::VmmError;
use crate::machine::bus::lock;
use crate::machine::{ReceivedFds, RollbackTarget};
use crate::snapshot::linear_memory::LinearMemory;
use crate::snapshot::pagemap_scan::scan_private;
use crate::virtio::net::Net;
use jiffy_proto::layer::UnitSet;
use jiffy_proto::snapshot::{RollbackConfig, RollbackReport};
use jiffy_proto::vm::{Event, FdIndex};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Checked rollback of a paused guest, which can no longer be rejected.
struct CheckedRollback {
    target: RollbackTarget,
    /// Guest's private pages.
    private: UnitSet,
    /// Private pages that have the content of the target.
    unwritten: UnitSet,
    paused_disks: DisksPaused,
    report: RollbackReport,
    stopped: Instant,
}

impl Vm {
    /// Handles a request to roll the VM back. A failed check changes nothing. A later failure ends
    /// the VM.
    pub(super) fn on_rollback(&mut self, config: &RollbackConfig, fds: Vec<OwnedFd>) {
        let was_running = self.running;
        let checked = match self.check_rollback(config, &mut ReceivedFds::new(fds)) {
            Ok(checked) => checked,
            Err(e) => {
                if was_running {
                    self.resume();
                }
                let reason = e.to_string();
                self.link.send(&Event::RollbackRefused { reason }, &[]);
                return;
            }
        };
        // From here on, the state of the guest is lost.
        self.link.send(&Event::RollbackBegun, &[]);
        match self.roll_back(checked) {
            Ok(report) => drop(self.link.send(&Event::RolledBack(report), &[])),
            // The guest's memory or devices are partly reverted: the VM must end.
            Err(e) => self.cause = Some(e.into()),
        }
    }

    /// Ends a rollback after the controller has received the agent's new greeting. Retains the
    /// greeting's stream and lets the network interface pass frames again.
    pub(super) fn on_finish_rollback(&mut self, greeting: Option<FdIndex>, fds: Vec<OwnedFd>) {
        let mut fds = ReceivedFds::new(fds);
        self._greeting = greeting.and_then(|greeting| fds.take(greeting, "greeting").ok());
        for device in self.machine.devices_of_event_loop() {
            lock(&device).device_mut(Net::open_gate);
        }
        // Close the layers only now: closing many layers takes time, during which the guest would
        // have been stopped.
        self.former_disks.clear();
    }

    /// Reads the snapshot and pauses the guest. The state of the guest is preserved.
    fn check_rollback(
        &mut self,
        config: &RollbackConfig,
        fds: &mut ReceivedFds,
    ) -> Result<CheckedRollback, VmmError> {
        let mut report = RollbackReport::default();
        let reading = Instant::now();
        if self.background_copy.is_some() {
            let reason = "a snapshot of this sandbox is still being written".to_owned();
            return Err(VmmError::Config(reason));
        }
        let pagemap = File::from(fds.take(config.pagemap, "pagemap")?);
        let target = RollbackTarget::read(&self.machine, config, fds)?;
        report.read_us = micros(reading);

        let stopped = Instant::now();
        // Set this before the call: after an error, some vCPUs are paused, and `on_rollback`
        // resumes all.
        self.running = false;
        target.pause_vcpus(&self.vcpus)?;
        // The disk thread must stop as well, because disk requests in flight write to guest memory.
        let paused_disks = self.disks.pause();
        report.pause_us = micros(stopped);
        let scanning = Instant::now();
        let linear = LinearMemory::new(&self.machine.memory)?;
        let private = scan_private(&pagemap, &linear)
            .map_err(|e| VmmError::host("searching for written pages", e))?;
        let unwritten = self.machine.unwritten_pages(&target, &private);
        let private = private.all;
        report.pages = private.count() - unwritten.count();
        report.scan_us = micros(scanning);
        Ok(CheckedRollback {
            target,
            private,
            unwritten,
            paused_disks,
            report,
            stopped,
        })
    }

    /// Reverts the machine and runs it. After an error, it must not run.
    fn roll_back(&mut self, checked: CheckedRollback) -> Result<RollbackReport, VmmError> {
        let CheckedRollback {
            mut target,
            private,
            unwritten,
            paused_disks,
            mut report,
            stopped,
        } = checked;
        let memory = Instant::now();
        self.machine
            .revert_memory(&mut target, &private, &unwritten)?;
        report.memory_us = micros(memory);
        let state = Instant::now();
        self.former_disks = self.machine.revert_state(target, &self.vcpus)?;
        report.state_us = micros(state);
        // A prepared snapshot belongs to the discarded state, because memory layers and overlays
        // were replaced. So do disks whose thaw failed after a failed snapshot.
        self.prepared = None;
        self.disks_to_thaw.clear();
        self._greeting = None;
        drop(paused_disks);
        self.resume();
        report.stopped_us = micros(stopped);
        Ok(report)
    }
}
