//! Tests of watchers, which report changes of the files in a directory. A *polled* watcher queues
//! its events until the client requests them. A stream sends its events at once.
#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

use crate::common::{TestAgent, wait_for};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

#[test]
fn a_polled_watcher_reports_events() {
    let agent = TestAgent::new();
    std::fs::create_dir(agent.path("w")).unwrap();
    let request = format!(
        r#"{{"path":"{}","recursive":true,"includeEntry":true}}"#,
        agent.path("w")
    );
    let (_, created) = agent.rpc("/filesystem.Filesystem/CreateWatcher", &request);
    let created: serde_json::Value = serde_json::from_str(&created).unwrap();
    let id = serde_json::json!({"watcherId": created["watcherId"]}).to_string();
    std::fs::create_dir_all(agent.path("w/sub")).unwrap();
    std::fs::write(agent.path("w/f"), "x").unwrap();
    std::fs::set_permissions(
        agent.path("w/f"),
        std::os::unix::fs::PermissionsExt::from_mode(0o600),
    )
    .unwrap();
    std::fs::rename(agent.path("w/f"), agent.path("w/g")).unwrap();
    std::fs::remove_file(agent.path("w/g")).unwrap();
    let take = || {
        let (_, events) = agent.rpc("/filesystem.Filesystem/GetWatcherEvents", &id);
        let events: serde_json::Value = serde_json::from_str(&events).unwrap();
        events["events"]
            .as_array()
            .unwrap()
            .iter()
            .map(|e| {
                format!(
                    "{} {}",
                    e["name"].as_str().unwrap(),
                    e["type"]
                        .as_str()
                        .unwrap()
                        .trim_start_matches("EVENT_TYPE_")
                )
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(
        take(),
        [
            "sub CREATE",
            "f CREATE",
            "f WRITE",
            "f CHMOD",
            "f RENAME",
            "g CREATE",
            "g REMOVE"
        ]
    );
    std::fs::write(agent.path("w/sub/below"), "").unwrap();
    assert_eq!(take(), ["sub/below CREATE"]);
    assert!(
        agent
            .rpc("/filesystem.Filesystem/RemoveWatcher", &id)
            .0
            .starts_with("HTTP/1.1 200")
    );
    assert!(
        agent
            .rpc("/filesystem.Filesystem/GetWatcherEvents", &id)
            .0
            .starts_with("HTTP/1.1 404")
    );
}

/// Creates the file `mark`, and waits until a watcher has reported it. This event follows all
/// earlier events. Adds all events to `events`.
fn seen(agent: &TestAgent, id: &str, mark: &str, events: &mut Vec<String>) {
    std::fs::write(agent.path(mark), "").unwrap();
    let name = mark.rsplit('/').next().unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !events.iter().any(|e| e == &format!("{name} CREATE")) {
        assert!(std::time::Instant::now() < deadline, "{events:?}");
        let (_, answer) = agent.rpc("/filesystem.Filesystem/GetWatcherEvents", id);
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        events.extend(answer["events"].as_array().unwrap().iter().map(|e| {
            let kind = e["type"].as_str().unwrap();
            let kind = kind.trim_start_matches("EVENT_TYPE_");
            format!("{} {kind}", e["name"].as_str().unwrap())
        }));
    }
}

/// Creates a directory and a recursive watcher of it. Returns the request for its events.
fn watcher(agent: &TestAgent, dir: &str) -> String {
    std::fs::create_dir(agent.path(dir)).unwrap();
    let request = format!(r#"{{"path":"{}","recursive":true}}"#, agent.path(dir));
    let (_, created) = agent.rpc("/filesystem.Filesystem/CreateWatcher", &request);
    let created: serde_json::Value = serde_json::from_str(&created).unwrap();
    serde_json::json!({"watcherId": created["watcherId"]}).to_string()
}

#[test]
fn a_polled_watcher_follows_directories_made_between_polls() {
    let agent = TestAgent::new();
    let id = watcher(&agent, "w");
    // Directories that the agent watches, from the kernel's list.
    let watched = || {
        let files = std::fs::read_dir(format!("/proc/{}/fdinfo", agent.pid())).unwrap();
        let texts = files.flatten().map(|f| std::fs::read_to_string(f.path()));
        let lines = |text: String| text.lines().filter(|l| l.starts_with("inotify ")).count();
        texts.flatten().map(lines).sum::<usize>()
    };
    for (at, dir) in ["w/sub", "w/sub/deep"].iter().enumerate() {
        std::fs::create_dir(agent.path(dir)).unwrap();
        wait_for("a watch of the new directory", || watched() == at + 2);
    }
    std::fs::write(agent.path("w/sub/deep/f"), "x").unwrap();
    std::fs::remove_file(agent.path("w/sub/deep/f")).unwrap();
    std::fs::remove_dir(agent.path("w/sub/deep")).unwrap();
    let mut events = Vec::new();
    seen(&agent, &id, "w/mark", &mut events);
    assert_eq!(
        events[..6],
        [
            "sub CREATE",
            "sub/deep CREATE",
            "sub/deep/f CREATE",
            "sub/deep/f WRITE",
            "sub/deep/f REMOVE",
            "sub/deep REMOVE"
        ],
        "{events:?}"
    );
}

#[test]
fn unpolled_events_are_bounded_and_their_loss_is_reported() {
    let agent = TestAgent::new();
    let id = watcher(&agent, "w");
    let (here, there) = (agent.path("w/a"), agent.path("w/b"));
    std::fs::write(&here, "").unwrap();
    // Each of the 5,200 renames causes two events. A watcher keeps at most 10,000 events
    // (`MAX_QUEUED_EVENTS`).
    for _ in 0..2_600 {
        std::fs::rename(&here, &there).unwrap();
        std::fs::rename(&there, &here).unwrap();
    }
    let take = || agent.rpc("/filesystem.Filesystem/GetWatcherEvents", &id);
    let (head, answer) = take();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    let events = answer["events"].as_array().unwrap();
    assert_eq!(events.len(), 10_000);
    assert_eq!(events[0]["name"], "a");
    let (head, answer) = take();
    assert!(head.starts_with("HTTP/1.1 429"), "{head}");
    assert!(answer.contains("were lost"), "{answer}");
    // The watcher continues to work.
    let mut events = Vec::new();
    seen(&agent, &id, "w/mark", &mut events);
}

#[test]
fn a_watch_stream_starts_sends_keepalives_and_ends_in_time() {
    let agent = TestAgent::new();
    std::fs::create_dir(agent.path("w")).unwrap();
    let file = agent.path("w/f");
    let writer = std::thread::spawn(move || {
        // Wait until the agent has added the watch: an earlier write would not be reported.
        std::thread::sleep(std::time::Duration::from_millis(500));
        std::fs::write(file, "").unwrap();
    });
    let request = format!(r#"{{"path":"{}"}}"#, agent.path("w"));
    let headers = ["Keepalive-Ping-Interval: 1", "connect-timeout-ms: 2000"];
    let frames = agent.stream(
        "/filesystem.Filesystem/WatchDir",
        &headers,
        request.as_bytes(),
    );
    writer.join().unwrap();
    assert_eq!(frames[0], r#"0{"start":{}}"#);
    assert!(
        frames.contains(&r#"0{"filesystem":{"name":"f","type":"EVENT_TYPE_CREATE"}}"#.to_owned()),
        "{frames:?}"
    );
    assert!(
        frames.contains(&r#"0{"keepalive":{}}"#.to_owned()),
        "{frames:?}"
    );
    assert!(
        frames
            .last()
            .unwrap()
            .starts_with(r#"2{"error":{"code":"deadline_exceeded""#)
    );
    let missing = agent.stream(
        "/filesystem.Filesystem/WatchDir",
        &[],
        br#"{"path":"/no/such"}"#,
    );
    assert!(missing[0].starts_with(r#"2{"error":{"code":"not_found""#));
    wait_for("the watch's end", || {
        std::fs::read_dir(format!("/proc/{}/fd", agent.pid()))
            .unwrap()
            .flatten()
            .all(|fd| {
                std::fs::read_link(fd.path())
                    .map_or(true, |t| !t.to_string_lossy().contains("inotify"))
            })
    });
}

#[test]
fn a_directory_that_is_moved_is_followed_below_the_root_only() {
    let agent = TestAgent::new();
    std::fs::create_dir_all(agent.path("w/a/deep")).unwrap();
    std::fs::create_dir_all(agent.path("w/b")).unwrap();
    let request = format!(r#"{{"path":"{}","recursive":true}}"#, agent.path("w"));
    let (_, created) = agent.rpc("/filesystem.Filesystem/CreateWatcher", &request);
    let created: serde_json::Value = serde_json::from_str(&created).unwrap();
    let id = serde_json::json!({"watcherId": created["watcherId"]}).to_string();
    std::fs::rename(agent.path("w/a"), agent.path("outside")).unwrap();
    std::fs::rename(agent.path("w/b"), agent.path("w/c")).unwrap();
    let mut events = Vec::new();
    seen(&agent, &id, "w/mark", &mut events);
    std::fs::write(agent.path("outside/f"), "x").unwrap();
    std::fs::write(agent.path("outside/deep/f"), "x").unwrap();
    std::fs::write(agent.path("w/c/f"), "").unwrap();
    seen(&agent, &id, "w/last", &mut events);
    assert_eq!(
        events,
        [
            "a RENAME",
            "b RENAME",
            "c CREATE",
            "mark CREATE",
            "c/f CREATE",
            "last CREATE"
        ]
    );
}

#[test]
fn a_watched_directory_that_is_moved_itself_is_reported_and_no_longer_watched() {
    let agent = TestAgent::new();
    let id = watcher(&agent, "w");
    std::fs::rename(agent.path("w"), agent.path("moved")).unwrap();
    std::fs::write(agent.path("moved/f"), "x").unwrap();
    let take = || agent.rpc("/filesystem.Filesystem/GetWatcherEvents", &id);
    let mut answer = take();
    wait_for("the report", || {
        let is_reported = answer.0.starts_with("HTTP/1.1 429");
        if !is_reported {
            assert!(answer.1.contains(r#""events":[]"#), "{answer:?}");
            answer = take();
        }
        is_reported
    });
    assert!(answer.1.contains("was moved"), "{}", answer.1);
    assert!(take().1.contains(r#""events":[]"#));
}

#[test]
fn a_stream_of_events_ends_with_an_error_if_events_are_lost() {
    let agent = TestAgent::new();
    std::fs::create_dir(agent.path("w")).unwrap();
    let body = crate::common::frame(format!(r#"{{"path":"{}"}}"#, agent.path("w")).as_bytes());
    let mut stream = UnixStream::connect(agent.socket()).unwrap();
    let limit = Some(Duration::from_secs(20));
    stream.set_read_timeout(limit).unwrap();
    let head = format!(
        "POST /filesystem.Filesystem/WatchDir HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
         Content-Type: application/connect+json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&body).unwrap();
    crate::common::until(&mut stream, br#"{"start":{}}"#);
    // The client does not read, so that the queues of the agent and of the kernel become full.
    let (here, there) = (agent.path("w/a"), agent.path("w/b"));
    std::fs::write(&here, "").unwrap();
    for _ in 0..15_000 {
        std::fs::rename(&here, &there).unwrap();
        std::fs::rename(&there, &here).unwrap();
    }
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    let rest = String::from_utf8_lossy(&rest);
    let end = rest.rfind(r#"{"error":{"code":"resource_exhausted""#);
    assert!(end.is_some(), "{}", &rest[rest.len() - 300..]);
    assert!(rest[end.unwrap()..].contains("were lost"));
}

#[test]
fn a_directory_that_cannot_be_watched_is_reported() {
    // Watches of `w`, `w/1` and `w/2` are permitted. A watch of `w/3` is not.
    let agent = TestAgent::with_user_limits("max_inotify_watches", 3);
    let Some(agent) = agent else {
        eprintln!("SKIPPED a_directory_that_cannot_be_watched_is_reported: no user namespaces");
        return;
    };
    std::fs::create_dir_all(agent.path("w/1")).unwrap();
    let create = "/filesystem.Filesystem/CreateWatcher";
    let request = format!(r#"{{"path":"{}","recursive":true}}"#, agent.path("w"));
    let (_, created) = agent.rpc(create, &request);
    let created: serde_json::Value = serde_json::from_str(&created).unwrap();
    let id = serde_json::json!({"watcherId": created["watcherId"]}).to_string();
    std::fs::create_dir(agent.path("w/2")).unwrap();
    let mut events = Vec::new();
    seen(&agent, &id, "w/mark", &mut events);
    std::fs::create_dir(agent.path("w/3")).unwrap();
    let poll = || agent.rpc("/filesystem.Filesystem/GetWatcherEvents", &id);
    wait_for("the report", || {
        let (head, body) = poll();
        head.starts_with("HTTP/1.1 429") && body.contains("/w/3'")
    });
    // The watcher continues to work.
    seen(&agent, &id, "w/last", &mut events);
    // A new watcher that cannot watch all directories is an error.
    let (head, body) = agent.rpc(create, &request);
    assert!(head.starts_with("HTTP/1.1 429"), "{head} {body}");
}
