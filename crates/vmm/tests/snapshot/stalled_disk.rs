//! Disks on host storage that does not respond.
//!
//! A *fold* merges two adjacent layers of a snapshot. A *controller* is the process that drives a
//! VMM through its control socket.

use super::files::SnapshotTarget;
use super::guest_image::{guest, skip};
use super::test_vm::{LAST_RECORD, LOOPS, TestVm};
use jiffy_proto::snapshot::{
    AfterSnapshot, FileIdentity, FoldedLayers, MemorySource, SnapshotLayerFiles,
};
use jiffy_proto::vm::Request;
use std::fs::{File, OpenOptions};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// File system whose writes can be stalled.
struct StalledDisk {
    place: TempDir,
}

/// Runs a program. Returns whether it succeeded.
fn command(program: &str, words: &[&str]) -> bool {
    let done = Command::new(program).args(words).output();
    done.is_ok_and(|output| output.status.success())
}

impl StalledDisk {
    /// Mounts an ext4 file system from a file. `None` if that is not permitted.
    fn new() -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let (image, at) = (place.path().join("image"), place.path().join("at"));
        File::create(&image).unwrap().set_len(256 << 20).unwrap();
        std::fs::create_dir(&at).unwrap();
        let (image, at) = (image.to_str().unwrap(), at.to_str().unwrap());
        let mounted = command("mkfs.ext4", &["-q", image])
            && command("mount", &["-o", "loop,nodiscard", image, at]);
        mounted.then_some(Self { place })
    }

    /// Returns the mount point.
    fn at(&self) -> String {
        self.place.path().join("at").to_str().unwrap().to_owned()
    }

    /// Creates an overlay without a name on the file system.
    fn overlay(&self) -> File {
        let path = self.place.path().join("at/overlay");
        let mut options = OpenOptions::new();
        let overlay = options.read(true).write(true).create_new(true).open(&path);
        std::fs::remove_file(path).unwrap();
        overlay.unwrap()
    }

    /// Stalls all writes until `thaw`.
    fn freeze(&self) {
        assert!(command("fsfreeze", &["-f", &self.at()]));
    }

    fn thaw(&self) {
        command("fsfreeze", &["-u", &self.at()]);
    }
}

impl Drop for StalledDisk {
    fn drop(&mut self) {
        self.thaw();
        command("umount", &["-l", &self.at()]);
    }
}

/// Waits until the guest's writer continues (`thaw`) or stalls.
fn wait_for_writes(vm: &mut TestVm, thaw: bool) {
    let began = Instant::now();
    loop {
        let before = vm.status()[LAST_RECORD];
        thread::sleep(Duration::from_millis(100));
        if (vm.status()[LAST_RECORD] != before) == thaw {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "thaw: {thaw}");
    }
}

/// Returns the identities of files that belong to no layer of the VM.
fn files_of_no_layer(inode: u64) -> SnapshotLayerFiles {
    let memory = FileIdentity { device: 0, inode };
    SnapshotLayerFiles {
        memory,
        disks: vec![memory],
    }
}

#[test]
fn a_stalled_disk_blocks_no_other_device_and_loses_no_data() {
    let test = "a_stalled_disk_blocks_no_other_device_and_loses_no_data";
    let Some(guest) = guest(test) else { return };
    let Some(disk) = StalledDisk::new() else {
        return skip(test, "a file system cannot be mounted from a file");
    };
    let mut vm = TestVm::boot_on(disk.overlay(), guest, 2, 256, "");
    wait_for_writes(&mut vm, true);
    let place = tempfile::tempdir().unwrap();
    vm.detach(&place.path().join("s"));
    disk.freeze();
    wait_for_writes(&mut vm, false);
    // Streams into the guest, its processors and the control socket must still work.
    let before = vm.status();
    vm.pause();
    vm.resume();
    wait_for_writes(&mut vm, false);
    assert!(vm.status()[LOOPS] > before[LOOPS]);
    // A fold, which waits for the disk, is deferred and delays no later request.
    vm.send(&Request::FoldLayers(Box::new(FoldedLayers {
        lower: files_of_no_layer(1),
        upper: files_of_no_layer(2),
    })));
    // The next controller does not wait for the disk either.
    vm.disconnect();
    assert_eq!(vm.adopt(&place.path().join("s")), (true, None));
    assert!(vm.status()[LOOPS] > before[LOOPS]);
    // A snapshot waits for the request in flight.
    let target = SnapshotTarget::new();
    vm.request_snapshot(&target, AfterSnapshot::Resume);
    disk.thaw();
    let snapshot = vm.finish_snapshot(target).unwrap();
    wait_for_writes(&mut vm, true);
    vm.verify();
    TestVm::restore(snapshot, &vm.base(), MemorySource::Map).verify();
    vm.verify();
}
