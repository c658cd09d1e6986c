//! A disk of the host that does not answer.

use super::guest::{guest, skip};
use super::vm::{Target, Vm};
use jiffy_proto::snapshot::{AfterSnapshot, MemorySource};
use std::fs::{File, OpenOptions};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A file system whose writes can be made to wait.
struct StuckDisk {
    place: TempDir,
}

fn command(program: &str, words: &[&str]) -> bool {
    let done = Command::new(program).args(words).output();
    done.is_ok_and(|output| output.status.success())
}

impl StuckDisk {
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

    fn at(&self) -> String {
        self.place.path().join("at").to_str().unwrap().to_owned()
    }

    fn overlay(&self) -> File {
        let path = self.place.path().join("at/overlay");
        let mut options = OpenOptions::new();
        let overlay = options.read(true).write(true).create_new(true).open(&path);
        std::fs::remove_file(path).unwrap();
        overlay.unwrap()
    }

    fn freeze(&self) {
        assert!(command("fsfreeze", &["-f", &self.at()]));
    }

    fn go_on(&self) {
        command("fsfreeze", &["-u", &self.at()]);
    }
}

impl Drop for StuckDisk {
    fn drop(&mut self) {
        self.go_on();
        command("umount", &["-l", &self.at()]);
    }
}

/// Waits until the guest's writer stands still, or goes on.
fn wait_for_writes(vm: &mut Vm, go_on: bool) {
    let began = Instant::now();
    loop {
        let before = vm.status()[1];
        thread::sleep(Duration::from_millis(100));
        if (vm.status()[1] != before) == go_on {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "go on: {go_on}");
    }
}

#[test]
fn a_disk_that_does_not_answer_holds_up_nothing_else_and_loses_nothing() {
    let test = "a_disk_that_does_not_answer_holds_up_nothing_else_and_loses_nothing";
    let Some(guest) = guest(test) else { return };
    let Some(disk) = StuckDisk::new() else {
        return skip(test, "a file system cannot be mounted from a file");
    };
    let mut vm = Vm::boot_on(disk.overlay(), guest, 2, 256, "");
    wait_for_writes(&mut vm, true);
    disk.freeze();
    wait_for_writes(&mut vm, false);
    // Streams into the guest, its processors and the control socket.
    let before = vm.status();
    vm.pause();
    vm.resume();
    wait_for_writes(&mut vm, false);
    assert!(vm.status()[2] > before[2]);
    // A snapshot waits for the request that is under way.
    let target = Target::new();
    vm.ask_snapshot(&target, AfterSnapshot::Resume);
    disk.go_on();
    let snapshot = vm.snapshotted(target).unwrap();
    wait_for_writes(&mut vm, true);
    vm.verify();
    Vm::restore(snapshot, &vm.base(), MemorySource::Map).verify();
    vm.verify();
}
