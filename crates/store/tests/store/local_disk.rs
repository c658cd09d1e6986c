//! Caches on full or read-only file systems.

use crate::support::*;
use jiffy_store::*;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Mounted file system. Dropping this value unmounts it.
struct Mount(PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        // A thread that persists a layer may still have its file open.
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

/// Creates and mounts a file system of `kind`. `None` if its programs are not installed.
fn loop_mount(dir: &Path, kind: &str) -> Option<Mount> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: local_disk: not root");
        return None;
    }
    let (image, place) = (dir.join("image"), dir.join("mount"));
    std::fs::create_dir(&place).unwrap();
    // Minimum sizes: 300 MiB for XFS, 109 MiB for btrfs. The file is sparse.
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(512 << 20).unwrap();
    for (program, arguments) in [
        (
            format!("mkfs.{kind}"),
            vec!["-q".as_ref(), image.as_os_str()],
        ),
        (
            "mount".into(),
            vec!["-oloop".as_ref(), image.as_os_str(), place.as_os_str()],
        ),
    ] {
        let done = std::process::Command::new(&program)
            .args(arguments)
            .output();
        let done = match done {
            Ok(done) if done.status.success() => continue,
            Ok(done) => String::from_utf8_lossy(&done.stderr).into_owned(),
            Err(e) => e.to_string(),
        };
        eprintln!("skipped: local_disk: {program}: {done}");
        return None;
    }
    Some(Mount(place))
}

/// Mounts a tmpfs of `mebibytes`. `None` if the user is not root.
fn tmpfs(dir: &Path, mebibytes: u32) -> Option<Mount> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: local_disk: not root");
        return None;
    }
    let place = dir.join("mount");
    std::fs::create_dir(&place).unwrap();
    let size = format!("size={mebibytes}m");
    mount(
        Some("tmpfs"),
        &place,
        Some("tmpfs"),
        MsFlags::empty(),
        Some(size.as_str()),
    )
    .unwrap();
    Some(Mount(place))
}

/// Stores a snapshot with 160 chunks (10 MiB) of memory.
async fn stored(dir: &Path) -> (SharedStore, RemoteSnapshot, SnapshotSource) {
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir, &(1..=160).collect::<Vec<_>>());
    let options = PushOptions::new(dir.join("index"));
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    (store, remote, source)
}

#[tokio::test]
async fn a_full_disk_is_reported_and_present_chunks_are_intact() {
    let dir = tempfile::tempdir().unwrap();
    let Some(place) = tmpfs(dir.path(), 4) else {
        return;
    };
    let (store, remote, source) = stored(dir.path()).await;
    let cache = Arc::new(LayerCache::open(place.0.join("cache"), u64::MAX).unwrap());
    // The layer has 10 MiB, the file system 4 MiB.
    let failed = store.pull(&remote, 0, Selection::All, &cache).await;
    let failed = failed.unwrap_err();
    assert!(matches!(failed, StoreError::DiskFull { .. }), "{failed}");
    assert!(failed.to_string().contains("cache"), "{failed}");
    // Chunks that are marked as present have the right content.
    let nothing = Selection::Chunks(&[]);
    let (layer, _) = store.pull(&remote, 0, nothing, &cache).await.unwrap();
    let (bytes, wanted) = (std::fs::read(layer.path()).unwrap(), content(&source, 0));
    let present: Vec<u64> = (0..160).filter(|&chunk| layer.has(chunk)).collect();
    for &chunk in &present {
        let range = chunk as usize * CHUNK..(chunk as usize + 1) * CHUNK;
        assert!(bytes[range.clone()] == wanted[range], "chunk {chunk}");
    }
    // 4 MiB are 64 chunks.
    assert!(present.len() < 70);
    drop(layer);
    // Another layer, which is unused, is evicted.
    let (small_store, small, small_source) = stored_small(dir.path()).await;
    let pulled = small_store.pull(&small, 0, Selection::All, &cache).await;
    let (layer, _) = pulled.unwrap();
    assert!(std::fs::read(layer.path()).unwrap() == content(&small_source, 0));
}

/// Stores a snapshot with 30 chunks of memory.
async fn stored_small(dir: &Path) -> (SharedStore, RemoteSnapshot, SnapshotSource) {
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir, &(1..=30).collect::<Vec<_>>());
    let options = PushOptions::new(dir.join("small-index"));
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    (store, remote, source)
}

#[tokio::test]
async fn a_read_only_file_system_is_reported_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let Some(place) = tmpfs(dir.path(), 64) else {
        return;
    };
    let (store, remote, _) = stored(dir.path()).await;
    let cache = Arc::new(LayerCache::open(place.0.join("cache"), u64::MAX).unwrap());
    let remount = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(None::<&str>, &place.0, None::<&str>, remount, None::<&str>).unwrap();
    let failed = store.pull(&remote, 0, Selection::All, &cache).await;
    let failed = failed.unwrap_err();
    assert!(matches!(failed, StoreError::ReadOnly { .. }), "{failed}");
    let text = failed.to_string();
    assert!(
        text.contains("cache") && text.contains("cannot write"),
        "{text}"
    );
}

/// Returns the number of free bytes of the file system at `path` after syncing it.
fn free_bytes(path: &Path) -> u64 {
    let dir = std::fs::File::open(path).unwrap();
    nix::unistd::syncfs(&dir).unwrap();
    let stat = nix::sys::statvfs::statvfs(path).unwrap();
    stat.blocks_free() * stat.fragment_size()
}

/// Clones a cached layer of 10 MiB in the file system at `place`. Returns whether the clone shares
/// storage, and the bytes that it uses.
async fn clone_within(dir: &Path, place: &Path) -> (bool, u64) {
    let (store, remote, source) = stored(dir).await;
    let cache = Arc::new(LayerCache::open(place.join("cache"), u64::MAX).unwrap());
    let pulled = store.pull(&remote, 0, Selection::All, &cache).await;
    let (layer, _) = pulled.unwrap();
    layer.persist().unwrap();
    let before = free_bytes(place);
    let to = place.join("clone");
    let shares = layer.clone_to(&remote.manifest.parts[0], &to).unwrap();
    let taken = before.saturating_sub(free_bytes(place));
    let wanted = content(&source, 0);
    assert!(std::fs::read(&to).unwrap() == wanted);
    // Writes to the clone do not change the cached file.
    let clone = std::fs::File::options().write(true).open(&to).unwrap();
    clone.write_all_at(&[0xa5; 3 * CHUNK], 7).unwrap();
    clone.sync_all().unwrap();
    assert!(std::fs::read(layer.path()).unwrap() == wanted);
    (shares, taken)
}

#[tokio::test]
async fn a_clone_of_a_cached_layer_shares_its_storage_where_the_file_system_can() {
    for kind in ["xfs", "btrfs"] {
        let dir = tempfile::tempdir().unwrap();
        let Some(place) = loop_mount(dir.path(), kind) else {
            continue;
        };
        let (shares, taken) = clone_within(dir.path(), &place.0).await;
        assert!(shares, "{kind}");
        assert!(
            taken < 2 << 20,
            "{kind}: {taken} bytes for a clone of 10 MiB"
        );
    }
}

#[tokio::test]
async fn a_clone_of_a_cached_layer_is_a_copy_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let Some(place) = tmpfs(dir.path(), 64) else {
        return;
    };
    let (shares, taken) = clone_within(dir.path(), &place.0).await;
    assert!(!shares);
    assert!(taken >= 10 << 20, "{taken} bytes for a copy of 10 MiB");
}
