//! Pull: fetches snapshots that other hosts pushed, and their ancestors, into the cache of this
//! host.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *tenant* is an owner of snapshots in the store,
//! usually an API key. The objects of a tenant are encrypted with its keys. The *resume bundle* of
//! a snapshot is an object with copies of the content that a host reads first to resume it. A
//! *part* is one file of a snapshot in the store, for example its memory.

use crate::host::{LOCAL_TENANT, LayerOrigin, RemoteError, RemoteStore};
use crate::{
    CachedLayer, DataKeys, EngineKind, Layer, LayerKind, PullReport, RemoteSnapshot, RunKind,
    SHARED_TENANT, Scope, Selection, StoreError, Tenant, WrittenChunks,
};
use futures_util::future::{Either, FutureExt, select};
use futures_util::{StreamExt, TryStreamExt};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Name of the part with the host's record of a snapshot.
pub const RECORD_PART: &str = "record.json";
/// Name of the part with the manifest that the engine wrote.
pub const MANIFEST_PART: &str = "manifest.json";
/// Maximum size in bytes of a record or manifest.
const MAX_DOCUMENT_BYTES: u64 = 8 << 20;
/// Maximum number of parts that are fetched concurrently.
const PARTS_AT_ONCE: usize = 4;
/// Maximum number of ancestors whose manifests are fetched concurrently.
const MANIFESTS_AT_ONCE: usize = 8;

/// Snapshot that was found in the store for an owner. Its content is authentic, because a host with
/// the owner's keys wrote it, but otherwise not validated.
#[derive(Debug, Clone)]
pub struct FoundSnapshot {
    /// Id.
    pub id: String,
    /// Id of the parent snapshot.
    pub parent: Option<String>,
    /// True if all tenants may read the snapshot.
    pub shared: bool,
    /// Content in the store.
    pub remote: RemoteSnapshot,
    /// Chunks that were read from a resume bundle, verified and written to the cache.
    pub(crate) written: Arc<WrittenChunks>,
}

/// Pulled file of a snapshot. It stays in the cache while this value exists.
#[derive(Debug, Clone)]
pub struct PulledFile {
    part: Layer,
    layer: Arc<CachedLayer>,
    /// Origin of the missing chunks in the store. `None` if the file is complete.
    origin: Option<LayerOrigin>,
}

/// Part of the memory that a pull fetches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryPull<'a> {
    /// All chunks.
    All,
    /// The listed chunks. The others are fetched when a guest needs them.
    Chunks(&'a [u64]),
}

impl FoundSnapshot {
    /// Returns the name of the engine that created the snapshot.
    pub fn engine(&self) -> &'static str {
        match self.remote.manifest.engine {
            EngineKind::Microvm => "microvm",
            EngineKind::Gvisor => "gvisor",
        }
    }

    /// Returns the number of chunks of a selection that were just verified and written.
    fn written_of(&self, part: usize, selection: Selection<'_>) -> u64 {
        let count = match selection {
            Selection::Chunks(chunks) => {
                let chunks = chunks.iter();
                let written = chunks.filter(|&&chunk| self.written.contains(&(part, chunk)));
                written.count()
            }
            Selection::All | Selection::WorkingSet => {
                self.written.iter().filter(|(of, _)| *of == part).count()
            }
        };
        count as u64
    }

    /// Returns an upper bound of its bytes on disk.
    pub fn bytes(&self) -> u64 {
        let parts = self.remote.manifest.parts.iter();
        let chunks = parts.map(|part| part.hashes.len() as u64).sum::<u64>();
        chunks.saturating_mul(crate::CHUNK_BYTES.into())
    }
}

impl PulledFile {
    /// Name of the file.
    pub fn name(&self) -> &str {
        &self.part.name
    }

    /// Creates the file at `to`, which must not exist. Prefers a hard link to the cached file,
    /// whose pages all users share in memory. Otherwise clones the file's storage, or copies the
    /// file if the file system cannot clone.
    pub fn place(&self, to: &Path) -> io::Result<()> {
        let linked = fs::hard_link(self.layer.path(), to);
        // An incomplete file must be the cached file itself, to which the fetcher adds chunks.
        if linked.is_ok() || self.origin.is_some() {
            return linked;
        }
        let cloned = self.layer.clone_to(&self.part, to);
        cloned.map(drop).map_err(|e| match e {
            StoreError::Io { source, .. } => source,
            StoreError::DiskFull { .. } => io::Error::new(io::ErrorKind::StorageFull, e),
            other => io::Error::other(other),
        })
    }

    /// Returns whether all present chunks have the expected hashes. Blocks.
    fn is_sound(&self, keys: &DataKeys) -> io::Result<bool> {
        let mut chunk = Vec::new();
        let stored = self.part.ranges(RunKind::Stored).flatten();
        let stored = stored.zip(&self.part.hashes);
        for (number, hash) in stored.filter(|(number, _)| self.layer.has(*number)) {
            let range = self.part.chunk_range(number);
            chunk.resize((range.end - range.start) as usize, 0);
            self.layer.file().read_exact_at(&mut chunk, range.start)?;
            if keys.chunk_hash(&chunk) != *hash {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the origin of the missing chunks. `None` if the file is complete.
    pub fn missing(&self) -> Option<&LayerOrigin> {
        self.origin.as_ref()
    }

    /// Protects the file from eviction until the file `to`, which must not exist yet, is removed.
    pub fn pin(&self, to: &Path) -> io::Result<()> {
        self.layer.pin(to).map_err(io::Error::other)
    }

    /// Returns the open file. After it is closed, the layer may be evicted from the cache.
    pub(crate) fn file(&self) -> Result<File, RemoteError> {
        let file = self.layer.file().try_clone();
        file.map_err(RemoteError::io(self.layer.path()))
    }

    fn read(&self) -> Result<Vec<u8>, RemoteError> {
        let failed = |e| RemoteError::io(self.layer.path())(e);
        let mut bytes = vec![0; self.part.bytes.min(MAX_DOCUMENT_BYTES) as usize];
        self.layer
            .file()
            .read_exact_at(&mut bytes, 0)
            .map_err(failed)?;
        Ok(bytes)
    }
}

impl RemoteStore {
    /// Finds snapshot `id` of `owner`. Returns the snapshot and its ancestors, nearest first.
    /// `None` if the owner has no such snapshot in the store.
    pub async fn find(
        &self,
        owner: Option<&str>,
        id: &str,
    ) -> Result<Option<Vec<FoundSnapshot>>, RemoteError> {
        let name = owner.unwrap_or(LOCAL_TENANT);
        match self.find_known(name, id).await {
            // Another host may have rotated the keys since they were read.
            Err(RemoteError::Store(StoreError::Key { .. })) => {
                self.forget_tenant(name);
                self.forget_tenant(SHARED_TENANT);
                self.find_known(name, id).await
            }
            other => other,
        }
    }

    /// Like [`Self::find`], with cached secrets of the tenants, which may be outdated.
    async fn find_known(
        &self,
        name: &str,
        id: &str,
    ) -> Result<Option<Vec<FoundSnapshot>>, RemoteError> {
        if let Some(found) = self.recent_finds.get(name, id) {
            return Ok(Some(found));
        }
        let (tenant, shared) = tokio::join!(
            self.find_cached_tenant(name),
            self.find_cached_tenant(SHARED_TENANT)
        );
        let Some(tenant) = tenant? else {
            return Ok(None);
        };
        let Some(root) = self.shared.named(&tenant, id).await? else {
            return Ok(None);
        };
        // Ignore an error: only a snapshot with shared ancestors needs this tenant, and
        // `open_ancestors` then requests the tenant again.
        let shared = shared.ok().flatten();
        let reading = self
            .shared
            .resume_bundle(&tenant, shared.as_ref(), root, &self.cache);
        let opening = self.shared.open(&tenant, root);
        let (reading, opening) = (std::pin::pin!(reading), std::pin::pin!(opening));
        // Bundle and snapshot are requested concurrently. Thus a snapshot without a bundle is
        // opened without a delay.
        let (bundle, opening) = match select(reading, opening).await {
            Either::Left((bundle, opening)) => (bundle, opening.left_future()),
            Either::Right((opened, reading)) => {
                (reading.await, std::future::ready(opened).right_future())
            }
        };
        let bundled = bundle.unwrap_or_else(|e| {
            tracing::warn!(id, error = %e, "cannot read a resume bundle");
            None
        });
        let is_bundled = bundled.is_some();
        let lineage = match bundled {
            Some(lineage) => lineage,
            None => {
                let lineage = self.open_ancestors(&tenant, opening.await?).await?;
                let lineage = lineage.into_iter();
                lineage.map(|found| (found, WrittenChunks::new())).collect()
            }
        };
        let snapshots = with_ids(id, lineage);
        check_lineage(id, &snapshots)?;
        if is_bundled {
            self.recent_finds.add(name, id, &snapshots);
        }
        Ok(Some(snapshots))
    }

    /// Opens the ancestors of `newest`. Returns all snapshots, nearest first.
    async fn open_ancestors(
        &self,
        tenant: &Arc<Tenant>,
        newest: RemoteSnapshot,
    ) -> Result<Vec<RemoteSnapshot>, RemoteError> {
        let names = newest.manifest.lineage.clone();
        let shared = if names.iter().any(|name| name.scope == Scope::Shared) {
            self.find_tenant(SHARED_TENANT).await?
        } else {
            None
        };
        let id = newest.manifest.attributes.id.clone();
        let of = |scope: Scope| -> Option<&Arc<Tenant>> {
            match scope {
                Scope::Tenant => Some(tenant),
                Scope::Shared => shared.as_ref(),
            }
        };
        let (of, id) = (&of, &id);
        let opening = names.into_iter().map(|name| async move {
            let tenant = of(name.scope).ok_or_else(|| damaged(id, "has no such ancestor"))?;
            Ok::<_, RemoteError>(self.shared.open(tenant, name.root).await?)
        });
        let opening = futures_util::stream::iter(opening);
        let ancestors: Vec<RemoteSnapshot> =
            opening.buffered(MANIFESTS_AT_ONCE).try_collect().await?;
        Ok([newest].into_iter().chain(ancestors).collect())
    }

    /// Reads part `name`, a document of at most [`MAX_DOCUMENT_BYTES`]. `None` if the snapshot has
    /// no such part.
    pub async fn document(
        &self,
        snapshot: &FoundSnapshot,
        name: &str,
    ) -> Result<Option<Vec<u8>>, RemoteError> {
        match snapshot.remote.part(name) {
            None => Ok(None),
            Some((_, part)) if part.bytes > MAX_DOCUMENT_BYTES => {
                Err(damaged(&snapshot.id, "has an oversized document"))
            }
            // The tenant names the source of missing chunks, and `All` leaves no chunk missing.
            Some((number, _)) => self
                .pull_part(snapshot, number, MemoryPull::All, "")
                .await?
                .0
                .read()
                .map(Some),
        }
    }

    /// Pulls all files of a snapshot of `owner`, without its ancestors' files. `memory` selects the
    /// chunks of its memory.
    pub async fn pull(
        &self,
        owner: Option<&str>,
        snapshot: &FoundSnapshot,
        memory: MemoryPull<'_>,
    ) -> Result<(Vec<PulledFile>, PullReport), RemoteError> {
        let parts = snapshot.remote.manifest.parts.iter().enumerate();
        let wanted = parts.filter(|(_, part)| part.name != RECORD_PART);
        let wanted: Vec<usize> = wanted.map(|(number, _)| number).collect();
        let tenant = if snapshot.shared {
            SHARED_TENANT
        } else {
            owner.unwrap_or(LOCAL_TENANT)
        };
        let pulling = wanted
            .into_iter()
            .map(|number| self.pull_part(snapshot, number, memory, tenant));
        let mut pulling = futures_util::stream::iter(pulling).buffer_unordered(PARTS_AT_ONCE);
        let (mut files, mut total) = (Vec::new(), PullReport::default());
        while let Some((file, report)) = pulling.try_next().await? {
            total.chunks += report.chunks;
            total.fetched += report.fetched;
            total.fetched_bytes += report.fetched_bytes;
            total.ranges += report.ranges;
            total.range_bytes += report.range_bytes;
            total.seconds = total.seconds.max(report.seconds);
            files.push(file);
        }
        Ok((files, total))
    }

    /// Pulls a part. Verifies chunks that were already cached, and fetches the part again if it is
    /// damaged. `tenant` names the source of the chunks that `memory` leaves out.
    pub(crate) async fn pull_part(
        &self,
        snapshot: &FoundSnapshot,
        number: usize,
        memory: MemoryPull<'_>,
        tenant: &str,
    ) -> Result<(PulledFile, PullReport), RemoteError> {
        let (id, remote) = (snapshot.id.as_str(), &snapshot.remote);
        let parts = &remote.manifest.parts;
        let part = parts
            .get(number)
            .cloned()
            .ok_or_else(|| damaged(id, "has no such part"))?;
        let selection = match (part.kind, memory) {
            (LayerKind::Memory, MemoryPull::Chunks(chunks)) => Selection::Chunks(chunks),
            _ => Selection::All,
        };
        let root = remote.part_root(number)?;
        let origin = (selection != Selection::All).then(|| LayerOrigin {
            tenant: tenant.to_owned(),
            snapshot: remote.root,
            part: number,
            layer: root,
        });
        let mut attempts = 0;
        loop {
            attempts += 1;
            let pulling = self.shared.pull(remote, number, selection, &self.cache);
            let (layer, report) = pulling.await?;
            // A lazy restore requests the chunks that the bitmap lacks, and holes need no request.
            if origin.is_some() {
                layer.mark_holes(&part)?;
            }
            let file = PulledFile {
                part: part.clone(),
                layer,
                origin: origin.clone(),
            };
            // The chunks that were just fetched, by this pull or in a resume bundle, are verified.
            let verified = report.fetched + snapshot.written_of(number, selection);
            if verified == report.chunks {
                return Ok((file, report));
            }
            let (keys, checked) = (remote.keys().clone(), file.clone());
            let checking = tokio::task::spawn_blocking(move || checked.is_sound(&keys));
            let is_sound = checking
                .await
                .map_err(io::Error::other)
                .flatten()
                .map_err(RemoteError::io(file.layer.path()))?;
            if is_sound {
                return Ok((file, report));
            }
            if attempts > 1 {
                return Err(damaged(id, "is damaged in the cache of this host"));
            }
            tracing::warn!(
                id,
                part = part.name,
                "cached layer is damaged: fetching it again"
            );
            drop(file);
            // The removal has no effect while the layer is in use. The second attempt then fails.
            self.cache.forget(&root)?;
        }
    }
}

/// Adds the ids to a snapshot and its ancestors, nearest first.
fn with_ids(id: &str, lineage: Vec<(RemoteSnapshot, WrittenChunks)>) -> Vec<FoundSnapshot> {
    let names = lineage
        .first()
        .map(|(newest, _)| newest.manifest.lineage.clone());
    let scopes = names.into_iter().flatten().map(|name| name.scope);
    let scopes: Vec<Scope> = [Scope::Tenant].into_iter().chain(scopes).collect();
    let mut snapshots: Vec<FoundSnapshot> = Vec::new();
    for ((remote, written), scope) in lineage.into_iter().zip(scopes) {
        let id = match snapshots.last_mut() {
            None => id.to_owned(),
            Some(child) => {
                let id = remote.manifest.attributes.id.clone();
                child.parent = Some(id.clone());
                id
            }
        };
        snapshots.push(FoundSnapshot {
            id,
            parent: None,
            shared: scope == Scope::Shared,
            remote,
            written: Arc::new(written),
        });
    }
    snapshots
}

/// Checks that the lineages of all ancestors agree and that no id occurs twice.
fn check_lineage(id: &str, snapshots: &[FoundSnapshot]) -> Result<(), RemoteError> {
    let Some((newest, ancestors)) = snapshots.split_first() else {
        return Ok(());
    };
    let names = &newest.remote.manifest.lineage;
    for (at, ancestor) in ancestors.iter().enumerate() {
        // Compare roots only: the scope of an ancestor depends on the tenant that refers to it.
        let below = ancestor
            .remote
            .manifest
            .lineage
            .iter()
            .map(|name| name.root);
        if !below.eq(names[at + 1..].iter().map(|name| name.root)) {
            return Err(damaged(id, "has inconsistent ancestors"));
        }
    }
    let ids: HashSet<&str> = snapshots
        .iter()
        .map(|snapshot| snapshot.id.as_str())
        .collect();
    if ids.len() == snapshots.len() {
        Ok(())
    } else {
        Err(damaged(id, "is its own ancestor"))
    }
}

fn damaged(id: &str, reason: &'static str) -> RemoteError {
    RemoteError::Damaged {
        id: id.to_owned(),
        reason,
    }
}
