//! Shared by the tests: a store that fails as it is told to, and snapshots to push.
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Get,
    Head,
    Put,
    Delete,
    List,
}

/// Fate of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    Unavailable,
    Denied,
    Precondition,
    /// Carried out, but the answer is lost.
    AnswerLost,
    Slow(Duration),
    /// The answer has one byte less.
    Cut,
    /// A bit of the answer is flipped.
    Flip,
    /// The answer comes in ten pieces, each after so long.
    Trickle(Duration),
    /// Half of the answer comes, and no more.
    Halt,
    /// It never ends: the host that made it is gone.
    Never,
}

type Decide = dyn FnMut(Op, &str) -> Fault + Send;

/// Store that fails as it is told to.
pub struct FaultyStore {
    inner: Arc<dyn ObjectStore>,
    decide: Mutex<Box<Decide>>,
    pub requests: AtomicU64,
    /// Told when a request was met with [`Fault::Never`].
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

    pub fn on(&self, decide: impl FnMut(Op, &str) -> Fault + Send + 'static) {
        *self.decide.lock().unwrap() = Box::new(decide);
    }

    /// From request `number` on nothing is answered.
    pub fn die_at(&self, number: u64) {
        let mut count = 0;
        self.on(move |_, _| {
            count += 1;
            match count > number {
                true => Fault::Never,
                false => Fault::None,
            }
        });
    }

    /// Runs `work` until it ends, or dies by [`Self::die_at`]: then it returns none.
    pub async fn until_death<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.died.notified() => None,
        }
    }

    pub fn heal(&self) {
        self.on(|_, _| Fault::None);
    }

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

/// Ten pieces, each after a pause.
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
        // In the index of a pack, if that is what is read.
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
        // One request at a time is all that is made.
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

pub fn keyring() -> Keyring {
    let text = format!(
        "locator = \"{}\"\ncurrent = \"k1\"\n[keys]\nk1 = \"{}\"\n",
        "a".repeat(64),
        "1".repeat(64)
    );
    Keyring::parse(&text).unwrap()
}

/// Limits that make tests fast.
pub fn quick() -> BackendSettings {
    BackendSettings {
        attempts: 3,
        request_timeout: Duration::from_secs(5),
        deadline: Duration::from_secs(10),
        hedge_after: None,
        ..BackendSettings::default()
    }
}

pub fn over(store: Arc<dyn ObjectStore>, settings: BackendSettings) -> SharedStore {
    SharedStore::new(Backend::new(store, Key::default(), settings), keyring())
}

/// A store in memory that fails as it is told to, and a host that uses it.
pub fn in_memory() -> (Arc<FaultyStore>, SharedStore) {
    in_memory_with(quick())
}

/// The same with settings of its own.
pub fn in_memory_with(settings: BackendSettings) -> (Arc<FaultyStore>, SharedStore) {
    let faulty = FaultyStore::new(Arc::new(object_store::memory::InMemory::new()));
    (faulty.clone(), over(faulty, settings))
}

/// Random bytes that do not compress, the same for one seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// Snapshot with memory whose chunks are given by seeds (0: a hole), and a state.
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

pub fn content(source: &SnapshotSource, part: usize) -> Vec<u8> {
    let file = &source.parts[part].file;
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Pulls all of a snapshot and compares it with its source.
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
