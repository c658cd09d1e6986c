//! Tests that interrupts, broken pipes and terminals behave like for a local command.
//!
//! A command that is ended by a signal has the exit code 128 + the number of the signal.

use crate::support::{alive, finish, jiffy, read_until, vmm_of, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::pty::{OpenptyResult, openpty};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};

fn send(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
}

/// Starts a command. Returns it and its standard output.
fn begin(args: &[&str]) -> (Child, std::process::ChildStdout) {
    let mut child = jiffy(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = child.stdout.take().unwrap();
    (child, stdout)
}

#[jiffy_test]
fn the_first_interrupt_is_forwarded_to_the_command() {
    let script = "trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.05; done";
    let (child, mut stdout) = begin(&["run", "--", "sh", "-c", script]);
    read_until(&mut stdout, "ready\n");
    send(&child, Signal::SIGINT);
    read_until(&mut stdout, "caught\n");
    assert_eq!(finish(child).code, Some(5));
}

#[jiffy_test]
fn an_unhandled_interrupt_ends_the_command_with_130() {
    let (child, mut stdout) = begin(&["run", "--", "sh", "-c", "echo ready; exec sleep 600"]);
    read_until(&mut stdout, "ready\n");
    send(&child, Signal::SIGINT);
    assert_eq!(finish(child).code, Some(130));
}

#[jiffy_test]
fn the_second_interrupt_ends_everything() {
    let (child, mut stdout) = begin(&[
        "run",
        "--",
        "sh",
        "-c",
        "trap 'echo again' INT; echo ready; while :; do sleep 0.05; done",
    ]);
    read_until(&mut stdout, "ready\n");
    let vmm = vmm_of(&child);
    send(&child, Signal::SIGINT);
    read_until(&mut stdout, "again\n");
    send(&child, Signal::SIGINT);
    assert_eq!(finish(child).code, Some(130));
    assert!(!alive(vmm));
}

#[jiffy_test]
fn a_termination_request_reaches_the_command() {
    let (child, mut stdout) = begin(&[
        "run",
        "--",
        "sh",
        "-c",
        "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done",
    ]);
    read_until(&mut stdout, "ready\n");
    send(&child, Signal::SIGTERM);
    read_until(&mut stdout, "bye\n");
    assert_eq!(finish(child).code, Some(0));
}

#[jiffy_test]
fn a_closed_output_pipe_terminates_the_sandbox() {
    let (mut child, mut stdout) = begin(&["run", "--", "yes"]);
    read_until(&mut stdout, "y\n");
    let vmm = vmm_of(&child);
    drop(stdout);
    let status = child.wait().unwrap();
    assert_eq!(
        status.code().or(status.signal().map(|s| 128 + s)),
        Some(141),
        "{status:?}"
    );
    assert!(!alive(vmm));
}

/// Runs `jiffy run -t` on a pseudo terminal. Returns the child and the terminal's other side.
fn on_terminal(args: &[&str]) -> (Child, File) {
    let OpenptyResult { master, slave } = openpty(
        Some(&nix::pty::Winsize {
            ws_row: 33,
            ws_col: 101,
            ws_xpixel: 0,
            ws_ypixel: 0,
        }),
        None,
    )
    .unwrap();
    let child = jiffy(args)
        .stdin(Stdio::from(slave.try_clone().unwrap()))
        .stdout(Stdio::from(slave.try_clone().unwrap()))
        .stderr(Stdio::from(slave))
        .spawn()
        .unwrap();
    (child, File::from(master))
}

/// Changes the size of a terminal.
fn resize(master: &File, rows: u16, cols: u16) {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCSWINSZ reads the given winsize.
    let result = unsafe {
        libc::ioctl(
            std::os::fd::AsRawFd::as_raw_fd(master),
            libc::TIOCSWINSZ,
            &size,
        )
    };
    assert_eq!(result, 0);
}

#[jiffy_test]
fn a_shell_on_a_terminal_is_usable() {
    let (mut child, mut terminal) =
        on_terminal(&["run", "-t", "--", "bash", "--norc", "--noprofile"]);
    read_until(&mut terminal, "$ ");
    terminal.write_all(b"tty; stty size; echo $TERM\n").unwrap();
    let seen = read_until(&mut terminal, "33 101");
    assert!(seen.contains("/dev/pts/"), "{seen}");
    // Ctrl-C interrupts the running program, not the shell.
    read_until(&mut terminal, "$ ");
    // Wait until the program is in the foreground, because the terminal sends the signal to the
    // foreground process.
    terminal
        .write_all(b"bash -c 'echo sleeping-$((600)); exec sleep 600'\n")
        .unwrap();
    read_until(&mut terminal, "sleeping-600");
    terminal.write_all(b"\x03").unwrap();
    read_until(&mut terminal, "^C");
    read_until(&mut terminal, "$ ");
    // The program receives a new size.
    resize(&terminal, 44, 122);
    send(&child, Signal::SIGWINCH);
    terminal
        .write_all(b"until stty size | grep '44 122'; do sleep 0.05; done; exit 9\n")
        .unwrap();
    read_until(&mut terminal, "44 122\r\n");
    let mut rest = Vec::new();
    let code = wait_for("the end", || {
        let mut byte = [0; 256];
        if let Ok(n) = terminal.read(&mut byte) {
            rest.extend_from_slice(&byte[..n]);
        }
        child.try_wait().unwrap()
    });
    assert_eq!(code.code(), Some(9), "{}", String::from_utf8_lossy(&rest));
}

#[jiffy_test]
fn the_terminal_is_as_before_after_the_command() {
    let (mut child, terminal) = on_terminal(&["run", "-t", "--", "true"]);
    let before = nix::sys::termios::tcgetattr(&terminal).unwrap();
    let code = wait_for("the end", || child.try_wait().unwrap());
    assert_eq!(code.code(), Some(0));
    let after = nix::sys::termios::tcgetattr(&terminal).unwrap();
    assert_eq!(before.local_flags, after.local_flags);
    assert_eq!(before.input_flags, after.input_flags);
}
