//! Tests for hooks: programs of a guest that run before its state is stored and after it continues.

use crate::support::sandbox_http;
use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;

/// Script that installs a hook for each moment. Each hook adds a line to a file.
const INSTALL: &str = "for moment in before-pause after-resume; do \
     mkdir -p /etc/jiffy/$moment.d; \
     printf '#!/bin/sh\\necho $JIFFY_HOOK $(hostname) >>/var/tmp/hooks\\n' \
     >/etc/jiffy/$moment.d/10-log; \
     chmod +x /etc/jiffy/$moment.d/10-log; done; \
     echo ignored >/etc/jiffy/before-pause.d/readme";

/// Runs a script as root.
fn root(test_home: &TestHome, id: &str, script: &str) -> String {
    test_home.ok(&["exec", "--user", "root", id, "--", "sh", "-c", script])
}

/// Returns the lines that hooks have written, and removes them.
fn taken_lines(test_home: &TestHome, id: &str) -> Vec<String> {
    let script = "cat /var/tmp/hooks 2>/dev/null; rm -f /var/tmp/hooks";
    let text = root(test_home, id, script);
    text.lines().map(str::to_owned).collect()
}

#[jiffy_test(engine = "each")]
fn hooks_run_before_a_state_is_stored_and_after_it_continues() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    root(&test_home, &id, INSTALL);
    let before = format!("before-pause {id}");
    let after = format!("after-resume {id}");
    let both = [before.clone(), after.clone()];

    test_home.ok(&["snapshot", "--name", "kept", &id]);
    assert_eq!(taken_lines(&test_home, &id), both);
    test_home.ok(&["pause", &id]);
    test_home.ok(&["resume", &id]);
    assert_eq!(taken_lines(&test_home, &id), both);
    // The snapshot contains the line of its own hook.
    test_home.ok(&["rollback", &id, "kept"]);
    assert_eq!(taken_lines(&test_home, &id), both);

    let fork = test_home.json(&["fork", &id, "-n", "1"]);
    let child = fork["children"][0]["id"].as_str().unwrap();
    let cloned = [before.clone(), format!("after-resume {child}")];
    assert_eq!(taken_lines(&test_home, child), cloned);
    let copy = test_home.ok(&["create", "--from", "kept"]);
    let cloned = [before, format!("after-resume {copy}")];
    assert_eq!(taken_lines(&test_home, &copy), cloned);
}

#[jiffy_test(engine = "each")]
fn failed_and_endless_hooks_are_reported_and_do_not_stop_a_pause() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    root(
        &test_home,
        &id,
        "mkdir -p /etc/jiffy/before-pause.d; cd /etc/jiffy/before-pause.d; \
         printf '#!/bin/sh\\nexit 3\\n' >1-fails; \
         printf '#!/bin/sh\\nexec sleep 1000\\n' >2-hangs; chmod +x *",
    );
    test_home.ok(&["pause", &id]);
    let steps = sandbox_http::sandbox(&test_home, &id)["jiffy"]["steps"]["last"].clone();
    assert_eq!(steps["operation"], "pause", "{steps}");
    let steps = steps["steps"].as_array().unwrap();
    let step = |name: &str| steps.iter().find(|step| step["step"] == name);
    let hooks = step("before_pause_hooks").unwrap()["ms"].as_f64().unwrap();
    // The hooks of a moment may run for 5 s in total.
    assert!((4000.0..9000.0).contains(&hooks), "{steps:?}");
    assert!(step("before_pause_hook_failed").is_some(), "{steps:?}");
    test_home.ok(&["resume", &id]);
    assert_eq!(test_home.sh(&id, "pgrep -c sleep; echo runs"), "0\nruns");
}
