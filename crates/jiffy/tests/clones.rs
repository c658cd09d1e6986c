//! Tests for hazards of cloned memory: identity, randomness, time and secrets of clones.

use crate::support::test_home::TestHome;
use crate::support::{jiffy, sandbox_http};
use jiffy_test_attributes::jiffy_test;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Creates `count` children.
fn fork(test_home: &TestHome, id: &str, count: usize) -> Vec<String> {
    let forked = test_home.ok(&["fork", id, "-n", &count.to_string()]);
    let children: Vec<String> = forked.lines().map(str::to_owned).collect();
    assert_eq!(children.len(), count);
    children
}

fn all_differ(texts: &[String]) -> bool {
    texts.iter().collect::<BTreeSet<_>>().len() == texts.len()
}

#[jiffy_test(engine = "each")]
fn clones_draw_different_random_bytes_from_the_first_byte_on() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    // Queries the kernel every millisecond and stores the answers, so that some are from directly
    // after the copy.
    test_home.sh(
        &id,
        "cat > draw.py <<'E'
import os, time
f = open('drawn', 'a')
while True: f.write(os.getrandom(32).hex() + '\\n'); f.flush(); time.sleep(0.001)
E
nohup python3 draw.py >/dev/null 2>&1 & until [ -s drawn ]; do sleep 0.01; done",
    );
    let before: usize = test_home.sh(&id, "wc -l < drawn").parse().unwrap();
    let children = fork(&test_home, &id, 2);
    let look = "head -c 4096 /dev/urandom | od -An -v -tx1; cat /proc/sys/kernel/random/uuid; python3 -c 'import uuid, random; \
        print(uuid.uuid4(), random.random())'";
    let seen: Vec<String> = [&id, &children[0], &children[1]]
        .iter()
        .map(|i| test_home.sh(i, look))
        .collect();
    for other in 1..3 {
        let same = seen[0]
            .lines()
            .zip(seen[other].lines())
            .filter(|(a, b)| a == b);
        assert_eq!(same.count(), 0, "{seen:?}");
    }
    let same = seen[1].lines().zip(seen[2].lines()).filter(|(a, b)| a == b);
    assert_eq!(same.count(), 0);
    // Random numbers drawn after the new identity differ as well. Some may be drawn earlier: both
    // copies run for some milliseconds until their agents have answered, and are not yet
    // accessible.
    let drawn: Vec<Vec<String>> = children
        .iter()
        .map(|c| {
            test_home
                .sh(c, "cat drawn")
                .lines()
                .map(str::to_owned)
                .collect()
        })
        .collect();
    // The last 20 numbers are from after the new identity.
    let last = |d: &Vec<String>| d[d.len() - 20..].to_vec();
    assert!(drawn.iter().all(|d| d.len() > before + 20));
    assert!(last(&drawn[0]).iter().all(|d| !drawn[1].contains(d)));
    assert!(last(&drawn[1]).iter().all(|d| !drawn[0].contains(d)));
}

#[jiffy_test(engine = "each")]
fn clones_have_names_and_ids_and_seeds_of_their_own() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(
        &id,
        "sudo mkdir -p /var/lib/systemd; head -c 512 /dev/zero | sudo tee /var/lib/systemd/random-seed >/dev/null",
    );
    // Lines: host name, machine id, boot id, digest of the seed, and two numbers of host entries.
    let look = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; sudo sha256sum < /var/lib/systemd/random-seed; \
        grep -c jiffy: /etc/hosts; getent hosts $(hostname) | wc -l";
    let parent = test_home.sh(&id, look);
    let children = fork(&test_home, &id, 3);
    let mut all = vec![parent.clone()];
    all.extend(children.iter().map(|c| test_home.sh(c, look)));
    assert_eq!(
        test_home.sh(&id, look),
        parent,
        "the parent keeps its identity"
    );
    for line in 0..4 {
        let of_all: Vec<String> = all
            .iter()
            .map(|t| t.lines().nth(line).unwrap().to_owned())
            .collect();
        assert!(all_differ(&of_all), "{of_all:?}");
    }
    for (n, child) in children.iter().enumerate() {
        let lines: Vec<&str> = all[n + 1].lines().collect();
        assert_eq!((lines[0], lines[4], lines[5]), (child.as_str(), "1", "1"));
        assert_eq!(lines[1].len(), 32);
        assert_eq!(
            lines[2].split('-').map(str::len).collect::<Vec<_>>(),
            [8, 4, 4, 4, 12]
        );
    }
}

#[jiffy_test(engine = "each")]
fn clones_of_a_guest_with_a_full_disk_receive_their_identity() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--disk", "64MiB"]);
    test_home.sh(
        &id,
        "for n in 1 2 3 4 5; do sudo sh -c \"cat /dev/zero > /fill$n\"; sync; done 2>/dev/null
        sudo sh -c 'cat /dev/zero > /run/fill' 2>/dev/null
        [ $(df --output=avail / | tail -1) = 0 ] && [ $(df --output=avail /run | tail -1) = 0 ] || { df / /run; exit 1; }",
    );
    let look = "hostname; cat /etc/machine-id; cat /run/jiffy/generation; getent hosts $(hostname) | wc -l; \
        grep -c '^127.0.0.1 localhost' /etc/hosts";
    let mut all = vec![test_home.sh(&id, look)];
    let children = fork(&test_home, &id, 2);
    all.extend(children.iter().map(|c| test_home.sh(c, look)));
    for line in 0..3 {
        let of_all: Vec<String> = all
            .iter()
            .map(|t| t.lines().nth(line).unwrap().to_owned())
            .collect();
        assert!(all_differ(&of_all), "{of_all:?}");
    }
    for text in &all {
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{all:?}");
        assert_eq!(
            (lines[1].len(), lines[3], lines[4]),
            (32, "1", "1"),
            "{all:?}"
        );
    }
}

#[jiffy_test(engine = "each")]
fn programs_detect_clones_and_rollbacks_by_the_vm_generation_id() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let read = |id: &str| {
        // Readable by every user, and always complete.
        let text = test_home.sh(
            id,
            "cat /run/jiffy/generation; stat -c %a /run/jiffy/generation",
        );
        let lines: Vec<&str> = text.lines().collect();
        let (name, word) = lines[0].split_once(' ').unwrap();
        assert_eq!((lines.len(), name, lines[1]), (2, id, "644"), "{text}");
        assert!(
            word.len() == 32 && word.bytes().all(|b| b.is_ascii_hexdigit()),
            "{text}"
        );
        word.to_owned()
    };
    // The documented method for programs: a generator that is reseeded when the line changes.
    test_home.sh(
        &id,
        "cat > serve.py <<'E'
import os, random, time
def generation(): return open('/run/jiffy/generation').read()
known, rng = generation(), random.Random(1)
while True:
    if known != generation(): known, rng = generation(), random.Random()
    open('new', 'w').write(f'{known.split()[0]} {rng.random()}'); os.rename('new', 'drawn'); time.sleep(0.01)
E
nohup python3 serve.py >serve.log 2>&1 & until [ -s drawn ]; do sleep 0.01; done",
    );
    let first = read(&id);
    let snapshot = test_home.ok(&["snapshot", &id]);
    assert_eq!(read(&id), first, "a snapshot has no effect on its sandbox");
    let mut words = vec![first];
    let children = fork(&test_home, &id, 2);
    words.extend(children.iter().map(|c| read(c)));
    let drawn: Vec<String> = children
        .iter()
        .map(|c| {
            test_home.sh(
                c,
                "until grep -q $(hostname) drawn; do sleep 0.01; done; cut -d' ' -f2 drawn",
            )
        })
        .collect();
    assert!(all_differ(&drawn), "{drawn:?}");
    words.push(read(&test_home.ok(&["create", "--from", &snapshot])));
    for _ in 0..2 {
        test_home.ok(&["rollback", &id, &snapshot]);
        words.push(read(&id));
    }
    test_home.ok(&["pause", &id]);
    test_home.ok(&["resume", &id]);
    words.push(read(&id));
    assert!(all_differ(&words), "{words:?}");
}

#[jiffy_test(
    not_on_gvisor = "gVisor does not support MADV_WIPEONFORK, and reports this to programs"
)]
fn wipe_on_fork_memory_is_wiped_in_clones_and_retained_in_the_original() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    // Libraries detect a copy by a byte that they set in memory with MADV_WIPEONFORK (18). The byte
    // of a copy is 0.
    test_home.sh(
        &id,
        "cat > mark.py <<'E'
import mmap, os, time
mark = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
mark.madvise(18)
mark[0] = 1
while True:
    with open('new', 'w') as f: f.write('kept' if mark[0] else 'wiped')
    os.rename('new', 'seen')
    time.sleep(0.005)
E
nohup python3 mark.py >/dev/null 2>&1 & until [ -s seen ]; do sleep 0.01; done",
    );
    let snapshot = test_home.ok(&["snapshot", &id]);
    // Observes values written from now on.
    let look = "sleep 0.02; rm -f seen; until [ -s seen ]; do sleep 0.01; done; cat seen";
    let copies = [
        fork(&test_home, &id, 1).remove(0),
        test_home.ok(&["create", "--from", &snapshot]),
    ];
    for copy in &copies {
        assert_eq!(test_home.sh(copy, look), "wiped");
    }
    assert_eq!(test_home.sh(&id, look), "kept");
    test_home.ok(&["rollback", &id, &snapshot]);
    assert_eq!(test_home.sh(&id, look), "wiped", "it was rolled back");
}

/// Returns the nanoseconds since 1970.
fn now() -> i128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i128::try_from(since.as_nanos()).unwrap()
}

/// Returns a lower bound of the error of the guest's wall clock, and the time of the guest's
/// monotonic clock, both in nanoseconds.
fn clocks(test_home: &TestHome, id: &str) -> (i128, i128) {
    let program = "import sys, time
for line in sys.stdin: print(time.time_ns(), time.monotonic_ns(), flush=True)";
    let mut child = jiffy(&["exec", "-i", id, "--", "python3", "-c", program])
        .env("JIFFY_HOME", test_home.dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ask = child.stdin.take().unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap());
    let mut error = 0;
    let mut monotonic = 0;
    for round in 0..20 {
        let before = now();
        ask.write_all(b"\n").unwrap();
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        let after = now();
        let (wall, since_boot) = line.trim().split_once(' ').unwrap();
        let wall: i128 = wall.parse().unwrap();
        monotonic = since_boot.parse().unwrap();
        // The first answer includes the start of the interpreter; later answers take about a
        // millisecond.
        if round > 0 {
            error = error.max(before - wall).max(wall - after);
        }
    }
    drop(ask);
    assert!(child.wait().unwrap().success());
    (error, monotonic)
}

#[jiffy_test(engine = "each")]
fn the_wall_clock_is_right_and_the_monotonic_clock_goes_on_after_every_kind_of_resume() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(
        &id,
        "cat > watch.py <<'E'
import time
last = time.monotonic_ns()
while True:
    now = time.monotonic_ns()
    if now < last: open('back', 'a').write(f'{last} {now}\\n')
    last = now
    time.sleep(0.0005)
E
nohup python3 watch.py >/dev/null 2>&1 &",
    );
    let (_, at_snapshot) = clocks(&test_home, &id);
    let snapshot = test_home.ok(&["snapshot", &id]);
    // The sandbox that was resumed or created last, of which the next way may make a fork.
    let last = std::cell::Cell::new(id.clone());
    let ways: [(&str, &dyn Fn() -> String); 4] = [
        ("resume", &|| {
            test_home.ok(&["pause", &id]);
            // The guest's clock stands still for this time. The test does not wait for an event.
            std::thread::sleep(Duration::from_secs(2));
            test_home.ok(&["resume", &id])
        }),
        ("create", &|| test_home.ok(&["create", "--from", &snapshot])),
        ("fork", &|| fork(&test_home, &last.take(), 1).remove(0)),
        ("rollback", &|| test_home.ok(&["rollback", &id, &snapshot])),
    ];
    for (way, wake) in ways {
        // The measured error includes the transfer time of a message from the host to the guest. On
        // a busy host some messages take long, but not all of them. The error must be below 5 ms.
        let mut errors = Vec::new();
        while errors.last().is_none_or(|e| *e >= 5_000_000) {
            assert!(errors.len() < 12, "{way}: wrong by {errors:?} ns");
            let woken = wake();
            let (error, monotonic) = clocks(&test_home, &woken);
            errors.push(error);
            assert!(
                monotonic > at_snapshot,
                "{way}: {monotonic} after {at_snapshot}"
            );
            // The monotonic clock never stepped back, and one watcher runs.
            let seen = test_home.sh(&woken, "cat back 2>/dev/null; pgrep -fc '[w]atch.py'");
            assert_eq!(seen, "1", "{way}");
            last.set(woken);
        }
    }
}

#[jiffy_test(engine = "each")]
fn a_clone_with_its_own_environment_has_none_of_its_parents() {
    let test_home = TestHome::new();
    let id = test_home.ok(&[
        "create",
        "-e",
        "TOKEN=parents-secret",
        "-e",
        "SHARED=parents",
    ]);
    assert_eq!(
        test_home.sh(&id, "echo $TOKEN $SHARED"),
        "parents-secret parents"
    );
    let snapshot = test_home.ok(&["snapshot", &id]);
    let clone = test_home.ok(&["create", "--from", &snapshot, "-e", "SHARED=clones"]);
    assert_eq!(test_home.sh(&clone, "echo $TOKEN.$SHARED"), ".clones");
    // The parent's value is neither in a process of the guest, nor in a file from which new
    // processes receive their environment.
    let look = "env; sudo cat /proc/self/environ /proc/1/environ | tr '\\0' '\\n'; sudo grep -rs parents-secret /run /etc /tmp; true";
    assert!(!test_home.sh(&clone, look).contains("parents-secret"));
    assert!(test_home.sh(&id, "env").contains("parents-secret"));
}

#[jiffy_test(engine = "each")]
fn agents_of_clone_and_parent_reject_each_others_tokens() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let snapshot = test_home.ok(&["snapshot", &id]);
    let family = [
        id.clone(),
        fork(&test_home, &id, 1).remove(0),
        test_home.ok(&["create", "--from", &snapshot]),
    ];
    let tokens: Vec<String> = family
        .iter()
        .map(|id| sandbox_http::token(&test_home, id))
        .collect();
    assert!(all_differ(&tokens), "{tokens:?}");
    for (to, id) in family.iter().enumerate() {
        assert_eq!(
            sandbox_http::read(&test_home, id, "/etc/os-release", None).0,
            401
        );
        for (from, token) in tokens.iter().enumerate() {
            let (status, name) = sandbox_http::read(&test_home, id, "/etc/os-release", Some(token));
            assert_eq!(status, if from == to { 200 } else { 401 }, "{from} {to}");
            assert!(from != to || !name.is_empty());
        }
    }
}
