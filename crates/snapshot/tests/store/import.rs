//! Imports of snapshots from other hosts.

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
fn an_imported_snapshot_is_what_it_was_on_its_host() {
    let ((_a, there), (_b, here)) = (store(), store());
    put(&there, "p", None).unwrap();
    put(&there, "c", Some("p")).unwrap();
    there.get("c").unwrap().write_checksums().unwrap();
    let import = |id, parent| here.import(id, parent, ImportMode::New, None, copy_of(&there, id));
    // The parent must be imported first.
    assert!(matches!(
        import("c", Some("p")),
        Err(SnapshotError::Missing(_))
    ));
    assert!(names(&here).is_empty());
    import("p", None).unwrap();
    import("c", Some("p")).unwrap();
    assert!(matches!(import("p", None), Err(SnapshotError::Exists(_))));
    assert_eq!(here.lineage("c").unwrap().snapshots().len(), 2);
    assert_eq!(
        here.get("c").unwrap().verify().unwrap(),
        VerifyResult::Intact
    );
    // Removals consider imported children.
    assert!(matches!(
        here.remove("p"),
        Err(SnapshotError::HasChild { .. })
    ));
    here.remove("c").unwrap();
    here.remove("p").unwrap();
}

#[test]
fn an_import_that_does_not_fit_leaves_nothing() {
    let ((_a, there), (_b, here)) = (store(), store());
    put(&there, "a", None).unwrap();
    put(&there, "b", None).unwrap();
    let refused = |fill: &dyn Fn(&Path) -> io::Result<()>, id: &str, parent: Option<&str>| {
        let import = here.import(id, parent, ImportMode::New, None, fill);
        assert!(import.is_err(), "{id} {parent:?}");
        assert!(names(&here).is_empty(), "{:?}", names(&here));
    };
    let copy = copy_of(&there, "a");
    refused(&copy, "b", None);
    refused(&copy, "a", Some("b"));
    refused(&copy, "../a", None);
    for file in ["manifest.json", "state.bin", "memory.index", "disk0.layer"] {
        let without = |dir: &Path| copy(dir).and_then(|()| fs::remove_file(dir.join(file)));
        refused(&without, "a", None);
    }
    let longer = |dir: &Path| {
        copy(dir)?;
        let memory = fs::File::options()
            .write(true)
            .open(dir.join("memory.layer"));
        memory?.set_len(MEMORY_BYTES + 1)
    };
    refused(&longer, "a", None);
    for file in ["disk1.layer", "x", ".hidden"] {
        let more = |dir: &Path| copy(dir).and_then(|()| fs::write(dir.join(file), ""));
        refused(&more, "a", None);
    }
    let link = |dir: &Path| {
        copy(dir)?;
        fs::remove_file(dir.join("state.bin"))?;
        std::os::unix::fs::symlink("/etc/passwd", dir.join("state.bin"))
    };
    refused(&link, "a", None);
    let full = |dir: &Path| {
        fs::write(dir.join("state.bin"), "half")?;
        Err(io::ErrorKind::StorageFull.into())
    };
    refused(&full, "a", None);
    let wrong_sizes = |dir: &Path| {
        copy(dir)?;
        let path = dir.join("manifest.json");
        let text = fs::read_to_string(&path)?;
        fs::write(path, text.replace("\"stored\": 1", "\"stored\": 2"))
    };
    refused(&wrong_sizes, "a", None);
}

#[test]
fn a_damaged_snapshot_is_replaced_by_its_import() {
    let ((_a, there), (_b, here)) = (store(), store());
    for store in [&there, &here] {
        put(store, "a", None).unwrap();
        store.get("a").unwrap().write_checksums().unwrap();
    }
    let layer = here.root().join("a/memory.layer");
    let file = fs::File::options().write(true).open(&layer).unwrap();
    file.write_all_at(&[8], 65540).unwrap();
    let hold = here.get("a").unwrap().hold().unwrap();
    assert!(matches!(
        here.get("a").unwrap().verify().unwrap(),
        VerifyResult::Damaged(_)
    ));
    let copy = copy_of(&there, "a");
    let again = here
        .import("a", None, ImportMode::Replace, None, copy)
        .unwrap();
    assert_eq!(again.verify().unwrap(), VerifyResult::Intact);
    assert_eq!(names(&here), ["a"]);
    drop(hold);
    // A snapshot without any files.
    fs::remove_dir_all(here.root().join("a")).unwrap();
    let copy = copy_of(&there, "a");
    here.import("a", None, ImportMode::Replace, None, copy)
        .unwrap();
}

#[test]
fn a_snapshot_whose_memory_has_not_all_arrived_is_only_restored() {
    let ((_a, there), (_b, here)) = (store(), store());
    put(&there, "a", None).unwrap();
    put(&there, "b", Some("a")).unwrap();
    let missing = MissingMemory {
        origin: "elsewhere".to_owned(),
    };
    let pinned = |dir: &Path| {
        copy_of(&there, "a")(dir)?;
        std::fs::write(dir.join(PIN_FILE), "")
    };
    // Without holes, no pin is needed.
    let import = here.import("a", None, ImportMode::New, None, pinned);
    assert!(import.is_err());
    here.import("a", None, ImportMode::New, Some(&missing), pinned)
        .unwrap();
    here.import("b", Some("a"), ImportMode::New, None, copy_of(&there, "b"))
        .unwrap();
    let a = here.get("a").unwrap();
    assert_eq!(a.missing().unwrap(), Some(missing));
    let incomplete = |e| matches!(e, SnapshotError::Incomplete(id) if id == "a");
    assert!(incomplete(here.merge("b", 0).unwrap_err()));
    assert!(incomplete(here.parts("a").unwrap_err()));
    assert!(incomplete(a.write_checksums().unwrap_err()));
    assert!(!here.lineage("b").unwrap().is_complete());
    assert!(!a.is_all_requested());
    a.request_all().unwrap();
    assert!(a.is_all_requested());
    a.set_complete().unwrap();
    assert!(here.lineage("b").unwrap().is_complete());
    assert!(!a.is_all_requested() && !a.pin().exists());
    here.merge("b", 0).unwrap();
}
