//! A full disk fails the call that needed room, and nothing else.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::path::Path;
use support::place::Place;
use support::{guests, skip, wait_for};
use tempfile::TempDir;

/// A small file system, gone with the test.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn new(test: &str, size: &str) -> Option<Self> {
        if !guests(test) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size}");
        let mounted = mount(
            Some("none"),
            dir.path(),
            Some("tmpfs"),
            MsFlags::empty(),
            Some(options.as_str()),
        );
        if let Err(e) = mounted {
            skip(test, &format!("nothing can be mounted here: {e}"));
            return None;
        }
        Some(Self(dir))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Takes all room but `left` bytes.
    fn fill(&self, left: u64) {
        let stat = nix::sys::statvfs::statvfs(self.path()).unwrap();
        let free = stat.blocks_available() * stat.fragment_size();
        let file = std::fs::File::create(self.path().join("filler")).unwrap();
        let taken = i64::try_from(free.saturating_sub(left)).unwrap();
        nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, taken).unwrap();
    }

    fn free(&self) {
        std::fs::remove_file(self.path().join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = umount2(self.path(), MntFlags::MNT_DETACH);
        assert!(unmounted.is_ok() || std::thread::panicking());
    }
}

#[test]
fn a_snapshot_pause_or_fork_that_finds_no_room_fails_and_the_sandbox_runs_on() {
    let test = "a_snapshot_pause_or_fork_that_finds_no_room_fails_and_the_sandbox_runs_on";
    let Some(disk) = SmallDisk::new(test, "1g") else {
        return;
    };
    let Some(place) = Place::beneath(disk.path(), test) else {
        return;
    };
    // Admission would refuse before the disk does.
    let mut daemon = place.serve(&["--warm-pool", "0", "--reserve-disk", "1MiB"]);
    let id = place.ok(&["create"]);
    place.sh(
        &id,
        "nohup sh -c 'i=0; while :; do i=$((i+1)); echo $i >/tmp/count; sleep 0.02; done' >/dev/null 2>&1 &
         head -c 150000000 /dev/urandom >/dev/shm/bulk; sha256sum /dev/shm/bulk >sum",
    );
    let count = || -> u64 { place.sh(&id, "cat /tmp/count").parse().unwrap_or(0) };
    let entries = || {
        let store = std::fs::read_dir(place.dir.path().join("snapshots")).unwrap();
        store.count()
    };
    place.ok(&["snapshot", &id, "--name", "before"]);
    place.sh(
        &id,
        "head -c 150000000 /dev/urandom >/dev/shm/bulk; sha256sum /dev/shm/bulk >sum",
    );
    let (snapshots, stored) = (place.json(&["snapshots"]), entries());
    disk.fill(40 << 20);
    for call in [
        vec!["snapshot", &id],
        vec!["pause", &id],
        vec!["fork", &id, "-n", "2"],
    ] {
        let failed = place.call(&call);
        assert_ne!(failed.code, Some(0), "{call:?} found room");
        assert!(
            failed.stderr.contains("No space left on device"),
            "{call:?}: {failed:?}"
        );
        let before = count();
        wait_for("the sandbox to go on", || {
            (count() > before + 2).then_some(())
        });
        assert_eq!(
            place.sh(&id, "sha256sum -c --quiet sum && echo whole"),
            "whole"
        );
        assert_eq!(place.json(&["snapshots"]), snapshots, "after {call:?}");
        wait_for("what was half written to go", || {
            (entries() == stored).then_some(())
        });
    }
    disk.free();
    let copy = place.ok(&["snapshot", &id]);
    let copy = place.ok(&["create", "--from", &copy]);
    assert_eq!(
        place.sh(&copy, "sha256sum -c --quiet sum && echo whole"),
        "whole"
    );
    place.ok(&["pause", &id]);
    place.ok(&["resume", &id]);
    assert_eq!(
        place.sh(&id, "sha256sum -c --quiet sum && echo whole"),
        "whole"
    );
    place.ok(&["serve", "--stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}
