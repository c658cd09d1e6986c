//! Rollback of a running microVM to a snapshot, in the same VMM process.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. The *greeting* is the first message of the agent, which then
//! receives the identity of its sandbox. The *first use* is the first request or command of a user
//! after the rollback.

use crate::boot_error::{BOOT_TIMEOUT, BootError};
use crate::boot_steps::BootStep;
use crate::snapshot_context::{SnapshotContext, add_fd};
use crate::vm::MicroVm;
use crate::vm::restore::{FirstUsePages, LineageFiles, MemoryPolicy, layers};
use jiffy_proto::agent::Identity;
use jiffy_proto::snapshot::{DiskRollback, RollbackConfig, RollbackReport};
use jiffy_proto::vm::{Event, FdIndex, Request};
use jiffy_snapshot::{Lineage, SnapshotError};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::sync::mpsc;

/// Specification of a rollback. The snapshot must be of a VM with the same size, images and
/// devices.
#[derive(Debug)]
pub struct RollbackSpec {
    /// Snapshot with its ancestors.
    pub lineage: Lineage,
    /// Empty file for the writes of this sandbox ([`jiffy_snapshot::Store::overlay`]).
    pub overlay: File,
    /// Identity for the agent.
    pub identity: Identity,
    /// Source of memory.
    pub memory: MemoryPolicy,
    /// See [`crate::RestoreSpec::populate`].
    pub populate: Option<File>,
    /// Pages that are made private at the first use after the rollback.
    pub populate_later: Option<FirstUsePages>,
}

/// Error of a rollback.
#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    /// The guest is unchanged and continues to run.
    #[error("the VMM cannot be rolled back in place: {0}")]
    Refused(String),
    /// The guest is lost: it has ended or must be terminated.
    #[error(transparent)]
    Lost(#[from] BootError),
}

fn refused(reason: impl std::fmt::Display) -> RollbackError {
    RollbackError::Refused(reason.to_string())
}

/// Open files of a rollback.
struct RollbackFiles {
    lineage: LineageFiles,
    pagemap: File,
}

impl MicroVm {
    /// Rolls the guest back to a snapshot. Returns when the agent has sent a new greeting and taken
    /// its identity. The VMM process, its limits and its network interface remain. `cut_off` runs
    /// while the interface passes no frames: it removes the connections of the former guest from
    /// the host.
    pub async fn roll_back(
        &self,
        spec: RollbackSpec,
        cut_off: impl Future<Output = ()>,
    ) -> Result<RollbackReport, RollbackError> {
        if !self.supported_requests.rollback {
            return Err(refused(
                "the VMM was started by an earlier version of jiffy",
            ));
        }
        // The failure is recorded until the VMM exits. A restore in a new VMM clears it.
        if let Some(failure) = self.disk_failure() {
            return Err(refused(failure));
        }
        let mut context = self.context.lock().await;
        let newest = spec
            .lineage
            .newest()
            .ok_or_else(|| refused(SnapshotError::Missing(String::new())))?;
        if !spec.lineage.is_complete() {
            return Err(refused(SnapshotError::Incomplete(newest.id().to_owned())));
        }
        let parent = (newest.id().to_owned(), newest.hold().map_err(refused)?);
        let files = RollbackFiles {
            lineage: LineageFiles::open(&spec.lineage).map_err(refused)?,
            pagemap: File::open(format!("/proc/{}/pagemap", self.vmm_pid())).map_err(refused)?,
        };

        // Streams that are opened now would belong to the discarded guest. Held until the end of
        // the rollback.
        let _closed = self.connect_gate.write().await;
        // A rollback has at most as many steps as a boot, so the driver rarely waits for the
        // receiver.
        let (sender, mut steps) = mpsc::channel(4);
        // Set the receiver of the steps and the identity before the request: the agent may greet as
        // soon as the VMM has reverted the guest.
        self.next_steps.set(Some(sender));
        let former = self.identity.send_replace(Some(spec.identity.clone()));
        if let Err(e) = self.begin_rollback(&mut context, &spec, &files).await {
            self.next_steps.set(None);
            self.identity.send_replace(former);
            return Err(e);
        }
        // The VMM has started the rollback, so the former guest is lost. Replace its state.
        context.greeting = None;
        context.overlay = spec.overlay;
        context.parent = Some(parent);
        context.fresh_memory = false;
        context.unpublished = None;
        context.lineage_lost = false;
        let ready = self.wait_until_ready(&mut context, &mut steps);
        let ready = tokio::time::timeout(BOOT_TIMEOUT, ready);
        // `cut_off` must finish before the interface passes frames again, so wait for both.
        let (ready, ()) = tokio::join!(ready, cut_off);
        let (report, greeting) = ready.map_err(|_| BootError::Timeout {
            console: self.console_tail(),
        })??;
        // The VMM of a detached VM must hold the greeting itself, because this process may exit.
        let passed = greeting
            .as_ref()
            .filter(|_| self.detached_socket.get().is_some());
        // The VMM lets the network interface pass frames again when it receives this request.
        let finish = Request::FinishRollback {
            greeting: passed.map(|_| FdIndex(0)),
        };
        let fds: Vec<BorrowedFd<'_>> = passed.iter().map(|fd| fd.as_fd()).collect();
        self.link.send(&finish, &fds).map_err(BootError::from)?;
        if passed.is_none() {
            context.greeting = greeting;
        }
        Ok(report)
    }

    /// Returns when the VMM has started the rollback.
    async fn begin_rollback(
        &self,
        context: &mut SnapshotContext,
        spec: &RollbackSpec,
        files: &RollbackFiles,
    ) -> Result<(), RollbackError> {
        let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
        let config = RollbackConfig {
            state: add_fd(&mut fds, &files.lineage.state),
            memory: layers(&mut fds, &files.lineage.memory),
            source: spec.memory.source(&mut fds),
            populate: spec.populate.as_ref().map(|pages| add_fd(&mut fds, pages)),
            populate_later: {
                let later = spec.populate_later.as_ref();
                later.map(|later| later.request(&mut fds))
            },
            pagemap: add_fd(&mut fds, &files.pagemap),
            disks: vec![DiskRollback {
                layers: layers(&mut fds, &files.lineage.disk),
                overlay: add_fd(&mut fds, &spec.overlay),
            }],
        };
        let request = Request::Rollback(Box::new(config));
        self.link.send(&request, &fds).map_err(refused)?;
        let begun = context.reply(|event| match event {
            Event::RollbackBegun => Some(Ok(())),
            Event::RollbackRefused { reason } => Some(Err(RollbackError::Refused(reason))),
            _ => None,
        });
        match begun.await {
            Ok(begun) => begun,
            Err(_) => Err(self.lost().await.into()),
        }
    }

    /// Returns the error of a VM whose VMM closed its control socket.
    async fn lost(&self) -> BootError {
        BootError::Ended {
            end: self.ended().await,
            console: self.console_tail(),
        }
    }

    /// Returns the report and the host's end of the agent's greeting.
    async fn wait_until_ready(
        &self,
        context: &mut SnapshotContext,
        steps: &mut mpsc::Receiver<BootStep>,
    ) -> Result<(RollbackReport, Option<OwnedFd>), BootError> {
        let rolled_back = |event| match event {
            Event::RolledBack(report) => Some(report),
            _ => None,
        };
        let Ok(report) = context.reply(rolled_back).await else {
            return Err(self.lost().await);
        };
        loop {
            match steps.recv().await {
                Some(BootStep::Hello { hello }) => context.hello = Some(hello),
                Some(BootStep::Running) => {}
                Some(BootStep::Ready { greeted, .. }) => {
                    let greeting = greeted.map_err(|source| BootError::Greeting {
                        source,
                        console: self.console_tail(),
                    });
                    return Ok((report, greeting?));
                }
                None => return Err(self.lost().await),
            }
        }
    }
}
