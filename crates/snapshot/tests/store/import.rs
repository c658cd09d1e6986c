//! Imports of snapshots from other hosts.
//!
//! An *incomplete* snapshot lacks chunks (pieces of 64 KiB) of its memory. The store from which the
//! snapshot was imported still has these chunks.

use super::*;
use jiffy_snapshot::{ImportMode, MissingMemory, PIN_FILE};
use std::io;

/// Returns a function that copies the files of snapshot `id` in `from` to a given directory.
fn copy_of<'a>(from: &'a Store, id: &'a str) -> impl Fn(&Path) -> io::Result<()> + 'a {
    move |dir| {
        for file in fs::read_dir(from.root().join(id))? {
            let file = file?;
            fs::copy(file.path(), dir.join(file.file_name()))?;
        }
        Ok(())
    }
}

#[test]
fn an_imported_snapshot_equals_the_original() {
    let ((_a, remote), (_b, local)) = (store(), store());
    put(&remote, "p", None).unwrap();
    put(&remote, "c", Some("p")).unwrap();
    remote.get("c").unwrap().write_checksums().unwrap();
    let import = |id, parent| local.import(id, parent, ImportMode::New, None, copy_of(&remote, id));
    // The parent must be imported first.
    assert!(matches!(
        import("c", Some("p")),
        Err(SnapshotError::Missing(_))
    ));
    assert!(names(&local).is_empty());
    import("p", None).unwrap();
    import("c", Some("p")).unwrap();
    assert!(matches!(import("p", None), Err(SnapshotError::Exists(_))));
    assert_eq!(local.lineage("c").unwrap().snapshots().len(), 2);
    assert_eq!(
        local.get("c").unwrap().verify().unwrap(),
        VerifyResult::Intact
    );
    // Removals consider imported children.
    assert!(matches!(
        local.remove("p"),
        Err(SnapshotError::HasChild { .. })
    ));
    local.remove("c").unwrap();
    local.remove("p").unwrap();
}

#[test]
fn a_rejected_import_leaves_no_files() {
    let ((_a, remote), (_b, local)) = (store(), store());
    put(&remote, "a", None).unwrap();
    put(&remote, "b", None).unwrap();
    let assert_rejected =
        |fill: &dyn Fn(&Path) -> io::Result<()>, id: &str, parent: Option<&str>| {
            let import = local.import(id, parent, ImportMode::New, None, fill);
            assert!(import.is_err(), "{id} {parent:?}");
            assert!(names(&local).is_empty(), "{:?}", names(&local));
        };
    let copy = copy_of(&remote, "a");
    assert_rejected(&copy, "b", None);
    assert_rejected(&copy, "a", Some("b"));
    assert_rejected(&copy, "../a", None);
    for file in ["manifest.json", "state.bin", "memory.index", "disk0.layer"] {
        let without = |dir: &Path| copy(dir).and_then(|()| fs::remove_file(dir.join(file)));
        assert_rejected(&without, "a", None);
    }
    let longer = |dir: &Path| {
        copy(dir)?;
        let memory = fs::File::options()
            .write(true)
            .open(dir.join("memory.layer"));
        memory?.set_len(MEMORY_BYTES + 1)
    };
    assert_rejected(&longer, "a", None);
    for file in ["disk1.layer", "x", ".hidden"] {
        let more = |dir: &Path| copy(dir).and_then(|()| fs::write(dir.join(file), ""));
        assert_rejected(&more, "a", None);
    }
    let link = |dir: &Path| {
        copy(dir)?;
        fs::remove_file(dir.join("state.bin"))?;
        std::os::unix::fs::symlink("/etc/passwd", dir.join("state.bin"))
    };
    assert_rejected(&link, "a", None);
    let full = |dir: &Path| {
        fs::write(dir.join("state.bin"), "half")?;
        Err(io::ErrorKind::StorageFull.into())
    };
    assert_rejected(&full, "a", None);
    let wrong_sizes = |dir: &Path| {
        copy(dir)?;
        let path = dir.join("manifest.json");
        let text = fs::read_to_string(&path)?;
        fs::write(path, text.replace("\"stored\": 1", "\"stored\": 2"))
    };
    assert_rejected(&wrong_sizes, "a", None);
}

#[test]
fn a_damaged_snapshot_is_replaced_by_its_import() {
    let ((_a, remote), (_b, local)) = (store(), store());
    for store in [&remote, &local] {
        put(store, "a", None).unwrap();
        store.get("a").unwrap().write_checksums().unwrap();
    }
    let layer = local.root().join("a/memory.layer");
    let file = fs::File::options().write(true).open(&layer).unwrap();
    // This byte is in chunk 1, which a snapshot of `put` stores.
    file.write_all_at(&[8], 65540).unwrap();
    let hold = local.get("a").unwrap().hold().unwrap();
    assert!(matches!(
        local.get("a").unwrap().verify().unwrap(),
        VerifyResult::Damaged(_)
    ));
    let copy = copy_of(&remote, "a");
    let again = local
        .import("a", None, ImportMode::Replace, None, copy)
        .unwrap();
    assert_eq!(again.verify().unwrap(), VerifyResult::Intact);
    assert_eq!(names(&local), ["a"]);
    drop(hold);
    // A snapshot without any files.
    fs::remove_dir_all(local.root().join("a")).unwrap();
    let copy = copy_of(&remote, "a");
    local
        .import("a", None, ImportMode::Replace, None, copy)
        .unwrap();
}

#[test]
fn an_incomplete_snapshot_can_only_be_restored() {
    let ((_a, remote), (_b, local)) = (store(), store());
    put(&remote, "a", None).unwrap();
    put(&remote, "b", Some("a")).unwrap();
    let missing = MissingMemory {
        origin: "elsewhere".to_owned(),
    };
    let pinned = |dir: &Path| {
        copy_of(&remote, "a")(dir)?;
        std::fs::write(dir.join(PIN_FILE), "")
    };
    // The pin is the file that lists the present chunks. It is rejected if no chunk is missing.
    let import = local.import("a", None, ImportMode::New, None, pinned);
    assert!(import.is_err());
    local
        .import("a", None, ImportMode::New, Some(&missing), pinned)
        .unwrap();
    local
        .import("b", Some("a"), ImportMode::New, None, copy_of(&remote, "b"))
        .unwrap();
    let a = local.get("a").unwrap();
    assert_eq!(a.missing().unwrap(), Some(missing));
    let incomplete = |e| matches!(e, SnapshotError::Incomplete(id) if id == "a");
    assert!(incomplete(local.merge("b", 0).unwrap_err()));
    assert!(incomplete(local.parts("a").unwrap_err()));
    assert!(incomplete(a.write_checksums().unwrap_err()));
    assert!(!local.lineage("b").unwrap().is_complete());
    // A reader that races with the removal of the file finds either state.
    let (file, copy) = (a.path().join("missing.json"), local.root().join("copy"));
    fs::rename(&file, &copy).unwrap();
    let reader = a.clone();
    std::thread::scope(|scope| {
        let reads = scope.spawn(move || {
            let (mut before, mut changes) = (true, 0);
            while changes < 3000 {
                let found = reader.missing()?.is_some();
                changes += usize::from(found != before);
                before = found;
            }
            Ok::<_, SnapshotError>(())
        });
        while !reads.is_finished() {
            fs::hard_link(&copy, &file).unwrap();
            fs::remove_file(&file).unwrap();
        }
        reads.join().unwrap().unwrap();
    });
    fs::rename(&copy, &file).unwrap();
    assert!(!a.is_all_requested());
    a.request_all().unwrap();
    assert!(a.is_all_requested());
    a.set_complete().unwrap();
    assert!(local.lineage("b").unwrap().is_complete());
    assert!(!a.is_all_requested() && !a.pin().exists());
    local.merge("b", 0).unwrap();
}
