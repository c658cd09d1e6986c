//! [`Heads`]: access of this host to the heads of sandboxes. The head of a sandbox is the record in
//! the store that decides which host may run the sandbox. The sandbox manager calls this module at
//! each pause, resume and kill of a stored sandbox.
//!
//! A head changes by conditional replacements only. A host publishes the head when the snapshot of
//! a pause is in the store. The *root* of a snapshot is the digest by which the store identifies
//! it. The host claims the head before a resumed guest receives its identity, and marks the head
//! when the sandbox is killed. Of two hosts that claim one head, exactly one succeeds.
//!
//! The outcome of a write may be unknown. The host then drops the guest, and repeats the same write
//! in the background until the outcome is known. If the write has made this host the owner, the
//! host releases the sandbox, so that any host may run it again.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. A restart of the daemon continues the epoch, but a reboot of the host does
//! not. The owner of a running sandbox is a member with one of its epochs.
//!
//! The state machines of these operations are in `jiffy_fleet_core`. This module executes their
//! effects.

mod authority;
mod claim;
mod error;
mod file;
mod update;

use crate::node::{BootClock, Clock};
use crate::records::{Records, SealedRecords};
use claim::{answer_of, spawn_finish, step, write_of};
use file::HeadFile;
use jiffy_fleet_core::record::{Head, HeadState, MAX_INLINE_RECORD_BYTES, SandboxRecord, Snapshot};
use jiffy_fleet_core::{
    Digest, HeldSandbox, MemberId, Owner, Publish, PublishEffect, PublishEvent, PublishInput,
    Purpose, ReadOutcome, Reconciliation, Resume, ResumeAnswer, ResumeEffect, ResumeEvent,
    Revision, SandboxId, reconcile,
};
use jiffy_store::host::{LOCAL_TENANT, RemoteStore};
use jiffy_store::{Hash, Tenant};
use std::sync::Arc;
use std::time::Duration;
use update::Updated;

pub use authority::Authority;
pub use claim::Claim;
pub use error::HeadError;

/// Maximum size in bytes of the record of a sandbox that other hosts can resume.
pub const MAX_SHARED_RECORD_BYTES: usize = MAX_INLINE_RECORD_BYTES;
/// Maximum number of attempts if other hosts change the head at the same time.
const ATTEMPTS: usize = 4;
/// Argument `repeat` of [`update::run`]: the first failure is returned.
const ONCE: bool = false;
/// Argument `repeat` of [`update::run`]: temporary failures are retried without limit.
const REPEATEDLY: bool = true;
/// Pause before a write with an unknown outcome is repeated.
const REPEAT_PAUSE: Duration = Duration::from_secs(1);
/// Maximum pause.
const MAX_REPEAT_PAUSE: Duration = Duration::from_secs(30);

/// Heads in the store of a host.
#[derive(Debug, Clone)]
pub struct Heads {
    remote: Arc<RemoteStore>,
    records: Arc<dyn Records>,
    host: Arc<dyn Authority>,
}

/// Sandbox as its head describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredSandbox {
    /// Id of the snapshot of its last stored pause.
    pub snapshot: String,
    /// Record of the sandbox, written by the host that stored the pause.
    pub record: String,
}

/// Snapshot of a sandbox that was killed on behalf of another host. The snapshot is in the store,
/// and the caller must remove it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnneededState {
    /// Id of the snapshot.
    pub snapshot: String,
    /// Root of the snapshot in the store, in hexadecimal.
    pub root: String,
}

/// Stored pause to publish.
#[derive(Debug, Clone)]
pub struct Publication<'a> {
    /// Sandbox.
    pub sandbox: &'a str,
    /// Id of the snapshot.
    pub snapshot: &'a str,
    /// Root of the snapshot in the store, in hexadecimal.
    pub root: &'a str,
    /// Time of the pause, in milliseconds since 1970.
    pub taken_ms: u64,
    /// Record of the sandbox for another host.
    pub record: String,
}

/// Sandbox of this host for [`Heads::reconcile`].
#[derive(Debug, Clone)]
pub struct LocalSandbox<'a> {
    /// A guest runs.
    pub is_running: bool,
    /// Revision of the head that this process wrote last, if any.
    pub revision: Option<Revision>,
    /// Root of the snapshot of the local state, in hexadecimal. `None` if the store does not have
    /// it.
    pub root: Option<&'a str>,
}

impl Heads {
    /// Uses the records in the store of `remote` for this host.
    pub fn new(remote: Arc<RemoteStore>, host: impl Authority + 'static) -> Self {
        let records = Arc::new(crate::StoreRecords::new(remote.shared.backend()));
        Self::with_records(remote, records, host)
    }

    /// Like [`Self::new`], with records elsewhere. They are encrypted with the keys of the store's
    /// tenants.
    pub fn with_records(
        remote: Arc<RemoteStore>,
        records: Arc<dyn Records>,
        host: impl Authority + 'static,
    ) -> Self {
        Self {
            remote,
            records,
            host: Arc::new(host),
        }
    }

    /// Returns the number of this host.
    pub fn member(&self) -> MemberId {
        self.host.member()
    }

    async fn file(&self, owner: Option<&str>, sandbox: &str) -> Result<HeadFile, HeadError> {
        let tenant = self.remote.tenant(owner).await.map_err(HeadError::store)?;
        self.file_of(tenant, sandbox)
    }

    fn file_of(&self, tenant: Arc<Tenant>, sandbox: &str) -> Result<HeadFile, HeadError> {
        let damaged = HeadError::damaged(sandbox);
        let id = SandboxId::try_from(sandbox).map_err(|e| damaged(&e))?;
        let key = tenant.head_key(id.slot().number(), sandbox);
        let key = key.map_err(|e| damaged(&e))?;
        let key = key.parse().map_err(HeadError::record(sandbox))?;
        let records = SealedRecords::new(self.records.clone(), tenant);
        Ok(HeadFile::new(id, key, Arc::new(records)))
    }

    /// Returns the sandbox of `owner` if it is paused and stored. `None` if the store does not know
    /// the sandbox.
    ///
    /// # Errors
    /// [`HeadError::Elsewhere`] if it runs on another host, [`HeadError::HostLost`] if it ran on a
    /// host that is dead, [`HeadError::Killed`] if it was killed.
    pub async fn stored(
        &self,
        owner: Option<&str>,
        sandbox: &str,
    ) -> Result<Option<StoredSandbox>, HeadError> {
        self.stored_or_older(owner, sandbox, false).await
    }

    /// Like [`Self::stored`]. With `or_older`, also returns the newest stored state of a sandbox
    /// whose host is dead and may have a newer state.
    ///
    /// # Errors
    /// As [`Self::stored`].
    pub async fn stored_or_older(
        &self,
        owner: Option<&str>,
        sandbox: &str,
        or_older: bool,
    ) -> Result<Option<StoredSandbox>, HeadError> {
        let name = owner.unwrap_or(LOCAL_TENANT);
        let tenant = self.remote.find_tenant(name).await;
        let Some(tenant) = tenant.map_err(HeadError::store)? else {
            return Ok(None);
        };
        let mut file = self.file_of(tenant, sandbox)?;
        match file.read().await {
            ReadOutcome::Missing => Ok(None),
            ReadOutcome::Failed => Err(file.take_error()),
            ReadOutcome::Found(head, _) => {
                match self.check_owner(sandbox, &head) {
                    Err(HeadError::HostLost { .. }) if or_older => {}
                    checked => checked?,
                }
                Ok(stored(&head))
            }
        }
    }

    /// Fails if this host must not run the sandbox.
    fn check_owner(&self, sandbox: &str, head: &Head) -> Result<(), HeadError> {
        match head.state() {
            HeadState::Paused => Ok(()),
            HeadState::Running(owner) if owner.member == self.host.member() => Ok(()),
            HeadState::Running(owner) => Err(self.elsewhere(sandbox, owner)),
            HeadState::Killed(_) => Err(HeadError::killed(sandbox)),
        }
    }

    fn elsewhere(&self, sandbox: &str, owner: Owner) -> HeadError {
        let (sandbox, host) = (sandbox.to_owned(), owner.member.to_string());
        if self.host.is_dead(owner) {
            HeadError::HostLost { sandbox, host }
        } else {
            HeadError::Elsewhere { sandbox, host }
        }
    }

    /// Publishes a stored pause: any host may resume the sandbox afterwards. The manifest of the
    /// snapshot must be in the store. Returns the revision of the head.
    ///
    /// # Errors
    /// [`HeadError::Elsewhere`], [`HeadError::Killed`] or [`HeadError::Newer`] if another host has
    /// changed the sandbox since this host paused it.
    pub async fn publish(
        &self,
        owner: Option<&str>,
        pause: &Publication<'_>,
    ) -> Result<Revision, HeadError> {
        let damaged = HeadError::damaged(pause.sandbox);
        let mut file = self.file(owner, pause.sandbox).await?;
        let root: Hash = pause.root.parse().map_err(|e| damaged(&e))?;
        let snapshot = Snapshot {
            id: pause.snapshot.to_owned(),
            root: Digest(root.0),
            taken_ms: pause.taken_ms,
            unknown: Default::default(),
        };
        for _ in 0..ATTEMPTS {
            let current = match file.read().await {
                ReadOutcome::Missing => None,
                ReadOutcome::Failed => return Err(file.take_error()),
                ReadOutcome::Found(head, version) => {
                    self.check_owner(pause.sandbox, &head)?;
                    if head.state() == HeadState::Paused {
                        if head.root() == Some(snapshot.root) {
                            // An earlier call of this host has published it.
                            return Ok(head.revision);
                        }
                        return Err(HeadError::newer(pause.sandbox));
                    }
                    Some((*head, version))
                }
            };
            let policy = current.as_ref().map(|(head, _)| head.policy.clone());
            let input = PublishInput {
                member: self.host.member(),
                id: file.id,
                current,
                snapshot: snapshot.clone(),
                record: SandboxRecord::Inline(pause.record.clone()),
                policy: policy.unwrap_or_default(),
            };
            // The caller has uploaded the manifest, so its event follows at once.
            let (mut publish, _) =
                Publish::new(input).ok_or_else(|| damaged(&"its revisions are exhausted"))?;
            let mut effects = Vec::new();
            publish.handle(BootClock.now(), PublishEvent::ManifestWritten, &mut effects);
            // Each attempt has a new state machine, whose writes are numbered from the start.
            file.restart();
            let Some(PublishEffect::WriteHead(write)) = effects.pop() else {
                return Err(HeadError::contended(pause.sandbox));
            };
            let event = PublishEvent::HeadWritten {
                write: write.write,
                outcome: file.write(&write).await,
            };
            publish.handle(BootClock.now(), event, &mut effects);
            for effect in effects {
                match effect {
                    PublishEffect::Stored { revision, .. } => return Ok(revision),
                    // A later call finds the outcome: the head then has the new root.
                    PublishEffect::Unavailable => return Err(file.take_error()),
                    // Another host has changed the head: read it again.
                    _ => {}
                }
            }
        }
        Err(HeadError::contended(pause.sandbox))
    }

    /// Claims a sandbox that is about to be resumed from `snapshot`. `None` if it has no head: it
    /// was never stored, and only this host has it. With `or_older`, also claims a sandbox that ran
    /// on a dead host.
    ///
    /// # Errors
    /// [`HeadError::Elsewhere`], [`HeadError::HostLost`], [`HeadError::Killed`] or
    /// [`HeadError::Newer`] if another host has changed the sandbox. [`HeadError::NoAuthority`] if
    /// this host has no contact with the fleet. If the outcome is unknown, it is settled in the
    /// background.
    pub async fn claim(
        &self,
        owner: Option<&str>,
        sandbox: &str,
        snapshot: &str,
        or_older: bool,
    ) -> Result<Option<Claim>, HeadError> {
        let mut file = self.file(owner, sandbox).await?;
        for _ in 0..ATTEMPTS {
            let (mut resume, _) = Resume::new(or_older);
            let read = file.read().await;
            // While this host owns the head, its own pause is newer than the stored one.
            let is_own = match &read {
                ReadOutcome::Found(head, _) => {
                    matches!(head.state(), HeadState::Running(owner)
                        if owner.member == self.host.member())
                }
                _ => false,
            };
            let mut effects = step(&mut resume, &*self.host, ResumeEvent::HeadRead(read));
            let is_newer = effects.iter().any(|effect| {
                matches!(effect, ResumeEffect::StartRestore(stored) if stored.id != snapshot)
            });
            if is_newer && !is_own {
                // No write has started, so this error is final.
                return Err(HeadError::newer(sandbox));
            }
            // Each attempt has a new state machine, whose writes are numbered from the start.
            file.restart();
            if let Some(write) = write_of(&effects) {
                let HeadState::Running(owner) = write.head.state() else {
                    return Err(HeadError::contended(sandbox));
                };
                let event = ResumeEvent::HeadWritten {
                    write: write.write,
                    outcome: file.write(&write).await,
                };
                effects = step(&mut resume, &*self.host, event);
                // The claim was written, and the state machine waits for the restore of the guest.
                if effects.is_empty() {
                    return Ok(Some(Claim::new(resume, file, self.host.clone(), owner)));
                }
            }
            match answer_of(&effects) {
                Some(ResumeAnswer::Forward(owner) | ResumeAnswer::HostLost(owner)) => {
                    return Err(self.elsewhere(sandbox, owner));
                }
                Some(ResumeAnswer::Killed) => return Err(HeadError::killed(sandbox)),
                Some(ResumeAnswer::NotStored) => return Ok(None),
                Some(ResumeAnswer::NoAuthority) => return Err(HeadError::no_authority(sandbox)),
                Some(ResumeAnswer::Unavailable) => {
                    let error = file.take_error();
                    spawn_finish(resume, file, self.host.clone(), effects);
                    return Err(error);
                }
                // Another host was first, or an earlier claim of this host arrived late: try again.
                _ => {}
            }
        }
        Err(HeadError::contended(sandbox))
    }

    /// Marks a sandbox as killed, so that no host resumes it. Does nothing if the sandbox has no
    /// head, or runs on another host.
    pub async fn kill(&self, owner: Option<&str>, sandbox: &str) -> Result<(), HeadError> {
        let mut file = self.file(owner, sandbox).await?;
        let by = self.host.member();
        let purpose = Purpose::Kill { by, home: None };
        if let Updated::Unchanged(Some(head)) = update::run(&mut file, purpose, ONCE).await?
            && let HeadState::Running(owner) = head.state()
        {
            tracing::warn!(sandbox, host = %owner.member, "did not kill a sandbox: another host runs it now");
        }
        // This host has removed the files of the sandbox, or the caller removes them now. The
        // confirmation allows the fleet to remove the head of the killed sandbox.
        update::run(&mut file, Purpose::Confirm(by), ONCE).await?;
        Ok(())
    }

    /// Marks a sandbox as killed in place of its host. `home` is the dead host with files of the
    /// sandbox: it kills the sandbox when it returns. `None` if no host has files of the sandbox,
    /// because its host has released it. The caller must have checked that `home` is dead. Returns
    /// the stored state that the caller must remove.
    ///
    /// # Errors
    /// [`HeadError::Elsewhere`] if the sandbox runs on another host, [`HeadError::NoAuthority`] if
    /// this host has no contact with the fleet.
    pub async fn kill_away(
        &self,
        owner: Option<&str>,
        sandbox: &str,
        home: Option<MemberId>,
    ) -> Result<Option<UnneededState>, HeadError> {
        if self.host.owner().is_none() {
            return Err(HeadError::no_authority(sandbox));
        }
        let mut file = self.file(owner, sandbox).await?;
        let by = self.host.member();
        let purpose = Purpose::Kill { by, home };
        match update::run(&mut file, purpose, ONCE).await? {
            Updated::Unchanged(Some(head)) => match head.state() {
                HeadState::Running(owner) => Err(self.elsewhere(sandbox, owner)),
                HeadState::Paused | HeadState::Killed(_) => Ok(None),
            },
            Updated::Stored(head, root) => Ok(root.and_then(|Digest(root)| {
                let snapshot = head.snapshot?.id;
                Some(UnneededState {
                    snapshot,
                    root: Hash(root).to_string(),
                })
            })),
            Updated::Unchanged(None) => Ok(None),
        }
    }

    /// Releases a sandbox that this host owns but does not run: its daemon exited between the claim
    /// and the start of the guest. Does nothing if this host does not own the sandbox.
    ///
    /// # Errors
    /// [`HeadError`] if the head could not be read: this host may still own the sandbox, and the
    /// call must be repeated.
    pub async fn release(&self, owner: Option<&str>, sandbox: &str) -> Result<(), HeadError> {
        let mut file = self.file(owner, sandbox).await?;
        let head = match file.read().await {
            ReadOutcome::Failed => return Err(file.take_error()),
            ReadOutcome::Missing => return Ok(()),
            ReadOutcome::Found(head, _) => head,
        };
        if let HeadState::Running(owner) = head.state()
            && owner.member == self.host.member()
        {
            update::run(&mut file, Purpose::Release(owner), REPEATEDLY).await?;
        }
        Ok(())
    }

    /// Compares a sandbox of this host with its head after a registration in the fleet, and makes
    /// the current epoch its owner if the local state is the newest one.
    ///
    /// Returns the action for the sandbox, and the revision of its head.
    ///
    /// # Errors
    /// [`HeadError`] if the head could not be read or written: the call must be repeated.
    pub async fn reconcile(
        &self,
        owner: Option<&str>,
        sandbox: &str,
        local: &LocalSandbox<'_>,
    ) -> Result<(Reconciliation, Option<Revision>), HeadError> {
        let damaged = HeadError::damaged(sandbox);
        let mut file = self.file(owner, sandbox).await?;
        let head = match file.read().await {
            ReadOutcome::Failed => return Err(file.take_error()),
            ReadOutcome::Missing => None,
            ReadOutcome::Found(head, _) => Some(head),
        };
        let root = local.root.map(str::parse::<Hash>).transpose();
        let held = HeldSandbox {
            is_running: local.is_running,
            revision: local.revision,
            root: root.map_err(|e| damaged(&e))?.map(|root| Digest(root.0)),
        };
        let me = self.host.member();
        let action = reconcile(me, &held, head.as_deref());
        let mut revision = head.map(|head| head.revision);
        match action {
            Reconciliation::Adopt => {
                let owner = self.host.owner();
                let owner = owner.ok_or_else(|| HeadError::no_authority(sandbox))?;
                let purpose = Purpose::Adopt(owner);
                if let Updated::Stored(head, _) = update::run(&mut file, purpose, ONCE).await? {
                    revision = Some(head.revision);
                }
            }
            Reconciliation::Kill => {
                update::run(&mut file, Purpose::Confirm(me), ONCE).await?;
            }
            Reconciliation::Retain | Reconciliation::Remove => {}
        }
        Ok((action, revision))
    }
}

/// Latest snapshot and inline record of a head, from which another host can restore the sandbox.
fn stored(head: &Head) -> Option<StoredSandbox> {
    let snapshot = head.snapshot.as_ref()?.id.clone();
    match head.record.as_ref()? {
        SandboxRecord::Inline(record) => Some(StoredSandbox {
            snapshot,
            record: record.clone(),
        }),
        SandboxRecord::Object { .. } => None,
    }
}
