//! `jiffy run` does what its users expect of `docker run`, `timeout` and a shell.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use support::{call, call_with, guests};

#[test]
fn a_python_program_sees_the_guests_own_kernel() {
    if !guests("a_python_program_sees_the_guests_own_kernel") {
        return;
    }
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

#[test]
fn output_streams_and_the_exit_code_are_the_commands() {
    if !guests("output_streams_and_the_exit_code_are_the_commands") {
        return;
    }
    let done = call(&["run", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]);
    assert_eq!(
        (done.code, done.stdout.as_str()),
        (Some(3), "out\n"),
        "{done:?}"
    );
    assert_eq!(done.stderr, "err\n");
}

#[test]
fn a_command_that_is_not_there_is_127_and_one_that_cannot_run_126() {
    if !guests("a_command_that_is_not_there_is_127_and_one_that_cannot_run_126") {
        return;
    }
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

#[test]
fn a_command_killed_by_a_signal_is_128_and_its_number() {
    if !guests("a_command_killed_by_a_signal_is_128_and_its_number") {
        return;
    }
    assert_eq!(
        call(&["run", "--", "sh", "-c", "kill -TERM $$"]).code,
        Some(143)
    );
    assert_eq!(
        call(&["run", "--", "sh", "-c", "kill -SEGV $$"]).code,
        Some(139)
    );
}

#[test]
fn a_command_over_its_time_is_killed_and_124() {
    if !guests("a_command_over_its_time_is_killed_and_124") {
        return;
    }
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

#[test]
fn a_million_bytes_pass_through_standard_input_unharmed() {
    if !guests("a_million_bytes_pass_through_standard_input_unharmed") {
        return;
    }
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

#[test]
fn an_endless_input_ends_with_the_command() {
    if !guests("an_endless_input_ends_with_the_command") {
        return;
    }
    let input = b"y\n".repeat(4 << 20);
    let done = call_with(&["run", "-i", "--", "head", "-c", "1000000"], &input);
    assert_eq!(
        (done.code, done.stdout.len()),
        (Some(0), 1_000_000),
        "{}",
        done.stderr
    );
}

#[test]
fn without_interactive_standard_input_is_empty() {
    if !guests("without_interactive_standard_input_is_empty") {
        return;
    }
    let done = call_with(&["run", "--", "wc", "-c"], b"not for the guest");
    assert_eq!(done.stdout.trim(), "0", "{done:?}");
}

#[test]
fn environment_directory_and_user_are_as_asked() {
    if !guests("environment_directory_and_user_are_as_asked") {
        return;
    }
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

#[test]
fn a_missing_directory_or_user_is_told_by_name() {
    if !guests("a_missing_directory_or_user_is_told_by_name") {
        return;
    }
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

#[test]
fn size_is_what_was_asked_for() {
    if !guests("size_is_what_was_asked_for") {
        return;
    }
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

#[test]
fn what_one_run_writes_the_next_does_not_see() {
    if !guests("what_one_run_writes_the_next_does_not_see") {
        return;
    }
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

#[test]
fn two_guests_have_different_identities() {
    if !guests("two_guests_have_different_identities") {
        return;
    }
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

#[test]
fn the_guests_clock_is_the_hosts() {
    if !guests("the_guests_clock_is_the_hosts") {
        return;
    }
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

#[test]
fn json_holds_everything_about_the_run() {
    if !guests("json_holds_everything_about_the_run") {
        return;
    }
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

#[test]
fn output_of_any_size_arrives_whole() {
    if !guests("output_of_any_size_arrives_whole") {
        return;
    }
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
