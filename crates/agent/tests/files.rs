//! Promises about files, directories and watchers.
#![allow(clippy::unwrap_used, reason = "a panic is a test's answer")]

mod common;

use common::{TestAgent, gzip, wait_for};
use flate2::read::GzDecoder;
use jiffy_agent_client::{ClientError, EntryKind, RpcCode};
use std::io::Read;
use std::os::unix::fs::MetadataExt;

#[tokio::test]
async fn a_file_survives_the_round_trip_and_belongs_to_the_user() {
    let agent = TestAgent::new();
    let path = agent.path("new/deep/datä +.bin");
    let content: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
    agent
        .client
        .write(&path, Some("nobody"), content.clone())
        .await
        .unwrap();
    let back = agent.client.read(&path, None, content.len()).await.unwrap();
    assert!(back == content);
    assert_eq!(std::fs::metadata(&path).unwrap().uid(), 65534);
    assert_eq!(std::fs::metadata(agent.path("new")).unwrap().uid(), 65534);
    let mut writer = agent.client.write_stream(&path, None);
    for _ in 0..10 {
        writer.write(vec![7; 1000]).await.unwrap();
    }
    writer.finish().await.unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), vec![7; 10_000]);
    let refused = agent.client.read(&path, None, 9_999).await;
    assert!(matches!(refused, Err(ClientError::TooLarge { .. })));
}

#[test]
fn missing_files_directories_and_pipes_are_errors() {
    let agent = TestAgent::new();
    let get = |path: &str| agent.raw(&format!("GET /files?path={path}"), &[], b"");
    let (head, body) = get("/no/such");
    assert!(head.starts_with("HTTP/1.1 404"));
    assert!(String::from_utf8(body).unwrap().contains(r#""code":404"#));
    assert!(get("/tmp").0.starts_with("HTTP/1.1 400"));
    std::process::Command::new("mkfifo")
        .arg(agent.path("pipe"))
        .status()
        .unwrap();
    assert!(get(&agent.path("pipe")).0.starts_with("HTTP/1.1 400"));
    assert!(get("/tmp&username=nope").0.starts_with("HTTP/1.1 401"));
    std::fs::write(agent.path("empty"), "").unwrap();
    let (head, body) = get(&agent.path("empty"));
    assert!(
        head.contains("content-length: 0") && body.is_empty(),
        "{head}"
    );
    assert!(!get("/proc/uptime").1.is_empty());
    let post = |path: &str| agent.raw(&format!("POST /files?path={path}"), &[], b"x").0;
    assert!(post("/tmp").starts_with("HTTP/1.1 400"));
    assert!(post(&agent.path("empty/below")).starts_with("HTTP/1.1 400"));
    assert!(
        agent
            .raw("POST /files", &[], b"x")
            .0
            .starts_with("HTTP/1.1 400")
    );
}

#[test]
fn parts_of_files_and_compressed_files_are_sent() {
    let agent = TestAgent::new();
    let text = "0123456789".repeat(20_000);
    std::fs::write(agent.path("f"), &text).unwrap();
    let get = |header: &str| {
        agent.raw(
            &format!("GET /files?path={}", agent.path("f")),
            &[header],
            b"",
        )
    };
    let (head, body) = get("Range: bytes=5-8");
    assert!(
        head.starts_with("HTTP/1.1 206") && head.contains("content-range: bytes 5-8/200000"),
        "{head}"
    );
    assert_eq!(body, b"5678");
    assert!(get("Range: bytes=200000-").0.starts_with("HTTP/1.1 416"));
    let (head, body) = get("Accept-Encoding: gzip");
    assert!(
        head.contains("content-encoding: gzip") && body.len() < 10_000,
        "{head}"
    );
    let mut back = String::new();
    GzDecoder::new(&body[..]).read_to_string(&mut back).unwrap();
    assert!(back == text);
    let (head, body) = get("Accept-Encoding: gzip, deflate, br");
    assert!(!head.contains("content-encoding") && body.len() == text.len());
}

#[test]
fn uploads_may_be_compressed_and_carry_metadata() {
    let agent = TestAgent::new();
    let text = "abc".repeat(100_000);
    let post = format!("POST /files?path={}", agent.path("f"));
    let headers = [
        "Content-Encoding: gzip",
        "X-Metadata-Owner: me",
        "Content-Type: application/octet-stream",
    ];
    let (head, body) = agent.raw(&post, &headers, &gzip(text.as_bytes()));
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let expected = format!(
        r#"[{{"path":"{}","name":"f","type":"file","metadata":{{"owner":"me"}}}}]"#,
        agent.path("f")
    );
    assert_eq!(String::from_utf8(body).unwrap(), expected);
    assert!(std::fs::read_to_string(agent.path("f")).unwrap() == text);
    let (_, stat) = agent.rpc(
        "/filesystem.Filesystem/Stat",
        &format!(r#"{{"path":"{}"}}"#, agent.path("f")),
    );
    assert!(stat.contains(r#""metadata":{"owner":"me"}"#), "{stat}");
    // Metadata is replaced, not added to.
    agent.raw(&post, &[], b"x");
    let (_, stat) = agent.rpc(
        "/filesystem.Filesystem/Stat",
        &format!(r#"{{"path":"{}"}}"#, agent.path("f")),
    );
    assert!(!stat.contains("metadata"), "{stat}");
    assert!(
        agent
            .raw(&post, &headers, b"no gzip at all")
            .0
            .starts_with("HTTP/1.1 400")
    );
    let (_, cut) = (0, &gzip(text.as_bytes())[..50]);
    assert!(
        agent
            .raw(&post, &headers, cut)
            .0
            .starts_with("HTTP/1.1 400")
    );
}

#[test]
fn multipart_file_names_are_whole_paths() {
    let agent = TestAgent::new();
    let part = |name: &str, content: &str| {
        format!(
            "--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\nContent-Type: application/octet-stream\r\n\r\n{content}\r\n"
        )
    };
    let kind = "Content-Type: multipart/form-data; boundary=B";
    let (one, two) = (agent.path("a/one"), agent.path("b/two"));
    let body = part(&one, "first") + &part(&two, "second") + "--B--\r\n";
    let (head, answer) = agent.raw("POST /files", &[kind], body.as_bytes());
    assert!(
        head.starts_with("HTTP/1.1 200"),
        "{head} {}",
        String::from_utf8_lossy(&answer)
    );
    assert_eq!(std::fs::read(&one).unwrap(), b"first");
    assert_eq!(std::fs::read(&two).unwrap(), b"second");
    // With a single file the query takes precedence.
    let body = part("ignored", "third") + "--B--\r\n";
    let (head, _) = agent.raw(&format!("POST /files?path={one}"), &[kind], body.as_bytes());
    assert!(head.starts_with("HTTP/1.1 200"));
    assert_eq!(std::fs::read(&one).unwrap(), b"third");
    let (head, _) = agent.raw(
        &format!("POST /files?path={one}"),
        &[kind, "Content-Encoding: gzip"],
        &gzip(body.as_bytes()),
    );
    assert!(head.starts_with("HTTP/1.1 200"));
    for bad in ["--B--\r\n", "garbage", ""] {
        let (head, _) = agent.raw("POST /files", &[kind], bad.as_bytes());
        assert!(head.starts_with("HTTP/1.1 400"), "{bad}: {head}");
    }
}

#[test]
fn parts_are_composed_in_order() {
    let agent = TestAgent::new();
    std::fs::write(agent.path("1"), "one ").unwrap();
    std::fs::write(agent.path("2"), "two").unwrap();
    let request = serde_json::json!({"source_paths": [agent.path("1"), agent.path("2")], "destination": agent.path("d/all")});
    let (head, _) = agent.rpc("/files/compose", &request.to_string());
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert_eq!(std::fs::read(agent.path("d/all")).unwrap(), b"one two");
    assert!(!std::fs::exists(agent.path("1")).unwrap());
}

#[tokio::test]
async fn directories_are_made_listed_moved_and_removed() {
    let agent = TestAgent::new();
    let client = &agent.client;
    let made = client
        .make_dir(&agent.path("a/b"), Some("nobody"))
        .await
        .unwrap();
    assert_eq!(
        (made.kind, made.owner.as_str(), made.permissions.as_str()),
        (EntryKind::Directory, "nobody", "drwxr-xr-x")
    );
    let again = client.make_dir(&agent.path("a/b"), None).await;
    assert!(matches!(
        again,
        Err(ClientError::Rpc {
            code: RpcCode::AlreadyExists,
            ..
        })
    ));
    client
        .write(&agent.path("a/b/f"), None, "12345")
        .await
        .unwrap();
    std::os::unix::fs::symlink("b/f", agent.path("a/link")).unwrap();
    let names = async |depth| -> Vec<String> {
        let entries = client
            .list_dir(&agent.path("a"), None, depth)
            .await
            .unwrap();
        entries.into_iter().map(|e| e.name).collect()
    };
    assert_eq!(names(0).await, ["b", "link"]);
    assert_eq!(names(2).await, ["b", "f", "link"]);
    let link = client.stat(&agent.path("a/link"), None).await.unwrap();
    assert!(link.is_symlink && link.kind == EntryKind::File);
    assert_eq!(link.symlink_target.unwrap(), agent.path("a/b/f"));
    let not_a_directory = client.list_dir(&agent.path("a/b/f"), None, 1).await;
    assert!(matches!(
        not_a_directory,
        Err(ClientError::Rpc {
            code: RpcCode::InvalidArgument,
            ..
        })
    ));
    assert!(
        client
            .list_dir(&agent.path("no"), None, 1)
            .await
            .err()
            .unwrap()
            .is_not_found()
    );
    let moved = client
        .rename(&agent.path("a/b/f"), &agent.path("c/g"), None)
        .await
        .unwrap();
    assert_eq!((moved.name.as_str(), moved.size.as_str()), ("g", "5"));
    assert!(
        client
            .rename(&agent.path("no"), &agent.path("x"), None)
            .await
            .err()
            .unwrap()
            .is_not_found()
    );
    client.remove(&agent.path("a"), None).await.unwrap();
    client.remove(&agent.path("a"), None).await.unwrap();
    assert!(
        client
            .stat(&agent.path("a"), None)
            .await
            .unwrap_err()
            .is_not_found()
    );
}

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

/// Lets a watcher's reader catch up: waits for an event that follows all earlier ones.
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
    // Two events each.
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
    // And it goes on.
    let mut events = Vec::new();
    seen(&agent, &id, "w/mark", &mut events);
}

#[test]
fn a_watch_stream_starts_sends_keepalives_and_ends_in_time() {
    let agent = TestAgent::new();
    std::fs::create_dir(agent.path("w")).unwrap();
    let file = agent.path("w/f");
    let writer = std::thread::spawn(move || {
        // The watch exists once the agent holds an inotify instance; a write before that is not
        // seen.
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
