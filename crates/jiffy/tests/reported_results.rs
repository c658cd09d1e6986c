//! Tests that reported results match the guest's state: for commands that are interrupted,
//! disconnected or partially completed.

use crate::support::remote::Remote;
use crate::support::test_home::TestHome;
use crate::support::{finish, read_until, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use std::fs::{self, File};
use std::io::{self, Read};
use std::process::Child;

/// All tests use one daemon, because its start takes long.
#[jiffy_test(engine = "each", root)]
fn reported_results_match_the_guest() {
    let test_home = TestHome::with_templates();
    let remote = Remote::of(test_home, &["--warm-pool", "0"]);
    let test_home = &remote.test_home;
    let id = test_home.ok(&["create", "--memory", "256"]);
    a_second_interrupt_ends_the_command_in_a_sandbox_that_stays(test_home, &id);
    a_command_whose_output_has_no_reader_ends(test_home, &id);
    only_a_victim_is_reported_as_out_of_memory(test_home, &id);
    sandboxes_after_a_failing_one_are_handled_and_reported(test_home, &id);
    the_end_of_a_sandbox_ends_what_depends_on_it(test_home);
    only_kills_by_a_timeout_are_reported_as_timed_out(test_home);
    a_key_reported_without_sandboxes_has_none(&remote);
    data_reported_as_freed_is_removed(test_home);
}

/// Starts a command in a sandbox. Returns the command and its process in the guest.
fn begin(
    test_home: &TestHome,
    id: &str,
    script: &str,
) -> (Child, std::process::ChildStdout, String) {
    let script = format!("echo $$; {script}");
    let mut child = test_home.begin(&["exec", id, "--", "sh", "-c", &script]);
    let mut stdout = child.stdout.take().unwrap();
    let pid = read_until(&mut stdout, "\n").trim().to_owned();
    (child, stdout, pid)
}

fn is_gone(test_home: &TestHome, id: &str, pid: &str) -> bool {
    let process = format!("/proc/{pid}");
    let done = test_home.call(&["exec", id, "--", "test", "!", "-e", &process]);
    done.code == Some(0)
}

fn interrupt(child: &Child) {
    let pid = Pid::from_raw(child.id().try_into().unwrap());
    kill(pid, Signal::SIGINT).unwrap();
}

fn a_second_interrupt_ends_the_command_in_a_sandbox_that_stays(test_home: &TestHome, id: &str) {
    let script = "trap 'echo again' INT; echo ready; while :; do sleep 0.05; done";
    let (child, mut stdout, pid) = begin(test_home, id, script);
    read_until(&mut stdout, "ready\n");
    interrupt(&child);
    read_until(&mut stdout, "again\n");
    assert!(!is_gone(test_home, id, &pid));
    interrupt(&child);
    let done = finish(child);
    // 128 + SIGINT.
    assert_eq!(done.code, Some(130), "{done:?}");
    assert!(
        is_gone(test_home, id, &pid),
        "it is still running: {done:?}"
    );
}

fn a_command_whose_output_has_no_reader_ends(test_home: &TestHome, id: &str) {
    // The second program ignores SIGPIPE.
    for script in ["exec yes 1", "exec python3 -uc 'while True: print(1)'"] {
        let (child, mut stdout, pid) = begin(test_home, id, script);
        read_until(&mut stdout, "1\n");
        drop(stdout);
        let done = finish(child);
        // 128 + SIGPIPE.
        assert_eq!(done.code, Some(141), "{done:?}");
        wait_for("the end of a command without a reader", || {
            is_gone(test_home, id, &pid).then_some(())
        });
    }
}

fn only_a_victim_is_reported_as_out_of_memory(test_home: &TestHome, id: &str) {
    // The victim is a child of a command that continues.
    let survived = test_home.sh(id, "tail /dev/zero; echo survived");
    assert!(survived.contains("survived"), "{survived}");
    let killed = test_home.call(&["exec", id, "--", "sh", "-c", "kill -9 $$"]);
    assert_eq!(killed.code, Some(137), "{killed:?}");
    assert_eq!(killed.stderr, "", "the command did not run out of memory");
    let victim = test_home.call(&["exec", id, "--", "tail", "/dev/zero"]);
    assert_eq!(victim.code, Some(137), "{victim:?}");
    assert!(victim.stderr.contains("ran out of memory"), "{victim:?}");
}

fn sandboxes_after_a_failing_one_are_handled_and_reported(test_home: &TestHome, id: &str) {
    let other = test_home.ok(&["create"]);
    let done = test_home.call(&["rm", "nosuch", &other]);
    assert_eq!(
        (done.code, &done.stdout[..]),
        (Some(1), &*format!("{other}\n"))
    );
    assert!(
        done.stderr.contains("sandbox `nosuch` does not exist"),
        "{done:?}"
    );
    assert!(!test_home.ok(&["ls", "--all"]).contains(&other[..12]));

    let done = test_home.call(&["wait", "--for", "running", "nosuch", id]);
    assert_eq!((done.code, &done.stdout[..]), (Some(1), "running\n"));
    assert!(
        done.stderr.contains("sandbox `nosuch` does not exist"),
        "{done:?}"
    );

    test_home.ok(&["template", "tag", "base", "copy"]);
    let done = test_home.call(&["template", "rm", "nosuch", "copy"]);
    assert_eq!(done.code, Some(1), "{done:?}");
    assert_eq!(done.stdout, "template copy removed\n");
    assert!(done.stderr.contains("nosuch"), "{done:?}");
    assert!(!test_home.ok(&["template", "ls"]).contains("copy"));
}

fn the_end_of_a_sandbox_ends_what_depends_on_it(test_home: &TestHome) {
    let id = test_home.ok(&["create"]);
    test_home.sh(&id, "truncate -s 1G /tmp/big");
    let pipe = test_home.dir.path().join("pipe");
    mkfifo(&pipe, Mode::S_IRWXU).unwrap();
    let copying = test_home.begin(&["cp", &format!("{id}:/tmp/big"), pipe.to_str().unwrap()]);
    let mut copied = File::open(&pipe).unwrap();
    copied.read_exact(&mut vec![0; 1 << 20]).unwrap();
    let mut forwarding = test_home.begin(&["port-forward", &id, ":80"]);
    read_until(forwarding.stdout.as_mut().unwrap(), "-> 80\n");
    let waiting = test_home.begin(&["wait", &id]);
    let (running, ..) = begin(test_home, &id, "sleep 1000");

    assert_eq!(test_home.ok(&["kill", &id]), id);
    let rest = std::thread::spawn(move || io::copy(&mut copied, &mut io::sink()).unwrap());
    let copying = finish(copying);
    assert!(rest.join().unwrap() < 1 << 30);
    assert_eq!(copying.code, Some(1), "{copying:?}");
    assert!(copying.stderr.contains("is incomplete"), "{copying:?}");
    let forwarding = finish(forwarding);
    assert_eq!(forwarding.code, Some(1), "{forwarding:?}");
    assert!(
        forwarding
            .stderr
            .contains(&format!("sandbox {id} was killed")),
        "{forwarding:?}"
    );
    let waiting = finish(waiting);
    assert_eq!((waiting.code, &waiting.stdout[..]), (Some(0), "killed\n"));
    let running = finish(running);
    assert_eq!(running.code, Some(125), "{running:?}");
    assert!(running.stderr.contains("is killed"), "{running:?}");
}

fn only_kills_by_a_timeout_are_reported_as_timed_out(test_home: &TestHome) {
    let slept = test_home.ok(&["create", "--timeout", "1s", "--on-timeout", "pause"]);
    // The timeout has paused this sandbox, and a command kills it.
    test_home.ok(&["wait", &slept, "--for", "paused"]);
    test_home.ok(&["kill", &slept]);
    assert_eq!(test_home.ok(&["wait", &slept]), "killed");
    let ran = test_home.ok(&["create", "--timeout", "1s"]);
    assert_eq!(test_home.ok(&["wait", &ran]), "killed: timeout expired");
}

fn a_key_reported_without_sandboxes_has_none(remote: &Remote) {
    let test_home = &remote.test_home;
    let before = test_home.json(&["ls"]);
    let context = test_home.dir.path().join("context");
    fs::create_dir(&context).unwrap();
    let steps = "FROM base\nUSER root\nRUN echo it waits; sleep 1000\n";
    fs::write(context.join("Dockerfile"), steps).unwrap();
    remote.ok(&["create"]);
    let build = [
        "template",
        "build",
        context.to_str().unwrap(),
        "--name",
        "long",
    ];
    let build = remote.command(&build).spawn().unwrap();
    wait_for("the step", || {
        let all = test_home.json(&["ls"]);
        let mut all = all.as_array().unwrap().iter();
        all.any(|s| {
            let id = s["id"].as_str().unwrap();
            test_home
                .call(&["exec", id, "--", "pgrep", "-x", "sleep"])
                .code
                == Some(0)
        })
        .then_some(())
    });
    let revoked = test_home.call(&["key", "revoke", "test", "--end"]);
    assert_eq!(revoked.code, Some(0), "{revoked:?}");
    assert!(
        revoked.stderr.contains("killed the sandboxes"),
        "{revoked:?}"
    );
    assert_eq!(test_home.json(&["ls"]), before);
    assert_eq!(finish(build).code, Some(1));
}

fn data_reported_as_freed_is_removed(test_home: &TestHome) {
    test_home.ok(&["rm", "--all", "--yes"]);
    let pruned = test_home.json(&["prune", "--yes", "--older-than", "0s"]);
    for item in pruned["items"].as_array().unwrap() {
        let id = item["id"].as_str().unwrap();
        for kept in ["snapshots", "gvisor"] {
            let files = test_home.dir.path().join(kept).join(id);
            assert!(!files.exists(), "{item} was not removed");
        }
    }
    assert_eq!(
        test_home.ok(&["prune", "--yes", "--older-than", "0s"]),
        "nothing to remove"
    );
}
