//! Templates with a start command: it runs in every sandbox, and what never gets ready is refused
//! in words.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use support::test_home::TestHome;

/// `base` with a startup, under another name.
fn derived(test_home: &TestHome, startup: &Value) -> &'static str {
    let shared = test_home.dir.path().join("templates");
    let real = fs::read_link(&shared).unwrap();
    fs::remove_file(&shared).unwrap();
    let derived = shared.join("derived");
    fs::create_dir_all(&derived).unwrap();
    symlink(real.join("base"), shared.join("base")).unwrap();
    for entry in fs::read_dir(real.join("base")).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "template.json" {
            symlink(entry.path(), derived.join(entry.file_name())).unwrap();
        }
    }
    let text = fs::read(real.join("base/template.json")).unwrap();
    let mut manifest: Value = serde_json::from_slice(&text).unwrap();
    manifest["name"] = json!("derived");
    for (key, value) in startup.as_object().unwrap() {
        manifest[key] = value.clone();
    }
    fs::write(derived.join("template.json"), manifest.to_string()).unwrap();
    "derived"
}

#[test]
fn start_commands_run_in_every_sandbox_of_a_template() {
    let Some(test_home) =
        TestHome::new("startup::start_commands_run_in_every_sandbox_of_a_template")
    else {
        return;
    };
    let serve = "echo start >>/tmp/started; sleep 0.3; cd /usr/share; exec python3 -m http.server 8000 --bind 127.0.0.1";
    let template = derived(
        &test_home,
        &json!({
            "start": { "command": serve, "user": "root", "workdir": "/" },
            "ready": { "port": 8000, "path": "/", "timeout_s": 60 },
        }),
    );
    let look = "curl -sf http://127.0.0.1:8000/ | grep -c python3; wc -l </tmp/started; stat -c %U /tmp/started";
    let one = test_home.ok(&["create", "--template", template]);
    assert_eq!(test_home.sh(&one, look), "1\n1\nroot");
    let two = test_home.ok(&["create", "--template", template]);
    assert_eq!(test_home.sh(&two, look), "1\n1\nroot");
    let run = test_home.ok(&["run", "--template", template, "--", "sh", "-c", look]);
    assert_eq!(run, "1\n1\nroot");
}

#[test]
fn a_template_that_never_becomes_ready_is_refused_with_its_last_output() {
    let Some(test_home) = TestHome::new(
        "startup::a_template_that_never_becomes_ready_is_refused_with_its_last_output",
    ) else {
        return;
    };
    let template = derived(
        &test_home,
        &json!({
            "start": { "command": "echo warming up; echo no coffee >&2; sleep 1000" },
            "ready": { "port": 8000, "timeout_s": 2 },
        }),
    );
    for args in [
        &["create", "--template", template][..],
        &["run", "--template", template, "--", "true"],
    ] {
        let done = test_home.call(args);
        assert_ne!(done.code, Some(0), "{done:?}");
        for word in ["derived", "not ready after 2 s", "8000", "no coffee"] {
            assert!(done.stderr.contains(word), "{word}: {}", done.stderr);
        }
    }
    assert_eq!(test_home.ok(&["ls", "--json"]), "[]");
    assert_eq!(test_home.ok(&["snapshots", "--json"]), "[]");
}

#[test]
fn a_failing_start_command_is_reported_at_once() {
    let Some(test_home) = TestHome::new("startup::a_failing_start_command_is_reported_at_once")
    else {
        return;
    };
    let template = derived(
        &test_home,
        &json!({
            "start": { "command": "echo cannot find my config; exit 7" },
            "ready": { "command": "test -e /never", "timeout_s": 3000 },
        }),
    );
    let done = test_home.call(&["create", "--template", template]);
    assert_ne!(done.code, Some(0), "{done:?}");
    for word in ["exit status 7", "cannot find my config"] {
        assert!(done.stderr.contains(word), "{word}: {}", done.stderr);
    }
}
