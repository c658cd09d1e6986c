//! `jiffy top` on a pseudo terminal: the live table, its keys, and the mode of the terminal.
//!
//! Keys: `g` selects the first row, `p` pauses, Enter shows details, and `q` leaves a view or the
//! program. `K` kills after `y`, and not after `n`. `y` copies the command of the next key. `s`
//! starts a shell.

use crate::support::jiffy;
use crate::support::remote::Remote;
use crate::support::terminal::Terminal;
use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::Signal;
use serde_json::Value;

fn top(test_home: &TestHome, columns: u16, rows: u16) -> Terminal {
    let mut command = jiffy(&["top", "--interval", "500ms"]);
    command.env("JIFFY_HOME", test_home.dir.path());
    Terminal::start(command, columns, rows)
}

/// Waits until the line of a sandbox contains `text`.
fn wait_for(terminal: &mut Terminal, name: &str, text: &str) {
    let has_text = |t: &Terminal| t.line(name).is_some_and(|line| line.contains(text));
    terminal.wait_for(&format!("{name} with {text}"), has_text);
}

/// Waits until the table is shown without a sandbox.
fn wait_for_absence(terminal: &mut Terminal, name: &str) {
    let row = format!(" {name} ");
    terminal.wait_for(&format!("table without {name}"), |t| {
        t.lines()[1].starts_with("ID") && !t.lines()[2..].iter().any(|l| l.contains(&row))
    });
}

fn states(test_home: &TestHome) -> Vec<(String, String)> {
    let all = test_home.json(&["ls"]);
    let text = |s: &Value, field: &str| s[field].as_str().unwrap().to_owned();
    let all = all.as_array().unwrap().iter();
    all.map(|s| (text(s, "name"), text(s, "state"))).collect()
}

#[jiffy_test]
fn the_live_table_shows_changes_executes_keys_and_restores_the_terminal() {
    let test_home = TestHome::new();
    test_home.ok(&["create", "--name", "first"]);
    let mut terminal = top(&test_home, 120, 30);
    wait_for(&mut terminal, "first", "running");
    // A new sandbox appears without a key. The usage follows.
    test_home.ok(&["create", "--name", "second"]);
    wait_for(&mut terminal, "second", "running");
    wait_for(&mut terminal, "second", " % ");
    // The newest sandbox is the first row.
    terminal.press("gp");
    wait_for(&mut terminal, "second", "paused");
    let state = |name: &str, state: &str| (name.to_owned(), state.to_owned());
    assert_eq!(
        states(&test_home),
        [state("first", "running"), state("second", "paused")]
    );
    terminal.press("\r");
    terminal.wait_for("details", |t| t.line("Details of second").is_some());
    wait_for(&mut terminal, "template", "base");
    // Without a confirmation, the sandbox is not killed.
    terminal.press("qKn");
    terminal.wait_for("cancelled kill", |t| t.line("was not killed").is_some());
    terminal.press("Ky");
    wait_for_absence(&mut terminal, "second");
    assert_eq!(states(&test_home), [state("first", "running")]);
    // A change by another client.
    test_home.ok(&["rename", "first", "third"]);
    wait_for(&mut terminal, "third", "running");
    terminal.press("yp");
    terminal.wait_for("copied command", |t| {
        t.line("copied: jiffy pause ").is_some()
    });
    terminal.resize(50, 8);
    terminal.wait_for("smaller screen", |t| {
        t.lines()[0].starts_with("jiffy top") && t.lines()[2].contains("third")
    });
    // A shell uses the same terminal.
    terminal.press("s");
    terminal.wait_for("prompt", |t| t.line("$").is_some() || t.line("#").is_some());
    terminal.press("echo $((6 * 7))-$((6 * 7))\r");
    terminal.wait_for("output of the shell", |t| t.line("42-42").is_some());
    terminal.press("exit\r");
    terminal.wait_for("table", |t| t.lines()[1].starts_with("ID"));
    wait_for(&mut terminal, "third", "running");
    terminal.press("q");
    assert_eq!(terminal.finish(), Some(0));
}

#[jiffy_test]
fn the_terminal_is_restored_after_signals_also_from_a_shell() {
    let test_home = TestHome::new();
    test_home.ok(&["create", "--name", "web"]);
    for (signal, code) in [
        (Signal::SIGTERM, 143),
        (Signal::SIGINT, 130),
        (Signal::SIGHUP, 129),
    ] {
        let mut terminal = top(&test_home, 80, 24);
        wait_for(&mut terminal, "web", "running");
        terminal.signal(signal);
        assert_eq!(terminal.finish(), Some(code), "{signal}");
        assert_restored(&terminal);
    }
    // A signal also ends the program while a shell is in the foreground.
    let mut terminal = top(&test_home, 80, 24);
    wait_for(&mut terminal, "web", "running");
    terminal.press("s");
    terminal.wait_for("prompt", |t| t.line("$").is_some() || t.line("#").is_some());
    terminal.signal(Signal::SIGTERM);
    assert_eq!(terminal.finish(), Some(143));
    assert_restored(&terminal);
}

/// Asserts that the mode, the cursor and the screen are as before the program.
fn assert_restored(terminal: &Terminal) {
    let fresh = Terminal::start(std::process::Command::new("true"), 80, 24).mode();
    let mode = terminal.mode();
    assert_eq!(mode.local_flags, fresh.local_flags);
    assert_eq!(mode.input_flags, fresh.input_flags);
    assert_eq!(mode.output_flags, fresh.output_flags);
    let output = String::from_utf8_lossy(&terminal.output);
    // Alternate screen, bracketed paste and hidden cursor: each is switched off again.
    for (on, off) in [
        ("\u{1b}[?1049h", "\u{1b}[?1049l"),
        ("\u{1b}[?2004h", "\u{1b}[?2004l"),
        ("\u{1b}[?25l", "\u{1b}[?25h"),
    ] {
        assert!(output.rfind(on) < output.rfind(off), "{on:?} in {output:?}");
    }
}

#[jiffy_test]
fn the_table_is_printed_once_also_for_a_daemon_on_another_host() {
    let remote = Remote::new(&[]);
    remote.test_home.ok(&["create", "--name", "private"]);
    let id = remote.ok(&["create", "--name", "web"]);
    // The owner of the host sees all sandboxes and the host.
    let printed = remote.test_home.ok(&["top", "--once"]);
    let lines: Vec<&str> = printed.lines().collect();
    // A summary, the heading of the table and two sandboxes.
    assert_eq!(lines.len(), 4, "{printed}");
    assert!(lines[0].contains("2 running  memory "), "{printed}");
    assert!(lines[1].starts_with("ID        NAME"), "{printed}");
    assert!(printed.contains("private"), "{printed}");
    // A key sees its own sandboxes and its usage.
    let printed = remote.ok(&["top", "--once", "--filter", "web"]);
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 3, "{printed}");
    assert!(lines[0].contains(&remote.url), "{printed}");
    assert!(lines[0].contains("key test: 1"), "{printed}");
    assert!(lines[2].starts_with(&id[..8]), "{printed}");
    assert!(
        lines[2].contains("web") && lines[2].contains(" % "),
        "{printed}"
    );
    let done = remote.call(&["top"]);
    assert!(done.stderr.contains("--once"), "{done:?}");
    assert_eq!(done.code, Some(1));
}
