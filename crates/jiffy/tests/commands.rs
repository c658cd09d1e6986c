//! Tests for commands on persistent sandboxes: names, labels, lists, engines and removals.

use crate::support::remote::Remote;
use crate::support::test_home::TestHome;
use crate::support::{engine, finish};
use jiffy_test_attributes::jiffy_test;
use serde_json::Value;

/// Returns the columns of the table row that starts with `begin`.
fn line<'a>(table: &'a str, begin: &str) -> Vec<&'a str> {
    let found = table.lines().find(|line| line.starts_with(begin));
    found
        .unwrap_or_else(|| panic!("no {begin} in {table}"))
        .split_whitespace()
        .collect()
}

/// Tests names and labels, over the socket or over the network.
fn names_and_labels(ok: &dyn Fn(&[&str]) -> String, fails: &dyn Fn(&[&str]) -> String) {
    let empty = ok(&["ls"]);
    assert_eq!(empty, "", "missing objects are reported on standard error");
    let web = ok(&[
        "create",
        "--cpu",
        "1",
        "--memory",
        "256Mi",
        "--name",
        "web",
        "--label",
        "team=a",
        "--timeout",
        "1h",
        "--on-timeout",
        "pause",
        "--network",
        "off",
    ]);
    let api = ok(&[
        "create",
        "--cpu",
        "1",
        "--memory",
        "256m",
        "--persist",
        "-l",
        "team=b",
    ]);
    let taken = fails(&["create", "--cpu", "1", "--memory", "256m", "--name", "web"]);
    assert!(
        taken.contains("name `web`") && taken.contains(&web),
        "{taken}"
    );
    assert_eq!(ok(&["exec", "web", "--", "hostname"]), web);
    assert_eq!(ok(&["cp", "/etc/hostname", "web:/tmp/x"]), "");

    let table = ok(&["ps"]);
    let shown = line(&table, &web[..8]);
    assert_eq!(shown[1..4], ["web", "running", "base"]);
    assert_eq!(shown[5..8], ["1", "256", "MiB"]);
    assert!(table.contains("in 59 min"), "{table}");
    assert_eq!(table.lines().count(), ok(&["list"]).lines().count());
    let only = |filter: &[&str]| ok(&[&["ls", "-q"], filter].concat());
    assert_eq!(only(&["--filter", "label=team=a"]), web);
    assert_eq!(only(&["--filter", "label=team"]), format!("{web}\n{api}"));
    assert_eq!(only(&["--filter", "name=w*"]), web);
    assert_eq!(only(&["--filter", "template=other"]), "");
    assert_eq!(ok(&["pause", "web", &api[..8]]), format!("{web}\n{api}"));
    assert_eq!(only(&["--filter", "state=paused"]), format!("{web}\n{api}"));
    assert_eq!(ok(&["resume", &api]), api);
    assert_eq!(only(&["--filter", "state=paused"]), web);
    let unknown = fails(&["ls", "--filter", "colour=red"]);
    assert!(unknown.contains("state, label, name"), "{unknown}");

    assert_eq!(ok(&["rename", &api, "api"]), api);
    assert_eq!(ok(&["exec", "api", "--", "hostname"]), api);
    assert!(fails(&["rename", "api", "web"]).contains("name `web`"));
    assert_eq!(ok(&["kill", "web", "api"]), format!("{web}\n{api}"));
    assert_eq!(only(&[]), "");
    assert!(fails(&["exec", "web", "--", "true"]).contains("sandbox `web` does not exist"));
}

/// Returns the completions of a command line in bash.
fn completed(test_home: &TestHome, words: &[&str]) -> String {
    let script = "source <(jiffy completions bash); words=(jiffy \"$@\"); COMP_WORDS=(\"${words[@]}\"); \
                  COMP_CWORD=$#; _clap_complete_jiffy jiffy \"${words[-1]}\" \"${words[-2]}\"; \
                  printf '%s\n' \"${COMPREPLY[@]}\"";
    let program = crate::support::jiffy(&[]).get_program().to_owned();
    let directory = std::path::Path::new(&program).parent().unwrap();
    let path = std::env::var("PATH").unwrap();
    let output = std::process::Command::new("bash")
        .args(["-c", script, "bash"])
        .args(words)
        .env("PATH", format!("{}:{path}", directory.display()))
        .env("JIFFY_HOME", test_home.dir.path())
        .output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}

/// Tests lists of snapshots with their sizes, and removals of snapshots in use and of unused data.
fn snapshots_and_prune(test_home: &TestHome) {
    let id = test_home.ok(&["create", "--name", "kept"]);
    let before = test_home.ok(&["snapshot", "kept", "--name", "before"]);
    let words = completed(test_home, &["exec", "ke"]);
    assert_eq!(words.lines().collect::<Vec<_>>(), ["kept"]);
    let words = completed(test_home, &["rollback", "kept", "be"]);
    assert_eq!(words.lines().collect::<Vec<_>>(), ["before"]);
    assert!(completed(test_home, &["snap"]).contains("snapshots"));
    test_home.ok(&["fork", "kept"]);
    let table = test_home.ok(&["snapshots"]);
    assert_eq!(line(&table, &before[..8])[1..3], ["before", "requested"]);
    assert!(
        table.contains("auto: fork") && table.contains("auto: template"),
        "{table}"
    );
    // Automatic snapshots: the booted templates of two sizes, and the snapshot of the fork.
    let sum = table.lines().last().unwrap();
    assert!(
        sum.contains(" in total, 3 of 4 snapshots are automatic"),
        "{sum}"
    );
    let used = test_home.ok(&["snapshot", "kept", "--name", "used"]);
    assert_eq!(test_home.ok(&["rm", "used"]), used);
    let table = test_home.ok(&["snapshots"]);
    assert!(table.contains("auto: removed, in use"), "{table}");
    let again = test_home.call(&["rm", &used]);
    assert_eq!(again.code, Some(1));
    let reason = format!("it is needed by sandbox {id} (kept)");
    assert!(again.stderr.contains(&reason), "{again:?}");

    let unasked = test_home.call(&["rm", "--all"]);
    assert!(unasked.stderr.contains("--yes"), "{unasked:?}");
    assert_eq!(test_home.ok(&["ls", "-q"]).lines().count(), 2);
    let removed = test_home.ok(&["rm", "--all", "--force"]);
    // Includes the records of `web` and `api`, which `names_and_labels` has killed.
    assert_eq!(removed.lines().count(), 4, "{removed}");
    assert!(removed.contains(&id));
    assert_eq!(test_home.ok(&["rm", "before"]), before);

    let killed = test_home.ok(&["create"]);
    test_home.ok(&["kill", &killed]);
    let report = test_home.json(&["prune", "--dry-run", "--older-than", "0s"]);
    let kinds = |report: &Value| -> Vec<String> {
        let items = report["items"].as_array().unwrap().iter();
        // Images of the shared data directory may be unused since their templates were rebuilt.
        items
            .map(|i| i["kind"].as_str().unwrap().to_owned())
            .filter(|kind| kind != "image")
            .collect()
    };
    // Snapshots of booted templates of two sizes.
    assert_eq!(kinds(&report), ["sandbox", "snapshot", "snapshot"]);
    assert!(report["bytes"].as_u64().unwrap() > 1 << 20, "{report}");
    assert_eq!(test_home.ok(&["ls", "-a", "-q"]), killed);
    // Data used within the last day remain.
    let young = test_home.ok(&["prune", "--dry-run"]);
    assert!(
        young.contains("sandbox") && !young.contains("snapshot"),
        "{young}"
    );
    assert!(test_home.call(&["prune"]).stderr.contains("--yes"));
    let done = test_home.ok(&["prune", "--yes", "--older-than", "0s"]);
    assert!(done.ends_with(" freed"), "{done}");
    assert_eq!(test_home.ok(&["ls", "-a", "-q"]), "");
    assert!(test_home.ok(&["snapshots", "--json"]) == "[]");
    assert_eq!(
        test_home.ok(&["prune", "--yes", "--older-than", "0s"]),
        "nothing to remove"
    );
}

/// Inspects, waits for and restarts a sandbox on any engine. Checks standard streams, groups, the
/// sandbox's ids, and renames of directories of the template.
fn commands_find_their_surroundings(test_home: &TestHome, engine: &str, id: &str) {
    let at = |user: &str, script: &str| {
        test_home.ok(&["exec", "seen", "-u", user, "--", "sh", "-c", script])
    };
    let streams = "echo a > /dev/stdout; echo b | tee /dev/stdout; echo c > /dev/stderr && echo d";
    assert_eq!(at("user", streams), "a\nb\nb\nd", "{engine}");
    let ids = at("1500:27", "id -u; id -g; id -G");
    assert_eq!(ids, "1500\n27\n27", "{engine}");

    let labels = "echo $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID $E2B_TEAM_ID; cd /run/e2b; \
        cat .E2B_SANDBOX .E2B_SANDBOX_ID .E2B_TEMPLATE_ID .E2B_TEAM_ID";
    let expected = |id: &str| format!("true {id} base local\ntrue{id}baselocal");
    assert_eq!(at("user", labels), expected(id), "{engine}");
    let child = test_home.ok(&["fork", "seen"]);
    assert_eq!(test_home.sh(&child, labels), expected(&child), "{engine}");
    test_home.ok(&["kill", &child]);

    // The script acts like programs that do not copy if a rename fails.
    let rename = r#"perl -e 'rename($ARGV[0], $ARGV[1]) or die "$!"' "#;
    let renames = format!(
        "set -e; cd /usr/share; {rename} common-licenses moved; test -s moved/GPL-3; \
         echo own > moved/own; {rename} moved common-licenses; cat common-licenses/own; \
         mkdir -p /tmp/p/DEBIAN /tmp/p/usr/share/common-licenses; \
         printf 'Package: p\nVersion: 1\nArchitecture: all\nMaintainer: m\nDescription: d\n' \
             > /tmp/p/DEBIAN/control; \
         echo packaged > /tmp/p/usr/share/common-licenses/own; \
         dpkg-deb -b /tmp/p /tmp/p.deb > /dev/null; dpkg -i --force-all /tmp/p.deb > /dev/null 2>&1; \
         cat common-licenses/own; test -s common-licenses/GPL-3; \
         git init -q -b a /usr/share/doc 2> /dev/null; cd /usr/share/doc; \
         git -c user.name=u -c user.email=e@e add base-files dpkg; \
         git -c user.name=u -c user.email=e@e commit -qm 1; git checkout -qb b; \
         git mv base-files files; git -c user.name=u -c user.email=e@e commit -qm 2; \
         git checkout -q a; test -e base-files/copyright; git checkout -q b; \
         test -e files/copyright; test ! -e base-files; echo checked out"
    );
    let renamed = at("root", &renames);
    assert_eq!(renamed, "own\npackaged\nchecked out", "{engine}");
    let diff = test_home.ok(&["diff", "seen", "--limit", "100000"]);
    for expected in ["D /usr/share/doc/base-files", "A /usr/share/doc/files"] {
        assert!(diff.lines().any(|l| l == expected), "{expected}: {diff}");
    }
}

/// Tests a FUSE file system whose server never answers, and a command that waits for it.
fn a_file_system_that_hangs_stops_nothing_else(test_home: &TestHome, engine: &str) {
    let root = |script: &str| {
        let args = ["exec", "seen", "-u", "root", "--", "bash", "-c", script];
        test_home.ok(&args)
    };
    // The sleeping process holds the descriptor of the file system's server, and answers nothing.
    root(
        "mkdir /mnt/hung; exec 9<>/dev/fuse; \
         mount -i -t fuse -o fd=9,rootmode=40000,user_id=0,group_id=0 hung /mnt/hung; \
         setsid sleep 1000 </dev/null >/dev/null 2>&1 &",
    );
    let waiting = test_home.begin(&[
        "exec",
        "seen",
        "-u",
        "root",
        "-w",
        "/mnt/hung",
        "--",
        "true",
    ]);
    assert_eq!(root("echo works"), "works", "{engine}");
    let child = test_home.ok(&["fork", "seen"]);
    assert_eq!(test_home.sh(&child, "echo works"), "works", "{engine}");
    test_home.ok(&["kill", &child]);
    test_home.ok(&["pause", "seen"]);
    test_home.ok(&["resume", "seen"]);
    assert_eq!(root("echo works"), "works", "{engine}");
    assert_ne!(finish(waiting).code, Some(0), "{engine}");
}

/// Tests commands on one sandbox: inspect, diff, stats, shell, restart and wait.
fn sandbox_is_inspected_and_restarted(test_home: &TestHome, engine: &str) {
    let created = test_home.json(&[
        "create", "--engine", engine, "--name", "seen", "-l", "team=a",
    ]);
    let id = created["id"].as_str().unwrap();
    let shown = test_home.ok(&["inspect", "seen"]);
    assert_eq!(line(&shown, "sandbox")[1], id);
    assert_eq!(line(&shown, "engine")[1], engine);
    assert_eq!(line(&shown, "labels")[1], "team=a");
    let all = test_home.json(&["inspect", "seen"]);
    assert_eq!(all[0]["name"], "seen");
    assert!(all[0]["agent_token"].is_null(), "{all}");
    commands_find_their_surroundings(test_home, engine, id);
    a_file_system_that_hangs_stops_nothing_else(test_home, engine);

    let root = |script: &str| {
        let args = ["exec", "seen", "-u", "root", "--", "sh", "-c", script];
        test_home.ok(&args)
    };
    root("echo 1 > /tmp/new; echo 2 >> /etc/profile; rm /etc/issue; mkdir /srv/d");
    let diff = test_home.ok(&["diff", "seen"]);
    let lines: Vec<&str> = diff.lines().collect();
    for expected in [
        "A /tmp/new",
        "C /etc/profile",
        "D /etc/issue",
        "A /srv/d",
        "C /srv",
    ] {
        assert!(
            lines.contains(&expected),
            "{expected} of {engine} in {diff}"
        );
    }
    assert!(!diff.contains("/proc") && !diff.contains("/run/"), "{diff}");
    let one = test_home.json(&["diff", "seen", "--limit", "1"]);
    assert_eq!(
        (one["changes"].as_array().unwrap().len(), &one["more"]),
        (1, &true.into())
    );

    let stats = test_home.ok(&["stats", "--no-stream", "seen"]);
    assert_eq!(line(&stats, &id[..8])[1..3], ["seen", "running"]);
    let stats = test_home.json(&["stats", "seen"]);
    assert!(stats[0]["memUsed"].as_u64().unwrap() > 1 << 20, "{stats}");

    let input = b"echo $0; cd /tmp; cat new; exit 7\n";
    let shell = test_home.call_with(&["shell", "seen", "-u", "root"], input);
    assert_eq!(shell.code, Some(7), "{shell:?}");
    assert!(shell.stdout.ends_with("bash\n1\n"), "{shell:?}");

    root("setsid sh -c 'trap \"\" TERM; sleep 1000' >/dev/null 2>&1 &");
    root("setsid sleep 2000 >/dev/null 2>&1 &");
    assert_eq!(test_home.ok(&["restart", "seen", "-t", "500ms"]), id);
    // The disk is retained. No process remains, although a program ignores SIGTERM.
    let remaining =
        root("cat /tmp/new; hostname; cat /proc/[0-9]*/cmdline | grep -ac '[s]leep'; true");
    assert_eq!(remaining, format!("1\n{id}\n0"), "{engine}");

    assert_eq!(
        test_home.ok(&["wait", "--for", "running", "seen"]),
        "running"
    );
    let late = test_home.call(&["wait", "seen", "--timeout", "100ms"]);
    assert_eq!((late.code, &late.stdout[..]), (Some(124), "running\n"));
    let waiting = test_home.begin(&["wait", "seen"]);
    crate::support::wait_for("the command to connect to the daemon", || {
        // One entry is the listener, under the name with which it was created: `jiffy.new`. Each
        // connection to the daemon is a further entry.
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
        let place = format!("{}/run/jiffy.", test_home.dir.path().display());
        (sockets.matches(&place).count() > 1).then_some(())
    });
    test_home.ok(&["kill", "seen"]);
    let ended = finish(waiting);
    assert_eq!((ended.code, &ended.stdout[..]), (Some(0), "killed\n"));
    let short = test_home.ok(&["create", "--engine", engine, "--timeout", "1s"]);
    assert_eq!(test_home.ok(&["wait", &short]), "killed: timeout expired");
}

/// Tests both engines in one daemon.
fn engines_side_by_side(test_home: &TestHome) {
    let unknown = test_home.call(&["create", "--engine", "quemu"]);
    assert_eq!(unknown.code, Some(2));
    assert!(
        unknown.stderr.contains("`microvm` or `gvisor`"),
        "{unknown:?}"
    );
    let default = test_home.json(&["create"])["engine"]
        .as_str()
        .unwrap()
        .to_owned();
    if engine::missing_gvisor().is_some() || default == "gvisor" {
        return;
    }
    let created = test_home.json(&["create", "--engine", "gvisor"]);
    assert_eq!(created["engine"], "gvisor");
    let id = created["id"].as_str().unwrap();
    assert_eq!(test_home.sh(id, "hostname"), id);
    let child = test_home.json(&["fork", id])["children"][0].clone();
    assert_eq!(child["engine"], "gvisor");
    let listed = test_home.ok(&["ls", "-q", "--filter", "engine=gvisor"]);
    assert_eq!(listed.lines().count(), 2);
    // The booted template of the other engine remains.
    let again = test_home.json(&["create"]);
    assert_eq!(
        (&again["engine"], &again["boot_mode"]),
        (&default.into(), &"snapshot".into())
    );
    test_home.ok(&["rm", "--all", "-f"]);
    sandbox_is_inspected_and_restarted(test_home, "gvisor");
}

#[jiffy_test]
fn sandboxes_are_named_listed_and_removed_by_commands() {
    let test_home = TestHome::new();
    let fails = |args: &[&str]| {
        let done = test_home.call(args);
        assert_ne!(done.code, Some(0), "{args:?}: {done:?}");
        done.stderr
    };
    // Sandboxes of a warm pool would use snapshots of templates, so `prune` would retain these.
    test_home.ok(&["daemon", "start", "--no-listen", "--warm-pool", "0"]);
    names_and_labels(&|args| test_home.ok(args), &fails);
    snapshots_and_prune(&test_home);
    let default = test_home.json(&["create"])["engine"]
        .as_str()
        .unwrap()
        .to_owned();
    sandbox_is_inspected_and_restarted(&test_home, &default);
    engines_side_by_side(&test_home);
}

#[jiffy_test]
fn the_same_commands_work_remotely_with_a_key() {
    let remote = Remote::new(&[]);
    // The operator has separate names.
    remote
        .test_home
        .ok(&["create", "--name", "web", "--memory", "256Mi", "--cpu", "1"]);
    let fails = |args: &[&str]| {
        let done = remote.call(args);
        assert_ne!(done.code, Some(0), "{args:?}: {done:?}");
        done.stderr
    };
    names_and_labels(&|args| remote.ok(args), &fails);
    // The killed sandboxes `web` and `api` are removed. The operator's sandbox remains.
    let report = remote.json(&["prune", "--yes", "--older-than", "0s"]);
    assert_eq!(report["items"].as_array().unwrap().len(), 2, "{report}");
    assert_eq!(remote.test_home.ok(&["ls", "-q"]).lines().count(), 1);
}
