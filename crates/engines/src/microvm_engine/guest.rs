//! [`MicroVmGuest`]: a running microVM, and the handle by which the next daemon adopts it.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. A *slot* is a network namespace with its devices and rules.
//! Slots are prepared in advance, and each is assigned to one guest. The *journal* is the database
//! of the daemon with the records of sandboxes and snapshots.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

mod rollback;
mod take_snapshot;

use super::shared::Shared;
use crate::guest_nic::GuestNic;
use crate::rehearsal::{rehearse, report_free_memory};
use async_trait::async_trait;
use jiffy_engine_api::{
    BootReport, ConnectionLog, EngineError, ExitReason, Guest, GuestCounters, GuestHandle,
    GuestStream, GuestUsage, MICROVM, NetworkRules, ProcessInstance, RollbackCommit,
    RollbackFailure, SandboxIdentity, SnapshotRequest, SnapshotTimes,
};
use jiffy_microvm_engine::MicroVm;
use jiffy_proto::agent::{Hello, Identity};
use jiffy_proto::snapshot::FoldedLayers;
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;

/// Size of a page, in bytes.
pub(super) const PAGE_BYTES: u64 = 4096;

/// Name of the directory of VMM control sockets, in the runtime directory.
pub(super) const SOCKET_DIRECTORY: &str = "vmm";

/// Name of the log file of the VMMs, in the runtime directory.
pub(super) const LOG_FILE: &str = "vmm.log";

/// Directory of control sockets, and log, of guests that continue to run after the daemon exits.
#[derive(Clone)]
pub(super) struct SocketDirectory {
    pub(super) sockets: Arc<PathBuf>,
    pub(super) log: Arc<File>,
}

impl SocketDirectory {
    /// Creates the directory in the runtime directory `run`, and opens the log.
    pub(super) fn open(run: &Path) -> io::Result<Self> {
        let sockets = run.join(SOCKET_DIRECTORY);
        DirBuilder::new()
            .recursive(true)
            // A process that can connect to a control socket controls the guest.
            .mode(0o700)
            .create(&sockets)?;
        let log = File::options()
            .append(true)
            .create(true)
            .open(run.join(LOG_FILE))?;
        Ok(Self {
            sockets: Arc::new(sockets),
            log: Arc::new(log),
        })
    }
}

/// Contents of a [`GuestHandle`].
#[derive(Serialize, Deserialize)]
pub(super) struct MicroVmHandle {
    /// Process of the VMM.
    pub(super) mark: ProcessInstance,
    /// Name of the guest's template version, as recorded in its snapshots.
    pub(super) image: String,
    /// Identity that was assigned to the agent, without clock and entropy.
    pub(super) identity: Identity,
    /// Greeting of the agent.
    pub(super) hello: Option<Hello>,
    /// Origin of the guest and times of its boot.
    pub(super) report: BootReport,
    /// Number of the guest's network slot.
    #[serde(default)]
    pub(super) slot: Option<u32>,
    /// Checksum of the kernel modules that the guest has mounted.
    #[serde(default)]
    pub(super) modules: Option<String>,
}

impl MicroVmHandle {
    /// Parses the handle in the journal.
    pub(super) fn read(handle: &GuestHandle) -> Result<Self, EngineError> {
        serde_json::from_str(&handle.0).map_err(|e| {
            EngineError::failed(format!(
                "the handle was written by another version of jiffy: {e}"
            ))
        })
    }
}

/// Running microVM.
pub(super) struct MicroVmGuest {
    pub(super) vm: MicroVm,
    /// Name of the guest's template version, as recorded in its snapshots.
    pub(super) image: String,
    /// Identity that was assigned last.
    pub(super) identity: Mutex<Identity>,
    pub(super) shared: Arc<Shared>,
    pub(super) nic: GuestNic,
}

impl MicroVmGuest {
    /// Returns the identity that was assigned last.
    pub(super) fn identity(&self) -> Identity {
        let identity = self.identity.lock();
        identity.clone()
    }

    /// Records the identity that the agent received in a rollback.
    pub(super) fn set_identity(&self, identity: Identity) {
        *self.identity.lock() = identity;
    }

    /// Returns the handle of the guest whose VMM is the process `mark`. Also marks the network slot
    /// to outlive this process.
    async fn handle_of(&self, mark: ProcessInstance) -> Result<GuestHandle, EngineError> {
        let handle = MicroVmHandle {
            mark,
            image: self.image.clone(),
            // The journal contains no entropy. The next daemon generates its own.
            identity: Identity {
                time_ns: 0,
                entropy: String::new(),
                ..self.identity()
            },
            hello: self.vm.hello().await,
            modules: self.vm.modules().await,
            report: self.vm.report(),
            slot: self.nic.detach(),
        };
        let handle = serde_json::to_string(&handle).map_err(EngineError::failed)?;
        Ok(GuestHandle(handle))
    }
}

impl Drop for MicroVmGuest {
    fn drop(&mut self) {
        // A guest that continues to run without this daemon also retains its slot.
        if self.vm.end().is_some() {
            self.nic.release();
        }
    }
}

#[async_trait]
impl Guest for MicroVmGuest {
    fn engine(&self) -> &'static str {
        MICROVM
    }

    async fn detach(&self) -> Result<GuestHandle, EngineError> {
        let directory = &self.shared.socket_directory;
        let mark = self.vm.detach(&directory.sockets, &directory.log).await;
        self.handle_of(mark.map_err(EngineError::failed)?).await
    }

    async fn handle(&self) -> Result<GuestHandle, EngineError> {
        let mark = ProcessInstance::of(self.vm.vmm_pid()).map_err(EngineError::failed)?;
        self.handle_of(mark).await
    }

    async fn take_snapshot(
        &self,
        request: SnapshotRequest<'_>,
    ) -> Result<SnapshotTimes, EngineError> {
        // The VM knows its parent snapshot.
        if request.content.is_full() {
            self.save(request).await
        } else {
            self.save_disk(request).await
        }
    }

    async fn finish_captured(&self) -> Result<SnapshotTimes, EngineError> {
        let saved = self.vm.finish_captured(&self.shared.store).await;
        self.times(saved, None)
    }

    async fn roll_back(
        &self,
        id: &str,
        identity: &SandboxIdentity,
        commit: &mut RollbackCommit<'_>,
    ) -> Result<(), RollbackFailure> {
        self.roll_back_in_place(id, identity, commit).await
    }

    fn fold_layers(&self, layers: &FoldedLayers) {
        self.vm.fold_layers(layers);
    }

    fn may_have_hooks(&self) -> bool {
        self.vm.may_have_hooks()
    }

    fn report(&self) -> BootReport {
        self.vm.report()
    }

    fn pid(&self) -> Option<u32> {
        Some(self.vm.vmm_pid())
    }

    fn usage(&self) -> Option<GuestUsage> {
        let pid = self.vm.vmm_pid();
        // Fields of statm, in pages: total, resident, resident and shared with files. Resident
        // pages that are not shared belong to the guest alone.
        let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
        let mut pages = statm
            .split(' ')
            .skip(1)
            .map_while(|n| n.parse::<u64>().ok());
        let (resident, shared) = (pages.next()?, pages.next()?);
        Some(GuestUsage {
            cpu_us: cpu_us(pid)?,
            memory_bytes: resident.saturating_sub(shared).saturating_mul(PAGE_BYTES),
            disk_bytes: self.vm.overlay_bytes(),
            net_bytes: self.nic.traffic(),
        })
    }

    fn counters(&self) -> Option<GuestCounters> {
        Some(GuestCounters {
            cpu_us: cpu_us(self.vm.vmm_pid())?,
            sent_bytes: self.nic.sent_bytes(),
        })
    }

    async fn exits(&self) -> Option<u64> {
        self.vm.stats().await.ok()?.exits
    }

    async fn connect(&self, port: u32) -> io::Result<UnixStream> {
        let stream = self.vm.connector().connect(port).await;
        stream.map_err(io::Error::other)
    }

    async fn connect_tcp(&self, port: u16) -> Option<GuestStream> {
        self.nic.connect(port).await
    }

    async fn rehearse(&self) {
        rehearse(&self.vm).await;
        report_free_memory(&self.vm).await;
    }

    async fn set_network(&self, rules: &NetworkRules) -> Result<(), EngineError> {
        self.nic.set_rules(rules).await
    }

    fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        self.nic.connections()
    }

    async fn ended(&self) -> ExitReason {
        let reason = self.vm.ended().await;
        self.nic.end_connections();
        reason
    }

    fn console_tail(&self) -> String {
        self.vm.console_tail()
    }

    fn disk_failure(&self) -> Option<String> {
        self.vm.disk_failure()
    }

    async fn stop(&self) {
        self.vm.stop_shared().await;
        self.nic.release();
    }

    async fn halt(&self) {
        self.vm.halt_shared().await;
        self.nic.end_connections();
    }
}

/// Returns the processor time of a process in microseconds. The clock needs one system call,
/// and /proc/PID/stat needs three. The clock is exact, whereas that file counts ticks.
fn cpu_us(pid: u32) -> Option<u64> {
    let clock = clock_getcpuclockid(Pid::from_raw(i32::try_from(pid).ok()?)).ok()?;
    let cpu = Duration::from(clock.now().ok()?).as_micros();
    Some(u64::try_from(cpu).unwrap_or(u64::MAX))
}
