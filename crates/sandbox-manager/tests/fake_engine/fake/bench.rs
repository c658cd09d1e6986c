//! Data directory with fake guests, for one test. Several daemons can open it one after another.

use super::engine::FakeEngine;
use super::world::World;
use jiffy_sandbox_manager::{
    CreateSpec, HostFigures, HostOptions, HostReader, SandboxSettings, SandboxSource, Sandboxes,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Host that never lacks a resource.
#[derive(Debug)]
pub struct Plenty;

impl HostReader for Plenty {
    fn read(&self) -> HostFigures {
        HostFigures::default()
    }
}

/// Data directory, and the state of its fake guests, which survives a daemon ([`World`]).
pub struct Bench {
    pub dir: tempfile::TempDir,
    pub world: Arc<World>,
}

impl Bench {
    pub fn new() -> Self {
        Self::in_dir(tempfile::tempdir().unwrap())
    }

    /// Uses `dir`, which must be empty, as data directory.
    pub fn in_dir(dir: tempfile::TempDir) -> Self {
        fs::create_dir(dir.path().join("snapshots")).unwrap();
        Self {
            dir,
            world: Arc::default(),
        }
    }

    /// Opens the sandboxes of the data directory, as a starting daemon does.
    pub async fn open(&self) -> Sandboxes {
        self.open_with(HostOptions::default()).await
    }

    /// Opens an empty data directory, and checks that this does not wait.
    pub fn open_first(&self, options: HostOptions) -> Sandboxes {
        let opening = std::pin::pin!(self.open_with(options));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match opening.poll(&mut context) {
            std::task::Poll::Ready(host) => host,
            std::task::Poll::Pending => panic!("opening the data directory waits"),
        }
    }

    /// Like [`Self::open`], with options. By default, the host has plenty of free resources.
    pub async fn open_with(&self, mut options: HostOptions) -> Sandboxes {
        // The tests must not depend on the load of this machine.
        options.reader.get_or_insert_with(|| Arc::new(Plenty));
        let engines = FakeEngine::all(&self.world, &self.files());
        let journal = self.dir.path().join("state.db");
        Sandboxes::open(engines, &journal, options).await.unwrap()
    }

    /// Returns the directory with the files of snapshots.
    pub fn files(&self) -> PathBuf {
        Path::join(self.dir.path(), "snapshots")
    }

    /// Returns the names of snapshot files, complete or not.
    pub fn file_names(&self) -> BTreeSet<String> {
        fs::read_dir(self.files())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    /// Waits until there are `count` snapshot files.
    pub async fn until_files(&self, count: usize) {
        let what = format!("{count} files, of {:?}", self.file_names());
        until(&what, || self.file_names().len() == count).await;
    }

    /// Runs `work` in a runtime of its own and then shuts the runtime down, as if the process were
    /// killed: no task continues.
    pub fn run_and_kill<F: Future<Output = ()>>(&self, work: F) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(work);
        // The tasks must have stopped before the next daemon starts.
        runtime.shutdown_timeout(std::time::Duration::from_secs(10));
    }
}

/// Specification of a sandbox of template `base`.
pub fn base() -> CreateSpec {
    CreateSpec {
        source: SandboxSource::Template("base".into()),
        size: None,
        env: BTreeMap::new(),
        settings: SandboxSettings::default(),
        name: None,
        engine: None,
        prefetch: Default::default(),
    }
}

/// Waits at most 10 s until `ready` returns true.
pub async fn until(what: &str, mut ready: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if ready() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("timed out waiting for {what}");
}

/// Creates a sandbox of the template `base`, and returns its id.
pub async fn create_id(host: &Sandboxes) -> String {
    host.create(base()).await.unwrap().id().to_owned()
}

/// Takes a snapshot, and returns its id.
pub async fn snapshot_id(host: &Sandboxes, sandbox: &str) -> String {
    let snapshot = host.snapshot(sandbox, None).await.unwrap();
    snapshot.id().to_owned()
}
