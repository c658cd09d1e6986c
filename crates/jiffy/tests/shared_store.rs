//! Tests for snapshots that another daemon restores, whose data directory shares only the store.
//!
//! A *tenant* is an owner of snapshots in the store. The *seal* of a snapshot is the file with
//! checksums of its chunks, which is written later.

use crate::support::store::{TestStore, directory};
use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Creates files and memory with checksums in a guest, and starts a program that counts.
const BEGIN: &str = "cd /home/user && head -c 3000000 /dev/urandom > file && sha256sum file > sums \
    && head -c 20000000 /dev/urandom > /dev/shm/memory && sha256sum /dev/shm/memory >> sums \
    && (setsid sh -c 'n=0; while :; do n=$((n+1)); echo $n > /dev/shm/count; sleep 0.05; done' \
    >/dev/null 2>&1 &) && until [ -s /dev/shm/count ]; do sleep 0.01; done";

/// Fails if a byte differs; prints the current count. The file is empty for a moment whenever it is
/// written.
const CHECK: &str = "cd /home/user && sha256sum -c sums > /dev/null \
    && until n=$(cat /dev/shm/count) && [ \"$n\" ]; do :; done && echo $n";

fn count(home: &TestHome, id: &str) -> u64 {
    home.sh(id, CHECK).parse().unwrap_or(0)
}

/// Asserts that the guest has all of its data, and that its program continues to count.
fn assert_continues_counting(home: &TestHome, id: &str, from: u64) {
    let first = count(home, id);
    assert!(first >= from, "{first} instead of at least {from}");
    wait_for("the program to continue counting", || {
        (count(home, id) > first).then_some(())
    });
}

/// Pushes a snapshot of a counting guest to the store, and removes its host. Returns the snapshot
/// and the count.
fn push_counting_guest(home: TestHome, store: &TestStore) -> (String, u64) {
    store.start(&home);
    let id = home.ok(&["create"]);
    home.sh(&id, BEGIN);
    let counted = count(&home, &id);
    let snapshot = home.ok(&["snapshot", &id, "--name", "moving"]);
    let found = store.wait_for(None, &snapshot);
    // After the snapshot itself, the list has the snapshots on which it is based: on a microVM, the
    // snapshot of its template, which all tenants share.
    assert!(found.iter().skip(1).all(|below| below.shared));
    (snapshot, counted)
}

/// Returns the names in the directories of snapshots.
fn snapshot_files(home: &TestHome) -> BTreeSet<String> {
    let dirs = ["snapshots", "gvisor"].map(|name| home.dir.path().join(name));
    let entries = dirs.iter().flat_map(std::fs::read_dir).flatten().flatten();
    entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect()
}

#[jiffy_test(engine = "each")]
fn a_snapshot_of_another_host_is_restored_from_the_store() {
    let (there, here) = (TestHome::new(), TestHome::new());
    let store = TestStore::new();
    let (snapshot, counted) = push_counting_guest(there, &store);
    store.start(&here);
    let unknown = here.call(&["create", "--from", "abcdefghijkmnpqrstuv"]);
    assert!(unknown.stderr.contains("does not exist"), "{unknown:?}");
    let unknown = here.call(&["resume", "abcdefghijkmnpqrstuv"]);
    assert!(unknown.stderr.contains("another host"), "{unknown:?}");
    let id = here.ok(&["create", "--from", &snapshot]);
    assert_continues_counting(&here, &id, counted);
    assert!(here.ok(&["snapshots"]).contains("moving"));
    // The snapshot behaves like a local snapshot: fork, pause and rollback.
    let child = here.ok(&["fork", &id]);
    assert_continues_counting(&here, &child, counted);
    here.ok(&["pause", &id]);
    here.ok(&["resume", &id]);
    here.sh(&id, "rm /home/user/file");
    here.ok(&["rollback", &id, "moving"]);
    assert_continues_counting(&here, &id, counted);
    // After its removal, the snapshot is fetched again.
    here.ok(&["rm", &child, &id]);
    // Uploads of dependent snapshots end, but not at once.
    wait_for("the snapshot to be unused", || {
        (here.call(&["rm", "moving"]).code == Some(0)).then_some(())
    });
    wait_for("the files to be removed", || {
        (!directory(&here, &snapshot).exists()).then_some(())
    });
    let again = here.ok(&["create"]);
    here.ok(&["rollback", &again, &snapshot]);
    assert_continues_counting(&here, &again, counted);
    assert!(
        snapshot_files(&here)
            .iter()
            .all(|name| !name.starts_with('.'))
    );
}

/// Flips a bit of a stored chunk of a microVM's snapshot in `dir`.
fn flip(dir: &Path) {
    let index = File::open(dir.join("memory.index")).unwrap();
    let index = jiffy_snapshot::read_index(&index).unwrap();
    let at = index.stored.iter().next().unwrap() * 65536 + 4097;
    let mut options = File::options();
    let layer = options.read(true).write(true);
    let layer = layer.open(dir.join("memory.layer")).unwrap();
    let mut byte = [0];
    layer.read_exact_at(&mut byte, at).unwrap();
    layer.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

#[jiffy_test(engine = "each")]
fn a_snapshot_that_is_damaged_on_its_host_is_fetched_anew() {
    let home = TestHome::new();
    let store = TestStore::new();
    store.start(&home);
    let id = home.ok(&["create"]);
    home.sh(&id, BEGIN);
    let counted = count(&home, &id);
    let snapshot = home.ok(&["snapshot", &id, "--name", "precious"]);
    store.wait_for(None, &snapshot);
    let dir = directory(&home, &snapshot);
    let (layer, pages) = (dir.join("memory.layer"), dir.join("pages.img"));
    let is_microvm = layer.exists();
    let memory = if is_microvm { layer } else { pages };
    let create = || home.ok(&["create", "--from", "precious"]);
    let older = create();
    fs::remove_file(&memory).unwrap();
    let newer = create();
    assert_continues_counting(&home, &newer, counted);
    // The guest runs from replaced files.
    assert_continues_counting(&home, &older, counted);
    home.ok(&["rm", &newer, &older]);
    if is_microvm {
        let verify = || home.call(&["snapshots", "--verify", "precious"]);
        wait_for("the seal", || (verify().code == Some(0)).then_some(()));
        flip(&dir);
        let verified = verify();
        assert_eq!(verified.code, Some(0), "{verified:?}");
        assert!(
            verified.stdout.contains("repaired from the store"),
            "{verified:?}"
        );
        let newer = create();
        assert_continues_counting(&home, &newer, counted);
    }
    // Without a store, a snapshot with a missing file cannot be repaired, and is rejected.
    home.ok(&["daemon", "restart", "--no-listen"]);
    fs::remove_file(&memory).unwrap();
    let refused = home.call(&["create", "--from", "precious"]);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(refused.stderr.contains("restore snapshot"), "{refused:?}");
}
