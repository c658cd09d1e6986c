//! Tests that sandboxes stay consistent and leave no resources after many copies, rollbacks and
//! pauses.

use crate::support::remote::Remote;
use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Returns the number of rounds of a test, which a variable may override.
fn rounds(variable: &str, default: usize) -> usize {
    std::env::var(variable).map_or(default, |rounds| rounds.parse().unwrap())
}

/// Writes numbered records with checksums to memory and to a file on disk in an endless loop, with
/// a pause of the given number of seconds after each record.
const WRITER: &str = r#"
import hashlib, mmap, os, struct, sys, time
rest = float(sys.argv[1])
memory = mmap.mmap(-1, 4096 * 256)
disk = os.open('/home/user/records', os.O_CREAT | os.O_RDWR)
def record(n): return (lambda b: b + hashlib.sha256(b).digest())(struct.pack('<Q', n) * 100)
n = 0
while True:
    r = record(n); at = n % 256 * 4096
    memory[at:at + len(r)] = r
    os.pwrite(disk, r, at)
    n += 1
    if rest: time.sleep(rest)
    if n % 8 == 0:
        # The claim follows the write of the record to memory and disk.
        m = memory[at:at + len(r)]; d = os.pread(disk, len(r), at)
        if m != r or d != r: open('/home/user/broken', 'a').write(f'{n}\n')
        open('/home/user/claim.new', 'w').write(f'{n}\n'); os.rename('/home/user/claim.new', '/home/user/claim')
"#;

/// Checks that all records on disk are valid, and that the writer is running and has found no
/// error.
const VERIFY: &str = r#"
import hashlib, os, struct, sys, time
assert not os.path.exists('/home/user/broken'), 'the writer found a broken record'
claim = int(open('/home/user/claim').read())
file = os.open('/home/user/records', os.O_RDONLY)
data = os.pread(file, 1 << 20, 0)
newest = -1
for at in range(0, len(data), 4096):
    r = data[at:at + 832]
    if len(r) < 832: continue
    n = struct.unpack('<Q', r[:8])[0]
    good = r[:800] == struct.pack('<Q', n) * 100 and r[800:] == hashlib.sha256(r[:800]).digest()
    # Only the last record may be incomplete: its writer may be waiting for a processor.
    for _ in range(500):
        if good: break
        time.sleep(0.01)
        r = os.pread(file, 832, at); n = struct.unpack('<Q', r[:8])[0]
        good = r[:800] == struct.pack('<Q', n) * 100 and r[800:] == hashlib.sha256(r[:800]).digest()
    assert good, f'record at {at} is broken'
    assert n % 256 * 4096 == at
    newest = max(newest, n)
assert newest >= claim - 1, f'{newest} written, {claim} claimed'
for _ in range(1000):
    if int(open('/home/user/claim').read()) > claim: print('verified'); sys.exit()
    time.sleep(0.01)
sys.exit('the writer does not go on')
"#;

/// Starts [`WRITER`] with a pause of `rest` seconds after each record.
fn start_writer(test_home: &TestHome, id: &str, rest: f64) {
    let file = test_home.dir.path().join("writer.py");
    std::fs::write(&file, WRITER).unwrap();
    test_home.ok(&[
        "cp",
        file.to_str().unwrap(),
        &format!("{id}:/home/user/writer.py"),
    ]);
    std::fs::write(&file, VERIFY).unwrap();
    test_home.ok(&[
        "cp",
        file.to_str().unwrap(),
        &format!("{id}:/home/user/verify.py"),
    ]);
    let start = format!(
        "nohup python3 writer.py {rest} >writer.log 2>&1 & until test -e claim; do sleep 0.05; done"
    );
    test_home.sh(id, &start);
}

#[jiffy_test]
fn every_snapshot_of_a_writer_restores_to_a_state_that_verifies() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--cpus", "1"]);
    start_writer(&test_home, &id, 0.0);
    let mut delay = 1u64;
    for round in 0..rounds("JIFFY_SNAPSHOT_ROUNDS", 12) {
        // A delay of 0 to 30 ms, so that snapshots interrupt the writer at different positions.
        delay = delay
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(std::time::Duration::from_millis((delay >> 33) % 30));
        let snapshot = test_home.ok(&["snapshot", &id]);
        let child = test_home.ok(&["create", "--from", &snapshot]);
        assert_eq!(
            test_home.sh(&child, "python3 verify.py"),
            "verified",
            "round {round}"
        );
        test_home.ok(&["rm", &child]);
    }
    assert_eq!(test_home.sh(&id, "python3 verify.py"), "verified");
}

#[jiffy_test]
fn many_pauses_retain_files_and_processes_in_few_layers() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(
        &id,
        "nohup sh -c 'while :; do sleep 1; done' >/dev/null 2>&1 & echo $! > pid",
    );
    let rounds = rounds("JIFFY_PAUSES", 30);
    for round in 0..rounds {
        test_home.sh(&id, &format!("echo {round} >> rounds"));
        test_home.ok(&["pause", &id]);
        test_home.ok(&["resume", &id]);
    }
    assert_eq!(
        test_home.sh(
            &id,
            "wc -l < rounds; tail -1 rounds; kill -0 $(cat pid) && echo alive"
        ),
        format!("{rounds}\n{}\nalive", rounds - 1)
    );
    let layers = std::fs::read_dir(test_home.dir.path().join("snapshots"))
        .unwrap()
        .count();
    // The daemon merges snapshots: at most three per ten pauses remain.
    assert!(layers < 10 + rounds * 3 / 10, "{layers} snapshots on disk");
    test_home.ok(&["rm", &id]);
}

/// Returns the disk space of the snapshots in `test_home` and of removed files that `vmm` still has
/// open, in bytes.
fn snapshot_space(test_home: &TestHome, vmm: u32) -> u64 {
    let mut files = BTreeMap::new();
    let mut count = |path: &Path| {
        // Files may be created and removed while they are listed.
        if let Ok(file) = std::fs::metadata(path)
            && file.is_file()
        {
            files.insert((file.dev(), file.ino()), file.blocks() * 512);
        }
    };
    let snapshots = test_home.dir.path().join("snapshots");
    for directory in std::fs::read_dir(&snapshots).unwrap().flatten() {
        for file in std::fs::read_dir(directory.path()).into_iter().flatten() {
            count(&file.unwrap().path());
        }
    }
    for link in std::fs::read_dir(format!("/proc/{vmm}/fd"))
        .unwrap()
        .flatten()
    {
        let target = std::fs::read_link(link.path()).unwrap_or_default();
        if target.starts_with(&snapshots) {
            count(&link.path());
        }
    }
    files.values().sum()
}

#[jiffy_test]
fn a_sandbox_with_its_last_snapshot_uses_the_space_of_its_changes() {
    // With a key, the removal of a snapshot succeeds even if another snapshot is based on it.
    let remote = Remote::new(&[]);
    let test_home = &remote.test_home;
    let id = remote.ok(&["create", "--cpus", "1"]);
    start_writer(test_home, &id, 0.02);
    let first = remote.ok(&["snapshot", &id]);
    let vmm = *test_home.vmms().first().unwrap();
    let before = snapshot_space(test_home, vmm);
    let mut previous = first.clone();
    for round in 0..rounds("JIFFY_SNAPSHOTS_REMOVED", 20) {
        let write = "head -c 8000000 /dev/urandom > data; sha256sum data > sum; sync";
        test_home.sh(&id, write);
        let newest = remote.ok(&["snapshot", &id]);
        // The first snapshot remains.
        if round > 0 {
            remote.ok(&["rm", &previous]);
        }
        previous = newest;
    }
    // 26 MiB change in each round: at most three times that amount.
    let bound = before + (80 << 20);
    wait_for("the space of removed snapshots", || {
        (snapshot_space(test_home, vmm) < bound).then_some(())
    });
    // Each byte is charged once. The template's snapshot is shared and not charged.
    let snapshots = remote.json(&["snapshots"]);
    let charged = snapshots.as_array().unwrap().iter();
    let charged: u64 = charged.map(|s| s["bytes"].as_u64().unwrap()).sum();
    let on_disk = snapshot_space(test_home, vmm);
    assert!(charged < on_disk, "{charged} charged of {on_disk}");
    let check = "sha256sum -c sum && python3 verify.py";
    assert_eq!(test_home.sh(&id, check), "data: OK\nverified");

    // Memory and disk of all remaining snapshots are intact: below, in and above the merged
    // snapshots.
    let child = test_home.ok(&["create", "--from", &previous]);
    assert_eq!(test_home.sh(&child, check), "data: OK\nverified");
    test_home.ok(&["rm", &child]);
    test_home.ok(&["pause", &id]);
    test_home.kill_daemon();
    test_home.ok(&["resume", &id]);
    assert_eq!(test_home.sh(&id, check), "data: OK\nverified");
    test_home.ok(&["rollback", &id, &previous]);
    assert_eq!(test_home.sh(&id, check), "data: OK\nverified");
    test_home.ok(&["rollback", &id, &first]);
    assert_eq!(
        test_home.sh(&id, "ls data 2>/dev/null; python3 verify.py"),
        "verified"
    );
}

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .count()
}

fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn entries(path: &Path) -> usize {
    std::fs::read_dir(path).unwrap().count()
}

#[jiffy_test]
fn many_rollbacks_leak_nothing() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(&id, "echo kept > file");
    let snapshot = test_home.ok(&["snapshot", &id]);
    let rollback = || {
        test_home.sh(
            &id,
            "echo lost > file; head -c 4000000 /dev/urandom > /dev/shm/x; echo x > new",
        );
        test_home.ok(&["rollback", &id, &snapshot]);
        assert_eq!(
            test_home.sh(&id, "cat file; ls new 2>/dev/null; true"),
            "kept"
        );
    };
    for _ in 0..10 {
        rollback();
    }
    let daemon = test_home.daemon();
    let look = || {
        (
            open_files(daemon),
            crate::support::children(daemon).len(),
            entries(&test_home.dir.path().join("snapshots")),
        )
    };
    // A transition, such as a warm pool that is being filled, is not a stable state.
    let before = wait_for("descriptors and processes to be stable", || {
        let seen = look();
        (0..20)
            .all(|_| {
                std::thread::sleep(std::time::Duration::from_millis(100));
                look() == seen
            })
            .then_some(seen)
    });
    let memory = resident_kib(daemon);
    for _ in 0..rounds("JIFFY_ROLLBACKS", 15) {
        rollback();
    }
    // The warm pool may be changing.
    wait_for(
        "descriptors and processes to return to their initial state",
        || (look() == before).then_some(()),
    );
    let grown = resident_kib(daemon).saturating_sub(memory);
    assert!(grown < 4096, "the daemon grew by {grown} KiB");
}

#[jiffy_test]
fn forks_of_a_busy_guest_are_independent() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--cpus", "1", "--memory", "256MiB"]);
    let fork_count = rounds("JIFFY_FORKS", 12);
    // More writers without pauses would only compete for the processors of a small host.
    start_writer(&test_home, &id, 0.02);
    let mut children: Vec<String> = Vec::new();
    while children.len() < fork_count {
        let count = (fork_count - children.len()).min(20).to_string();
        let forked = test_home.ok(&["fork", &id, "-n", &count]);
        children.extend(forked.lines().map(str::to_owned));
    }
    assert_eq!(children.len(), fork_count);
    for (n, child) in children.iter().enumerate() {
        test_home.sh(
            child,
            &format!("echo {n} > mine; head -c 100000 /dev/urandom | sha256sum > sum"),
        );
    }
    let mut sums = std::collections::BTreeSet::new();
    for (n, child) in children.iter().enumerate() {
        let seen = test_home.sh(child, "cat mine; hostname; cat sum; python3 verify.py");
        let lines: Vec<&str> = seen.lines().collect();
        assert_eq!(
            (lines[0], lines[1], lines[3]),
            (n.to_string().as_str(), child.as_str(), "verified")
        );
        assert!(
            sums.insert(lines[2].to_owned()),
            "two children drew the same random bytes"
        );
    }
    assert_eq!(
        test_home.sh(&id, "ls mine 2>/dev/null; python3 verify.py"),
        "verified"
    );
    for child in &children {
        test_home.ok(&["rm", child]);
    }
}
