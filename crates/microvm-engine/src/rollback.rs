//! Rollback of a running microVM to a snapshot, in its process.

use crate::boot_error::{BOOT_TIMEOUT, BootError};
use crate::boot_steps::BootStep;
use crate::restore::{FirstUsePages, LineageFiles, MemoryPolicy, layers};
use crate::snapshot_context::{SnapshotContext, add_fd};
use crate::vm::MicroVm;
use jiffy_proto::agent::Identity;
use jiffy_proto::snapshot::{DiskRollback, RollbackConfig, RollbackReport};
use jiffy_proto::vm::{Event, FdIndex, Request};
use jiffy_snapshot::{Lineage, SnapshotError};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::sync::mpsc;

/// Specification of a rollback. The snapshot is of a VM of the same size, with the same images and
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
    /// Pages that become its own in its first use after this.
    pub populate_later: Option<FirstUsePages>,
}

/// Failure of a rollback.
#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    /// The guest is as before and runs on.
    #[error("the VMM cannot go back in place: {0}")]
    Refused(String),
    /// The guest is lost: it has ended, or must be.
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
    /// Puts the guest back to a snapshot; returns when its agent has greeted again and taken its
    /// identity. The process, its limits and its network interface stay. `cut_off` runs while the
    /// interface passes no frame.
    pub async fn roll_back(
        &self,
        spec: RollbackSpec,
        cut_off: impl Future<Output = ()>,
    ) -> Result<RollbackReport, RollbackError> {
        if !self.knows.rollback {
            return Err(refused("it was started by an earlier version of jiffy"));
        }
        if let Some(failure) = self.disk_failure() {
            return Err(refused(failure));
        }
        let mut context = self.context.lock().await;
        let newest = spec.lineage.newest();
        let newest = newest.ok_or_else(|| refused(SnapshotError::Missing(String::new())))?;
        if !spec.lineage.is_complete() {
            return Err(refused(SnapshotError::Incomplete(newest.id().to_owned())));
        }
        let parent = (newest.id().to_owned(), newest.hold().map_err(refused)?);
        let files = RollbackFiles {
            lineage: LineageFiles::open(&spec.lineage).map_err(refused)?,
            pagemap: File::open(format!("/proc/{}/pagemap", self.vmm_pid())).map_err(refused)?,
        };

        let _closed = self.connect_gate.write().await;
        let (sender, mut steps) = mpsc::channel(4);
        self.next_steps.set(Some(sender));
        let former = self.identity.send_replace(Some(spec.identity.clone()));
        if let Err(e) = self.begin_rollback(&mut context, &spec, &files).await {
            self.next_steps.set(None);
            self.identity.send_replace(former);
            return Err(e);
        }
        context.greeting = None;
        context.overlay = spec.overlay;
        context.parent = Some(parent);
        context.unpublished = None;
        context.lineage_lost = false;
        let ready = self.wait_until_ready(&mut context, &mut steps);
        let ready = tokio::time::timeout(BOOT_TIMEOUT, ready);
        let (ready, ()) = tokio::join!(ready, cut_off);
        let (report, greeting) = ready.map_err(|_| BootError::Timeout {
            console: self.console_tail(),
        })??;
        // A kept VM holds its greeting itself.
        let held = greeting.as_ref().filter(|_| self.kept.get().is_some());
        let finish = Request::FinishRollback {
            greeting: held.map(|_| FdIndex(0)),
        };
        let fds: Vec<BorrowedFd<'_>> = held.iter().map(|fd| fd.as_fd()).collect();
        self.link.send(&finish, &fds).map_err(BootError::from)?;
        if held.is_none() {
            context.greeting = greeting;
        }
        Ok(report)
    }

    /// Returns when the VMM has begun.
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

    /// The end of a VM whose VMM closed its control socket.
    async fn lost(&self) -> BootError {
        BootError::Ended {
            end: self.ended().await,
            console: self.console_tail(),
        }
    }

    /// Returns the report, and the host's end of the agent's greeting.
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
