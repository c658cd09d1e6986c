//! A real S3 server: versitygw over a directory, on the loopback device.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use jiffy_store::*;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::*;

const PROGRAM: &str = "JIFFY_VERSITYGW";

struct Server(Child, SocketAddr);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The program that `scripts/setup` builds.
fn program() -> Option<PathBuf> {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/versitygw");
    let found = std::env::var_os(PROGRAM).map_or(built, PathBuf::from);
    match found.exists() {
        true => Some(found),
        false if std::env::var_os("CI").is_some() => {
            panic!("versitygw is missing: run scripts/setup")
        }
        false => None,
    }
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
        .arg("--nometa")
        .arg(dir.join("root"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let server = Server(child, address);
    let deadline = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(address).is_err() {
        assert!(Instant::now() < deadline, "versitygw does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    server
}

/// Store on the server, by the variables that users set.
fn connect(address: SocketAddr, secret: &str) -> SharedStore {
    for (name, value) in [
        ("AWS_ENDPOINT_URL", format!("http://{address}")),
        ("AWS_ALLOW_HTTP", "true".into()),
        ("AWS_REGION", "us-east-1".into()),
        ("AWS_ACCESS_KEY_ID", "test".into()),
        ("AWS_SECRET_ACCESS_KEY", secret.into()),
    ] {
        // SAFETY: the one test of this program sets them before it makes threads that read them.
        unsafe { std::env::set_var(name, value) };
    }
    let url: StoreUrl = "s3://bucket/some/prefix".parse().unwrap();
    SharedStore::new(url.open(quick()).unwrap(), keyring())
}

#[test]
fn a_real_s3_server_serves_pushes_pulls_collections_and_tells_its_faults() {
    let Some(program) = program() else {
        eprintln!("skipped: s3::a_real_s3_server: versitygw is not built");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let server = start(&program, dir.path());
    let store = connect(server.1, "testsecret");
    let nowhere: StoreUrl = "s3://another-bucket/prefix".parse().unwrap();
    let nowhere = SharedStore::new(nowhere.open(quick()).unwrap(), keyring());
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
        assert_eq!((report.new_chunks, report.packs), (201, 4));
        assert_same(&store, &tenant, name.root, &source).await;
        let (_, again) = store.push(&tenant, &source, &options).await.unwrap();
        assert!(again.existed);
        // Two hosts at once: the manifest is written on condition.
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
            // The times of S3 are whole seconds.
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
