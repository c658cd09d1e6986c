//! Sentences that say that something was done, held against the guest: of commands that are
//! interrupted, cut off, or done by half.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use std::fs::{self, File};
use std::io::{self, Read};
use std::process::Child;
use support::place::Place;
use support::remote::Remote;
use support::{finish, read_until, wait_for};

/// One daemon for all: what takes long is its start.
#[test]
fn what_is_said_to_be_done_is_done() {
    let Some(place) = Place::with_templates("claims::what_is_said_to_be_done_is_done") else {
        return;
    };
    let remote = Remote::of(place, &["--warm-pool", "0"]);
    let place = &remote.place;
    let id = place.ok(&["create", "--memory", "256"]);
    a_second_interrupt_ends_the_command_in_a_sandbox_that_stays(place, &id);
    a_command_whose_output_has_no_reader_ends(place, &id);
    only_a_victim_is_said_to_have_been_out_of_memory(place, &id);
    those_after_one_that_fails_are_done_and_told(place, &id);
    the_end_of_a_sandbox_ends_what_depends_on_it(place);
    only_what_ran_is_said_to_have_been_over_its_time(place);
    a_key_that_is_said_to_have_nothing_left_has_nothing_left(&remote);
    what_is_said_to_be_freed_is_gone(place);
}

on_gvisor! { what_is_said_to_be_done_is_done, }

/// A command in a sandbox, and its process there.
fn begin(place: &Place, id: &str, script: &str) -> (Child, std::process::ChildStdout, String) {
    let script = format!("echo $$; {script}");
    let mut child = place.begin(&["exec", id, "--", "sh", "-c", &script]);
    let mut stdout = child.stdout.take().unwrap();
    let pid = read_until(&mut stdout, "\n").trim().to_owned();
    (child, stdout, pid)
}

fn is_gone(place: &Place, id: &str, pid: &str) -> bool {
    let process = format!("/proc/{pid}");
    let done = place.call(&["exec", id, "--", "test", "!", "-e", &process]);
    done.code == Some(0)
}

fn interrupt(child: &Child) {
    let pid = Pid::from_raw(child.id().try_into().unwrap());
    kill(pid, Signal::SIGINT).unwrap();
}

fn a_second_interrupt_ends_the_command_in_a_sandbox_that_stays(place: &Place, id: &str) {
    let script = "trap 'echo again' INT; echo ready; while :; do sleep 0.05; done";
    let (child, mut stdout, pid) = begin(place, id, script);
    read_until(&mut stdout, "ready\n");
    interrupt(&child);
    read_until(&mut stdout, "again\n");
    assert!(!is_gone(place, id, &pid));
    interrupt(&child);
    let done = finish(child);
    assert_eq!(done.code, Some(130), "{done:?}");
    assert!(is_gone(place, id, &pid), "it goes on: {done:?}");
}

fn a_command_whose_output_has_no_reader_ends(place: &Place, id: &str) {
    // The second ignores SIGPIPE.
    for script in ["exec yes 1", "exec python3 -uc 'while True: print(1)'"] {
        let (child, mut stdout, pid) = begin(place, id, script);
        read_until(&mut stdout, "1\n");
        drop(stdout);
        let done = finish(child);
        assert_eq!(done.code, Some(141), "{done:?}");
        wait_for("the end of a command without a reader", || {
            is_gone(place, id, &pid).then_some(())
        });
    }
}

fn only_a_victim_is_said_to_have_been_out_of_memory(place: &Place, id: &str) {
    // The victim is a child of a command that goes on.
    let survived = place.sh(id, "tail /dev/zero; echo survived");
    assert!(survived.contains("survived"), "{survived}");
    let killed = place.call(&["exec", id, "--", "sh", "-c", "kill -9 $$"]);
    assert_eq!(killed.code, Some(137), "{killed:?}");
    assert_eq!(killed.stderr, "", "it was not for want of memory");
    let victim = place.call(&["exec", id, "--", "tail", "/dev/zero"]);
    assert_eq!(victim.code, Some(137), "{victim:?}");
    assert!(victim.stderr.contains("ran out of memory"), "{victim:?}");
}

fn those_after_one_that_fails_are_done_and_told(place: &Place, id: &str) {
    let other = place.ok(&["create"]);
    let done = place.call(&["rm", "nosuch", &other]);
    assert_eq!(
        (done.code, &done.stdout[..]),
        (Some(1), &*format!("{other}\n"))
    );
    assert!(done.stderr.contains("no sandbox `nosuch`"), "{done:?}");
    assert!(!place.ok(&["ls", "--all"]).contains(&other[..12]));

    let done = place.call(&["wait", "--for", "running", "nosuch", id]);
    assert_eq!((done.code, &done.stdout[..]), (Some(1), "running\n"));
    assert!(done.stderr.contains("no sandbox `nosuch`"), "{done:?}");

    place.ok(&["template", "tag", "base", "copy"]);
    let done = place.call(&["template", "rm", "nosuch", "copy"]);
    assert_eq!(done.code, Some(1), "{done:?}");
    assert_eq!(done.stdout, "template copy removed\n");
    assert!(done.stderr.contains("nosuch"), "{done:?}");
    assert!(!place.ok(&["template", "ls"]).contains("copy"));
}

fn the_end_of_a_sandbox_ends_what_depends_on_it(place: &Place) {
    let id = place.ok(&["create"]);
    place.sh(&id, "truncate -s 1G /tmp/big");
    let pipe = place.dir.path().join("pipe");
    mkfifo(&pipe, Mode::S_IRWXU).unwrap();
    let copying = place.begin(&["cp", &format!("{id}:/tmp/big"), pipe.to_str().unwrap()]);
    let mut copied = File::open(&pipe).unwrap();
    copied.read_exact(&mut vec![0; 1 << 20]).unwrap();
    let mut forwarding = place.begin(&["port-forward", &id, ":80"]);
    read_until(forwarding.stdout.as_mut().unwrap(), "-> 80\n");
    let waiting = place.begin(&["wait", &id]);
    let (running, ..) = begin(place, &id, "sleep 1000");

    assert_eq!(place.ok(&["kill", &id]), id);
    let rest = std::thread::spawn(move || io::copy(&mut copied, &mut io::sink()).unwrap());
    let copying = finish(copying);
    assert!(rest.join().unwrap() < 1 << 30);
    assert_eq!(copying.code, Some(1), "{copying:?}");
    assert!(
        copying.stderr.contains("has only the beginning"),
        "{copying:?}"
    );
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
    assert!(running.stderr.contains("is killed now"), "{running:?}");
}

fn only_what_ran_is_said_to_have_been_over_its_time(place: &Place) {
    let slept = place.ok(&["create", "--timeout", "1s", "--on-timeout", "pause"]);
    place.ok(&["wait", &slept, "--for", "paused"]);
    place.ok(&["kill", &slept]);
    assert_eq!(place.ok(&["wait", &slept]), "killed");
    let ran = place.ok(&["create", "--timeout", "1s"]);
    assert_eq!(place.ok(&["wait", &ran]), "killed: its time was over");
}

fn a_key_that_is_said_to_have_nothing_left_has_nothing_left(remote: &Remote) {
    let place = &remote.place;
    let before = place.json(&["ls"]);
    let context = place.dir.path().join("context");
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
        let all = place.json(&["ls"]);
        let mut all = all.as_array().unwrap().iter();
        all.any(|s| {
            let id = s["id"].as_str().unwrap();
            place.call(&["exec", id, "--", "pgrep", "-x", "sleep"]).code == Some(0)
        })
        .then_some(())
    });
    let revoked = place.call(&["key", "revoke", "test", "--end"]);
    assert_eq!(revoked.code, Some(0), "{revoked:?}");
    assert!(revoked.stderr.contains("have ended"), "{revoked:?}");
    assert_eq!(place.json(&["ls"]), before);
    assert_eq!(finish(build).code, Some(1));
}

fn what_is_said_to_be_freed_is_gone(place: &Place) {
    place.ok(&["rm", "--all", "--yes"]);
    let pruned = place.json(&["prune", "--yes", "--older-than", "0s"]);
    for item in pruned["items"].as_array().unwrap() {
        let id = item["id"].as_str().unwrap();
        for kept in ["snapshots", "gvisor"] {
            let files = place.dir.path().join(kept).join(id);
            assert!(!files.exists(), "{item} was not removed");
        }
    }
    assert_eq!(
        place.ok(&["prune", "--yes", "--older-than", "0s"]),
        "nothing to remove"
    );
}
