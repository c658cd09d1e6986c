//! Upload of one snapshot and of the ancestors that the store lacks. The oldest is uploaded first,
//! so that each uploaded snapshot can be restored.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. A *tenant* is an
//! owner of snapshots in the store. A *retraction* is the removal of a copy from the store.

use super::is_named;
use crate::journal::JournalChange;
use crate::records::SnapshotRecord;
use crate::sandboxes::snapshot_catalog::SnapshotPin;
use crate::sandboxes::{OperationError, Sandboxes};
use crate::snapshot::Snapshot;
use crate::store_copies::{StoreCopies, StorePlace, StoreRetraction};
use jiffy_api_types::SnapshotPurpose;
use jiffy_engine_api::SnapshotParts;
use jiffy_store::host::{LOCAL_TENANT, PushRequest, Pushed, RemoteError, RemoteStore};
use jiffy_store::{MAX_LINEAGE, SHARED_TENANT};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::watch;

/// Maximum number of restarts of an upload whose ancestors change while it runs. The number exceeds
/// [`MAX_LINEAGE`], because each ancestor with incomplete memory causes one restart.
const MAX_RESTARTS: usize = 300;

/// Failure of an upload.
#[derive(Debug, thiserror::Error)]
pub(super) enum UploadError {
    /// The snapshot was removed, or its upload was cancelled.
    #[error("the snapshot was removed")]
    Removed,
    /// An ancestor changed. The next attempt uses the new lineage.
    #[error("its ancestors changed too often")]
    Changed,
    /// Chunks of this snapshot are neither in the store nor on this host.
    #[error("the memory of snapshot {0} is incomplete on this host")]
    MissingMemory(String),
    #[error("it has more than {MAX_LINEAGE} ancestors")]
    LongLineage,
    #[error(transparent)]
    Remote(#[from] RemoteError),
    #[error(transparent)]
    Operation(#[from] OperationError),
}

/// Snapshot to push. Its files are open, and its pin protects it from garbage collection.
struct Link {
    place: StorePlace,
    parts: SnapshotParts,
    _pin: SnapshotPin,
}

/// Snapshots that the store lacks, newest first, and their nearest ancestor in the store.
struct Chain {
    links: Vec<Link>,
    /// Id, place and root hash of the nearest ancestor in the store. `None` if no ancestor is
    /// in the store.
    base: Option<(String, StorePlace, String)>,
    /// Guards that prevent the removal of these snapshots.
    _pins: Vec<SnapshotPin>,
}

impl Sandboxes {
    /// Uploads snapshot `id`, and starts again whenever its ancestors change.
    pub(super) async fn upload(
        &self,
        remote: &Arc<RemoteStore>,
        id: &str,
        cancelled: &watch::Receiver<bool>,
    ) -> Result<(), UploadError> {
        for _ in 0..MAX_RESTARTS {
            match self.upload_once(remote, id, cancelled).await {
                // The cancellation is checked first: an error may be its effect.
                _ if *cancelled.borrow() => return Err(UploadError::Removed),
                Err(UploadError::Changed) => {}
                // The snapshot was fetched without all of its memory, and this store has no copy.
                Err(UploadError::MissingMemory(id)) => self.complete_memory(&id).await?,
                other => return other,
            }
        }
        Err(UploadError::Changed)
    }

    /// Uploads a snapshot with its ancestors, which are pinned meanwhile.
    async fn upload_once(
        &self,
        remote: &Arc<RemoteStore>,
        id: &str,
        cancelled: &watch::Receiver<bool>,
    ) -> Result<(), UploadError> {
        let (this, url, owned) = (self.clone(), remote.url().to_owned(), id.to_owned());
        let opening = move || this.open_chain(&url, &owned);
        let opened = tokio::task::spawn_blocking(opening).await;
        let chain = opened.map_err(|e| OperationError::Lost(e.to_string()))??;
        let ids: Vec<String> = chain.links.iter().map(|l| l.parts.id.clone()).collect();
        let pushed = self.push_chain(remote, &chain, cancelled).await;
        drop(chain);
        // The pins delayed the garbage collection of snapshots that were removed meanwhile.
        self.0.gc.collect(ids);
        pushed
    }

    /// Opens snapshot `id` and the ancestors that the store at `url` lacks. Blocks.
    fn open_chain(&self, url: &str, id: &str) -> Result<Chain, UploadError> {
        let record = self.0.catalog.get(id).ok_or(UploadError::Removed)?;
        // A lineage is pushed for the owner of its newest snapshot, except for shared snapshots.
        let tenant = record.owner.unwrap_or_else(|| LOCAL_TENANT.to_owned());
        let mut chain = Chain {
            links: Vec::new(),
            base: None,
            _pins: Vec::new(),
        };
        let mut next = Some(id.to_owned());
        while let Some(id) = next {
            let newest = chain.links.is_empty();
            if chain.links.len() >= MAX_LINEAGE {
                return Err(UploadError::LongLineage);
            }
            // The snapshot is pinned before its record is read: garbage collection skips pinned
            // snapshots.
            let pin = self.0.catalog.pin(&id);
            let missing_record = || {
                if newest {
                    UploadError::Removed
                } else {
                    UploadError::Changed
                }
            };
            let record = self.0.catalog.get(&id).ok_or_else(missing_record)?;
            let place = StorePlace {
                store: url.to_owned(),
                tenant: if self.0.uploads.is_shared(&record) {
                    SHARED_TENANT.to_owned()
                } else {
                    tenant.clone()
                },
            };
            // The store already has this snapshot with all of its ancestors.
            if let Some(root) = record.store.root(&place) {
                chain.base = Some((id, place.clone(), root.to_owned()));
                chain._pins.push(pin);
                break;
            }
            let missing = self.snapshots().missing_memory(&id);
            let failed = OperationError::engine("check its memory");
            if missing.map_err(failed)?.is_some() {
                return Err(UploadError::MissingMemory(id));
            }
            let parts = match self
                .0
                .snapshot_engines
                .files_of(&id)
                .and_then(|files| files.parts(&id))
            {
                Ok(parts) => parts,
                // The ancestor was merged into its child meanwhile.
                Err(_) if self.0.catalog.get(&id).is_none() => return Err(missing_record()),
                Err(e) => return Err(OperationError::engine("open its files")(e).into()),
            };
            next = parts.parent.clone();
            chain.links.push(Link {
                place,
                parts,
                _pin: pin,
            });
        }
        Ok(chain)
    }

    /// Pushes the snapshots of `chain`, oldest first.
    ///
    /// # Errors
    /// [`UploadError::Changed`] if the store lost content or an ancestor changed: the caller opens
    /// the chain again and repeats the push.
    async fn push_chain(
        &self,
        remote: &Arc<RemoteStore>,
        chain: &Chain,
        cancelled: &watch::Receiver<bool>,
    ) -> Result<(), UploadError> {
        let mut lineage = Vec::new();
        if let Some((id, place, root)) = &chain.base {
            match remote.stored_lineage(&place.tenant, root).await? {
                Some(stored) => lineage = stored,
                None => {
                    tracing::warn!(id, "the store lost a snapshot, pushing it again");
                    self.discard_copies(id);
                    return Err(UploadError::Changed);
                }
            }
        }
        for link in chain.links.iter().rev() {
            // Another owner's upload may be pushing the same snapshot.
            let _sharing = if link.place.tenant == SHARED_TENANT {
                Some(self.0.uploads.sharing.lock().await)
            } else {
                None
            };
            let record = self.0.catalog.get(&link.parts.id);
            let record = record.ok_or(UploadError::Changed)?;
            if record.store.root(&link.place).is_some() {
                // Another upload has pushed this ancestor.
                return Err(UploadError::Changed);
            }
            match self.push(remote, link, record, lineage, cancelled).await {
                Err(UploadError::Remote(e)) if e.is_gone() => {
                    // The store has lost content that this push is based on. Discarding the copies
                    // also increments the revision in the record of the snapshot. The record is
                    // part of the pushed content, so the next attempt pushes new content and does
                    // not depend on the removal of the former content.
                    let id = &link.parts.id;
                    tracing::debug!(id, error = %e, "the store lost an ancestor of a snapshot");
                    let base = chain.base.as_ref().map(|(id, ..)| id);
                    self.discard_copies(base.unwrap_or(&link.parts.id));
                    return Err(UploadError::Changed);
                }
                other => lineage = other?.lineage,
            }
        }
        Ok(())
    }

    /// Pushes a snapshot, and records its copy in the catalog.
    async fn push(
        &self,
        remote: &RemoteStore,
        link: &Link,
        record: Snapshot,
        lineage: Vec<jiffy_store::SnapshotName>,
        cancelled: &watch::Receiver<bool>,
    ) -> Result<Pushed, UploadError> {
        let id = &record.id;
        // The place (store and tenant) is recorded before the first byte is sent: after a crash,
        // the daemon knows that an incomplete copy may be in this place.
        self.0.catalog.update(id, |now| {
            now.store.uploading = Some(link.place.clone());
        });
        let revision = record.store.revision;
        // Hosts that fetch the snapshot receive this record. It does not contain the list of copies
        // in stores: this host removes these copies, and other hosts must not.
        let written = Snapshot {
            store: StoreCopies {
                revision,
                ..StoreCopies::default()
            },
            ..record.clone()
        };
        let text = serde_json::to_vec(&SnapshotRecord::from(&written));
        let text = text.map_err(|e| OperationError::Lost(e.to_string()))?;
        let named = is_named(&record);
        let pushed = remote
            .push(PushRequest {
                tenant: &link.place.tenant,
                parts: &link.parts,
                record: &text,
                owner: record.owner.as_deref().unwrap_or_default(),
                created_ms: record.created_ms,
                lineage,
                named,
                resumable: record.purpose == SnapshotPurpose::Pause,
                // If an earlier copy was discarded, the id may still refer to it in the store.
                renamed: revision > 0,
                cancelled: cancelled.clone(),
            })
            .await?;
        let report = &pushed.report;
        tracing::info!(
            id,
            chunks = report.chunks,
            new_chunks = report.new_chunks,
            pack_bytes = report.pack_bytes,
            seconds = report.seconds,
            "pushed a snapshot"
        );
        let counters = &self.0.uploads.counters;
        counters.chunks.fetch_add(report.chunks, Ordering::Relaxed);
        counters
            .new_chunks
            .fetch_add(report.new_chunks, Ordering::Relaxed);
        self.record_copy(link, &pushed, revision, named)?;
        Ok(pushed)
    }

    /// Records a complete copy. Removes it again if the snapshot changed or was removed during the
    /// upload. `named` states whether the copy has a name in the store.
    fn record_copy(
        &self,
        link: &Link,
        pushed: &Pushed,
        revision: u32,
        named: bool,
    ) -> Result<(), UploadError> {
        let (place, root) = (&link.place, &pushed.root);
        let mut is_current = false;
        let now = self.0.catalog.update(&link.parts.id, |now| {
            // A client changed the record during the upload, so the copy is outdated.
            is_current = now.store.revision == revision;
            if is_current {
                now.store.add(place.clone(), root.clone());
            }
        });
        // `content` is true if the content is removed, and false if only the name is removed.
        let retraction =
            |content| StoreRetraction::new(place, &link.parts.id, Some(root.as_str()), content);
        match now {
            Some(_) if !is_current => {
                self.retract_copies(vec![retraction(true)]);
                Err(UploadError::Changed)
            }
            // The snapshot was removed meanwhile, but its descendants need its content.
            Some(now) if named && !is_named(&now) => {
                self.retract_copies(vec![retraction(false)]);
                Ok(())
            }
            Some(_) => Ok(()),
            None => {
                self.retract_copies(vec![retraction(true)]);
                Err(UploadError::Removed)
            }
        }
    }

    /// Removes the copies of a snapshot from its record and from the store, so that the snapshot is
    /// uploaded again.
    fn discard_copies(&self, id: &str) {
        let mut copies = Vec::new();
        self.0
            .catalog
            .update(id, |now| copies = now.store.discard_copies(id));
        self.retract_copies(copies);
    }

    /// Removes copies from the store, in the background.
    pub(in crate::sandboxes) fn retract_copies(&self, copies: Vec<StoreRetraction>) {
        // The journal comes first, so that a crash does not forget a removal.
        let changes = copies.iter().cloned().map(JournalChange::Retraction);
        let changes: Vec<_> = changes.collect();
        self.0.journal.commit_write_behind(&changes);
        self.0.uploads.retract(copies);
    }
}
