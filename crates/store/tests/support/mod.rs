//! Shared by the tests: a store with injected faults, and snapshots to push.
#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::unimplemented, reason = "the store makes no such request")]

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use jiffy_store::*;
use object_store::path::Path as Key;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub mod shifted;

pub const CHUNK: usize = CHUNK_BYTES as usize;

/// Kind of a request to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Get,
    Head,
    Put,
    Delete,
    List,
}

/// Outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The request is executed.
    None,
    /// The store answers with status 503.
    Unavailable,
    /// The store denies the permission.
    Denied,
    /// The store answers that the condition of the request is not met.
    Precondition,
    /// The request is executed, but the response is lost.
    AnswerLost,
    /// The request is executed after this delay.
    Slow(Duration),
    /// The response lacks its last byte.
    Cut,
    /// A bit of the response is flipped.
    Flip,
    /// The response consists of ten pieces, each after this delay.
    Trickle(Duration),
    /// Half of the response arrives, and then nothing.
    Halt,
    /// The request never completes: its host has exited.
    Never,
}

type Decide = dyn FnMut(Op, &str) -> Fault + Send;

/// Store with injected faults.
pub struct FaultyStore {
    inner: Arc<dyn ObjectStore>,
    decide: Mutex<Box<Decide>>,
    pub requests: AtomicU64,
    /// Notified when a request met [`Fault::Never`].
    pub died: tokio::sync::Notify,
}

impl std::fmt::Debug for FaultyStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FaultyStore")
    }
}

impl std::fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FaultyStore")
    }
}

impl FaultyStore {
    pub fn new(inner: Arc<dyn ObjectStore>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            decide: Mutex::new(Box::new(|_, _| Fault::None)),
            requests: AtomicU64::new(0),
            died: tokio::sync::Notify::new(),
        })
    }

    /// Replaces the function that decides on the fault of each request.
    pub fn on(&self, decide: impl FnMut(Op, &str) -> Fault + Send + 'static) {
        *self.decide.lock().unwrap() = Box::new(decide);
    }

    /// Requests from number `number` on never complete.
    pub fn die_at(&self, number: u64) {
        let mut count = 0;
        self.on(move |_, _| {
            count += 1;
            if count > number {
                Fault::Never
            } else {
                Fault::None
            }
        });
    }

    /// Runs `work` to completion. `None` if [`Self::die_at`] stopped it.
    pub async fn until_death<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.died.notified() => None,
        }
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.on(|_, _| Fault::None);
    }

    /// Counts a request, and performs the faults that precede its execution. Returns the fault.
    async fn meet(&self, op: Op, key: &Key) -> Result<Fault> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let fault = (self.decide.lock().unwrap())(op, key.as_ref());
        let (path, source) = (key.to_string(), "injected".into());
        match fault {
            Fault::Unavailable => Err(unavailable()),
            Fault::Denied => Err(Error::PermissionDenied { path, source }),
            Fault::Precondition => Err(Error::Precondition { path, source }),
            Fault::Never => {
                self.died.notify_one();
                std::future::pending().await
            }
            Fault::Slow(time) => {
                tokio::time::sleep(time).await;
                Ok(fault)
            }
            _ => Ok(fault),
        }
    }
}

/// Sends the bytes in ten pieces, each after a pause.
fn trickle(bytes: Vec<u8>, pause: Duration) -> BoxStream<'static, Result<bytes::Bytes>> {
    let pieces: Vec<Vec<u8>> = bytes
        .chunks(bytes.len().div_ceil(10).max(1))
        .map(<[u8]>::to_vec)
        .collect();
    let pieces = futures_util::stream::iter(pieces).then(move |piece| async move {
        tokio::time::sleep(pause).await;
        Ok(piece.into())
    });
    pieces.boxed()
}

fn unavailable() -> Error {
    Error::Generic {
        store: "faulty",
        source: "503 Slow Down".into(),
    }
}

#[async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(
        &self,
        key: &Key,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let fault = self.meet(Op::Put, key).await?;
        let put = self.inner.put_opts(key, payload, options).await?;
        match fault {
            Fault::AnswerLost => Err(unavailable()),
            _ => Ok(put),
        }
    }

    async fn put_multipart_opts(
        &self,
        _: &Key,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        unimplemented!()
    }

    async fn get_opts(&self, key: &Key, options: GetOptions) -> Result<GetResult> {
        let op = if options.head { Op::Head } else { Op::Get };
        let fault = self.meet(op, key).await?;
        let mut found = self.inner.get_opts(key, options).await?;
        let is_whole = !matches!(
            fault,
            Fault::Cut | Fault::Flip | Fault::Trickle(_) | Fault::Halt
        );
        if is_whole {
            return Ok(found);
        }
        let (meta, range, attributes) = (
            found.meta.clone(),
            found.range.clone(),
            found.attributes.clone(),
        );
        let extensions = std::mem::take(&mut found.extensions);
        let mut bytes = found.bytes().await?.to_vec();
        // Flip a bit near the end, which is in the index if a pack's tail is read.
        let at = bytes.len().saturating_sub(60);
        match fault {
            Fault::Cut => bytes.truncate(bytes.len().saturating_sub(1)),
            Fault::Flip => bytes[at] ^= 1,
            _ => {}
        }
        let stream = match fault {
            Fault::Trickle(pause) => trickle(bytes, pause),
            Fault::Halt => {
                bytes.truncate(bytes.len() / 2);
                trickle(bytes, Duration::ZERO)
                    .chain(futures_util::stream::pending())
                    .boxed()
            }
            _ => futures_util::stream::once(async move { Ok(bytes.into()) }).boxed(),
        };
        Ok(GetResult {
            payload: GetResultPayload::Stream(stream),
            meta,
            range,
            attributes,
            extensions,
        })
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, Result<Key>>,
    ) -> BoxStream<'static, Result<Key>> {
        // The store removes only one object per request.
        let inner = self.inner.clone();
        let fault = {
            self.requests.fetch_add(1, Ordering::SeqCst);
            (self.decide.lock().unwrap())(Op::Delete, "")
        };
        match fault {
            Fault::Never => {
                self.died.notify_one();
                futures_util::stream::pending().boxed()
            }
            Fault::Unavailable => futures_util::stream::once(async { Err(unavailable()) }).boxed(),
            _ => inner.delete_stream(keys),
        }
    }

    fn list(&self, prefix: Option<&Key>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let key = prefix.map(ToString::to_string).unwrap_or_default();
        match (self.decide.lock().unwrap())(Op::List, &key) {
            Fault::Never => {
                self.died.notify_one();
                futures_util::stream::pending().boxed()
            }
            Fault::Unavailable => futures_util::stream::once(async { Err(unavailable()) }).boxed(),
            _ => self.inner.list(prefix),
        }
    }

    async fn list_with_delimiter(&self, _: Option<&Key>) -> Result<ListResult> {
        unimplemented!()
    }

    async fn copy_opts(&self, _: &Key, _: &Key, _: CopyOptions) -> Result<()> {
        unimplemented!()
    }
}

/// Returns the keys of all hosts: the master key `k1`, and the secret from which names of objects
/// are derived.
pub fn keyring() -> Keyring {
    let text = format!(
        "locator = \"{}\"\ncurrent = \"k1\"\n[keys]\nk1 = \"{}\"\n",
        "a".repeat(64),
        "1".repeat(64)
    );
    Keyring::parse(&text).unwrap()
}

/// Returns settings with short limits, for fast tests.
pub fn quick() -> BackendSettings {
    BackendSettings {
        attempts: 3,
        request_timeout: Duration::from_secs(5),
        deadline: Duration::from_secs(10),
        // No second request for a slow range.
        hedge_after: None,
        ..BackendSettings::default()
    }
}

/// Returns a client of `store`, as another host has.
pub fn over(store: Arc<dyn ObjectStore>, settings: BackendSettings) -> SharedStore {
    SharedStore::new(Backend::new(store, Key::default(), settings), keyring())
}

/// Creates a store in memory with injected faults, and a client of it.
pub fn in_memory() -> (Arc<FaultyStore>, SharedStore) {
    in_memory_with(quick())
}

/// Like [`in_memory`], with the given settings.
pub fn in_memory_with(settings: BackendSettings) -> (Arc<FaultyStore>, SharedStore) {
    let faulty = FaultyStore::new(Arc::new(object_store::memory::InMemory::new()));
    (faulty.clone(), over(faulty, settings))
}

/// Returns incompressible pseudorandom bytes, which depend only on `seed`.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// Creates a snapshot with memory whose chunks are given by seeds (0 is a hole), and with a state
/// of one chunk. The working set, which a push writes first, are the chunks 2 and 0 of the memory.
pub fn snapshot(dir: &Path, seeds: &[u64]) -> SnapshotSource {
    let path = dir.join(format!("{:?}", std::time::Instant::now()).replace(' ', ""));
    let memory = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .unwrap();
    memory.set_len((seeds.len() * CHUNK) as u64).unwrap();
    for (number, &seed) in seeds.iter().enumerate().filter(|(_, seed)| **seed != 0) {
        memory
            .write_all_at(&noise(seed, CHUNK), (number * CHUNK) as u64)
            .unwrap();
    }
    let state = tempfile::tempfile_in(dir).unwrap();
    state.write_all_at(b"state", 0).unwrap();
    let part = |kind, name: &str, file| PartSource {
        kind,
        name: name.into(),
        file: Arc::new(file),
        inherited: Vec::new(),
    };
    SnapshotSource {
        engine: EngineKind::Microvm,
        created_ms: 0,
        attributes: Attributes::default(),
        lineage: Vec::new(),
        parts: vec![
            part(LayerKind::Memory, "memory.layer", memory),
            part(LayerKind::DeviceState, "state.bin", state),
        ],
        working_set: vec![2, 0],
    }
}

/// Returns the content of part `part` of a snapshot: 0 is the memory, 1 the state.
pub fn content(source: &SnapshotSource, part: usize) -> Vec<u8> {
    let file = &source.parts[part].file;
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Pulls a complete snapshot and compares it with its source.
pub async fn assert_same(
    store: &SharedStore,
    tenant: &Arc<Tenant>,
    root: Hash,
    source: &SnapshotSource,
) {
    let dir = tempfile::tempdir().unwrap();
    let cache = Arc::new(LayerCache::open(dir.path().into(), u64::MAX).unwrap());
    let remote = store.open(tenant, root).await.unwrap();
    for number in 0..source.parts.len() {
        let (layer, _) = store
            .pull(&remote, number, Selection::All, &cache)
            .await
            .unwrap();
        let pulled = std::fs::read(layer.path()).unwrap();
        assert!(pulled == content(source, number), "part {number} differs");
    }
}
