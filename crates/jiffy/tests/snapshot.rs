//! Tests for snapshots of sandboxes with their agent: retained, lost and separate state.

use crate::support::programs;
use jiffy_agent_client::ProcessSpec;
use jiffy_engine_api::{BootMode, SandboxSize};
use jiffy_engines::{Host, PreparedTemplate, Programs, SandboxSpec};
use jiffy_image::Home;
use jiffy_microvm_engine::{MemoryPolicy, MicroVm, SnapshotSpec};
use jiffy_proto::agent::ENVD_PORT;
use jiffy_proto::snapshot::AfterSnapshot;
use jiffy_snapshot::{Durability, SnapshotError, Store, VerifyResult};
use jiffy_test_attributes::jiffy_test;
use tempfile::TempDir;

/// Template and store of snapshots, without a daemon.
struct SnapshotFixture {
    prepared: PreparedTemplate,
    store: Store,
    _dir: TempDir,
}

fn fixture() -> SnapshotFixture {
    let directory = programs();
    let programs = Programs {
        vmm: jiffy_microvm_engine::Vmm::new(
            directory.join("jiffy-vmm"),
            nix::unistd::Uid::effective().is_root(),
        ),
        agent: directory.join("jiffy-agent"),
        gvisor: Ok(directory.join("jiffy-gvisor")),
        functions: Ok(directory.join("jiffy-functions")),
    };
    let home = Home::locate().unwrap();
    // Next to the data of the host, so that overlays become layers without copies. An overlay is
    // the file that receives the disk writes of a guest. A layer is the part of a disk that one
    // snapshot stores.
    let dir = tempfile::tempdir_in(home.run()).unwrap();
    let prepared = Host::new(home, programs)
        .prepare("base", &mut |_| ())
        .unwrap();
    let store = Store::open(dir.path()).unwrap();
    SnapshotFixture {
        prepared,
        store,
        _dir: dir,
    }
}

fn spec() -> SandboxSpec {
    SandboxSpec {
        size: SandboxSize {
            vcpus: 2,
            memory_mib: 512,
            disk_mib: 256,
        },
        ..SandboxSpec::default()
    }
}

/// Returns the parameters of the snapshot `id`. The guest resumes or stops afterwards, as `then`
/// specifies.
fn snapshot_spec(id: &str, then: AfterSnapshot) -> SnapshotSpec {
    SnapshotSpec {
        id: id.to_owned(),
        template: "base".to_owned(),
        then,
        durability: Durability::PageCache,
        max_bytes: None,
        working_set: false,
        disk_only: false,
    }
}

/// Runs a shell script, which must succeed. Returns its output.
async fn sh(vm: &MicroVm, script: &str) -> String {
    let agent = jiffy_engines::agent(vm);
    let process = agent
        .start(&ProcessSpec::new("/bin/sh", ["-c", script]))
        .await;
    let (status, out, err) = process.unwrap().output(1 << 20).await.unwrap();
    assert_eq!(
        status.exit_code,
        0,
        "{script}: {}",
        String::from_utf8_lossy(&err)
    );
    String::from_utf8(out).unwrap().trim_end().to_owned()
}

impl SnapshotFixture {
    async fn restore(&self, id: &str) -> MicroVm {
        let spec = spec();
        let vm = self
            .prepared
            .restore(&spec, &self.store, id, MemoryPolicy::Map);
        let vm = vm.await.unwrap();
        assert_eq!(vm.report().mode, BootMode::Snapshot);
        vm
    }
}

#[jiffy_test]
async fn restored_sandboxes_keep_everything_but_their_identity() {
    let fixture = fixture();
    let vm = fixture.prepared.boot(&spec()).await.unwrap();
    sh(&vm, "echo precious > $HOME/file; (while :; do echo x >> /tmp/alive; sleep 0.02; done) >/dev/null 2>&1 &").await;
    let (snapshot, report) = vm
        .snapshot(&fixture.store, &snapshot_spec("one", AfterSnapshot::Resume))
        .await
        .unwrap();
    assert_eq!(snapshot.manifest().parent, None);
    assert_eq!(snapshot.manifest().vcpus, 2);
    assert!(!snapshot.manifest().versions.agent.is_empty());
    assert!(report.stopped_us <= report.total_us, "{report:?}");

    let look = "cat $HOME/file; cat /proc/sys/kernel/hostname; head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid";
    let (a, b) = (fixture.restore("one").await, fixture.restore("one").await);
    let (from_a, from_b, from_parent) =
        (sh(&a, look).await, sh(&b, look).await, sh(&vm, look).await);
    let lines = |s: &str| s.lines().map(str::to_owned).collect::<Vec<_>>();
    let (from_a, from_b, from_parent) = (lines(&from_a), lines(&from_b), lines(&from_parent));
    assert_eq!(from_a[0], "precious");
    assert_eq!(from_b[0], "precious");
    for line in 1..from_a.len() {
        assert_ne!(from_a[line], from_b[line]);
        assert_ne!(from_a[line], from_parent[line]);
    }
    // The processes of a restored guest continue, its clock is correct, and its changes are
    // separate.
    let grown =
        "a=$(wc -c < /tmp/alive); sleep 0.5; b=$(wc -c < /tmp/alive); [ $b -gt $a ] && date +%s";
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let guest: i64 = sh(&a, grown).await.parse().unwrap();
    assert!((guest - now.unwrap().as_secs() as i64).abs() < 5);
    sh(&a, "echo mine > $HOME/file").await;
    assert_eq!(sh(&b, "cat $HOME/file").await, "precious");
    assert_eq!(sh(&vm, "cat $HOME/file").await, "precious");

    assert!(matches!(
        fixture.store.remove("one"),
        Err(SnapshotError::InUse(_))
    ));
    for vm in [vm, a, b] {
        vm.stop().await;
    }
    fixture.store.remove("one").unwrap();
}

#[jiffy_test]
async fn repeated_snapshots_make_a_lineage_to_roll_back_in() {
    let fixture = fixture();
    let mut vm = fixture.prepared.boot(&spec()).await.unwrap();
    for generation in 0..6 {
        sh(&vm, &format!("echo {generation} > $HOME/generation")).await;
        let then = if generation % 2 == 0 {
            AfterSnapshot::Resume
        } else {
            AfterSnapshot::Stop
        };
        let spec = snapshot_spec(&format!("g{generation}"), then);
        let (snapshot, _) = vm.snapshot(&fixture.store, &spec).await.unwrap();
        let parent = (generation > 0).then(|| format!("g{}", generation - 1));
        assert_eq!(snapshot.manifest().parent, parent);
        if then == AfterSnapshot::Stop {
            vm.ended().await;
            vm = fixture.restore(&spec.id).await;
        }
    }
    vm.stop().await;
    for generation in [0, 3, 5] {
        let vm = fixture.restore(&format!("g{generation}")).await;
        assert_eq!(
            sh(&vm, "cat $HOME/generation").await,
            generation.to_string()
        );
        vm.stop().await;
    }
    // A lineage contains a snapshot and all snapshots that it is based on, oldest first.
    let lineage = fixture.store.lineage("g5").unwrap();
    lineage.snapshots()[5].write_checksums().unwrap();
    let verdict = lineage.snapshots()[5].verify().unwrap();
    assert_eq!(verdict, VerifyResult::Intact);
    let error = fixture.store.remove("g2").unwrap_err();
    assert!(matches!(error, SnapshotError::HasChild { child, .. } if child == "g3"));
}

#[jiffy_test]
async fn a_paused_sandbox_answers_again_after_it_is_resumed() {
    let fixture = fixture();
    let vm = fixture.prepared.boot(&spec()).await.unwrap();
    for _ in 0..10 {
        vm.pause().await.unwrap();
        vm.resume().await.unwrap();
        assert_eq!(sh(&vm, "echo here").await, "here");
    }
    vm.stop().await;
}

#[jiffy_test]
async fn connections_closed_by_a_restore_do_not_accumulate_in_the_agent() {
    let fixture = fixture();
    let mut vm = fixture.prepared.boot(&spec()).await.unwrap();
    let mut open = Vec::new();
    for generation in 0..5 {
        open.push(sh(&vm, "sudo ls /proc/1/fd | wc -l").await);
        let spec = snapshot_spec(&format!("g{generation}"), AfterSnapshot::Stop);
        // The host's side keeps the stream open until the VM has exited.
        let connector = vm.connector();
        let held = connector.connect(ENVD_PORT).await.unwrap();
        assert_eq!(sh(&vm, "echo here").await, "here");
        vm.snapshot(&fixture.store, &spec).await.unwrap();
        vm.ended().await;
        drop(held);
        vm = fixture.restore(&spec.id).await;
    }
    // Compares the guests of the first and of the fourth restore.
    assert_eq!(open[1], open[4], "{open:?}");
    vm.stop().await;
}

#[jiffy_test]
async fn an_abandoned_snapshot_does_not_affect_the_next() {
    let fixture = fixture();
    let vm = fixture.prepared.boot(&spec()).await.unwrap();
    // The call is dropped directly after the request, and after several delays.
    for delay in [0, 1, 2, 4, 8, 16, 32] {
        sh(
            &vm,
            &format!("echo {delay} > $HOME/round; head -c 8000000 /dev/urandom > /dev/shm/x"),
        )
        .await;
        let given_up = snapshot_spec(&format!("g{delay}"), AfterSnapshot::Resume);
        let given_up = vm.snapshot(&fixture.store, &given_up);
        let _ = tokio::time::timeout(std::time::Duration::from_millis(delay), given_up).await;
        let id = format!("after{delay}");
        let next = snapshot_spec(&id, AfterSnapshot::Resume);
        vm.snapshot(&fixture.store, &next).await.unwrap();
        let restored = fixture.restore(&id).await;
        let sum = "cat $HOME/round; sha256sum < /dev/shm/x";
        assert_eq!(sh(&restored, sum).await, sh(&vm, sum).await);
        restored.stop().await;
    }
    vm.stop().await;
}

#[jiffy_test]
async fn a_failed_publication_of_a_snapshot_does_not_affect_the_next_snapshot() {
    let fixture = fixture();
    let vm = fixture.prepared.boot(&spec()).await.unwrap();
    for (then, id) in [(AfterSnapshot::Resume, "one"), (AfterSnapshot::Stop, "two")] {
        sh(&vm, &format!("echo {id} > $HOME/state")).await;
        sh(&vm, "head -c 100000000 /dev/urandom > /dev/shm/x").await;
        let place = fixture.store.root().join(id);
        // A snapshot is written to a directory `.draft...`, which is renamed at the end.
        let drafts = || {
            let names = std::fs::read_dir(fixture.store.root()).unwrap().flatten();
            names
                .filter(|n| n.file_name().to_string_lossy().starts_with(".draft"))
                .count()
        };
        let before = drafts();
        let spec = snapshot_spec(id, then);
        let taking = vm.snapshot(&fixture.store, &spec);
        // Create a file with the snapshot's name as soon as the snapshot is being written.
        let hinder = async {
            while drafts() == before {
                tokio::task::yield_now().await;
            }
            std::fs::create_dir_all(place.join("x")).unwrap();
        };
        let (taken, ()) = tokio::join!(taking, hinder);
        assert!(taken.unwrap_err().to_string().contains("already exists"));
        // The guest continues to run, even if it was to be stopped; the conflicting file remains.
        assert_eq!(sh(&vm, "cat $HOME/state").await, id);
        let next = snapshot_spec(&format!("{id}next"), AfterSnapshot::Resume);
        // The next snapshot is based on the unpublished one: it fails as long as the file exists.
        vm.snapshot(&fixture.store, &next).await.unwrap_err();
        std::fs::remove_dir_all(&place).unwrap();
        let (snapshot, _) = vm.snapshot(&fixture.store, &next).await.unwrap();
        assert_eq!(snapshot.manifest().parent.as_deref(), Some(id));
        let restored = fixture.restore(&next.id).await;
        let look = "cat $HOME/state; sha256sum < /dev/shm/x";
        assert_eq!(sh(&restored, look).await, sh(&vm, look).await);
        restored.stop().await;
        // Only the named snapshots remain.
        assert_eq!(drafts(), 0);
    }
    vm.stop().await;
}
