//! Heads: one record per sandbox that was ever stored. It decides which host may run the sandbox.
//!
//! A head changes by conditional replaces only. A host publishes the head when the snapshot of a
//! pause is in the store. It claims the head before a resumed guest receives its identity, and
//! marks it when the sandbox is killed. Of two hosts that claim one head, exactly one succeeds.
//!
//! The outcome of a write may be unknown. The host then drops the guest, and repeats the same write
//! in the background until the outcome is known. If the host turns out to own the sandbox, it
//! releases it, so that a sandbox never stays without a host that may run it.

mod error;

use crate::records::{Outcome, PendingWrite, Record, RecordError, SealedRecords};
use crate::{RecordKey, Records};
use jiffy_fleet_core::record::{
    Head, HeadState, KilledAt, MAX_INLINE_RECORD_BYTES, SandboxRecord, Snapshot,
};
use jiffy_fleet_core::{Digest, Owner, SandboxId};
use jiffy_store::host::{LOCAL_TENANT, RemoteStore};
use jiffy_store::{Hash, Tenant};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

pub use error::HeadError;

/// Maximum size in bytes of the record of a sandbox that other hosts can resume.
pub const MAX_SHARED_RECORD_BYTES: usize = MAX_INLINE_RECORD_BYTES;
/// Attempts at a change that other hosts precede.
const ATTEMPTS: usize = 4;
/// Pause before a write with an unknown outcome is repeated.
const REPEAT_PAUSE: Duration = Duration::from_secs(1);
/// Maximum pause.
const MAX_REPEAT_PAUSE: Duration = Duration::from_secs(30);

/// Heads in the store of a host.
#[derive(Debug, Clone)]
pub struct Heads {
    remote: Arc<RemoteStore>,
    records: Arc<dyn Records>,
    host: Owner,
}

/// Sandbox as its head describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredSandbox {
    /// Id of the snapshot of its last stored pause.
    pub snapshot: String,
    /// Record of the sandbox, as the host wrote it that stored it.
    pub record: String,
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

/// Head with the place of its record.
struct Place {
    host: Owner,
    key: RecordKey,
    id: SandboxId,
    records: Arc<SealedRecords>,
}

/// Head that was read, with the version of its record.
struct Current {
    head: Head,
    record: Record,
}

/// Claimed sandbox. Dropping the claim releases the sandbox, unless [`Self::retain`] was called.
#[must_use]
pub struct Claim {
    held: Option<(Place, Current)>,
}

impl std::fmt::Debug for Claim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let held = self.held.as_ref().map(|(place, _)| place.id);
        f.debug_struct("Claim").field("held", &held).finish()
    }
}

impl Claim {
    /// Keeps the sandbox: its guest runs.
    pub fn retain(mut self) {
        self.held = None;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some((place, current)) = self.held.take() {
            tokio::spawn(release(place, current));
        }
    }
}

impl Heads {
    /// Uses the records in the store of `remote` for the host `host`.
    pub fn new(remote: Arc<RemoteStore>, host: Owner) -> Self {
        let records = Arc::new(crate::StoreRecords::new(remote.shared.backend()));
        Self::with_records(remote, records, host)
    }

    /// Like [`Self::new`], with records elsewhere. They are encrypted with the keys of the store's
    /// tenants.
    pub fn with_records(remote: Arc<RemoteStore>, records: Arc<dyn Records>, host: Owner) -> Self {
        Self {
            remote,
            records,
            host,
        }
    }

    /// Returns the number of this host.
    pub fn host(&self) -> Owner {
        self.host
    }

    async fn place(&self, owner: Option<&str>, sandbox: &str) -> Result<Place, HeadError> {
        let tenant = self.remote.tenant(owner).await.map_err(HeadError::store)?;
        self.place_of(tenant, sandbox)
    }

    fn place_of(&self, tenant: Arc<Tenant>, sandbox: &str) -> Result<Place, HeadError> {
        let damaged = HeadError::damaged(sandbox);
        let id = SandboxId::try_from(sandbox).map_err(|e| damaged(&e))?;
        let key = tenant.head_key(id.slot().number(), sandbox);
        let key = key.map_err(|e| HeadError::damaged(sandbox)(&e))?;
        Ok(Place {
            host: self.host,
            key: key.parse().map_err(HeadError::record(sandbox))?,
            id,
            records: Arc::new(SealedRecords::new(self.records.clone(), tenant)),
        })
    }

    /// Returns the sandbox of `owner` if it is paused and stored. `None` if the store does not know
    /// the sandbox.
    ///
    /// # Errors
    /// [`HeadError::Elsewhere`] if it runs on another host, [`HeadError::Killed`] if it was killed.
    pub async fn stored(
        &self,
        owner: Option<&str>,
        sandbox: &str,
    ) -> Result<Option<StoredSandbox>, HeadError> {
        let name = owner.unwrap_or(LOCAL_TENANT);
        let tenant = self.remote.find_tenant(name).await;
        let Some(tenant) = tenant.map_err(HeadError::store)? else {
            return Ok(None);
        };
        let place = self.place_of(tenant, sandbox)?;
        let Some(current) = place.read().await? else {
            return Ok(None);
        };
        self.check_owner(sandbox, &current.head)?;
        Ok(current.stored())
    }

    /// Fails if this host must not run the sandbox.
    fn check_owner(&self, sandbox: &str, head: &Head) -> Result<(), HeadError> {
        match head.state() {
            HeadState::Paused => Ok(()),
            HeadState::Running(owner) if owner == self.host => Ok(()),
            HeadState::Running(owner) => Err(HeadError::Elsewhere {
                sandbox: sandbox.to_owned(),
                host: owner.member.to_string(),
            }),
            HeadState::Killed(_) => Err(HeadError::Killed {
                sandbox: sandbox.to_owned(),
            }),
        }
    }

    /// Publishes a stored pause: any host may resume the sandbox afterwards. The manifest of the
    /// snapshot must be in the store.
    ///
    /// # Errors
    /// [`HeadError::Elsewhere`], [`HeadError::Killed`] or [`HeadError::Newer`] if another host has
    /// changed the sandbox since this host paused it.
    pub async fn publish(
        &self,
        owner: Option<&str>,
        pause: &Publication<'_>,
    ) -> Result<(), HeadError> {
        let damaged = HeadError::damaged(pause.sandbox);
        let place = self.place(owner, pause.sandbox).await?;
        let root: Hash = pause.root.parse().map_err(|e| damaged(&e))?;
        let snapshot = Snapshot {
            id: pause.snapshot.to_owned(),
            root: Digest(root.0),
            taken_ms: pause.taken_ms,
            unknown: Default::default(),
        };
        let record = SandboxRecord::Inline(pause.record.clone());
        for _ in 0..ATTEMPTS {
            let write = match place.read().await? {
                None => {
                    let mut head = Head::new(
                        place.id,
                        HeadState::Paused,
                        Some(snapshot.clone()),
                        Some(record.clone()),
                    );
                    head.origin = Some(self.host.member);
                    place.create(&head)?
                }
                Some(current) => {
                    self.check_owner(pause.sandbox, &current.head)?;
                    if current.head.state() == HeadState::Paused {
                        if current.head.root() == Some(snapshot.root) {
                            // An earlier call of this host has published it.
                            return Ok(());
                        }
                        return Err(HeadError::Newer {
                            sandbox: pause.sandbox.to_owned(),
                        });
                    }
                    let mut head = place.successor(&current.head, HeadState::Paused)?;
                    head.snapshot = Some(snapshot.clone());
                    head.record = Some(record.clone());
                    place.replace(&head, &current)?
                }
            };
            if let Outcome::Done(_) = place.send(&write).await? {
                return Ok(());
            }
        }
        Err(HeadError::contended(pause.sandbox))
    }

    /// Claims a sandbox that is about to be resumed from `snapshot`. `None` if it has no head: it
    /// was never stored, and only this host has it.
    ///
    /// # Errors
    /// [`HeadError::Elsewhere`], [`HeadError::Killed`] or [`HeadError::Newer`] if another host has
    /// changed the sandbox. If the outcome is unknown, it is settled in the background.
    pub async fn claim(
        &self,
        owner: Option<&str>,
        sandbox: &str,
        snapshot: &str,
    ) -> Result<Option<Claim>, HeadError> {
        let place = self.place(owner, sandbox).await?;
        for _ in 0..ATTEMPTS {
            let Some(current) = place.read().await? else {
                return Ok(None);
            };
            self.check_owner(sandbox, &current.head)?;
            let stored = current.head.snapshot.as_ref().map(|stored| &*stored.id);
            // While this host owns the head, its own pause is newer than the stored one.
            let is_own = current.head.state() == HeadState::Running(self.host);
            if !is_own && stored != Some(snapshot) {
                return Err(HeadError::Newer {
                    sandbox: sandbox.to_owned(),
                });
            }
            let head = place.successor(&current.head, HeadState::Running(self.host))?;
            let write = place.replace(&head, &current)?;
            match place.send(&write).await {
                Ok(Outcome::Done(record)) => {
                    let held = (place, Current { head, record });
                    return Ok(Some(Claim { held: Some(held) }));
                }
                // Another host was first, or an earlier claim of this host arrived late.
                Ok(Outcome::Lost(_)) => {}
                Err(e) => {
                    if let HeadError::Record {
                        source: RecordError::Unknown { .. },
                        ..
                    } = e
                    {
                        tokio::spawn(settle(place, write, head));
                    }
                    return Err(e);
                }
            }
        }
        Err(HeadError::contended(sandbox))
    }

    /// Marks a sandbox as killed, so that no host resumes it. Does nothing if the sandbox has no
    /// head, or runs on another host.
    pub async fn kill(&self, owner: Option<&str>, sandbox: &str) -> Result<(), HeadError> {
        let place = self.place(owner, sandbox).await?;
        for _ in 0..ATTEMPTS {
            let Some(current) = place.read().await? else {
                return Ok(());
            };
            match self.check_owner(sandbox, &current.head) {
                Ok(()) => {}
                Err(HeadError::Killed { .. }) => return Ok(()),
                Err(e) => {
                    tracing::warn!(sandbox, error = %e, "a killed sandbox was moved before");
                    return Ok(());
                }
            }
            let at_ms = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let killed = KilledAt {
                at_ms: at_ms.map_or(0, |time| time.as_millis() as u64),
                home: None,
            };
            let head = place.successor(&current.head, HeadState::Killed(killed))?;
            let write = place.replace(&head, &current)?;
            if let Outcome::Done(_) = place.send(&write).await? {
                return Ok(());
            }
        }
        Err(HeadError::contended(sandbox))
    }

    /// Releases a sandbox that this host owns but does not run: its daemon exited between the claim
    /// and the start of the guest.
    pub async fn release(&self, owner: Option<&str>, sandbox: &str) -> Result<(), HeadError> {
        let place = self.place(owner, sandbox).await?;
        if let Some(current) = place.read().await?
            && current.head.state() == HeadState::Running(self.host)
        {
            place.release(&current).await?;
        }
        Ok(())
    }
}

impl Place {
    async fn read(&self) -> Result<Option<Current>, HeadError> {
        let record = self.records.get(&self.key).await;
        let Some(record) = record.map_err(HeadError::record(self.id))? else {
            return Ok(None);
        };
        let head = Head::decode(&record.content, self.id);
        let head = head.map_err(|e| HeadError::damaged(&self.id.to_string())(&e))?;
        Ok(Some(Current { head, record }))
    }

    fn encode(&self, head: &Head) -> Result<Vec<u8>, HeadError> {
        let encoded = head.encode();
        encoded.map_err(|e| HeadError::damaged(&self.id.to_string())(&e))
    }

    fn create(&self, head: &Head) -> Result<PendingWrite, HeadError> {
        let prepared = self.records.create(&self.key, self.encode(head)?);
        prepared.map_err(HeadError::record(self.id))
    }

    fn replace(&self, head: &Head, current: &Current) -> Result<PendingWrite, HeadError> {
        let content = self.encode(head)?;
        let prepared = self.records.replace(&self.key, content, &current.record);
        prepared.map_err(HeadError::record(self.id))
    }

    async fn send(&self, write: &PendingWrite) -> Result<Outcome, HeadError> {
        let sent = self.records.send(write).await;
        sent.map_err(HeadError::record(self.id))
    }

    fn successor(&self, head: &Head, state: HeadState) -> Result<Head, HeadError> {
        head.successor(self.host.member, state)
            .ok_or_else(|| HeadError::damaged(&self.id.to_string())(&"its revisions are exhausted"))
    }

    /// Writes that no host runs the sandbox, unless the head has changed.
    async fn release(&self, current: &Current) -> Result<(), HeadError> {
        let head = self.successor(&current.head, HeadState::Paused)?;
        let write = self.replace(&head, current)?;
        repeat(self, &write).await.map(drop)
    }
}

impl Current {
    fn stored(&self) -> Option<StoredSandbox> {
        let snapshot = self.head.snapshot.as_ref()?.id.clone();
        match self.head.record.as_ref()? {
            SandboxRecord::Inline(record) => Some(StoredSandbox {
                snapshot,
                record: record.clone(),
            }),
            SandboxRecord::Object { .. } => None,
        }
    }
}

/// Sends a write until its outcome is known.
async fn repeat(place: &Place, write: &PendingWrite) -> Result<Outcome, HeadError> {
    let mut pause = REPEAT_PAUSE;
    loop {
        match place.send(write).await {
            Err(e) if e.is_temporary() => {
                tracing::debug!(sandbox = %place.id, error = %e, "repeating a write of a head");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(MAX_REPEAT_PAUSE);
            }
            other => return other,
        }
    }
}

/// Settles a claim with an unknown outcome. If it succeeded, releases the sandbox, whose guest was
/// dropped.
async fn settle(place: Place, write: PendingWrite, head: Head) {
    match repeat(&place, &write).await {
        Ok(Outcome::Done(record)) => release(place, Current { head, record }).await,
        // The claim had no effect, or a later one of this host has replaced it.
        Ok(Outcome::Lost(_)) => {}
        Err(e) => tracing::warn!(sandbox = %place.id, error = %e, "cannot settle a claim"),
    }
}

async fn release(place: Place, current: Current) {
    if let Err(e) = place.release(&current).await {
        tracing::warn!(sandbox = %place.id, error = %e, "cannot release a sandbox in the store");
    }
}
