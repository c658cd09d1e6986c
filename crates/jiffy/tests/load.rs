//! Tests that guests under load produce correct results, alone and concurrently.

use crate::support::test_home::TestHome;
use crate::support::{call, call_with, finish, jiffy, skip};
use jiffy_test_attributes::jiffy_test;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the built stress programs as a tar archive.
fn torture_archive() -> Vec<u8> {
    let out = tempfile::tempdir().unwrap();
    let status = Command::new("make")
        .arg("-s")
        .arg("-C")
        .arg(repository().join("tests/guest"))
        .arg(format!("OUT={}", out.path().display()))
        .status()
        .unwrap();
    assert!(status.success());
    let tar = Command::new("tar")
        .arg("-C")
        .arg(out.path())
        .args(["-c", "."])
        .output()
        .unwrap();
    assert!(tar.status.success());
    tar.stdout
}

#[jiffy_test]
fn twenty_guests_at_once_work() {
    let children: Vec<_> = (0..20)
        .map(|i| {
            let script =
                format!("sum=0; for n in $(seq 1000); do sum=$((sum+n*{i})); done; echo $sum");
            jiffy(&[
                "run", "--cpus", "1", "--memory", "256MiB", "--", "bash", "-c", &script,
            ])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
        })
        .collect();
    for (i, child) in children.into_iter().enumerate() {
        let done = finish(child);
        assert_eq!(
            (done.code, done.stdout.trim()),
            // 1 + ... + 1,000 is 500,500.
            (Some(0), (500_500 * i).to_string().as_str()),
            "{}",
            done.stderr
        );
    }
}

#[jiffy_test]
fn the_torture_programs_find_nothing_wrong_in_a_guest() {
    let seconds = std::env::var("JIFFY_TORTURE_SECONDS").unwrap_or_else(|_| "1".to_owned());
    let script = "mkdir /tmp/t && cd /tmp/t && tar x && for p in $(find . -type f -perm -1 ! -name init | sort); do $p $0 || echo \"$p: exit $?\"; done";
    let done = call_with(
        &[
            "run", "-i", "-u", "root", "--cpus", "2", "--memory", "1GiB", "--", "sh", "-c", script,
            &seconds,
        ],
        &torture_archive(),
    );
    assert_eq!(done.code, Some(0), "{done:?}");
    // Each program prints a line that starts with `ok`.
    let ok = done.stdout.lines().filter(|l| l.starts_with("ok ")).count();
    assert!(
        ok >= 8 && !done.stdout.contains("FAIL") && !done.stdout.contains(": exit"),
        "{done:?}"
    );
}

#[jiffy_test]
fn load_on_two_cpus_computes_correct_results() {
    let seconds = std::env::var("JIFFY_LOAD_SECONDS").unwrap_or_else(|_| "4".to_owned());
    let program = r#"
import hashlib, multiprocessing as mp, os, sys, time, tempfile
def work(seed):
    end = time.monotonic() + float(sys.argv[1]); rounds = 0
    data = bytes((i * seed) & 255 for i in range(1 << 16))
    want = hashlib.sha256(data * 16).hexdigest()
    while time.monotonic() < end:
        assert hashlib.sha256(data * 16).hexdigest() == want
        with tempfile.NamedTemporaryFile() as f:
            f.write(data * 16); f.flush(); os.fsync(f.fileno()); f.seek(0)
            assert hashlib.sha256(f.read()).hexdigest() == want
        assert sum(range(10000)) == 49995000
        rounds += 1
    return rounds
with mp.Pool(4) as pool:
    rounds = pool.map(work, [3, 5, 7, 11])
print('rounds', min(rounds) > 0)
"#;
    let done = call(&[
        "run", "--cpus", "2", "--", "python3", "-c", program, &seconds,
    ]);
    assert_eq!(
        (done.code, done.stdout.trim()),
        (Some(0), "rounds True"),
        "{done:?}"
    );
}

#[jiffy_test]
fn many_processes_start_and_end() {
    let number = std::env::var("JIFFY_PROCESSES").unwrap_or_else(|_| "300".to_owned());
    let script = "n=0; for i in $(seq $0); do /bin/true && n=$((n+1)); done; echo $n; ps -e -o stat= | grep -c Z";
    let done = call(&["run", "--cpus", "2", "--", "bash", "-c", script, &number]);
    assert_eq!(done.stdout, format!("{number}\n0\n"), "{done:?}");
}

#[jiffy_test]
fn a_parallel_compile_gives_the_right_program() {
    let recipe = repository().join("tests/templates/compiler");
    let built = call(&["template", "build", recipe.to_str().unwrap()]);
    if built.code != Some(0) && !nix::unistd::geteuid().is_root() {
        return skip("building its template requires root");
    }
    assert_eq!(built.code, Some(0), "{built:?}");
    let script = r#"set -e; mkdir p && cd p
        for i in $(seq 40); do
            printf 'int f%d(int x){int s=0;for(int i=0;i<=x;i++)s+=i*%d;return s;}\n' $i $i > f$i.c
        done
        { echo '#include <stdio.h>'; for i in $(seq 40); do echo "int f$i(int);"; done; echo 'int main(void){long s=0;'
          for i in $(seq 40); do echo "s+=f$i(100);"; done; echo 'printf("%ld\n",s);return 0;}'; } > main.c
        printf 'O=$(patsubst %%.c,%%.o,$(wildcard *.c))\nprog: $(O)\n\tcc -o $@ $^\n%%.o: %%.c\n\tcc -O2 -c -o $@ $<\n' > Makefile
        make -s -j4 && ./prog"#;
    let done = call(&[
        "run",
        "--template",
        "compiler",
        "--memory",
        "1GiB",
        "--",
        "bash",
        "-c",
        script,
    ]);
    // 5050 * (1 + ... + 40)
    assert_eq!(
        (done.code, done.stdout.trim()),
        (Some(0), "4141000"),
        "{done:?}"
    );
}

#[jiffy_test]
fn concurrent_sandbox_lifecycles_succeed_and_leave_no_resources() {
    let home = TestHome::new();
    home.ok(&["daemon", "start", "--no-listen", "--warm-pool", "0"]);
    let report = home.json(&["bench", "stress", "-n", "12", "-c", "4", "-w", "2"]);
    let series = report["series"].as_array().unwrap();
    let of = |name: &str| series.iter().find(|s| s["name"] == name).unwrap();
    // In percent.
    assert_eq!(of("lives that succeeded")["p50"], 100.0);
    assert_eq!(of("resume, c=4")["samples"].as_array().unwrap().len(), 12);
    assert_eq!(home.ok(&["ls", "--quiet"]), "");
}
