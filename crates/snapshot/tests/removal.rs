//! The cost of a removal does not depend on the number of snapshots.
#![allow(clippy::unwrap_used)]

use jiffy_proto::layer::{DISK_BLOCK, LayerIndex, MEMORY_CHUNK};
use jiffy_snapshot::{
    DiskSizes, Durability, Manifest, MemorySizes, SNAPSHOT_FORMAT, SnapshotError, Store, Versions,
};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

const MEMORY_BYTES: u64 = MEMORY_CHUNK as u64;
const DISK_BYTES: u64 = DISK_BLOCK as u64;

/// Publishes a snapshot whose layers are empty.
fn put(store: &Store, id: &str, parent: Option<&str>) {
    let mut draft = store.draft(1).unwrap();
    draft.state.write_all_at(b"state", 0).unwrap();
    draft.memory.set_len(MEMORY_BYTES).unwrap();
    let index = LayerIndex::empty(MEMORY_CHUNK, MEMORY_BYTES);
    draft.memory_index.write_all_at(&index.encode(), 0).unwrap();
    let overlay = store.overlay().unwrap();
    overlay.set_len(DISK_BYTES).unwrap();
    let index = LayerIndex::empty(DISK_BLOCK, DISK_BYTES);
    let disk = &draft.disk_indexes[0];
    disk.write_all_at(&index.encode(), 0).unwrap();
    let manifest = manifest(id, parent);
    let published = draft.publish(&manifest, &[overlay], Durability::PageCache);
    published.unwrap();
}

/// Returns the manifest of a snapshot with one chunk of memory and one block of disk.
fn manifest(id: &str, parent: Option<&str>) -> Manifest {
    Manifest {
        format: SNAPSHOT_FORMAT,
        id: id.to_owned(),
        parent: parent.map(str::to_owned),
        template: "base".to_owned(),
        created_ms: 1,
        versions: Versions::default(),
        cpu: "cpu".to_owned(),
        vcpus: 1,
        memory: MemorySizes {
            bytes: MEMORY_BYTES,
            ..MemorySizes::default()
        },
        disks: vec![DiskSizes {
            bytes: DISK_BYTES,
            stored: 0,
        }],
        net: false,
        modules: None,
        disk_only: false,
    }
}

/// Creates only a manifest, which is sufficient for a search for children.
fn fabricate(store: &Store, id: &str, parent: &str) {
    let directory = store.root().join(id);
    fs::create_dir(&directory).unwrap();
    let text = serde_json::to_vec(&manifest(id, Some(parent))).unwrap();
    fs::write(directory.join("manifest.json"), text).unwrap();
}

/// Counter of opened snapshot files (inotify(7)).
struct OpenedFiles(File);

impl OpenedFiles {
    /// Watches all snapshots in `store` except `except`.
    fn of_all_but(store: &Store, except: &str) -> Self {
        // SAFETY: the call has no pointer arguments, and the descriptor has no other owner.
        let events = unsafe {
            let fd = libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC);
            assert!(fd >= 0);
            File::from_raw_fd(fd)
        };
        for id in store.ids().unwrap().iter().filter(|id| *id != except) {
            let path = store.root().join(id).into_os_string().into_encoded_bytes();
            let path = CString::new(path).unwrap();
            // SAFETY: the path is null-terminated and outlives the call.
            let watch = unsafe {
                libc::inotify_add_watch(events.as_raw_fd(), path.as_ptr(), libc::IN_OPEN)
            };
            assert!(watch >= 0, "{}", std::io::Error::last_os_error());
        }
        Self(events)
    }

    /// Returns the number of bytes of events: 0 if no file was opened.
    fn seen(&mut self) -> usize {
        let mut buffer = vec![0; 1 << 20];
        match self.0.read(&mut buffer) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => 0,
            seen => seen.unwrap(),
        }
    }
}

#[test]
fn a_removal_opens_no_file_of_any_other_snapshot() {
    for others in [10, 1000] {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        put(&store, "root", None);
        for number in 0..others {
            fabricate(&store, &format!("other{number}"), "root");
        }
        // The first removal reads all manifests once.
        put(&store, "first", None);
        store.remove("first").unwrap();
        put(&store, "leaf", Some("root"));
        let mut opens = OpenedFiles::of_all_but(&store, "leaf");
        store.remove("leaf").unwrap();
        assert_eq!(opens.seen(), 0, "with {others} other snapshots");
        let result = store.remove("root");
        assert!(matches!(result, Err(SnapshotError::HasChild { .. })));
        // Check that the watch works: the rejected removal has opened the manifest of `root` to
        // lock it.
        assert_ne!(opens.seen(), 0);
    }
}

#[test]
fn stores_opened_before_and_after_a_child_was_created_list_it() {
    let dir = tempfile::tempdir().unwrap();
    let before = Store::open(dir.path()).unwrap();
    put(&before, "a", None);
    assert!(before.is_independent("a").unwrap());
    put(&Store::open(dir.path()).unwrap(), "b", Some("a"));
    assert!(!before.is_independent("b").unwrap());
    let is_rejected = |store: &Store| {
        let removed = store.remove("a");
        matches!(removed, Err(SnapshotError::HasChild { child, .. }) if child == "b")
    };
    assert!(is_rejected(&before));
    drop(before);
    // Simulates the next process.
    let after = Store::open(dir.path()).unwrap();
    assert!(is_rejected(&after));
    after.merge("b", 0).unwrap();
    assert!(after.is_independent("b").unwrap());
    after.remove("a").unwrap();
    assert!(after.is_independent("a").is_err());
    assert_eq!(after.ids().unwrap(), ["b"]);
}
