//! Tests of `jiffy tree` and of comparisons of sandboxes and snapshots with real guests.

use crate::support::test_home::TestHome;
use crate::support::{finish, wait_for};
use jiffy_test_attributes::jiffy_test;
use serde_json::Value;
use std::collections::BTreeMap;

fn root(test_home: &TestHome, id: &str, script: &str) -> String {
    test_home.ok(&["exec", id, "-u", "root", "--", "sh", "-c", script])
}

/// Returns the kind of each difference below `/srv`, by path.
fn below_srv(comparison: &Value) -> BTreeMap<String, String> {
    let changes = comparison["changes"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let below = changes.filter(|c| text(&c["path"]).starts_with("/srv"));
    below
        .map(|c| (text(&c["path"]), text(&c["kind"])))
        .collect()
}

fn expected(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let pairs = pairs.iter();
    pairs
        .map(|(path, kind)| ((*path).to_owned(), (*kind).to_owned()))
        .collect()
}

/// Calls the API over the socket.
fn get(test_home: &TestHome, path: &str) -> Value {
    let socket = test_home.dir.path().join("run/jiffy.sock");
    let out = std::process::Command::new("curl")
        .args(["-s", "--unix-socket"])
        .arg(socket)
        .arg(format!("http://localhost{path}"))
        .output()
        .unwrap();
    serde_json::from_slice(&out.stdout).unwrap()
}

#[jiffy_test(engine = "each")]
fn sandboxes_and_snapshots_are_compared_by_content_and_leave_nothing() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--name", "agent"]);
    root(
        &test_home,
        &id,
        "cd /srv; echo same >same; echo 1 >content; echo gone >gone; echo x >mode; ln -s same link
         mkdir dir; echo a >dir/file; touch -d @0 /etc/issue",
    );
    test_home.ok(&["snapshot", "agent", "--name", "before"]);
    root(
        &test_home,
        &id,
        "cd /srv; echo same >same; echo 2 >content; rm gone; chmod 700 mode; ln -sf mode link
         echo new >new; rm -r dir; rm -r /usr/share/common-licenses",
    );
    test_home.ok(&["snapshot", "agent", "--name", "after"]);
    let changes = expected(&[
        ("/srv/content", "changed"),
        ("/srv/dir", "removed"),
        ("/srv/dir/file", "removed"),
        ("/srv/gone", "removed"),
        ("/srv/link", "changed"),
        ("/srv/mode", "changed"),
        ("/srv/new", "added"),
    ]);
    for other in ["after", "agent"] {
        let found = test_home.json(&["diff", "before", other]);
        assert_eq!(below_srv(&found), changes, "{other}");
        let all = found["changes"].as_array().unwrap();
        let licences = all
            .iter()
            .find(|c| c["path"] == "/usr/share/common-licenses");
        let licences = licences.unwrap();
        assert_eq!(licences["kind"], "removed");
        // The size of a directory of the template includes its files.
        assert!(
            licences["a"]["size"].as_u64().unwrap() > 10_000,
            "{licences}"
        );
        // A file with a new time only does not differ.
        assert!(all.iter().all(|c| c["path"] != "/etc/issue"), "{found}");
        eprintln!(
            "{}: {} + {} ms",
            other, found["startMs"], found["compareMs"]
        );
    }
    let reverse = test_home.ok(&["diff", "after", "before"]);
    assert!(reverse.contains("D /srv/new  4 bytes\n"), "{reverse}");
    assert!(reverse.contains("A /srv/gone  5 bytes\n"), "{reverse}");
    test_home.ok(&["pause", "agent"]);
    let none = test_home.json(&["diff", "after", "agent"]);
    assert_eq!(below_srv(&none), expected(&[]));
    let contents = get(&test_home, "/compare?a=before&b=after&path=/srv/content");
    assert_eq!(contents["file"]["a"]["content"], "1\n", "{contents}");
    assert_eq!(contents["file"]["b"]["content"], "2\n", "{contents}");
    let contents = get(&test_home, "/compare?a=before&b=after&path=/srv/new");
    assert_eq!(contents["file"]["a"], Value::Null, "{contents}");
    let refused = get(&test_home, "/compare?a=before&b=after&path=/srv");
    assert_eq!(refused["code"], 400, "{refused}");
    // Temporary guests are in no list, and their processes end.
    let all = test_home.json(&["ls", "--all"]);
    assert_eq!(all.as_array().unwrap().len(), 1, "{all}");
    let tree = test_home.ok(&["tree", "before"]);
    assert!(
        tree.contains(" before, ") && tree.contains("  <--\n"),
        "{tree}"
    );
    // The sandbox, its two snapshots, and the snapshot of its pause.
    assert_eq!(tree.lines().count(), 4, "{tree}");
}

#[jiffy_test(engine = "microvm")]
fn many_changed_files_are_compared_within_seconds() {
    const FILES: usize = 50_000;
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--name", "agent"]);
    let write = |text: &str, step: usize| {
        let script = format!(
            "mkdir -p /srv/many; cd /srv/many; i=0
             while [ $i -lt {FILES} ]; do echo {text} >$i; i=$((i+{step})); done"
        );
        root(&test_home, &id, &script);
    };
    write("first", 1);
    test_home.ok(&["snapshot", "agent", "--name", "before"]);
    write("other", 10);
    test_home.ok(&["snapshot", "agent", "--name", "after"]);
    let found = test_home.json(&["diff", "before", "after", "--limit", "100000"]);
    assert_eq!(below_srv(&found).len(), FILES / 10);
    assert_eq!(found["incomplete"], false);
    assert!(found["summary"]["changed"]["count"].as_u64().unwrap() >= 5000);
    eprintln!(
        "compared {FILES} files, {} of them changed, in {} ms, after {} ms for the start of two guests",
        FILES / 10,
        found["compareMs"],
        found["startMs"]
    );
    // The target on an idle host is 2 s.
    assert!(found["compareMs"].as_f64().unwrap() < 20_000.0);
}

#[jiffy_test(engine = "microvm")]
fn temporary_guests_end_with_a_killed_daemon() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--name", "agent"]);
    // The comparison reads the contents of these files, because their times change below. This
    // takes some time, in which the daemon is killed.
    root(
        &test_home,
        &id,
        "cd /srv; for i in 1 2; do head -c 100M /dev/zero >$i; done",
    );
    test_home.ok(&["snapshot", "agent", "--name", "before"]);
    root(&test_home, &id, "cd /srv; touch 1 2; echo x >new");
    test_home.ok(&["snapshot", "agent", "--name", "after"]);
    test_home.ok(&["rm", "-y", "agent"]);
    let before = test_home.vmms();
    let comparing = test_home.begin(&["diff", "before", "after"]);
    wait_for("the temporary guests", || {
        let new = test_home.vmms().difference(&before).count();
        (new >= 1).then_some(())
    });
    test_home.kill_daemon();
    finish(comparing);
    wait_for("the temporary guests to exit with their daemon", || {
        test_home.vmms().is_empty().then_some(())
    });
    // The next daemon has no trace of the guests, and compares again.
    let all = test_home.json(&["ls", "--all"]);
    let running = all.as_array().unwrap().iter();
    assert_eq!(running.filter(|s| s["state"] == "running").count(), 0);
    let found = test_home.json(&["diff", "before", "after"]);
    assert_eq!(below_srv(&found), expected(&[("/srv/new", "added")]));
}
