//! Volumes that sandboxes mount.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.
//!
//! The *server* of a volume is the process that performs file operations of all sandboxes with this
//! volume.

use crate::support::store::TestStore;
use crate::support::test_home::TestHome;
use crate::support::{alive, network_probe, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Uses of files that need more than reads and writes of whole files.
const PROGRAM: &str = "cd /data/d && python3 - <<'END'
import mmap, os, sqlite3
with open('m', 'w+b') as f:
    f.truncate(1 << 20)
    with mmap.mmap(f.fileno(), 0) as m:
        m[5:10] = b'bytes'
        m.flush()
assert open('m', 'rb').read()[5:10] == b'bytes'
db = sqlite3.connect('s.db')
db.execute('CREATE TABLE t (n)')
db.executemany('INSERT INTO t VALUES (?)', [(n,) for n in range(1000)])
db.commit()
assert db.execute('SELECT sum(n) FROM t').fetchone() == (499500,)
f = open('gone', 'w+')
f.write('still there')
f.flush()
os.unlink('gone')
f.seek(0)
assert f.read() == 'still there'
os.rename('f', 'g')
END
sync";

/// Requests a sandbox with a volume. Returns status and body.
fn request(test_home: &TestHome, mount: &Value) -> (u16, String) {
    let body = json!({ "templateID": "base", "timeout": 600, "volumeMounts": [mount] });
    network_probe::call(test_home, "POST", "/v2/sandboxes", &body)
}

/// Creates a sandbox with a volume at `/data`.
fn create(test_home: &TestHome, volume: &str, read_only: bool) -> String {
    let rights = if read_only { ":ro" } else { "" };
    test_home.ok(&["create", "-v", &format!("{volume}:/data{rights}")])
}

/// Holds a file open that has no name, until a file `continue` exists. Then writes the result
/// of a read: the content, or the number of the error.
const HOLDER: &str = "cat > /tmp/holder.py <<'END'
import os, time
fd = os.open('/data/nameless', os.O_RDWR | os.O_CREAT)
os.write(fd, b'own content')
os.unlink('/data/nameless')
open('/data/holds', 'w').close()
while not os.path.exists('/data/continue'):
    time.sleep(0.02)
time.sleep(1.1)
try:
    result = os.pread(fd, 100, 0).decode()
except OSError as e:
    result = f'error {e.errno}'
with open('/data/result.new', 'w') as f:
    f.write(result)
os.rename('/data/result.new', '/data/result')
END
nohup python3 /tmp/holder.py >/tmp/holder.log 2>&1 &";

/// Holds a lock of each family, until a file `unlock` exists. The last one is a lock of an open
/// file description (OFD).
const LOCKER: &str = "cat > /tmp/locker.py <<'END'
import fcntl, os, struct, time
with open('/data/locked', 'w') as f, open('/data/ofd', 'w') as o:
    def ofd(kind):
        fcntl.fcntl(o, fcntl.F_OFD_SETLK, struct.pack('hhqqi', kind, 0, 5, 10, 0))
    fcntl.flock(f, fcntl.LOCK_EX)
    fcntl.lockf(f, fcntl.LOCK_EX, 10, 5)
    ofd(fcntl.F_WRLCK)
    f.write('content of the holder')
    f.flush()
    open('/data/has-locks', 'w').close()
    while not os.path.exists('/data/unlock'):
        time.sleep(0.02)
    ofd(fcntl.F_UNLCK)
END
nohup python3 /tmp/locker.py >/tmp/locker.log 2>&1 &";

/// Prints whether a shared lock is available: for the whole file (`flock`), for byte 14, which is
/// the last byte that [`LOCKER`] locks, and for byte 15. Locks of open file descriptions are
/// requested for the same bytes of the other file. `held` is EAGAIN, and `lost` is EIO.
const LOCKS: &str = "python3 - <<'END'
import fcntl, struct
f, o = open('/data/locked'), open('/data/ofd')
def ofd(start):
    # The end of the process does not end such a lock.
    for kind in fcntl.F_RDLCK, fcntl.F_UNLCK:
        fcntl.fcntl(o, fcntl.F_OFD_SETLK, struct.pack('hhqqi', kind, 0, start, 1, 0))
def free(lock):
    try:
        lock()
        return 'free'
    except OSError as e:
        return {11: 'held', 5: 'lost'}.get(e.errno, e.errno)
print(free(lambda: fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)),
      free(lambda: fcntl.lockf(f, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 14)),
      free(lambda: fcntl.lockf(f, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 15)),
      free(lambda: ofd(14)), free(lambda: ofd(15)))
END";
/// Output of [`LOCKS`] while [`LOCKER`] has its locks, and without them.
const HELD: &str = "held held free held free";
const FREE: &str = "free free free free free";

/// Writes numbered files, and records the number of each file after its `fsync`. An operation that
/// fails because the server ended is repeated.
const WRITER: &str = "cat > /tmp/writer.py <<'END'
import os
def write(n):
    with open('/data/new', 'w') as f:
        f.write(str(n) * 1000)
        f.flush()
        os.fsync(f.fileno())
    os.rename('/data/new', f'/data/{n}')
n = 0
while True:
    try:
        write(n)
    except OSError as e:
        print(n, e, flush=True)
        continue
    with open('/tmp/written.new', 'w') as f:
        f.write(str(n + 1))
    os.rename('/tmp/written.new', '/tmp/written')
    n += 1
END
nohup python3 /tmp/writer.py >/tmp/writer.log 2>&1 &";

/// Returns the server of the only volume of a data directory.
fn server(test_home: &TestHome) -> Option<u32> {
    let own = test_home.dir.path().join("volumes").display().to_string();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = processes.filter_map(|process| {
        let command = std::fs::read(process.path().join("cmdline")).ok()?;
        let command = String::from_utf8_lossy(&command).into_owned();
        let is_server = command.contains("\0--as-volume-server\0") && command.contains(&own);
        let pid = process.file_name().to_str()?.parse().ok()?;
        (is_server && alive(pid)).then_some(pid)
    });
    pids.next()
}

fn kill_process(pid: u32) {
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL).unwrap();
    wait_for("the process to exit", || (!alive(pid)).then_some(()));
}

/// Asserts that a directory of a volume has a state that [`WRITER`] has left, with one of these
/// numbers of complete files.
fn assert_state_of_writer(test_home: &TestHome, from: &str, counts: RangeInclusive<usize>) {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy");
    test_home.ok(&["volume", "cp", from, copy.to_str().unwrap()]);
    let entries = std::fs::read_dir(&copy).unwrap().flatten();
    let read = |entry: std::fs::DirEntry| {
        let content = std::fs::read_to_string(entry.path()).unwrap();
        (entry.file_name().into_string().unwrap(), content)
    };
    let mut files: BTreeMap<String, String> = entries.map(read).collect();
    // The next file is empty or complete before it receives its name.
    let next = files.remove("new");
    assert!(
        counts.contains(&files.len()),
        "{} of {counts:?}",
        files.len()
    );
    for n in 0..files.len() {
        let content = files.get(&n.to_string());
        assert_eq!(content, Some(&n.to_string().repeat(1000)), "{n}");
    }
    let complete = files.len().to_string().repeat(1000);
    assert!(next.is_none_or(|next| next.is_empty() || next == complete));
}

#[jiffy_test(engine = "microvm")]
fn a_volume_is_shared_by_sandboxes_and_continues_through_pause_fork_and_rollback() {
    let test_home = TestHome::new();
    let volume = test_home.ok(&["volume", "create", "shared", "--size", "16M"]);
    let a = create(&test_home, "shared", false);
    // A volume is not mounted at a path that is no directory.
    let mount = json!({ "name": "shared", "path": "/etc/passwd" });
    let (status, text) = request(&test_home, &mount);
    assert!(status == 400 && text.contains("/etc/passwd"), "{text}");
    let b = create(&test_home, &volume, true);
    let sh = |id: &str, script: &str| test_home.sh(id, script);
    let made = "cd /data && mkdir d && echo one > d/f && ln -s /etc/passwd link && mkfifo p";
    sh(&a, made);
    let seen = "cat /data/d/f; readlink /data/link; stat -c %F /data/p";
    assert_eq!(sh(&b, seen), "one\n/etc/passwd\nfifo");
    let denied = "sudo mount -o remount,rw /data 2>&1; touch /data/x 2>&1 || true";
    let denied = sh(&b, denied);
    assert!(denied.contains("Read-only file system"), "{denied}");
    sh(&a, PROGRAM);
    // The quota holds for guests.
    let full = "head -c 20M /dev/zero 2>&1 > /data/large; rm /data/large; df -m /data | tail -1";
    let full = sh(&a, full);
    let is_full = full.contains("quota exceeded") && full.contains(" 16 ");
    assert!(is_full, "{full}");
    // A program that has a file open continues after a pause, and in a fork and a rollback.
    let writer = "nohup sh -c 'exec 3>>/data/log; while :; do echo x >&3; sleep 0.05; done' \
        >/dev/null 2>&1 & echo $!";
    let pid = sh(&a, writer);
    let lines = |id: &str| sh(id, "wc -l < /data/log").parse::<usize>().unwrap();
    wait_for("lines", || (lines(&a) > 3).then_some(()));
    sh(&a, HOLDER);
    wait_for("the holder", || {
        (sh(&b, "ls /data").contains("holds")).then_some(())
    });
    // Locks exclude the other sandbox. A wait ends with a signal.
    sh(&a, "touch /data/locked /data/ofd");
    assert_eq!(sh(&b, LOCKS), FREE);
    assert_eq!(sh(&b, "cat /data/locked"), "");
    sh(&a, LOCKER);
    wait_for("the locks", || (sh(&b, LOCKS) == HELD).then_some(()));
    let interrupted = "timeout 0.2 flock -s /data/locked true; echo $?";
    // The exit code of `timeout` after its signal.
    assert_eq!(sh(&b, interrupted), "124");
    test_home.ok(&["pause", &a]);
    // A pause ends the locks, and a resume requests them again.
    assert_eq!(sh(&b, LOCKS), FREE);
    let before = lines(&b);
    test_home.ok(&["resume", &a]);
    assert_eq!(sh(&b, LOCKS), HELD);
    // A fork has lost the locks, which the parent keeps. It cannot use the file.
    let child = test_home.ok(&["fork", &a, "-n", "1"]);
    assert_eq!(sh(&b, LOCKS), HELD);
    let unusable = "cat /data/locked 2>&1 >/dev/null || true";
    assert_eq!(
        sh(&child, unusable),
        "cat: /data/locked: Input/output error"
    );
    assert_eq!(sh(&a, "cat /data/locked"), "content of the holder");
    test_home.ok(&["kill", &child]);
    sh(&a, "(sleep 0.3; touch /data/unlock) >/dev/null 2>&1 &");
    let waited = "timeout 20 flock -s /data/locked cat /data/locked";
    assert_eq!(sh(&b, waited), "content of the holder");
    assert_eq!(sh(&b, LOCKS), FREE);
    // Numbers of files are not reused: the holder never reads one of these files.
    sh(
        &a,
        "cd /data && for n in 1 2 3 4 5; do echo other > other$n; done; touch continue",
    );
    let result = wait_for("the holder's result", || {
        let result = sh(&b, "cat /data/result 2>/dev/null || true");
        (!result.is_empty()).then_some(result)
    });
    // Error 116 is ESTALE: the volume no longer has the file.
    let is_own = result == "own content" || result == "error 116";
    assert!(is_own, "{result}");
    let resumed = || (lines(&b) > before + 3).then_some(());
    wait_for("lines after a resume", resumed);
    let child = test_home.ok(&["fork", &a, "-n", "1"]);
    sh(&a, &format!("kill {pid}"));
    let before = lines(&b);
    let forked = || (lines(&b) > before + 3).then_some(());
    wait_for("lines of a fork", forked);
    sh(&child, &format!("kill {pid}; echo child > /data/child"));
    assert_eq!(sh(&a, "cat /data/child"), "child");
    let snapshot = test_home.ok(&["snapshot", &a]);
    sh(&a, "echo later > /data/later");
    test_home.ok(&["rollback", &a, &snapshot]);
    // A rollback does not change the volume.
    assert_eq!(sh(&a, "cat /data/later"), "later");
    // `a`, `b` and the child use it.
    let refused = test_home.call(&["volume", "rm", "shared"]);
    let refused = refused.stderr;
    assert!(
        refused.contains("is mounted in sandboxes (3: "),
        "{refused}"
    );
    for id in [&a, &b, &child] {
        test_home.ok(&["kill", id]);
    }
    test_home.ok(&["volume", "rm", "shared"]);
    wait_for("the server to exit", || {
        server(&test_home).is_none().then_some(())
    });
}

#[jiffy_test(engine = "microvm")]
fn the_death_of_server_daemon_or_vmm_loses_no_written_file_of_a_volume() {
    let test_home = TestHome::new();
    let store = TestStore::new();
    store.start(&test_home);
    test_home.ok(&["volume", "create", "data"]);
    let reader = create(&test_home, "data", true);
    let writer = create(&test_home, "data", false);
    test_home.sh(&writer, WRITER);
    let written = || {
        let count = test_home.sh(&writer, "cat /tmp/written 2>/dev/null || echo 0");
        count.parse::<usize>().unwrap()
    };
    let continues = |what: &str| {
        let before = written();
        wait_for(what, || (written() > before + 3).then_some(()))
    };
    continues("the first files");
    let before = written();
    let snapshot = test_home.ok(&["volume", "snapshot", "data"]);
    let after = written();
    test_home.ok(&["volume", "restore", &snapshot, "copy"]);
    assert_state_of_writer(&test_home, "copy:/", before..=after + 1);
    let locks = || test_home.sh(&reader, LOCKS);
    test_home.sh(&writer, "touch /data/locked /data/ofd");
    test_home.sh(&writer, LOCKER);
    wait_for("the locks", || (locks() == HELD).then_some(()));
    kill_process(server(&test_home).unwrap());
    continues("files after the death of the server");
    // The guest has requested its locks again.
    assert_eq!(locks(), HELD);
    test_home.kill_daemon();
    // The next daemon adopts the sandboxes, whose server still runs.
    let server_of_both = server(&test_home).unwrap();
    continues("files after the death of the daemon");
    assert_eq!(server(&test_home), Some(server_of_both));
    // Kill the server and the daemon.
    test_home.kill_daemon();
    kill_process(server_of_both);
    continues("files after the death of both");
    let count = written();
    let path = format!("/sandboxes/{writer}/process");
    let (status, process) = network_probe::call(&test_home, "GET", &path, &Value::Null);
    assert_eq!(status, 200, "{process}");
    let process: Value = serde_json::from_str(&process).unwrap();
    kill_process(process["pid"].as_u64().unwrap().try_into().unwrap());
    let check = format!(
        "for n in $(seq 0 {}); do [ $(tr -d '\\n' < /data/$n | wc -c) = $((1000 * ${{#n}})) ] && \
         [ $(head -c ${{#n}} /data/$n) = $n ] || echo lost $n; done",
        count - 1
    );
    assert_eq!(test_home.sh(&reader, &check), "");
}
