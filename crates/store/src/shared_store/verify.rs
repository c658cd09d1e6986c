//! Verification of a store: reads all objects of a tenant and reports damaged ones (`jiffy store
//! verify`).
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *pack* is an object in the store with many
//! compressed and encrypted chunks. A *tenant* is an owner of snapshots in the store, usually an
//! API key. The objects of a tenant are encrypted with its keys.

use crate::data_keys::Hash;
use crate::fetch_plan::{ChunkRequest, PlannedRange, plan};
use crate::pack::{PackId, decode_frame};
use crate::remote::RemoteSnapshot;
use crate::shared_store::SharedStore;
use crate::shared_store::collection::OnProgress;
use crate::shared_store::pack_index::{decode_tail, pack_id};
use crate::tenant::Tenant;
use crate::{FormatError, Listed, StoreError};
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Attempts at verifying a snapshot whose chunks are moved concurrently.
const VERIFY_ATTEMPTS: usize = 3;

/// Damaged chunk. A frame is the form in which a pack stores a chunk.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct DamagedFrame {
    /// Name of the snapshot's part.
    pub part: String,
    /// Number of the chunk in the part.
    pub chunk: u64,
    /// Key of its pack.
    pub pack: String,
    /// Defect.
    pub reason: String,
}

/// Snapshot with damaged chunks.
#[derive(Debug, Clone, Serialize)]
pub struct DamagedSnapshot {
    /// Id of the snapshot on the host that created it.
    pub id: String,
    /// Hash that identifies the snapshot in the store.
    pub root: String,
    /// Damaged chunks of the snapshot, ascending.
    pub chunks: Vec<DamagedFrame>,
    /// The snapshot.
    #[serde(skip)]
    pub snapshot: RemoteSnapshot,
}

/// Damaged object: a manifest, a table of chunk locations, the index of a pack, or the name of a
/// tenant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct DamagedObject {
    /// Key.
    pub object: String,
    /// Defect.
    pub reason: String,
}

/// Result of a verification.
#[derive(Debug, Clone, Default, Serialize)]
pub struct VerifyReport {
    /// Number of snapshots read.
    pub snapshots: u64,
    /// Number of distinct chunks read.
    pub chunks: u64,
    /// Bytes read from packs.
    pub bytes: u64,
    /// Snapshots with damaged chunks.
    pub damaged: Vec<DamagedSnapshot>,
    /// Other damaged objects.
    pub objects: Vec<DamagedObject>,
}

impl VerifyReport {
    /// Returns true if no damage was found.
    pub fn is_sound(&self) -> bool {
        self.damaged.is_empty() && self.objects.is_empty()
    }

    /// Returns the keys of the damaged packs.
    pub(crate) fn packs(&self) -> BTreeSet<String> {
        let chunks = self.damaged.iter().flat_map(|damaged| &damaged.chunks);
        let objects = self.objects.iter().map(|damaged| &damaged.object);
        let packs = objects.filter(|key| key.contains("/packs/"));
        chunks
            .map(|frame| &frame.pack)
            .chain(packs)
            .cloned()
            .collect()
    }
}

/// Frames that were read, with the defect of each damaged frame.
#[derive(Debug, Default)]
struct CheckedFrames {
    /// Results by pack and offset, so that each frame is read once.
    frames: Mutex<HashMap<(PackId, u32), Option<FormatError>>>,
    bytes: AtomicU64,
}

impl CheckedFrames {
    /// Returns `None` if the frame was not read, and `Some(None)` if it is undamaged.
    fn defect(&self, frame: &ChunkRequest) -> Option<Option<FormatError>> {
        let frames = self.frames.lock();
        let key = (frame.location.pack, frame.location.offset);
        frames.get(&key).cloned()
    }
}

impl DamagedSnapshot {
    /// Returns its damaged chunks, each with the number of its part and its hash.
    pub(crate) fn hashes(&self) -> Vec<(&DamagedFrame, usize, Hash)> {
        let parts = &self.snapshot.manifest.parts;
        let hashes: Vec<HashMap<u64, Hash>> =
            parts.iter().map(|part| part.stored().collect()).collect();
        let chunks = self.chunks.iter().filter_map(|frame| {
            let (part, _) = self.snapshot.part(&frame.part)?;
            Some((frame, part, *hashes.get(part)?.get(&frame.chunk)?))
        });
        chunks.collect()
    }
}

impl SharedStore {
    /// Reads all chunks of a snapshot and returns the damaged ones.
    pub async fn verify(&self, snapshot: &RemoteSnapshot) -> Result<Vec<DamagedFrame>, StoreError> {
        let checked = CheckedFrames::default();
        self.check_frames(snapshot, &checked, &|| {}).await
    }

    /// Verifies the snapshots `only` of `tenant`. Defaults to all snapshots and the indexes of all
    /// packs.
    pub async fn verify_tenant(
        &self,
        tenant: &Arc<Tenant>,
        only: Option<&[Hash]>,
        progress: OnProgress<'_>,
    ) -> Result<VerifyReport, StoreError> {
        let packs = self.backend.list(&tenant.key("packs")).await?;
        let roots = match only {
            Some(roots) => roots.to_vec(),
            None => self.snapshots(tenant).await?,
        };
        let all = packs.iter().map(|pack| pack.bytes).sum();
        let mut report = VerifyReport::default();
        let checked = CheckedFrames::default();
        let report_progress = || progress("bytes", checked.bytes.load(Ordering::Relaxed), all);
        for root in roots {
            self.verify_root(tenant, root, &checked, &report_progress, &mut report)
                .await?;
        }
        if only.is_none() {
            report
                .objects
                .extend(self.verify_indexes(tenant, &packs).await?);
        }
        report.objects.sort();
        report.bytes = checked.bytes.into_inner();
        let frames = checked.frames.into_inner();
        report.chunks = frames.len() as u64;
        Ok(report)
    }

    /// Verifies one snapshot. If chunks are damaged, verifies it again after their locations have
    /// changed: a concurrent collection may have moved them.
    async fn verify_root(
        &self,
        tenant: &Arc<Tenant>,
        root: Hash,
        checked: &CheckedFrames,
        report_progress: &(dyn Fn() + Send + Sync),
        report: &mut VerifyReport,
    ) -> Result<(), StoreError> {
        let mut damaged: Option<DamagedSnapshot> = None;
        for _ in 0..VERIFY_ATTEMPTS {
            let snapshot = match self.open(tenant, root).await {
                Ok(snapshot) => snapshot,
                Err(e) => {
                    let defect = self.unreadable(tenant, root, e).await?;
                    report.objects.extend(defect);
                    return Ok(());
                }
            };
            let before = damaged.as_ref().map(|damaged| &damaged.snapshot.locations);
            if before == Some(&snapshot.locations) {
                break;
            }
            let chunks = self
                .check_frames(&snapshot, checked, report_progress)
                .await?;
            if chunks.is_empty() {
                damaged = None;
                break;
            }
            // The chunks may have been moved concurrently: verify again.
            damaged = Some(DamagedSnapshot {
                id: snapshot.manifest.attributes.id.clone(),
                root: root.to_string(),
                chunks,
                snapshot,
            });
        }
        report.snapshots += 1;
        report.damaged.extend(damaged);
        Ok(())
    }

    /// Returns the damage of a snapshot that cannot be opened. `None` if it was removed
    /// concurrently.
    async fn unreadable(
        &self,
        tenant: &Tenant,
        root: Hash,
        e: StoreError,
    ) -> Result<Option<DamagedObject>, StoreError> {
        let key = tenant.manifest_key(&root);
        let (object, reason) = match e {
            StoreError::Damaged { object, reason } => (object, reason.to_string()),
            StoreError::Missing { object } => (object, "it is missing".to_owned()),
            e @ (StoreError::TooLarge { .. } | StoreError::Tenant { .. }) => (key, e.to_string()),
            e => return Err(e),
        };
        let exists = self.backend.head(&tenant.manifest_key(&root)).await?;
        Ok(exists.map(|_| DamagedObject { object, reason }))
    }

    /// Reads and checks the frames (stored chunks) of a snapshot that were not checked before.
    /// Returns all damaged frames of the snapshot.
    async fn check_frames(
        &self,
        snapshot: &RemoteSnapshot,
        checked: &CheckedFrames,
        report_progress: &(dyn Fn() + Send + Sync),
    ) -> Result<Vec<DamagedFrame>, StoreError> {
        let generation = snapshot.keys.generation();
        let mut damages = Vec::new();
        for (number, part) in snapshot.manifest.parts.iter().enumerate() {
            let all = snapshot.wanted(number);
            let unread = all.iter().filter(|wanted| checked.defect(wanted).is_none());
            let ranges = plan(&unread.copied().collect::<Vec<_>>());
            self.backend
                .each(ranges, async |range: PlannedRange| {
                    self.check_range(snapshot, checked, range).await?;
                    report_progress();
                    Ok(())
                })
                .await?;
            damages.extend(all.iter().filter_map(|wanted| {
                let reason = checked.defect(wanted)??;
                Some(DamagedFrame {
                    part: part.name.clone(),
                    chunk: wanted.number,
                    pack: snapshot.tenant.pack_key(generation, &wanted.location.pack),
                    reason: reason.to_string(),
                })
            }));
        }
        damages.sort();
        Ok(damages)
    }

    /// Reads a range of a pack, and verifies each of its chunks.
    async fn check_range(
        &self,
        snapshot: &RemoteSnapshot,
        checked: &CheckedFrames,
        range: PlannedRange,
    ) -> Result<(), StoreError> {
        let key = snapshot
            .tenant
            .pack_key(snapshot.keys.generation(), &range.pack);
        let bytes = match self.backend.get_range(&key, range.start..range.end).await {
            Ok(bytes) => Ok(bytes),
            // The pack is missing or truncated. An unavailable store is not damage.
            Err(e) => match self.backend.head(&key).await? {
                Some(pack) if pack.bytes >= range.end => return Err(e),
                Some(_) => Err("the pack is truncated"),
                None => Err("the pack is missing"),
            },
        };
        let read = range.end - range.start;
        checked.bytes.fetch_add(read, Ordering::Relaxed);
        for frame in &range.frames {
            let at = (u64::from(frame.location.offset) - range.start) as usize;
            let decoded = match &bytes {
                Ok(bytes) => bytes
                    .get(at..at + frame.location.length as usize)
                    .ok_or(FormatError::Damaged("the pack is truncated"))
                    .and_then(|bytes| decode_frame(&snapshot.keys, &frame.hash, bytes).map(drop)),
                Err(reason) => Err(FormatError::Damaged(reason)),
            };
            let key = (frame.location.pack, frame.location.offset);
            let mut frames = checked.frames.lock();
            frames.insert(key, decoded.err());
        }
        Ok(())
    }

    /// Returns the packs with damaged indexes. Their chunks remain readable by the locations in
    /// snapshots, but [`Self::distrust`] excludes these packs from reuse.
    async fn verify_indexes(
        &self,
        tenant: &Tenant,
        packs: &[Listed],
    ) -> Result<Vec<DamagedObject>, StoreError> {
        let damaged = Mutex::new(Vec::new());
        let check = async |pack: &Listed| {
            let mut parts = pack.key.rsplit('/').skip(1);
            let generation = parts.next().and_then(|number| number.parse().ok());
            let (Some(id), Some(generation)) = (pack_id(&pack.key), generation) else {
                return Ok(());
            };
            let keys = tenant.generation(generation)?;
            let read = self.read_tail(tenant, keys, id, pack.bytes).await;
            let decoded = read.and_then(|tail| {
                decode_tail(tenant, keys, id, &tail, pack.bytes)
                    .map_err(StoreError::damaged(&pack.key))
            });
            match decoded {
                Ok(_) | Err(StoreError::Missing { .. }) => Ok(()),
                Err(StoreError::Damaged { object, reason }) => {
                    let mut damaged = damaged.lock();
                    damaged.push(DamagedObject {
                        object,
                        reason: format!("its index: {reason}"),
                    });
                    Ok(())
                }
                Err(e) => Err(e),
            }
        };
        self.backend.each(packs, check).await?;
        Ok(damaged.into_inner())
    }
}
