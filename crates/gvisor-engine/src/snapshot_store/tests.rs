//! Tests of the snapshot store.
//!
//! A *draft* is the directory of a snapshot that is not published yet. A *boot* snapshot was taken
//! before any command was started in the sandbox, so that restoring it equals a boot of the
//! template. The store marks it by a file.
use super::*;

#[test]
fn a_snapshot_is_complete_or_absent() {
    let dir = tempfile::tempdir().unwrap();
    let store = SnapshotStore::open(dir.path().join("s")).unwrap();
    let draft = store.draft().unwrap();
    fs::write(draft.join("pages.img"), [1; 9000]).unwrap();
    assert!(store.ids().unwrap().is_empty());
    let manifest = GvisorManifest::new("abc", 7);
    store.publish(&draft, &manifest).unwrap();
    assert_eq!(store.get("abc").unwrap(), manifest);
    assert!(store.expect_free("abc").is_err() && store.expect_free("abd").is_ok());
    assert!(store.exists("abc"));
    store.prefetch("abc").unwrap();
    assert!(!store.is_boot("abc") && store.mark_boot("none").is_err());
    store.mark_boot("abc").unwrap();
    assert!(store.is_boot("abc"));
    // The removal of a missing snapshot succeeds.
    store.remove("abc").unwrap();
    store.remove("abc").unwrap();
    assert!(!store.exists("abc") && store.ids().unwrap().is_empty());
}

#[test]
fn an_import_is_complete_or_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = SnapshotStore::open(dir.path().join("s")).unwrap();
    let manifest = GvisorManifest::new("abc", 7);
    // Places a file `name`, and the manifest of another host, in the directory of an import.
    let with = |name: &'static str, text: &'static str| {
        move |dir: &Path| {
            fs::write(dir.join(MANIFEST_FILE), "of another host")?;
            fs::write(dir.join(name), text)
        }
    };
    for bad in [".draft-1", "a.sh", "A.img", ".img"] {
        assert!(store.import(&manifest, false, with(bad, "")).is_err());
    }
    let broken = |_: &Path| Err(io::Error::other("the disk is full"));
    assert!(store.import(&manifest, false, broken).is_err());
    // No draft has remained.
    assert_eq!(fs::read_dir(dir.path().join("s")).unwrap().count(), 0);
    let good = with("pages_meta.img", "one");
    store.import(&manifest, false, good).unwrap();
    assert_eq!(store.get("abc").unwrap(), manifest);
    // A snapshot is only replaced on request, which the second argument states.
    assert!(store.import(&manifest, false, good).is_err());
    let other = with("pages_meta.img", "two");
    store.import(&manifest, true, other).unwrap();
    let pages = dir.path().join("s/abc/pages_meta.img");
    assert_eq!(fs::read_to_string(pages).unwrap(), "two");
    assert_eq!(fs::read_dir(dir.path().join("s")).unwrap().count(), 1);
}

#[test]
fn an_import_does_not_replace_a_snapshot_that_is_created_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let store = SnapshotStore::open(dir.path().join("s")).unwrap();
    let manifest = GvisorManifest::new("abc", 7);
    let own = GvisorManifest::new("abc", 9);
    let fill = |dir: &Path| {
        let draft = store.draft().unwrap();
        fs::write(draft.join("pages.img"), "own")?;
        store.publish(&draft, &own).unwrap();
        fs::write(dir.join("pages.img"), "imported")
    };
    assert!(store.import(&manifest, false, fill).is_err());
    assert_eq!(store.get("abc").unwrap(), own);
    let pages = dir.path().join("s/abc/pages.img");
    assert_eq!(fs::read_to_string(pages).unwrap(), "own");
    assert_eq!(fs::read_dir(dir.path().join("s")).unwrap().count(), 1);
}

#[test]
fn abandoned_drafts_are_removed_and_invalid_ids_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let store = SnapshotStore::open(dir.path()).unwrap();
    // Above the maximum process id (pid_max, proc(5)).
    fs::create_dir(dir.path().join(".draft-4194305-0")).unwrap();
    // Drafts of an earlier process with the same id, and of this process.
    let earlier = format!(".draft-{}-0", std::process::id());
    fs::create_dir(dir.path().join(earlier)).unwrap();
    let own = store.draft().unwrap();
    assert_eq!(store.walk().unwrap().count(), 0);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    assert!(own.exists());
    for bad in ["", "..", "a/b", "A", ".draft-1-1"] {
        assert!(
            store.get(bad).is_err() && store.remove(bad).is_err(),
            "{bad}"
        );
    }
    fs::create_dir(dir.path().join("abc")).unwrap();
    fs::write(dir.path().join("abc/manifest.json"), "{}").unwrap();
    assert!(
        store
            .get("abc")
            .unwrap_err()
            .to_string()
            .contains("damaged")
    );
}
