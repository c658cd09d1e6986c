//! Tests that `jiffy run` behaves like `docker run`, `timeout` and a shell.

use crate::support::{call, call_with, children, finish, jiffy, programs, read_until, wait_for};
use jiffy_test_attributes::jiffy_test;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

#[jiffy_test]
fn a_python_program_sees_the_guests_own_kernel() {
    let done = call(&[
        "run",
        "--",
        "python3",
        "-c",
        "import platform; print(platform.release())",
    ]);
    assert_eq!(done.code, Some(0), "{done:?}");
    let host = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert!(done.stdout.contains("-jiffy"), "{done:?}");
    assert_ne!(done.stdout.trim(), host.trim());
}

#[jiffy_test]
fn output_streams_and_the_exit_code_are_the_commands() {
    let done = call(&["run", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]);
    assert_eq!(
        (done.code, done.stdout.as_str()),
        (Some(3), "out\n"),
        "{done:?}"
    );
    assert_eq!(done.stderr, "err\n");
}

#[jiffy_test]
fn a_missing_command_exits_with_127_and_a_non_executable_one_with_126() {
    let done = call(&["run", "--", "no-such-command"]);
    assert_eq!(done.code, Some(127), "{done:?}");
    assert!(
        done.stderr.contains("no-such-command") && done.stderr.contains("not found"),
        "{done:?}"
    );
    let done = call(&["run", "--", "/etc/passwd"]);
    assert_eq!(done.code, Some(126), "{done:?}");
    assert!(done.stderr.contains("/etc/passwd"), "{done:?}");
}

#[jiffy_test]
fn a_command_killed_by_a_signal_is_128_and_its_number() {
    assert_eq!(
        call(&["run", "--", "sh", "-c", "kill -TERM $$"]).code,
        Some(143)
    );
    assert_eq!(
        call(&["run", "--", "sh", "-c", "kill -SEGV $$"]).code,
        Some(139)
    );
}

#[jiffy_test]
fn a_timed_out_command_is_killed_and_exits_with_124() {
    let done = call(&[
        "run",
        "--timeout",
        "1s",
        "--",
        "sh",
        "-c",
        "echo begun; sleep 600",
    ]);
    assert_eq!(
        (done.code, done.stdout.as_str()),
        (Some(124), "begun\n"),
        "{done:?}"
    );
    assert!(done.stderr.contains("timed out"), "{done:?}");
}

#[jiffy_test]
fn a_million_bytes_pass_through_standard_input_unharmed() {
    let input: Vec<u8> = (0..1_000_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let done = call_with(&["run", "-i", "--", "sha256sum"], &input);
    let here = sha256(&input);
    assert_eq!(
        done.stdout.split_whitespace().next(),
        Some(here.as_str()),
        "{done:?}"
    );
}

fn sha256(bytes: &[u8]) -> String {
    use std::io::Write;
    let mut child = std::process::Command::new("sha256sum")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    let text = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    text.split_whitespace().next().unwrap().to_owned()
}

#[jiffy_test]
fn an_endless_input_ends_with_the_command() {
    let input = b"y\n".repeat(4 << 20);
    let done = call_with(&["run", "-i", "--", "head", "-c", "1000000"], &input);
    assert_eq!(
        (done.code, done.stdout.len()),
        (Some(0), 1_000_000),
        "{}",
        done.stderr
    );
}

#[jiffy_test]
fn without_interactive_standard_input_is_empty() {
    let done = call_with(&["run", "--", "wc", "-c"], b"not for the guest");
    assert_eq!(done.stdout.trim(), "0", "{done:?}");
}

#[jiffy_test]
fn environment_directory_and_user_are_as_requested() {
    let script = "echo $A/$B; pwd; id -un";
    let done = call(&[
        "run", "-e", "A=1 2", "-e", "B=x=y", "-w", "/tmp", "-u", "root", "--", "sh", "-c", script,
    ]);
    assert_eq!(done.stdout, "1 2/x=y\n/tmp\nroot\n", "{done:?}");
    let done = call(&[
        "run",
        "--",
        "sh",
        "-c",
        "pwd; id -un; sudo -n id -un 2>&1; echo $HOME",
    ]);
    assert_eq!(
        done.stdout, "/home/user\nuser\nroot\n/home/user\n",
        "{done:?}"
    );
}

#[jiffy_test]
fn a_missing_directory_or_user_is_named() {
    let done = call(&["run", "-w", "/no/such/dir", "--", "true"]);
    assert!(
        done.code == Some(125) && done.stderr.contains("/no/such/dir"),
        "{done:?}"
    );
    let done = call(&["run", "-u", "nosuchuser", "--", "true"]);
    assert!(
        done.code == Some(125) && done.stderr.contains("nosuchuser"),
        "{done:?}"
    );
}

#[jiffy_test]
fn the_guest_has_the_requested_size() {
    let script = "nproc; awk '/MemTotal/{print int($2/1024)}' /proc/meminfo; df -m --output=size / | tail -1";
    let done = call(&[
        "run", "--cpus", "4", "--memory", "1GiB", "--disk", "2GiB", "--", "sh", "-c", script,
    ]);
    let numbers: Vec<u64> = done
        .stdout
        .split_whitespace()
        .map(|n| n.parse().unwrap())
        .collect();
    assert_eq!(numbers[0], 4, "{done:?}");
    assert!((900..=1024).contains(&numbers[1]), "{done:?}");
    assert!((1800..=2048).contains(&numbers[2]), "{done:?}");
}

#[jiffy_test]
fn writes_of_one_run_are_not_in_the_next() {
    let script = "test -e /etc/mark && echo seen; echo x > /etc/mark; dd if=/dev/zero of=/big bs=1M count=64 2>/dev/null; sync; ls /big";
    for _ in 0..2 {
        let done = call(&["run", "-u", "root", "--", "sh", "-c", script]);
        assert_eq!(
            (done.code, done.stdout.as_str()),
            (Some(0), "/big\n"),
            "{done:?}"
        );
    }
}

#[jiffy_test]
fn two_guests_have_different_identities() {
    let script = "cat /etc/machine-id /proc/sys/kernel/random/boot_id; hostname; head -c 16 /dev/urandom | base64";
    let all: Vec<Vec<String>> = (0..2)
        .map(|_| {
            call(&["run", "--", "sh", "-c", script])
                .stdout
                .lines()
                .map(str::to_owned)
                .collect()
        })
        .collect();
    assert_eq!(all[0].len(), 4, "{all:?}");
    for (a, b) in all[0].iter().zip(&all[1]) {
        assert_ne!(a, b);
    }
}

#[jiffy_test]
fn the_guests_clock_is_the_hosts() {
    let now = || {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_secs_f64()
    };
    let before = now();
    let done = call(&["run", "--", "date", "+%s.%N"]);
    let guest: f64 = done.stdout.trim().parse().unwrap();
    assert!(
        before - 0.005 <= guest && guest <= now() + 0.005,
        "{before} {guest}"
    );
}

#[jiffy_test]
fn json_holds_everything_about_the_run() {
    let done = call(&[
        "run",
        "--json",
        "--",
        "sh",
        "-c",
        "echo out; echo err >&2; exit 7",
    ]);
    assert_eq!(done.code, Some(7), "{done:?}");
    let report: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(report["exit_code"], 7);
    assert_eq!(report["stdout"], "out\n");
    assert_eq!(report["stderr"], "err\n");
    assert_eq!(report["boot_mode"], "cold");
    assert!(
        report["boot_ms"].as_f64().unwrap() > 1.0 && report["exec_ms"].as_f64().unwrap() > 0.0,
        "{report}"
    );
}

#[jiffy_test]
fn output_of_any_size_arrives_whole() {
    for bytes in [0usize, 1, 32 * 1024, 65_537, 20_000_000] {
        let script = format!("head -c {bytes} /dev/zero | tr '\\0' x");
        let done = call(&["run", "--", "sh", "-c", &script]);
        assert_eq!(
            (done.code, done.stdout.len()),
            (Some(0), bytes),
            "{}",
            done.stderr
        );
    }
}

#[jiffy_test(engine = "gvisor")]
fn on_gvisor_streams_exit_code_and_boot_report_are_the_same() {
    let script = "uname -r; tr a-z A-Z; echo err >&2; exit 3";
    let words = ["run", "--engine", "gvisor", "-i", "--", "sh", "-c", script];
    let done = call_with(&words, b"input");
    assert_eq!(done.code, Some(3), "{done:?}");
    assert_eq!(done.stderr, "err\n");
    let (kernel, rest) = done.stdout.split_once('\n').unwrap();
    assert!(kernel.ends_with("-gvisor") && rest == "INPUT", "{done:?}");
    let done = call(&["run", "--engine", "gvisor", "--json", "--", "true"]);
    let report: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(
        (&report["exit_code"], &report["boot_mode"]),
        (&0.into(), &"cold".into())
    );
    assert!(report["boot_ms"].as_f64().unwrap() > 1.0, "{report}");
}

#[jiffy_test(engine = "gvisor")]
fn on_gvisor_a_command_not_found_and_one_over_its_time_have_their_codes() {
    let done = call(&["run", "--engine", "gvisor", "--", "no-such-command"]);
    assert_eq!(done.code, Some(127), "{done:?}");
    let words = ["run", "--engine", "gvisor", "--timeout", "1s", "--"];
    let done = call(&[&words[..], &["sleep", "600"]].concat());
    assert_eq!(done.code, Some(124), "{done:?}");
}

/// Returns the directory that a running `jiffy run` created for gVisor.
fn gvisor_directory(jiffy: &Child) -> PathBuf {
    wait_for("the helper for gVisor", || {
        children(jiffy.id()).into_iter().find_map(|pid| {
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
            let mut words = line.split('\0').skip(1);
            (words.next()? == "serve-brief").then(|| words.next().map(PathBuf::from))?
        })
    })
}

/// Returns the number of processes whose command lines contain a directory.
fn processes_of(directory: &Path) -> usize {
    let name = directory.to_str().unwrap();
    let lines = fs::read_dir("/proc").unwrap().flatten();
    lines
        .filter_map(|entry| fs::read_to_string(entry.path().join("cmdline")).ok())
        .filter(|line| line.contains(name))
        .count()
}

/// Returns the existing control groups of the sandboxes in a gVisor directory. A group has the name
/// of its sandbox.
fn groups_of(sandboxes: &[OsString]) -> Vec<PathBuf> {
    let trees = fs::read_dir("/sys/fs/cgroup").unwrap().flatten();
    let trees = trees.map(|tree| tree.path().join("jiffy-gvisor"));
    trees
        .chain([PathBuf::from("/sys/fs/cgroup/jiffy-gvisor")])
        .flat_map(|tree| sandboxes.iter().map(move |id| tree.join(id)))
        .filter(|group| group.exists())
        .collect()
}

#[jiffy_test(engine = "gvisor")]
fn a_run_on_gvisor_leaves_no_resources_however_it_exits() {
    // The run ends by completion, by a signal, and by SIGKILL. Then both signals end it during the
    // start.
    for (signal, up) in [
        (None, true),
        (Some("-INT"), true),
        (Some("-KILL"), true),
        (Some("-INT"), false),
        (Some("-KILL"), false),
    ] {
        let script = match signal {
            Some(_) => "echo up; sleep 600",
            None => "echo up; sleep 0.2",
        };
        let mut run = jiffy(&["run", "--engine", "gvisor", "--", "sh", "-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let directory = gvisor_directory(&run);
        if up {
            read_until(run.stdout.as_mut().unwrap(), "up");
            // The helper, and the process that isolates the sandbox.
            assert!(processes_of(&directory) > 1);
        }
        let inside = fs::read_dir(&directory).into_iter().flatten().flatten();
        let sandboxes: Vec<OsString> = inside.map(|entry| entry.file_name()).collect();
        if let Some(signal) = signal {
            let pid = run.id().to_string();
            let sent = Command::new("kill").args([signal, &pid]).status().unwrap();
            assert!(sent.success());
        }
        let done = finish(run);
        let code = match signal {
            None => Some(0),
            Some("-INT") => Some(130),
            Some(_) => None,
        };
        assert_eq!(done.code, code, "{signal:?} {done:?}");
        // A run that was terminated has stopped everything by now. After SIGKILL, the helper does
        // this.
        if signal != Some("-KILL") {
            assert!(!directory.exists() && processes_of(&directory) == 0);
        }
        wait_for("all processes to exit", || {
            let removed = !directory.exists() && processes_of(&directory) == 0;
            (removed && groups_of(&sandboxes).is_empty()).then_some(())
        });
    }
}

#[jiffy_test(engine = "gvisor")]
fn a_host_without_kvm_runs_commands_on_gvisor() {
    // Replaces the device for this command only.
    let hidden = "[ ! -e /dev/kvm ] || mount --bind /dev/null /dev/kvm; exec \"$@\"";
    let run = |helper: PathBuf| {
        let mut command = Command::new("unshare");
        command
            .args(["-m", "sh", "-c", hidden, "sh"])
            .arg(programs().join("jiffy"))
            .args(["run", "--", "uname", "-r"])
            .env("JIFFY_VMM", programs().join("jiffy-vmm"))
            .env("JIFFY_AGENT", programs().join("jiffy-agent"))
            .env("JIFFY_GVISOR", helper)
            .env_remove("JIFFY_ENGINE")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        finish(command.spawn().unwrap())
    };
    let done = run(programs().join("jiffy-gvisor"));
    assert!(done.stdout.ends_with("-gvisor\n"), "{done:?}");
    // Without gVisor as well, the message names the remedy.
    let done = run(PathBuf::from("/no/such/helper"));
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(
        done.stderr.contains("/dev/kvm") && done.stderr.contains("jiffy-gvisor"),
        "{done:?}"
    );
}
