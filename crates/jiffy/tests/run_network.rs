//! Tests that `jiffy run` without a daemon has the network of a daemon's sandboxes, and removes it.

use crate::support::lab::{PRIVATE, PUBLIC, output, with_lab6};
use crate::support::network_probe::{PRELUDE, assert_clean};
use crate::support::test_home::TestHome;
use crate::support::{children, jiffy, read_until, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::process::Stdio;

#[jiffy_test(engine = "each", lab)]
fn without_a_daemon_a_run_reaches_the_internet_and_leaves_nothing_of_a_network() {
    with_lab6(|_| {
        let test_home = TestHome::new();
        let reach = |options: &[&str]| {
            let (public, private) = (PUBLIC[1], PRIVATE[0]);
            let program = format!(
                "{PRELUDE}\nprint(tcp({public:?}), tcp({private:?}), socket.gethostbyname('a.example'))"
            );
            let words = [
                &["run", "--no-daemon"],
                options,
                &["--", "python3", "-c", &program],
            ];
            test_home.call(&words.concat())
        };
        let done = reach(&[]);
        let heard: Vec<&str> = done.stdout.split_whitespace().collect();
        assert_eq!(
            heard,
            ["internet", "ConnectionRefusedError", "9.9.9.9"],
            "{done:?}"
        );
        assert_eq!(done.stderr, "");
        wait_for("the last rule to be removed", || {
            output("nft", &["list", "tables"]).is_empty().then_some(())
        });
        assert_clean();
        let program = format!("{PRELUDE}\nprint(tcp({:?}, 80, 1))", PUBLIC[1]);
        let off = [
            "run",
            "--no-daemon",
            "--network",
            "off",
            "--",
            "python3",
            "-c",
            &program,
        ];
        let done = test_home.call(&off);
        assert_eq!(done.code, Some(0), "{done:?}");
        assert_ne!(done.stdout.trim(), "internet", "{done:?}");
        // A killed run leaves no network either.
        let mut run = jiffy(&["run", "--no-daemon", "--", "sh", "-c", "echo up; sleep 600"])
            .env("JIFFY_HOME", test_home.dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        read_until(run.stdout.as_mut().unwrap(), "up");
        assert!(output("nft", &["list", "tables"]).contains("jiffy_"));
        run.kill().unwrap();
        run.wait().unwrap();
        wait_for("the last rule to be removed", || {
            output("nft", &["list", "tables"]).is_empty().then_some(())
        });
        assert_clean();
        // If its cleanup process was killed as well, the next run removes the network.
        let mut run = jiffy(&["run", "--no-daemon", "--", "sh", "-c", "echo up; sleep 600"])
            .env("JIFFY_HOME", test_home.dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        read_until(run.stdout.as_mut().unwrap(), "up");
        let remover = children(run.id()).into_iter().find(|pid| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
            line.is_ok_and(|line| line.contains("--as-network-remover"))
        });
        let remover = Pid::from_raw(remover.unwrap().try_into().unwrap());
        kill(remover, Signal::SIGKILL).unwrap();
        run.kill().unwrap();
        run.wait().unwrap();
        assert!(output("nft", &["list", "tables"]).contains("jiffy_"));
        let done = reach(&["--network", "on"]);
        assert_eq!(done.code, Some(0), "{done:?}");
        wait_for("the last rule to be removed", || {
            output("nft", &["list", "tables"]).is_empty().then_some(())
        });
        assert_clean();
    });
}
