//! Tests for `jiffy run` with a running daemon: its warm pool, its network, and the removal of
//! sandboxes after the run.

use crate::support::network_probe::call;
use crate::support::test_home::TestHome;
use crate::support::{engine, finish, jiffy, read_until, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

/// Starts a run in the background with piped outputs.
fn start(test_home: &TestHome, args: &[&str]) -> Child {
    jiffy(&[&["run"], args].concat())
        .env("JIFFY_HOME", test_home.dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until the daemon lists no sandbox, including killed ones.
fn wait_until_forgotten(test_home: &TestHome) {
    wait_for("the sandbox to be removed", || {
        let all = test_home.json(&["ls", "--all"]);
        all.as_array().unwrap().is_empty().then_some(())
    });
}

/// Kills all sandboxes and stops the daemon.
fn end(test_home: &TestHome, mut daemon: Child) {
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

#[jiffy_test(engine = "each")]
fn a_run_uses_the_warm_pool_and_exits_like_its_command() {
    let test_home = TestHome::new();
    let daemon = test_home.serve(&["--warm-pool", "1"]);
    let report = wait_for("a run from the pool", || {
        let done = test_home.call(&["run", "--json", "--", "sh", "-c", "echo out; exit 3"]);
        assert_eq!(done.code, Some(3), "{done:?}");
        let report: Value = serde_json::from_str(&done.stdout).unwrap();
        (report["boot_mode"] == "warm-pool").then_some(report)
    });
    assert_eq!(report["stdout"], "out\n");
    assert!(report["boot_ms"].as_f64().unwrap() > 0.0, "{report}");
    wait_until_forgotten(&test_home);
    let script = "echo out; echo err >&2; kill -TERM $$";
    let done = test_home.call(&["run", "--rm", "--", "sh", "-c", script]);
    let streams = (done.stdout.as_str(), done.stderr.as_str());
    assert_eq!((done.code, streams), (Some(143), ("out\n", "err\n")));
    assert_eq!(
        test_home.call(&["run", "--", "no-such-command"]).code,
        Some(127)
    );
    let done = test_home.call(&["run", "--timeout", "1s", "--", "sleep", "600"]);
    assert_eq!(done.code, Some(124), "{done:?}");
    // The command reports a lost guest.
    let mut run = start(
        &test_home,
        &["--name", "victim", "--", "sh", "-c", "echo up; sleep 600"],
    );
    read_until(run.stdout.as_mut().unwrap(), "up");
    assert_eq!(test_home.sh("victim", "echo inside"), "inside");
    // Sandboxes of earlier runs may still be terminating.
    let listed = test_home.json(&["ls", "--filter", "name=victim"]);
    let id = listed[0]["id"].as_str().unwrap();
    let process = call(
        &test_home,
        "GET",
        &format!("/sandboxes/{id}/process"),
        &Value::Null,
    )
    .1;
    let process: Value = serde_json::from_str(&process).unwrap();
    let vmm = process["pid"].as_i64().unwrap().try_into().unwrap();
    kill(Pid::from_raw(vmm), Signal::SIGKILL).unwrap();
    let done = finish(run);
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(done.stderr.contains("is lost"), "{done:?}");
    wait_until_forgotten(&test_home);
    // A signal during the command is forwarded to the command.
    let mut run = start(
        &test_home,
        &[
            "--",
            "sh",
            "-c",
            "trap 'echo caught; exit 7' INT; echo up; while :; do sleep 0.1; done",
        ],
    );
    read_until(run.stdout.as_mut().unwrap(), "up");
    kill(Pid::from_raw(run.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    let done = finish(run);
    assert_eq!(
        (done.code, done.stdout.trim()),
        (Some(7), "caught"),
        "{done:?}"
    );
    // A port of this host is forwarded to the guest during the command.
    let server = "import socket; s = socket.create_server(('127.0.0.1', 8000)); print('up', flush=True); s.accept()[0].sendall(b'from the guest')";
    let mut run = start(&test_home, &["-p", ":8000", "--", "python3", "-c", server]);
    // The first line of standard error contains the address on this host.
    let mut announcement = String::new();
    BufReader::new(run.stderr.as_mut().unwrap())
        .read_line(&mut announcement)
        .unwrap();
    let address = announcement
        .trim()
        .strip_prefix("jiffy: ")
        .unwrap()
        .split(' ')
        .next();
    read_until(run.stdout.as_mut().unwrap(), "up");
    let mut received = String::new();
    let mut stream = TcpStream::connect(address.unwrap()).unwrap();
    stream.read_to_string(&mut received).unwrap();
    assert_eq!(received, "from the guest");
    assert_eq!(finish(run).code, Some(0));
    wait_until_forgotten(&test_home);
    end(&test_home, daemon);
}

/// Maximum number of page faults of a VMM during its guest's first command. A guest that has not
/// run a command before has 140 to 300 page faults.
const MAX_COMMAND_FAULTS: u64 = 100;

/// Returns the page faults of the VMM of a sandbox so far.
fn faults(test_home: &TestHome, id: &str) -> u64 {
    let path = format!("/sandboxes/{id}/process");
    let (status, process) = call(test_home, "GET", &path, &Value::Null);
    assert_eq!(status, 200, "{process}");
    let process: Value = serde_json::from_str(&process).unwrap();
    let stat = fs::read_to_string(format!("/proc/{}/stat", process["pid"])).unwrap();
    // `minflt` is the tenth field (proc_pid_stat(5)). Two fields precede the end of the name.
    let (_, fields) = stat.rsplit_once(')').unwrap();
    fields.split_whitespace().nth(7).unwrap().parse().unwrap()
}

#[jiffy_test]
fn a_warm_pool_sandbox_retains_only_memory_of_its_warm_up() {
    let test_home = TestHome::new();
    let daemon = test_home.serve(&["--warm-pool", "2"]);
    let first_command = |id: &str| {
        let before = faults(&test_home, id);
        test_home.ok(&["exec", id, "--", "true"]);
        faults(&test_home, id) - before
    };
    let restored = test_home.ok(&["create"]);
    let restored_faults = first_command(&restored);
    assert!(
        restored_faults <= MAX_COMMAND_FAULTS,
        "{restored_faults} faults"
    );
    let pool = || call(&test_home, "GET", "/pools", &Value::Null).1;
    wait_for("two sandboxes in the pool", || {
        pool().contains("\"ready\":2").then_some(())
    });
    let pooled = [(); 2].map(|()| test_home.ok(&["create"]));
    for id in &pooled {
        let record = test_home.json(&["inspect", id]);
        assert!(record.to_string().contains("\"warm-pool\""), "{record}");
        let pooled_faults = first_command(id);
        assert!(
            pooled_faults <= MAX_COMMAND_FAULTS,
            "{pooled_faults} faults"
        );
    }
    let look = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; cat /etc/hosts; \
        ps -eo comm=; env; ls -A /tmp ~";
    let seen = pooled.each_ref().map(|id| test_home.sh(id, look));
    for (id, seen) in pooled.iter().zip(&seen) {
        assert_eq!(seen.lines().next(), Some(id.as_str()));
        // The host name of a guest is `waiting` during its warm-up.
        assert!(!seen.contains("waiting"), "{seen}");
        assert_eq!(seen.matches("127.0.1.1").count(), 1, "{seen}");
    }
    let ids = seen.each_ref().map(|seen| {
        let ids: Vec<&str> = seen.lines().skip(1).take(2).collect();
        assert!(ids.iter().all(|id| id.len() >= 32), "{seen}");
        ids
    });
    assert!(ids[0][0] != ids[1][0] && ids[0][1] != ids[1][1], "{ids:?}");
    end(&test_home, daemon);
}

#[jiffy_test(engine = "each")]
fn a_run_that_is_killed_leaves_no_sandbox() {
    let test_home = TestHome::new();
    let daemon = test_home.serve(&["--warm-pool", "0"]);
    let mut run = start(&test_home, &["--", "sh", "-c", "echo up; sleep 600"]);
    read_until(run.stdout.as_mut().unwrap(), "up");
    assert_eq!(test_home.vmms().len(), 1);
    run.kill().unwrap();
    run.wait().unwrap();
    wait_until_forgotten(&test_home);
    assert!(test_home.vmms().is_empty());
    // If the daemon is killed as well, the sandbox remains for at most a minute.
    let mut run = start(&test_home, &["--", "sh", "-c", "echo up; sleep 600"]);
    read_until(run.stdout.as_mut().unwrap(), "up");
    test_home.kill_daemon();
    drop(daemon);
    let done = finish(run);
    assert_eq!(done.code, Some(125), "{done:?}");
    // The command starts another daemon.
    let all = test_home.json(&["ls"]);
    let deadline = all[0]["deadline_ms"].as_u64().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    assert!(u128::from(deadline) <= now.as_millis() + 60_000, "{all}");
}

#[jiffy_test(engine = "each")]
fn a_volume_is_copied_back_as_the_command_left_it_and_nothing_else_is_written() {
    let test_home = TestHome::new();
    let daemon = test_home.serve(&["--warm-pool", "0"]);
    let dir = tempfile::tempdir().unwrap();
    let (work, outside) = (dir.path().join("work"), dir.path().join("outside"));
    fs::create_dir_all(work.join("sub")).unwrap();
    fs::create_dir(&outside).unwrap();
    for (name, text) in [
        ("work/kept", "kept"),
        ("work/sub/gone", "gone"),
        ("outside/x", "mine"),
        ("input", "in"),
    ] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let text = |path: &Path| fs::read_to_string(path).unwrap();
    let volume = format!("{}:/work", work.display());
    let input = format!("{}:/etc/input:ro", dir.path().join("input").display());
    // A link out of the volume, through which a second run then writes.
    let script = format!(
        "cat kept /etc/input; echo new > new; rm sub/gone; ln -s {} way; echo x >> /etc/input",
        outside.display()
    );
    let args = [
        "run", "-v", &volume, "-v", &input, "-w", "/work", "-u", "root", "--", "sh", "-c",
    ];
    let done = test_home.call(&[&args[..], &[script.as_str()]].concat());
    assert_eq!(
        (done.code, done.stdout.as_str()),
        (Some(0), "keptin"),
        "{done:?}"
    );
    assert_eq!(text(&work.join("new")), "new\n");
    assert_eq!(text(&dir.path().join("input")), "in");
    assert!(!work.join("sub/gone").exists());
    assert_eq!(fs::read_link(work.join("way")).unwrap(), outside);
    // A directory in the guest replaces the link of the first run.
    let script = "rm way; mkdir way; echo theirs > way/x; echo theirs > kept; exit 4";
    // The copy must not follow this link of the host either.
    symlink(&outside, work.join("other")).unwrap();
    let done = test_home.call(&[&args[..], &[script]].concat());
    assert_eq!(done.code, Some(4), "{done:?}");
    assert_eq!(
        (
            text(&work.join("way/x")).as_str(),
            text(&work.join("kept")).as_str()
        ),
        ("theirs\n", "theirs\n")
    );
    assert_eq!(text(&outside.join("x")), "mine");
    // A volume that exceeds its limits is reported, and changes no files on the host.
    let script = "echo other > kept; truncate -s 1T huge";
    let done = test_home.call(&[&args[..], &[script]].concat());
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(done.stderr.contains("/work back to"), "{done:?}");
    assert_eq!(text(&work.join("kept")), "theirs\n");
    // A missing directory is rejected before the start of a guest.
    let done = test_home.call(&["run", "-v", "/no/such/directory:/work", "--", "true"]);
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(done.stderr.contains("/no/such/directory"), "{done:?}");
    end(&test_home, daemon);
}

#[jiffy_test(engine = "each")]
fn logs_name_the_process_that_was_killed_for_memory() {
    let test_home = TestHome::new();
    let daemon = test_home.serve(&["--warm-pool", "0"]);
    let id = test_home.ok(&["create", "--memory", "256MiB"]);
    let done = test_home.call(&["exec", &id, "--", "tail", "/dev/zero"]);
    assert_eq!(done.code, Some(137), "{done:?}");
    // The end of the line, because a console may deliver a line in parts.
    let logs = wait_for("the log line", || {
        let logs = test_home.ok(&["logs", &id]);
        logs.contains("had none left").then_some(logs)
    });
    assert!(logs.contains("out of memory"), "{logs}");
    assert!(logs.contains("(tail)"), "{logs}");
    assert!(logs.contains(" MiB) had none left"), "{logs}");
    if !engine::is_gvisor() {
        assert!(logs.contains("the kernel killed process"), "{logs}");
    }
    // The last console output and the reason of a terminated guest are retained.
    let vmm = *test_home.vmms().first().unwrap();
    kill(Pid::from_raw(vmm.try_into().unwrap()), Signal::SIGKILL).unwrap();
    let logs = wait_for("the reason of the exit", || {
        let logs = test_home.ok(&["logs", &id]);
        logs.contains("is lost").then_some(logs)
    });
    assert!(logs.contains("(tail)"), "{logs}");
    end(&test_home, daemon);
}
