//! Measures memory and time of a collection of a tenant with many simulated snapshots. A store
//! generates manifests, locations and listings on request. Each snapshot has ten chunks in a pack
//! of its own. Every tenth snapshot is the base of the nine that follow. Every hundredth base was
//! removed with its descendants.
//!
//! usage: collect_scale SNAPSHOTS
#![allow(clippy::unimplemented, reason = "the store makes no such request")]

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use jiffy_store::*;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use serde_json::json;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// Chunks per snapshot.
const CHUNKS: u32 = 10;
/// Size of a stored chunk.
const FRAME_BYTES: u32 = 4096;
/// Snapshots per base, including the base.
const DESCENDANTS: u64 = 10;
/// Number of snapshots of which the first base is removed with its descendants.
const REMOVED: u64 = 1000;

/// Keys and roots of the simulated snapshots.
struct Tenants {
    keys: DataKeys,
    id: [u8; 16],
    roots: Vec<Hash>,
    numbers: HashMap<Hash, u32>,
}

/// Store whose snapshots are generated.
struct Simulated {
    inner: InMemory,
    tenants: OnceLock<Tenants>,
}

impl std::fmt::Debug for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Simulated")
    }
}

impl std::fmt::Display for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Simulated")
    }
}

fn manifest(number: u64, base: Option<Hash>) -> StoredManifest {
    let hashes = (0..CHUNKS).map(|chunk| {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.to_le_bytes());
        hash[8..12].copy_from_slice(&chunk.to_le_bytes());
        Hash(hash)
    });
    let scope = Scope::Tenant;
    StoredManifest {
        engine: EngineKind::Microvm,
        created_ms: number,
        attributes: Attributes::default(),
        lineage: base
            .into_iter()
            .map(|root| SnapshotName { scope, root })
            .collect(),
        parts: vec![Layer {
            kind: LayerKind::Memory,
            name: "memory".to_owned(),
            bytes: u64::from(CHUNKS) * u64::from(CHUNK_BYTES),
            runs: vec![Run {
                kind: RunKind::Stored,
                chunks: CHUNKS,
            }],
            hashes: hashes.collect(),
        }],
        working_set: Vec::new(),
    }
}

fn pack(number: u64) -> [u8; 16] {
    let mut id = [7; 16];
    id[..8].copy_from_slice(&number.to_be_bytes());
    id
}

impl Tenants {
    fn new(keys: DataKeys, id: [u8; 16], count: u64) -> Self {
        let mut roots = Vec::new();
        for number in 0..count {
            let root = manifest(number, base_of(&roots, number)).root(&keys);
            roots.extend(root.ok());
        }
        let numbers = roots.iter().copied().zip(0..).collect();
        Self {
            keys,
            id,
            roots,
            numbers,
        }
    }

    fn key(&self, kind: &str, name: &str) -> Path {
        let tenant: String = self.id.iter().map(|byte| format!("{byte:02x}")).collect();
        Path::from(format!("{tenant}/{kind}/{name}"))
    }

    /// Returns the objects in the folder `kind`.
    fn listed(&self, kind: &str) -> Vec<ObjectMeta> {
        let meta = |location, size| ObjectMeta {
            location,
            last_modified: Default::default(),
            size,
            e_tag: None,
            version: None,
        };
        let roots = self.roots.iter().zip(0u64..);
        match kind {
            "manifests" | "locations" => roots
                .map(|(root, _)| meta(self.key(kind, &root.to_string()), 1000))
                .collect(),
            "removed" => roots
                .filter(|(_, number)| number % REMOVED < DESCENDANTS)
                .map(|(root, _)| meta(self.key(kind, &root.to_string()), 7))
                .collect(),
            "packs" => roots
                .map(|(_, number)| {
                    let id: String = pack(number)
                        .iter()
                        .map(|byte| format!("{byte:02x}"))
                        .collect();
                    let bytes = u64::from(CHUNKS * FRAME_BYTES) + 1000;
                    meta(self.key("packs/1", &id), bytes)
                })
                .collect(),
            _ => Vec::new(),
        }
    }

    fn object(&self, kind: &str, name: &str) -> Option<Vec<u8>> {
        let number = u64::from(*self.numbers.get(&name.parse().ok()?)?);
        match kind {
            "manifests" => {
                let manifest = manifest(number, base_of(&self.roots, number));
                Some(manifest.encode(&self.keys, self.id).ok()?.1)
            }
            "locations" => {
                let chunks = (0..CHUNKS).map(|chunk| Location {
                    pack: pack(number),
                    offset: 64 + chunk * FRAME_BYTES,
                    length: FRAME_BYTES,
                });
                let root = *self.roots.get(usize::try_from(number).ok()?)?;
                Locations(chunks.collect())
                    .encode(&self.keys, self.id, root)
                    .ok()
            }
            _ => None,
        }
    }
}

fn base_of(roots: &[Hash], number: u64) -> Option<Hash> {
    let base = number / DESCENDANTS * DESCENDANTS;
    (base != number).then(|| roots.get(base as usize).copied())?
}

/// Returns the error of an operation that neither pushes nor collections use.
fn unsupported(operation: &str) -> Error {
    Error::NotImplemented {
        operation: operation.to_owned(),
        implementer: "the simulated store".to_owned(),
    }
}

#[async_trait]
impl ObjectStore for Simulated {
    async fn put_opts(
        &self,
        key: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.inner.put_opts(key, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(unsupported("put_multipart"))
    }

    async fn get_opts(&self, key: &Path, options: GetOptions) -> Result<GetResult> {
        let parts: Vec<String> = key.parts().map(|part| part.as_ref().to_owned()).collect();
        let generated = self.tenants.get().zip(parts.get(1).zip(parts.get(2)));
        let generated = generated.and_then(|(tenants, (kind, name))| tenants.object(kind, name));
        let Some(bytes) = generated else {
            return self.inner.get_opts(key, options).await;
        };
        let size = bytes.len() as u64;
        let bytes = bytes::Bytes::from(bytes);
        Ok(GetResult {
            payload: GetResultPayload::Stream(
                futures_util::stream::once(async move { Ok::<_, Error>(bytes) }).boxed(),
            ),
            meta: ObjectMeta {
                location: key.clone(),
                last_modified: Default::default(),
                size,
                e_tag: None,
                version: None,
            },
            range: 0..size,
            attributes: Default::default(),
            extensions: Default::default(),
        })
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(keys)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let kind = prefix
            .and_then(|prefix| prefix.parts().nth(1))
            .map(|part| part.as_ref().to_owned());
        let listed = self
            .tenants
            .get()
            .zip(kind)
            .map(|(tenants, kind)| tenants.listed(&kind));
        match listed.filter(|listed| !listed.is_empty()) {
            Some(listed) => futures_util::stream::iter(listed.into_iter().map(Ok)).boxed(),
            None => self.inner.list(prefix),
        }
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        Err(unsupported("list_with_delimiter"))
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(unsupported("copy"))
    }
}

/// Returns a figure of this process in MiB.
fn memory_mib(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with(name))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? / 1024)
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let count: u64 = std::env::args()
        .nth(1)
        .ok_or("usage: collect_scale SNAPSHOTS")?
        .parse()?;
    let simulated = Arc::new(Simulated {
        inner: InMemory::new(),
        tenants: OnceLock::new(),
    });
    let settings = BackendSettings {
        max_listed: 8_000_000,
        ..BackendSettings::default()
    };
    let key = "1".repeat(64);
    let keys = format!("locator = \"{key}\"\ncurrent = \"k\"\n[keys]\nk = \"{key}\"\n");
    let backend = Backend::new(simulated.clone(), Path::default(), settings);
    let store = SharedStore::new(backend, Keyring::parse(&keys)?);
    let tenant = store.tenant("simulated").await?;
    let tenants = Tenants::new(tenant.current()?.clone(), tenant.id(), count);
    simulated.tenants.get_or_init(|| tenants);
    let before = memory_mib("VmRSS:");
    let start = std::time::Instant::now();
    let options = GcOptions {
        grace: std::time::Duration::ZERO,
        ..GcOptions::default()
    };
    let report = store.collect(&tenant, options).await?;
    println!(
        "{}",
        json!({
            "snapshots": count,
            "seconds": start.elapsed().as_secs_f64(),
            "rss_before_mib": before,
            "peak_rss_mib": memory_mib("VmHWM:"),
            "report": report,
            "traffic": store.backend().traffic(),
        })
    );
    Ok(())
}
