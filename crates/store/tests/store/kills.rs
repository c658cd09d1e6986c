//! Processes that push or collect are killed with SIGKILL at each of their requests. The store's
//! clock differs from the hosts' clock by an hour in either direction.
//!
//! A *lease* is an object that protects the objects of a push in progress.

use crate::support::shifted::ShiftedStore;
use crate::support::*;
use jiffy_store::*;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Variables of the child: directory, work and number of the request at which it kills itself.
const CHILD: [&str; 3] = ["JIFFY_KILL_DIR", "JIFFY_KILL_WORK", "JIFFY_KILL_AT"];
/// Options without a grace period: a first collection condemns unused objects, and a second one
/// removes them. The lock of a killed collection is taken over at once.
const AT_ONCE: GcOptions = GcOptions {
    grace: Duration::ZERO,
    lock_time: Duration::ZERO,
    reader_time: READER_TIME,
    repack_percent: 50,
    repack_bytes: 1 << 30,
    dry_run: false,
};

/// Opens the store in `dir`.
fn directory(dir: &Path) -> Arc<dyn object_store::ObjectStore> {
    let place = dir.join("store");
    std::fs::create_dir_all(&place).unwrap();
    Arc::new(object_store::local::LocalFileSystem::new_with_prefix(place).unwrap())
}

/// Returns the snapshot that the child pushes.
fn pushed(dir: &Path) -> SnapshotSource {
    snapshot(dir, &[2, 14, 30, 31])
}

/// Waits until the store's clock has advanced.
async fn tick() {
    tokio::time::sleep(Duration::from_millis(15)).await;
}

/// Entry point of the child: runs its work until the request at which it kills itself.
#[tokio::test]
async fn work_in_a_child_process() {
    let [Some(dir), Some(work), Some(at)] = CHILD.map(std::env::var_os) else {
        return;
    };
    let (dir, mut left): (PathBuf, u64) = (dir.into(), at.to_str().unwrap().parse().unwrap());
    let faulty = FaultyStore::new(directory(&dir));
    let store = over(faulty.clone(), quick());
    let tenant = store.tenant("alice").await.unwrap();
    faulty.on(move |_, _| {
        if left == 0 {
            let own = nix::unistd::Pid::this();
            nix::sys::signal::kill(own, nix::sys::signal::Signal::SIGKILL).unwrap();
        }
        left -= 1;
        Fault::None
    });
    match work.to_str().unwrap() {
        "push" => {
            let mut options = PushOptions::new(dir.join("child-index"));
            options.pack_bytes = 150 << 10;
            store.push(&tenant, &pushed(&dir), &options).await.unwrap();
        }
        _ => {
            for _ in 0..2 {
                tick().await;
                store.collect(&tenant, AT_ONCE).await.unwrap();
            }
        }
    }
}

/// Runs the child. Returns true if the child was killed.
fn child(dir: &Path, work: &str, at: u64) -> bool {
    let values = [dir.to_str().unwrap(), work, &at.to_string()].map(str::to_owned);
    let ended = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kills::work_in_a_child_process"])
        .envs(CHILD.into_iter().zip(values))
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(ended.success() || ended.signal() == Some(9), "{ended}");
    ended.signal() == Some(9)
}

/// Creates a store with a retained snapshot and a removed one. Returns the retained snapshot.
async fn prepare(dir: &Path) -> (SharedStore, Arc<Tenant>, Hash, SnapshotSource) {
    let store = over(directory(dir), quick());
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.join("index"));
    let big = snapshot(dir, &(1..=16).collect::<Vec<_>>());
    let (gone, _) = store.push(&tenant, &big, &options).await.unwrap();
    let source = snapshot(dir, &[3, 0, 14, 20]);
    let (kept, _) = store.push(&tenant, &source, &options).await.unwrap();
    store.remove(&tenant, gone.root).await.unwrap();
    (store, tenant, kept.root, source)
}

/// Kills the child at each request of `work` (`push`, or `gc` for two collections), which sends at
/// least `min_requests`. Checks after each kill that another host can push and collect, and that no
/// snapshot is damaged.
async fn kill_at_each_request(work: &str, min_requests: u64) {
    for at in 0..120 {
        let dir = tempfile::tempdir().unwrap();
        let (store, tenant, root, source) = prepare(dir.path()).await;
        let killed = child(dir.path(), work, at);
        assert_same(&store, &tenant, root, &source).await;
        let more = pushed(dir.path());
        let options = PushOptions::new(dir.path().join("index"));
        let (name, _) = store.push(&tenant, &more, &options).await.unwrap();
        // The objects of the killed push remain, since its lease protects them for a day. These
        // collections check only that no other object is lost.
        for _ in 0..3 {
            tick().await;
            store.collect(&tenant, AT_ONCE).await.unwrap();
        }
        assert_same(&store, &tenant, root, &source).await;
        assert_same(&store, &tenant, name.root, &more).await;
        let verified = store.verify_tenant(&tenant, None, &|_, _, _| {}).await;
        assert!(verified.unwrap().is_sound());
        if !killed {
            assert!(at >= min_requests, "{at} requests");
            return;
        }
    }
    panic!("the child never ended");
}

#[tokio::test]
async fn a_push_that_is_killed_anywhere_loses_nothing() {
    kill_at_each_request("push", 12).await;
}

#[tokio::test]
async fn a_collection_that_is_killed_anywhere_loses_nothing() {
    kill_at_each_request("gc", 30).await;
}

/// All objects have times an hour before or after the host's clock: only the store's clock matters.
#[tokio::test]
async fn a_clock_an_hour_off_changes_nothing() {
    for offset in [-3600, 3600] {
        let dir = tempfile::tempdir().unwrap();
        let (hour, minute) = (Duration::from_secs(3600), Duration::from_secs(60));
        let (store, tenant, root, source) = prepare(dir.path()).await;
        let options = GcOptions {
            grace: minute,
            ..AT_ONCE
        };
        // By the store's clock, all existing objects were just written.
        let shifted = ShiftedStore::new(directory(dir.path()), offset);
        let off = over(shifted, quick());
        let tenant_there = off.tenant("alice").await.unwrap();
        for _ in 0..3 {
            tick().await;
            let report = off.collect(&tenant_there, options).await.unwrap();
            assert_eq!((report.condemned, report.removed), (0, 0), "{offset}");
        }
        // The last collection was less than an hour ago.
        let held = off.collect_if_due(&tenant_there, options, hour).await;
        assert_eq!(held.unwrap(), None);
        let at_once = GcOptions {
            grace: Duration::ZERO,
            ..options
        };
        let mut removed = 0;
        for _ in 0..3 {
            tick().await;
            removed += off.collect(&tenant_there, at_once).await.unwrap().removed;
        }
        assert!(removed > 0);
        assert_same(&store, &tenant, root, &source).await;
    }
}
