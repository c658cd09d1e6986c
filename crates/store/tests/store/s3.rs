//! Tests with a real S3 server: versitygw over a directory, on the loopback device.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::hostile_s3::{Answer, HostileS3};
use crate::support::*;
use jiffy_store::*;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

const PROGRAM: &str = "JIFFY_VERSITYGW";

/// Process of versitygw and its address. Dropping this value kills the process.
struct Server(Child, SocketAddr);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the path of versitygw as built by `scripts/setup`.
fn program() -> Option<PathBuf> {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/versitygw");
    let found = std::env::var_os(PROGRAM).map_or(built, PathBuf::from);
    if !found.exists() {
        let is_ci = std::env::var_os("CI").is_some();
        assert!(!is_ci, "versitygw is missing: run scripts/setup");
        return None;
    }
    Some(found)
}

fn start(program: &Path, dir: &Path) -> Server {
    std::fs::create_dir_all(dir.join("root/bucket")).unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let child = Command::new(program)
        .args([
            "--port",
            &address.to_string(),
            "--access",
            "test",
            "--secret",
            "testsecret",
            "--quiet",
        ])
        .arg("posix")
        .arg(dir.join("root"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut server = Server(child, address);
    let deadline = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(address).is_err() {
        let ended = server.0.try_wait().unwrap();
        assert!(
            ended.is_none() && Instant::now() < deadline,
            "versitygw does not listen: {ended:?}; TMPDIR must support user extended attributes"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    server
}

/// Held while environment variables are set and read.
static VARIABLES: Mutex<()> = Mutex::new(());

/// Opens the store on the server, configured by environment variables.
fn connect(address: SocketAddr, secret: &str) -> SharedStore {
    connect_to(address, secret, "s3://bucket/some/prefix", quick())
}

/// Opens a store with the settings of a server in environment variables. A lock serialises the
/// callers, because the variables belong to the process.
fn connect_to(
    address: SocketAddr,
    secret: &str,
    url: &str,
    settings: BackendSettings,
) -> SharedStore {
    let _turn = VARIABLES.lock().unwrap();
    for (name, value) in [
        ("AWS_ENDPOINT_URL", format!("http://{address}")),
        ("AWS_ALLOW_HTTP", "true".into()),
        ("AWS_REGION", "us-east-1".into()),
        ("AWS_ACCESS_KEY_ID", "test".into()),
        ("AWS_SECRET_ACCESS_KEY", secret.into()),
    ] {
        // SAFETY: only the standard library reads variables, and it locks them.
        unsafe { std::env::set_var(name, value) };
    }
    let url: StoreUrl = url.parse().unwrap();
    SharedStore::new(url.open(settings).unwrap(), keyring())
}

#[test]
fn a_real_s3_server_serves_pushes_pulls_and_collections_and_reports_faults() {
    let Some(program) = program() else {
        eprintln!("skipped: s3::a_real_s3_server: versitygw is not built");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let server = start(&program, dir.path());
    let store = connect(server.1, "testsecret");
    let nowhere = "s3://another-bucket/prefix";
    let nowhere = connect_to(server.1, "testsecret", nowhere, quick());
    let stranger = connect(server.1, "wrong");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let tenant = store.tenant("alice").await.unwrap();
        assert_eq!(store.tenant("alice").await.unwrap().id(), tenant.id());
        let mut options = PushOptions::new(dir.path().join("index"));
        options.pack_bytes = 4 << 20;
        let source = snapshot(dir.path(), &(1..=200).collect::<Vec<_>>());
        let (name, report) = store.push(&tenant, &source, &options).await.unwrap();
        // 200 chunks of memory and the state, 64 chunks per pack.
        assert_eq!((report.new_chunks, report.packs), (201, 4));
        assert_same(&store, &tenant, name.root, &source).await;
        let (_, again) = store.push(&tenant, &source, &options).await.unwrap();
        assert!(again.existed);
        // Two hosts push concurrently: the write of the manifest is conditional.
        let more = snapshot(dir.path(), &(100..=260).collect::<Vec<_>>());
        let (a, b) = tokio::join!(
            store.push(&tenant, &more, &options),
            store.push(&tenant, &more, &options)
        );
        assert_eq!(a.unwrap().0, b.unwrap().0);
        store.remove(&tenant, name.root).await.unwrap();
        let at_once = GcOptions {
            grace: Duration::ZERO,
            lock_time: Duration::from_secs(60),
            ..GcOptions::default()
        };
        let mut removed = 0;
        for _ in 0..2 {
            // S3 timestamps have a resolution of one second.
            tokio::time::sleep(Duration::from_millis(1100)).await;
            removed += store.collect(&tenant, at_once).await.unwrap().removed;
        }
        assert!(removed >= 2, "{removed} objects removed");
        let roots = store.snapshots(&tenant).await.unwrap();
        assert_eq!(roots.len(), 1);
        assert_same(&store, &tenant, roots[0], &more).await;
        let refused = stranger.tenant("alice").await.unwrap_err();
        assert!(matches!(refused, StoreError::Denied { .. }), "{refused}");
        for absent in [
            nowhere.find_tenant("alice").await.unwrap_err(),
            nowhere.tenant("alice").await.unwrap_err(),
            nowhere.backend().get("any", 1).await.unwrap_err(),
        ] {
            assert!(matches!(absent, StoreError::Absent { .. }), "{absent}");
            assert!(absent.to_string().contains("bucket"), "{absent}");
        }
        let remote = store.open(&tenant, roots[0]).await.unwrap();
        drop(server);
        let cache = Arc::new(LayerCache::open(dir.path().join("cache"), u64::MAX).unwrap());
        let failed = store
            .pull(&remote, 0, Selection::All, &cache)
            .await
            .unwrap_err();
        assert!(matches!(failed, StoreError::Unavailable { .. }), "{failed}");
    });
}

#[test]
fn endless_responses_are_aborted_at_their_limits() {
    let server = HostileS3::start();
    let settings = BackendSettings {
        attempts: 2,
        deadline: Duration::from_secs(60),
        max_listed: 12_000,
        ..quick()
    };
    let url = "s3://bucket/some/prefix";
    let store = connect_to(server.address, "any", url, settings.clone());
    let brief = BackendSettings {
        deadline: Duration::from_millis(400),
        ..settings
    };
    let brief = connect_to(server.address, "any", url, brief);
    let (store, brief) = (store.backend(), brief.backend());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        // Each of two attempts reads at most a page of 8 MiB, and 8 MiB into socket buffers.
        let max_bytes = 2 * ((8 << 20) + (8 << 20));
        for status in [200, 403, 500] {
            server.answer(Answer::Endless(status));
            let failed = store.list("tenants").await.unwrap_err().to_string();
            assert!(failed.contains("larger than"), "{status}: {failed}");
            let failed = store.probe("tenants").await.unwrap_err().to_string();
            assert!(failed.contains("larger than"), "{status}: {failed}");
            let (_, sent) = server.counts();
            // Two calls.
            assert!(sent < 2 * max_bytes, "{status}: {sent} bytes");
        }
        for status in [403, 500] {
            server.answer(Answer::Endless(status));
            store.get("any", 100).await.unwrap_err();
            store.put("any", "bytes".into()).await.unwrap_err();
            store.delete("any").await.unwrap_err();
            let (_, sent) = server.counts();
            // Three calls.
            assert!(sent < 3 * max_bytes, "{status}: {sent} bytes");
        }
        server.answer(Answer::LongRange);
        store.get_range("any", 0..100).await.unwrap_err();
        let (_, sent) = server.counts();
        assert!(sent < max_bytes, "{sent} bytes");
        server.answer(Answer::Page(5000, Duration::ZERO));
        store.probe("tenants").await.unwrap();
        assert_eq!(server.counts().0, 1);
        let failed = store.list("tenants").await.unwrap_err();
        assert!(matches!(failed, StoreError::TooMany { .. }), "{failed}");
        // The third page of 5,000 keys exceeds the limit of 12,000.
        assert_eq!(server.counts().0, 3);
        // Progress that is too slow does not extend the deadline.
        server.answer(Answer::Page(1, Duration::from_millis(50)));
        let failed = brief.list("tenants").await.unwrap_err();
        assert!(failed.is_unavailable(), "{failed}");
        server.answer(Answer::Trickle);
        let failed = brief.get("any", 100_000).await.unwrap_err();
        assert!(failed.is_unavailable(), "{failed}");
    });
}

/// Several hosts find a stale lock at the same moment: the lock of a collection that was cut off
/// two hours ago. One host takes the lock, and the collections of the others fail.
#[test]
fn one_of_many_collections_takes_over_a_stale_lock() {
    const HOSTS: usize = 6;
    let dir = tempfile::tempdir().unwrap();
    let server = program().map(|program| start(&program, dir.path()));
    if server.is_none() {
        eprintln!("skipped: s3::one_of_many_collections: versitygw is not built");
    }
    let address = server.as_ref().map(|server| server.1);
    let objects = dir.path().join("root/bucket/some/prefix");
    let directory = dir.path().join("directory");
    let url = format!("file://{}", directory.display());
    let open = |address: Option<SocketAddr>| match address {
        Some(address) => connect(address, "testsecret"),
        None => {
            let url: StoreUrl = url.parse().unwrap();
            SharedStore::new(url.open(quick()).unwrap(), keyring())
        }
    };
    // Without versitygw, only the store in a directory is tested.
    let places = [(None, directory.clone()), (address, objects)];
    for (address, place) in places
        .iter()
        .filter(|(a, p)| a.is_some() || *p == directory)
    {
        let first = open(*address);
        let runtime = || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
        };
        let tenant = runtime().block_on(async {
            let tenant = first.tenant("alice").await.unwrap();
            let options = PushOptions::new(dir.path().join("index"));
            let source = snapshot(dir.path(), &[1]);
            first.push(&tenant, &source, &options).await.unwrap();
            tenant
        });
        let id: String = tenant.id().iter().map(|b| format!("{b:02x}")).collect();
        let lock = place.join(id).join("gc/lock");
        for round in 0..5 {
            let stale = format!("stale lock {round}, of a process that was cut off");
            let key = format!(
                "{}/gc/lock",
                lock.parent()
                    .unwrap()
                    .parent()
                    .unwrap()
                    .file_name()
                    .unwrap()
                    .display()
            );
            // The content of a lock has 32 bytes.
            let stale = &stale.as_bytes()[..32];
            let write = first.backend().put(&key, stale.to_vec().into());
            runtime().block_on(write).unwrap();
            let file = std::fs::File::options().write(true).open(&lock).unwrap();
            let hours_ago = std::time::SystemTime::now() - Duration::from_secs(7200);
            file.set_modified(hours_ago).unwrap();
            let (collecting, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let barrier = Barrier::new(HOSTS);
            let collect = || {
                let store = open(*address);
                let runtime = runtime();
                runtime.block_on(store.find_tenant("alice")).unwrap();
                let entered = AtomicUsize::new(0);
                // The first report of progress means that this host collects. It waits there until
                // each other host collects as well or has failed.
                let wait = |_: &str, _, _| {
                    if entered.fetch_add(1, Ordering::SeqCst) > 0 {
                        return;
                    }
                    collecting.fetch_add(1, Ordering::SeqCst);
                    let deadline = Instant::now() + Duration::from_secs(30);
                    while collecting.load(Ordering::SeqCst) + ended.load(Ordering::SeqCst) < HOSTS {
                        assert!(
                            Instant::now() < deadline,
                            "a host neither collects nor fails"
                        );
                        std::thread::sleep(Duration::from_millis(2));
                    }
                };
                barrier.wait();
                let collected =
                    runtime.block_on(store.collect_with(&tenant, GcOptions::default(), &wait));
                if let Err(e) = collected {
                    assert!(matches!(e, StoreError::Collecting(_)), "{e}");
                    ended.fetch_add(1, Ordering::SeqCst);
                }
            };
            std::thread::scope(|scope| {
                for _ in 0..HOSTS {
                    scope.spawn(collect);
                }
            });
            let collecting = collecting.into_inner();
            assert_eq!(collecting, 1, "{collecting} hosts collected at once");
        }
    }
}
