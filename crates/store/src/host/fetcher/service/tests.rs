//! Tests of the fetch service with VMMs that are threads of the test.
//!
//! The service (the *fetcher*) downloads missing chunks of memory from the store into the cache of
//! its host, from which a restored VMM reads them. A *grant* is a file that permits one VMM to
//! fetch the memory layers of its snapshot. A *layer* is the part of a memory that one snapshot
//! stores.

use super::*;
use crate::host::{GrantSocket, GrantedLayer, LastStore, LayerOrigin, RemoteSettings};
use crate::{
    Attributes, CHUNK_BYTES, EngineKind, Hash, LayerKind, PartSource, PushOptions, SnapshotSource,
};
use jiffy_proto::fetch::{FetchAnswer, FetchOutcome, FetchRequest, MAX_ANSWER_BYTES};
use nix::sys::socket::{MsgFlags, recv, send};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use tempfile::TempDir;

const CHUNKS: u64 = 40;
const TIMEOUT: Duration = Duration::from_secs(20);

/// Host with a store that contains one layer, and the directory of its grants.
struct TestHost {
    dir: TempDir,
    remote: Arc<RemoteStore>,
    grants: GrantDirectory,
    origin: LayerOrigin,
}

/// Returns the byte of which a chunk of the layer consists.
fn byte(chunk: u64) -> u8 {
    // Chunk 7 is a hole.
    if chunk == 7 { 0 } else { (chunk + 1) as u8 }
}

/// Opens the store in a directory.
fn open(dir: &Path) -> Arc<RemoteStore> {
    let settings = RemoteSettings {
        url: format!("file://{}/bucket", dir.display()).parse().unwrap(),
        keyring: None,
        home: dir.join("home"),
        cache_bytes: u64::MAX,
        upload_bytes_per_second: None,
        timeout: crate::host::STORE_TIMEOUT,
    };
    let remote = RemoteStore::open(&settings).unwrap();
    // Record the store as a daemon does. The service, which opens the store a second time, must
    // not create another one.
    LastStore::write(&settings).unwrap();
    remote
}

impl TestHost {
    /// Pushes a layer to a new store, whose cache on this host is empty.
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let remote = open(dir.path());
        let file = tempfile::tempfile().unwrap();
        for chunk in (0..CHUNKS).filter(|chunk| byte(*chunk) != 0) {
            let content = vec![byte(chunk); CHUNK_BYTES as usize];
            let at = chunk * u64::from(CHUNK_BYTES);
            file.write_all_at(&content, at).unwrap();
        }
        let source = SnapshotSource {
            engine: EngineKind::Microvm,
            created_ms: 0,
            attributes: Attributes::default(),
            lineage: Vec::new(),
            parts: vec![PartSource {
                name: "memory.layer".to_owned(),
                kind: LayerKind::Memory,
                file: Arc::new(file),
                inherited: Vec::new(),
            }],
            working_set: Vec::new(),
        };
        let tenant = remote.tenant(None).await.unwrap();
        let options = PushOptions::new(remote.index_cache().to_owned());
        let (name, _) = remote
            .shared
            .push(&tenant, &source, &options)
            .await
            .unwrap();
        let snapshot = remote.shared.open(&tenant, name.root).await.unwrap();
        let origin = LayerOrigin {
            tenant: crate::host::LOCAL_TENANT.to_owned(),
            snapshot: name.root,
            part: 0,
            layer: snapshot.part_root(0).unwrap(),
        };
        let grants = GrantDirectory::open(&dir.path().join("run")).unwrap();
        Self {
            dir,
            remote,
            grants,
            origin,
        }
    }

    /// Starts the service in a task.
    fn serve(&self) -> tokio::task::JoinHandle<()> {
        let mut service = FetchService::new(self.grants.clone(), open(self.dir.path()));
        tokio::spawn(async move { service.run().await.unwrap() })
    }

    /// Grants the layer as layer 2 (the only one in these tests) to a new VMM. If `prefetch` is
    /// true, the fetcher also downloads memory before the VMM requests it.
    fn grant(&self, prefetch: bool) -> GrantSocket {
        let socket = self.grants.listen().unwrap();
        let layer = GrantedLayer {
            number: 2,
            origin: self.origin.clone(),
        };
        let grant = FetchGrant {
            layers: vec![layer],
            prefetch,
        };
        self.grants.write(&socket, &grant).unwrap();
        socket
    }

    /// Returns the last byte of a chunk in the cache.
    fn cached(&self, chunk: u64) -> u8 {
        let bytes = CHUNKS * u64::from(CHUNK_BYTES);
        let layer = self.remote.cache.layer_of(&self.origin.layer, bytes);
        let mut read = [0];
        let at = (chunk + 1) * u64::from(CHUNK_BYTES) - 1;
        layer.unwrap().file().read_exact_at(&mut read, at).unwrap();
        read[0]
    }

    /// Waits until the service has removed the grants of ended VMMs.
    async fn wait_for_no_grant(&self) {
        let wait = async {
            while !self.grants.ids().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, wait).await.unwrap();
    }
}

/// VMM's end of a connection.
struct TestVmm(OwnedFd);

impl TestVmm {
    /// Accepts the connection of the fetcher, as a VMM does.
    async fn accept(socket: &GrantSocket) -> Self {
        let listener = registered(socket.listener.try_clone().unwrap()).unwrap();
        let ready = tokio::time::timeout(TIMEOUT, listener.readable());
        drop(ready.await.unwrap().unwrap());
        let link = nix::sys::socket::accept(socket.listener.as_raw_fd()).unwrap();
        // SAFETY: `accept` has just returned this descriptor, which has no other owner.
        Self(unsafe { OwnedFd::from_raw_fd(link) })
    }

    fn send(&self, message: &[u8]) {
        send(self.0.as_raw_fd(), message, MsgFlags::MSG_NOSIGNAL).unwrap();
    }

    /// Requests a chunk of a layer.
    fn ask(&self, layer: u32, chunk: u64) {
        self.send(&FetchRequest { layer, chunk }.encode());
    }

    /// Receives the next answer. `None` if the connection was closed.
    async fn answer(&self) -> Option<FetchAnswer> {
        let link = self.0.try_clone().unwrap();
        let receive = tokio::task::spawn_blocking(move || {
            let mut message = [0; MAX_ANSWER_BYTES];
            let length = recv(link.as_raw_fd(), &mut message, MsgFlags::empty()).unwrap_or(0);
            (length > 0).then(|| FetchAnswer::decode(&message[..length]).unwrap())
        });
        tokio::time::timeout(TIMEOUT, receive)
            .await
            .unwrap()
            .unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_gets_the_chunks_of_its_layers_and_no_others() {
    let host = TestHost::new().await;
    let service = host.serve();
    let socket = host.grant(false);
    let vmm = TestVmm::accept(&socket).await;
    for chunk in [3, 39, 7] {
        vmm.ask(2, chunk);
        let answer = vmm.answer().await.unwrap();
        assert_eq!(answer.request, FetchRequest { layer: 2, chunk });
        assert_eq!(answer.outcome, FetchOutcome::Present);
        assert_eq!(host.cached(chunk), byte(chunk));
    }
    assert_eq!(host.cached(4), 0, "the chunk was not requested");
    vmm.ask(0, 4);
    let refused = vmm.answer().await.unwrap().outcome;
    assert!(matches!(&refused, FetchOutcome::Failed(why) if why.contains("not one of")));
    // A chunk far beyond the end of the layer needs no fetch. The request is answered, and the
    // connection stays open.
    vmm.ask(2, u64::MAX);
    vmm.answer().await.unwrap();
    // The connection is closed after a malformed request, and the fetcher connects again.
    vmm.send(b"nonsense");
    assert_eq!(vmm.answer().await, None);
    let vmm = TestVmm::accept(&socket).await;
    vmm.ask(2, 5);
    assert_eq!(vmm.answer().await.unwrap().outcome, FetchOutcome::Present);
    drop((socket, vmm));
    host.wait_for_no_grant().await;
    assert_eq!(std::fs::read_dir(host.grants.path()).unwrap().count(), 0);
    service.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn more_concurrent_requests_than_the_limit_are_all_answered() {
    let host = TestHost::new().await;
    let service = host.serve();
    let socket = host.grant(false);
    let vmm = TestVmm::accept(&socket).await;
    let count = 2 * jiffy_proto::fetch::MAX_OPEN_REQUESTS as u64;
    let asking = TestVmm(vmm.0.try_clone().unwrap());
    let asking = tokio::task::spawn_blocking(move || {
        for number in 0..count {
            asking.ask(2, number % CHUNKS);
        }
    });
    // The socket buffers some requests, the fetcher serves some, and the others wait.
    for _ in 0..count {
        let answer = vmm.answer().await.unwrap();
        assert_eq!(answer.outcome, FetchOutcome::Present);
    }
    asking.await.unwrap();
    service.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn whole_layers_are_fetched_if_the_grant_requests_it() {
    let host = TestHost::new().await;
    let service = host.serve();
    let socket = host.grant(true);
    let vmm = TestVmm::accept(&socket).await;
    let answer = vmm.answer().await.unwrap();
    assert_eq!(
        (answer.request.layer, answer.outcome),
        (2, FetchOutcome::Complete)
    );
    assert!((0..CHUNKS).all(|chunk| host.cached(chunk) == byte(chunk)));
    assert_eq!(vmm.answer().await, None);
    host.wait_for_no_grant().await;
    service.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_fail_while_the_store_is_unavailable() {
    let host = TestHost::new().await;
    let bucket = host.dir.path().join("bucket");
    let away = host.dir.path().join("away");
    std::fs::rename(&bucket, &away).unwrap();
    let service = host.serve();
    let socket = host.grant(false);
    let vmm = TestVmm::accept(&socket).await;
    vmm.ask(2, 1);
    let outcome = vmm.answer().await.unwrap().outcome;
    assert!(matches!(outcome, FetchOutcome::Failed(_)), "{outcome:?}");
    std::fs::rename(&away, &bucket).unwrap();
    vmm.ask(2, 1);
    assert_eq!(vmm.answer().await.unwrap().outcome, FetchOutcome::Present);
    // Another fetcher takes over after the first was killed.
    service.abort();
    assert_eq!(vmm.answer().await, None);
    let service = host.serve();
    let vmm = TestVmm::accept(&socket).await;
    vmm.ask(2, 2);
    assert_eq!(vmm.answer().await.unwrap().outcome, FetchOutcome::Present);
    assert_eq!(host.cached(2), byte(2));
    service.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_for_a_layer_that_the_snapshot_lacks_fails_requests() {
    let mut host = TestHost::new().await;
    host.origin.layer = Hash([9; 32]);
    let service = host.serve();
    let socket = host.grant(false);
    let vmm = TestVmm::accept(&socket).await;
    vmm.ask(2, 1);
    let outcome = vmm.answer().await.unwrap().outcome;
    assert!(matches!(outcome, FetchOutcome::Failed(_)), "{outcome:?}");
    service.abort();
}
