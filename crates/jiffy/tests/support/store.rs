//! Store that daemons of several data directories share.

use super::test_home::TestHome;
use super::wait_for;
use jiffy_store::host::{FoundSnapshot, LOCAL_TENANT, RemoteSettings, RemoteStore, STORE_TIMEOUT};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Store in a directory, and its keys.
pub struct TestStore {
    pub dir: TempDir,
    pub url: String,
    pub keys: PathBuf,
    remote: Arc<RemoteStore>,
    runtime: Runtime,
}

impl TestStore {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("file://{}/bucket", dir.path().display());
        let runtime = Runtime::new().unwrap();
        let inside = runtime.enter();
        let remote = RemoteStore::open(&RemoteSettings {
            url: url.parse().unwrap(),
            keyring: None,
            home: dir.path().join("reader"),
            cache_bytes: u64::MAX,
            upload_bytes_per_second: None,
            timeout: STORE_TIMEOUT,
        });
        drop(inside);
        let remote = remote.unwrap();
        Self {
            url,
            keys: remote.made_keys().unwrap().to_owned(),
            dir,
            remote,
            runtime,
        }
    }

    /// Returns the options of a daemon that uses the store.
    pub fn options(&self) -> [&str; 4] {
        let keys = self.keys.to_str().unwrap();
        ["--store", &self.url, "--store-keys", keys]
    }

    /// Starts the daemon of `home` with the store, without a warm pool.
    pub fn start(&self, home: &TestHome) {
        drop(home.serve(&[&self.options()[..], &["--warm-pool", "0"]].concat()));
    }

    /// Returns the path of the bucket.
    pub fn bucket(&self) -> PathBuf {
        self.dir.path().join("bucket")
    }

    /// Returns snapshot `id` of `owner` and the snapshots below it, nearest first.
    pub fn find(&self, owner: Option<&str>, id: &str) -> Option<Vec<FoundSnapshot>> {
        let found = self.runtime.block_on(self.remote.find(owner, id));
        found.unwrap()
    }

    /// Removes snapshot `id` of the operator, like another host.
    pub fn remove(&self, id: &str) {
        let removed = self.remote.retract(LOCAL_TENANT, id, None, true);
        self.runtime.block_on(removed).unwrap();
    }

    /// Waits until a daemon has uploaded snapshot `id` of `owner`.
    pub fn wait_for(&self, owner: Option<&str>, id: &str) -> Vec<FoundSnapshot> {
        wait_for("the upload", || self.find(owner, id))
    }

    /// Returns the files of the bucket whose key contains `part`.
    pub fn objects(&self, part: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        collect(&self.bucket(), part, &mut found);
        found
    }
}

/// Appends the files below `dir` whose path contains `part` to `found`.
fn collect(dir: &Path, part: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, part, found);
        } else if path.to_str().unwrap().contains(part) {
            found.push(path);
        }
    }
}

/// Returns the directory of a snapshot.
pub fn directory(home: &TestHome, id: &str) -> PathBuf {
    let microvm = home.dir.path().join("snapshots").join(id);
    if microvm.exists() {
        microvm
    } else {
        home.dir.path().join("gvisor").join(id)
    }
}
