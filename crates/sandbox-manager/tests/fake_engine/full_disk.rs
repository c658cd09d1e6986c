//! Full disk: changes that have happened are recorded, and operations that need disk space fail.

use crate::fake;

use fake::{Bench, create_id};
use jiffy_sandbox_manager::{ErrorKind, SandboxState};
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use tempfile::TempDir;

/// File system of 32 MiB in memory, unmounted when dropped.
struct Small(TempDir);

impl Small {
    /// Mounts a file system of 32 MiB in memory. `None`, and a note that the test is skipped,
    /// without the required privileges.
    fn mount(test: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=32m,mode=700", "tmpfs"]);
        let mounted = mount.arg(dir.path()).output();
        if mounted.is_ok_and(|o| o.status.success()) {
            return Some(Self(dir));
        }
        eprintln!("SKIPPED {test}: a file system cannot be mounted");
        if let Some(log) = std::env::var_os("JIFFY_SKIP_LOG") {
            let mut log = File::options().append(true).create(true).open(log).unwrap();
            writeln!(log, "{test}: a file system cannot be mounted").unwrap();
        }
        None
    }

    fn filler(&self) -> PathBuf {
        self.0.path().join("filler")
    }

    /// Fills the file system except for `pages` pages.
    fn fill(&self, pages: u64) {
        let mut file = File::create(self.filler()).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
        let length = file.metadata().unwrap().len();
        file.set_len((length / 4096 - pages) * 4096).unwrap();
    }

    fn empty(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[tokio::test]
async fn a_full_disk_loses_no_acknowledged_state() {
    let Some(small) = Small::mount("a_full_disk_loses_no_acknowledged_state") else {
        return;
    };
    let bench = Bench::in_dir(tempfile::tempdir_in(small.0.path()).unwrap());
    let host = bench.open().await;
    let paused_id = create_id(&host).await;
    let running = create_id(&host).await;
    bench.world.write(&paused_id, "dream");
    // 16 pages are enough for the snapshot files, but not for more space of the journal. The
    // journal must manage with the space that it has reserved. The changes below fill the log of
    // the journal several times.
    small.fill(16);
    for _ in 0..5 {
        let paused = host.pause(&paused_id).await.unwrap();
        assert_eq!(*paused.state(), SandboxState::Paused);
        for _ in 0..60 {
            let temporary = create_id(&host).await;
            host.remove(&temporary).await.unwrap();
        }
        assert_eq!(
            *host.resume(&paused_id).await.unwrap().state(),
            SandboxState::Running
        );
    }
    host.pause(&paused_id).await.unwrap();
    small.empty();
    small.fill(0);
    let error = host.snapshot(&running, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Failed);
    assert!(error.to_string().contains("No space left"), "{error}");
    assert!(host.pause(&running).await.is_err());
    assert_eq!(*host.get(&running).unwrap().state(), SandboxState::Running);
    // Panics if the guest does not exist.
    bench.world.read(&running);
    host.kill(&running).await.unwrap();
    drop(host);
    // The next daemon starts on the full disk with the complete state.
    let host = bench.open().await;
    assert_eq!(*host.get(&paused_id).unwrap().state(), SandboxState::Paused);
    assert_eq!(*host.get(&running).unwrap().state(), SandboxState::Killed);
    host.remove(&running).await.unwrap();
    host.resume(&paused_id).await.unwrap();
    assert_eq!(bench.world.read(&paused_id), "dream");
    small.empty();
    host.snapshot(&paused_id, None).await.unwrap();
    let files = bench.file_names();
    let listed = host.snapshots().list(None).unwrap();
    assert!(listed.iter().all(|s| files.contains(s.id())));
}
