//! Templates with a start command: it runs in every sandbox, and what never gets ready is refused
//! in words.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use support::place::Place;

/// `base` with a startup, under another name.
fn derived(place: &Place, startup: &Value) -> &'static str {
    let shared = place.dir.path().join("templates");
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
fn what_a_template_starts_runs_in_every_sandbox_made_from_it() {
    let Some(place) =
        Place::new("startup::what_a_template_starts_runs_in_every_sandbox_made_from_it")
    else {
        return;
    };
    let serve = "echo start >>/tmp/started; sleep 0.3; cd /usr/share; exec python3 -m http.server 8000 --bind 127.0.0.1";
    let template = derived(
        &place,
        &json!({
            "start": { "command": serve, "user": "root", "workdir": "/" },
            "ready": { "port": 8000, "path": "/", "timeout_s": 60 },
        }),
    );
    let look = "curl -sf http://127.0.0.1:8000/ | grep -c python3; wc -l </tmp/started; stat -c %U /tmp/started";
    let one = place.ok(&["create", "--template", template]);
    assert_eq!(place.sh(&one, look), "1\n1\nroot");
    let two = place.ok(&["create", "--template", template]);
    assert_eq!(place.sh(&two, look), "1\n1\nroot");
    let run = place.ok(&["run", "--template", template, "--", "sh", "-c", look]);
    assert_eq!(run, "1\n1\nroot");
}

#[test]
fn a_template_that_does_not_get_ready_is_refused_with_its_last_words() {
    let Some(place) =
        Place::new("startup::a_template_that_does_not_get_ready_is_refused_with_its_last_words")
    else {
        return;
    };
    let template = derived(
        &place,
        &json!({
            "start": { "command": "echo warming up; echo no coffee >&2; sleep 1000" },
            "ready": { "port": 8000, "timeout_s": 2 },
        }),
    );
    for args in [
        &["create", "--template", template][..],
        &["run", "--template", template, "--", "true"],
    ] {
        let done = place.call(args);
        assert_ne!(done.code, Some(0), "{done:?}");
        for word in ["derived", "not ready after 2 s", "8000", "no coffee"] {
            assert!(done.stderr.contains(word), "{word}: {}", done.stderr);
        }
    }
    assert_eq!(place.ok(&["ls", "--json"]), "[]");
    assert_eq!(place.ok(&["snapshots", "--json"]), "[]");
}

#[test]
fn a_start_command_that_fails_is_told_at_once() {
    let Some(place) = Place::new("startup::a_start_command_that_fails_is_told_at_once") else {
        return;
    };
    let template = derived(
        &place,
        &json!({
            "start": { "command": "echo cannot find my config; exit 7" },
            "ready": { "command": "test -e /never", "timeout_s": 3000 },
        }),
    );
    let done = place.call(&["create", "--template", template]);
    assert_ne!(done.code, Some(0), "{done:?}");
    for word in ["exit status 7", "cannot find my config"] {
        assert!(done.stderr.contains(word), "{word}: {}", done.stderr);
    }
}
