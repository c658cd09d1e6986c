//! Tests for commands on the sandboxes of another host over http and https, and for their error
//! messages.

use crate::support::remote::{Remote, from};
use crate::support::test_home::TestHome;
use crate::support::{Done, finish, read_until};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;

#[jiffy_test]
fn every_command_does_the_same_over_the_network_as_over_the_socket() {
    let remote = Remote::new(&["--warm-pool", "0"]);
    let created = remote.json(&["create", "-e", "GREETING=hello"]);
    let id = created["id"].as_str().unwrap();
    let short = &id[..6];
    assert_eq!(
        (&created["state"], &created["vcpus"]),
        (&"running".into(), &2.into())
    );
    assert_eq!(
        remote.sh(short, "echo $GREETING; hostname"),
        format!("hello\n{id}")
    );
    let listed = remote.json(&["ls"]);
    assert_eq!(listed[0]["id"], id);
    assert!(remote.ok(&["ls"]).contains(&id[..8]));

    remote.sh(short, "echo one > /tmp/state");
    let snapshot = remote.json(&["snapshot", short, "--name", "first"]);
    remote.sh(short, "echo two > /tmp/state");
    let fork = remote.json(&["fork", short, "-n", "2"]);
    let child = |n: usize| fork["children"][n]["id"].as_str().unwrap();
    assert_eq!(remote.sh(child(0), "cat /tmp/state"), "two");
    // The promoted child replaces its sibling.
    assert_eq!(
        remote.ok(&["promote", child(0)]),
        format!("removed {}", child(1))
    );
    let all = remote.json(&["snapshots"]);
    assert_eq!(all[0]["name"], "first");
    assert_eq!(remote.ok(&["rollback", short, "first"]), id);
    assert_eq!(remote.sh(short, "cat /tmp/state"), "one");
    let copy = remote.ok(&["create", "--from", &snapshot["id"].as_str().unwrap()[..8]]);
    assert_eq!(remote.sh(&copy, "cat /tmp/state"), "one");

    assert_eq!(remote.ok(&["pause", short]), id);
    let refused = remote.call(&["exec", short, "--", "true"]);
    assert_eq!(refused.code, Some(125));
    assert!(refused.stderr.contains("jiffy resume"), "{refused:?}");
    assert_eq!(remote.ok(&["resume", short]), id);
    assert_eq!(remote.sh(short, "cat /tmp/state"), "one");

    let missing = remote.call(&["exec", "zzzz", "--", "true"]);
    assert_eq!(missing.code, Some(125));
    assert!(
        missing.stderr.contains("sandbox `zzzz` does not exist"),
        "{missing:?}"
    );
    // The operator is another owner than the key, and sees all sandboxes of the key: the first one,
    // its child and the copy.
    assert_eq!(remote.test_home.json(&["ls"]).as_array().unwrap().len(), 3);
    remote.ok(&["kill", child(0)]);
    assert_eq!(remote.ok(&["rm", short, &copy]), format!("{id}\n{copy}"));
    remote.ok(&["rm", "first"]);
    assert_eq!(remote.ok(&["ls", "--json"]), "[]");
    assert_eq!(remote.ok(&["snapshots", "--json"]), "[]");
    assert!(
        !remote.elsewhere().exists(),
        "the command changed this host"
    );
}

/// Tests input, large output, exit codes, signals and files. `calls` returns a command of the
/// client with these arguments.
fn streams(remote: &Remote, calls: impl Fn(&[&str]) -> std::process::Command) {
    let run = |args: &[&str]| finish(calls(args).spawn().unwrap());
    let id = run(&["create"]).stdout.trim_end().to_owned();
    // All ids of sandboxes have 20 characters.
    assert_eq!(id.len(), 20);
    let exec = |script: &str| run(&["exec", &id, "--", "sh", "-c", script]);
    assert_eq!(exec("echo no >&2; exit 7").code, Some(7));
    assert_eq!(exec("kill -9 $$").code, Some(137));
    assert_eq!(run(&["exec", &id, "--", "no-such"]).code, Some(127));
    let much = exec("yes | head -c 20000000");
    assert_eq!((much.code, much.stdout.len()), (Some(0), 20_000_000));

    let data: Vec<u8> = (0..1_000_000u32).flat_map(u32::to_le_bytes).collect();
    let file = remote.test_home.dir.path().join("data");
    std::fs::write(&file, &data).unwrap();
    let mut counted = calls(&["exec", "-i", &id, "--", "sha256sum"]);
    counted.stdin(std::fs::File::open(&file).unwrap());
    let counted = finish(counted.spawn().unwrap());
    run(&["cp", file.to_str().unwrap(), &format!("{id}:/tmp/")]);
    let sum = exec("sha256sum < /tmp/data");
    assert_eq!((counted.code, counted.stdout), (Some(0), sum.stdout));
    let back = remote.test_home.dir.path().join("back");
    run(&["cp", &format!("{id}:/tmp/data"), back.to_str().unwrap()]);
    assert!(std::fs::read(&back).unwrap() == data);

    let script = "trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.05; done";
    let mut waiting = calls(&["exec", &id, "--", "sh", "-c", script])
        .spawn()
        .unwrap();
    read_until(waiting.stdout.as_mut().unwrap(), "ready");
    let pid = Pid::from_raw(waiting.id().try_into().unwrap());
    kill(pid, Signal::SIGTERM).unwrap();
    let done = finish(waiting);
    assert_eq!((done.code, done.stdout.trim()), (Some(3), "caught"));
    assert_eq!(run(&["rm", &id]).code, Some(0));
}

#[jiffy_test]
fn streams_files_exit_codes_and_signals_pass_over_http() {
    let remote = Remote::new(&[]);
    streams(&remote, |args| remote.command(args));
}

#[jiffy_test]
fn https_needs_a_trusted_certificate_and_names_the_missing_authority() {
    let remote = Remote::new(&["--tls"]);
    assert!(remote.url.starts_with("https://"), "{}", remote.url);
    let distrusted = remote.call(&["ls"]);
    assert_eq!(distrusted.code, Some(1));
    assert!(distrusted.stderr.contains("JIFFY_CA"), "{distrusted:?}");
    let authority = remote.authority();
    streams(&remote, |args| {
        let mut command = remote.command(args);
        command.env("JIFFY_CA", &authority);
        command
    });
    let mut plain = remote.command(&["ls"]);
    plain.env("JIFFY_URL", remote.url.replace("https", "http"));
    let plain = finish(plain.spawn().unwrap());
    assert!(
        plain.code == Some(1) && plain.stderr.contains("https://"),
        "{plain:?}"
    );
}

#[jiffy_test]
fn invalid_keys_are_rejected_with_an_explanation() {
    let remote = Remote::new(&["--warm-pool", "0"]);
    let with = |key: &str, args: &[&str]| {
        let mut command = remote.command(args);
        finish(command.env("JIFFY_API_KEY", key).spawn().unwrap())
    };
    let says = |done: Done, words: &[&str]| {
        assert_eq!(done.code, Some(1), "{done:?}");
        assert!(
            words.iter().all(|w| done.stderr.contains(w)),
            "{words:?}: {done:?}"
        );
    };
    let none = format!("e2b_{}", "0".repeat(40));
    says(
        with(&none, &["ls"]),
        &[&remote.url, "rejected the API key", "jiffy key create"],
    );
    says(with("", &["ls"]), &["JIFFY_API_KEY", "--key-file"]);
    says(with("two words", &["ls"]), &["is not an API key"]);

    let reader = remote
        .test_home
        .ok(&["key", "create", "--name", "reader", "--scope", "read"]);
    assert_eq!(with(&reader, &["ls"]).code, Some(0));
    says(
        with(&reader, &["create"]),
        &["is read-only", "--scope", "create"],
    );

    let file = remote.test_home.dir.path().join("key");
    std::fs::write(&file, format!("{}\n", remote.key)).unwrap();
    let by_file = [
        "ls",
        "--url",
        &remote.url,
        "--key-file",
        file.to_str().unwrap(),
    ];
    let mut by_file = from(&remote.elsewhere(), &by_file);
    assert_eq!(finish(by_file.spawn().unwrap()).code, Some(0));

    remote.test_home.ok(&["key", "revoke", "test"]);
    says(remote.call(&["ls"]), &["revoked"]);
    remote.test_home.ok(&["daemon", "stop"]);
    says(remote.call(&["ls"]), &["cannot connect to", &remote.url]);
}

#[jiffy_test]
fn a_command_reports_that_its_daemon_exited() {
    let remote = Remote::new(&["--warm-pool", "0"]);
    let id = remote.ok(&["create"]);
    let script = "echo ready; exec sleep 1000";
    let mut waiting = remote.command(&["exec", &id, "--", "sh", "-c", script]);
    let mut waiting = waiting.spawn().unwrap();
    read_until(waiting.stdout.as_mut().unwrap(), "ready");
    remote.test_home.kill_daemon();
    let done = finish(waiting);
    assert_eq!(done.code, Some(125), "{done:?}");
    let report =
        done.stderr.contains("cannot connect to") || done.stderr.contains("lost the connection");
    assert!(report, "{done:?}");
    // The process continues to run, and the next daemon finds it.
    assert_eq!(remote.test_home.sh(&id, "pgrep -c sleep"), "1");
}

/// Answers every request on `stream` with `answer`.
fn reply(mut stream: impl Read + Write, answer: &str) {
    let mut head = [0; 4096];
    while matches!(stream.read(&mut head), Ok(n) if n > 0) {
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

fn answer(status: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\n\r\n{body}")
}

#[test]
fn an_address_of_another_server_is_reported() {
    let ls = |url: &str| {
        let dir = tempfile::tempdir().unwrap();
        let mut command = from(&dir.path().join("home"), &["ls", "--url", url]);
        let done = finish(command.env("JIFFY_API_KEY", "e2b_x").spawn().unwrap());
        assert_eq!(done.code, Some(1), "{done:?}");
        done.stderr
    };
    let said_at = |answer: String| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || reply(listener.accept().unwrap().0, &answer));
        ls(&url)
    };
    let page = said_at(answer("200 OK", "", "<html>"));
    assert!(page.contains("not a Jiffy daemon"), "{page}");
    let newer = said_at(answer(
        "404 Not Found",
        "jiffy-version: 99.0.0\r\n",
        r#"{"error_code":"no_such_call"}"#,
    ));
    assert!(
        newer.contains("99.0.0") && newer.contains("same version"),
        "{newer}"
    );
    let other = said_at("220 mail.example ESMTP\r\n".to_owned());
    assert!(other.contains("does not respond with HTTP"), "{other}");
    let wrong = ls("127.0.0.1:3000");
    assert!(wrong.contains("http://HOST:PORT"), "{wrong}");
    let nobody = ls("http://127.0.0.1:1");
    assert!(
        nobody.contains("cannot connect to http://127.0.0.1:1"),
        "{nobody}"
    );
}

#[test]
fn an_older_daemon_is_reported_with_its_remedy() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("run")).unwrap();
    let listener = UnixListener::bind(dir.path().join("run/jiffy.sock")).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let old = answer(
                "404 Not Found",
                "",
                r#"{"error":"the daemon knows no such call"}"#,
            );
            std::thread::spawn(move || reply(stream.unwrap(), &old));
        }
    });
    for args in [&["ls"][..], &["daemon", "status"], &["kill", "x"]] {
        let done = finish(from(dir.path(), args).spawn().unwrap());
        assert_eq!(done.code, Some(1), "{done:?}");
        let words = ["older version", "jiffy daemon restart"];
        assert!(words.iter().all(|w| done.stderr.contains(w)), "{done:?}");
    }
}

#[jiffy_test]
fn the_socket_answers_what_the_address_answers_without_a_key() {
    let test_home = TestHome::new();
    test_home.ok(&["daemon", "start", "--no-listen"]);
    let socket = test_home.dir.path().join("run/jiffy.sock");
    let ask = |path: &str| {
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    for path in [
        "/health",
        "/openapi.json",
        "/v2/sandboxes",
        "/host",
        "/metrics",
    ] {
        let answer = ask(path);
        assert!(
            answer.starts_with("HTTP/1.0 200") || answer.starts_with("HTTP/1.1 200"),
            "{path}: {answer}"
        );
        assert!(answer.contains("jiffy-version: "), "{path}: {answer}");
    }
    assert!(ask("/host").contains("\"arguments\":"), "{}", ask("/host"));
}
