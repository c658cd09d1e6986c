//! Push: copies a snapshot of this host to the store, with the tenant of its owner.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys. The *root* of a snapshot is the hash that identifies it in the
//! store. A *chunk* is 64 KiB of memory or of a disk. The *lineage* of a snapshot is the snapshot
//! and the chain of its ancestors. The *resume bundle* of a snapshot is an object with copies of
//! the content that a host reads first to resume it.

use crate::host::remote_store::pull::RECORD_PART;
use crate::host::{RemoteError, RemoteStore};
use crate::{
    Attributes, CHUNK_BYTES, EngineKind, Hash, LayerKind, PartSource, PushOptions, PushReport,
    SHARED_TENANT, Scope, SnapshotName, SnapshotSource, StoreError, Tenant,
};
use jiffy_engine_api::{GVISOR, PART_CHUNK_BYTES, SnapshotFile, SnapshotFileKind, SnapshotParts};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;

const _: () = assert!(PART_CHUNK_BYTES == CHUNK_BYTES as u64);

/// Snapshot to push.
#[derive(Debug)]
pub struct PushRequest<'a> {
    /// Tenant that will own the snapshot in the store.
    pub tenant: &'a str,
    /// Files of the snapshot.
    pub parts: &'a SnapshotParts,
    /// Record that this host has of the snapshot.
    pub record: &'a [u8],
    /// Id of the API key that owns the snapshot. Empty if the snapshot belongs to the owner of the
    /// host.
    pub owner: &'a str,
    /// Time of creation in milliseconds since 1970.
    pub created_ms: u64,
    /// Lineage of its parent in the store, nearest first ([`RemoteStore::stored_lineage`]).
    pub lineage: Vec<SnapshotName>,
    /// True if the snapshot can be found by its id.
    pub named: bool,
    /// True if another host is likely to resume the snapshot. A resume bundle is then written.
    pub resumable: bool,
    /// True if the id may already name a former copy of the snapshot.
    pub renamed: bool,
    /// Becomes true when the push is cancelled.
    pub cancelled: watch::Receiver<bool>,
}

/// Result of a push.
#[derive(Debug, Clone)]
pub struct Pushed {
    /// Lineage for its children, nearest first: this snapshot and its ancestors.
    pub lineage: Vec<SnapshotName>,
    /// Root of the snapshot in hexadecimal.
    pub root: String,
    /// Numbers of chunks and bytes.
    pub report: PushReport,
}

impl RemoteStore {
    /// Pushes a snapshot. Chunks that exist in the store are not uploaded.
    pub async fn push(&self, request: PushRequest<'_>) -> Result<Pushed, RemoteError> {
        let tenant = self.tenant(Some(request.tenant)).await?;
        let parts = request.parts;
        let mut files: Vec<PartSource> = parts.files.iter().map(part).collect();
        files.push(record_part(request.record).map_err(RemoteError::io(Path::new(RECORD_PART)))?);
        let source = SnapshotSource {
            engine: if parts.engine == GVISOR {
                EngineKind::Gvisor
            } else {
                EngineKind::Microvm
            },
            created_ms: request.created_ms,
            attributes: Attributes {
                id: parts.id.clone(),
                template: parts.template.clone(),
                engine_version: parts.version.clone(),
                kernel: parts.kernel.clone(),
                agent: parts.agent.clone(),
                processor_level: parts.processor.clone(),
                owner: request.owner.to_owned(),
            },
            lineage: request.lineage,
            parts: files,
            working_set: parts.working_set.clone(),
        };
        let options = PushOptions {
            cancelled: Some(request.cancelled.clone()),
            ..PushOptions::new(self.index_cache().to_owned())
        };
        let (name, report) = self.shared.push(&tenant, &source, &options).await?;
        if request.named && request.renamed {
            self.shared.set_name(&tenant, &parts.id, name.root).await?;
        } else if request.named {
            let naming = self.shared.set_new_name(&tenant, &parts.id, name.root);
            naming.await?;
        }
        // gVisor snapshots have no bundle, because they are always fetched completely.
        let is_microvm = source.engine == EngineKind::Microvm;
        if request.resumable && is_microvm && !*request.cancelled.borrow() {
            self.write_bundle(&tenant, &parts.id, name.root).await;
        }
        let mut lineage = source.lineage;
        lineage.insert(0, name);
        Ok(Pushed {
            lineage,
            root: name.root.to_string(),
            report,
        })
    }

    /// Writes the resume bundle of a pushed snapshot. Only logs a failure: a resume without the
    /// bundle sends more requests.
    async fn write_bundle(&self, tenant: &Arc<Tenant>, id: &str, root: Hash) {
        let start = Instant::now();
        match self.shared.write_resume_bundle(tenant, root).await {
            Ok(bytes) => {
                let seconds = start.elapsed().as_secs_f64();
                tracing::debug!(id, bytes, seconds, "wrote a resume bundle");
            }
            Err(e) => tracing::warn!(id, error = %e, "cannot write a resume bundle"),
        }
    }

    /// Returns the lineage for children of the pushed snapshot `root` of `tenant`, nearest first:
    /// the snapshot and its ancestors. `None` if the snapshot is missing or damaged in the store,
    /// or if `root` is not a hash.
    pub async fn stored_lineage(
        &self,
        tenant: &str,
        root: &str,
    ) -> Result<Option<Vec<SnapshotName>>, RemoteError> {
        let Ok(root) = root.parse::<Hash>() else {
            return Ok(None);
        };
        let opened = self.tenant(Some(tenant)).await?;
        let snapshot = match self.shared.open(&opened, root).await {
            Ok(snapshot) => snapshot,
            Err(StoreError::Missing { .. } | StoreError::Damaged { .. }) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let scope = scope(tenant);
        let own = SnapshotName { scope, root };
        let below = snapshot.manifest.lineage.iter().map(|name| SnapshotName {
            // Ancestors of a shared snapshot are shared, too.
            scope: match scope {
                Scope::Shared => Scope::Shared,
                Scope::Tenant => name.scope,
            },
            root: name.root,
        });
        Ok(Some([own].into_iter().chain(below).collect()))
    }
}

fn scope(tenant: &str) -> Scope {
    if tenant == SHARED_TENANT {
        Scope::Shared
    } else {
        Scope::Tenant
    }
}

/// Returns the part of a snapshot in the store that contains this file.
fn part(file: &SnapshotFile) -> PartSource {
    PartSource {
        kind: match file.kind {
            SnapshotFileKind::Memory => LayerKind::Memory,
            SnapshotFileKind::Disk(number) => LayerKind::Disk(number),
            SnapshotFileKind::DeviceState => LayerKind::DeviceState,
            SnapshotFileKind::Other => LayerKind::File,
        },
        name: file.name.clone(),
        file: file.file.clone(),
        inherited: file.inherited.clone(),
    }
}

/// Stores the record in an anonymous file, because the record has no file on disk.
fn record_part(record: &[u8]) -> io::Result<PartSource> {
    let mut file = File::from(memfd_create("record", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(record)?;
    Ok(PartSource {
        kind: LayerKind::File,
        name: RECORD_PART.to_owned(),
        file: Arc::new(file),
        inherited: Vec::new(),
    })
}
