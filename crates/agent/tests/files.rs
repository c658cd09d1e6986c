//! Tests of files and directories.
#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

use crate::common::{TestAgent, gzip};
use flate2::read::GzDecoder;
use jiffy_agent_client::{ClientError, EntryKind, ProcessSpec, RpcCode};
use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
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
    // 65534 is the usual id of an unprivileged user.
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
    // HTTP libraries send several encodings by default. Only a client that lists gzip alone has
    // requested compression.
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
    // New metadata replaces the old metadata.
    agent.raw(&post, &[], b"x");
    let (_, stat) = agent.rpc(
        "/filesystem.Filesystem/Stat",
        &format!(r#"{{"path":"{}"}}"#, agent.path("f")),
    );
    assert!(!stat.contains("metadata"), "{stat}");
    assert!(
        agent
            .raw(&post, &headers, b"not gzip data")
            .0
            .starts_with("HTTP/1.1 400")
    );
    let cut = &gzip(text.as_bytes())[..50];
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
    // A backslash is part of a name, either escaped (as httpx sends it) or not (as browsers do).
    let body = part(&agent.path("x\\\\y"), "1") + &part(&agent.path("x\\z"), "2") + "--B--\r\n";
    let (head, _) = agent.raw("POST /files", &[kind], body.as_bytes());
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert_eq!(std::fs::read(agent.path("x\\y")).unwrap(), b"1");
    assert_eq!(std::fs::read(agent.path("x\\z")).unwrap(), b"2");
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
    assert_eq!(
        std::fs::metadata(agent.path("d/all")).unwrap().mode() & 0o777,
        0o644
    );
}

#[test]
fn a_composed_file_remains_if_it_is_a_source_under_another_path() {
    let agent = TestAgent::new();
    std::fs::create_dir(agent.path("d")).unwrap();
    std::os::unix::fs::symlink(agent.path("d"), agent.path("link")).unwrap();
    for source in ["d/all", "d/../d/all", "link/all"] {
        std::fs::write(agent.path("d/all"), "one ").unwrap();
        std::fs::write(agent.path("2"), "two").unwrap();
        let sources = [agent.path(source), agent.path("2")];
        let request =
            serde_json::json!({"source_paths": sources, "destination": agent.path("d/all")});
        let (head, _) = agent.rpc("/files/compose", &request.to_string());
        assert!(head.starts_with("HTTP/1.1 200"), "{source}: {head}");
        let composed = std::fs::read(agent.path("d/all")).ok();
        assert_eq!(composed.as_deref(), Some(&b"one two"[..]), "{source}");
        assert!(!std::fs::exists(agent.path("2")).unwrap());
        // No partial file remains.
        assert_eq!(std::fs::read_dir(agent.path("d")).unwrap().count(), 1);
    }
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

#[tokio::test]
async fn files_whose_names_are_not_text_can_be_listed_read_moved_and_removed() {
    let agent = TestAgent::new();
    let client = &agent.client;
    let directory = agent.directory.path().join("d");
    std::fs::create_dir(&directory).unwrap();
    let file = |name: &[u8]| directory.join(OsStr::from_bytes(name));
    std::fs::write(file(b"a\xff"), "first").unwrap();
    std::fs::write(file(b"b\xff"), "second").unwrap();
    let listed = client.list_dir(&agent.path("d"), None, 1).await.unwrap();
    assert_eq!(listed[0].name, "a\u{fffd}");
    // Clients that support only text use the path as it is displayed.
    let shown = &listed[0].path;
    let content = client.read(shown, None, 100).await.unwrap();
    assert_eq!(content, "first");
    client
        .rename(shown, &agent.path("d/c"), None)
        .await
        .unwrap();
    assert_eq!(std::fs::read(file(b"c")).unwrap(), b"first");
    client.remove(&listed[1].path, None).await.unwrap();
    assert!(!file(b"b\xff").exists());
    // If several files are displayed with this text, they must be selected by their bytes.
    std::fs::write(file(b"x\xfe"), "one").unwrap();
    std::fs::write(file(b"x\xff"), "two").unwrap();
    let listed = client.list_dir(&agent.path("d"), None, 1).await.unwrap();
    let ambiguous = client.remove(&listed[1].path, None).await;
    let Err(ClientError::Rpc { code, message }) = ambiguous else {
        panic!("{ambiguous:?}");
    };
    assert_eq!(code, RpcCode::InvalidArgument);
    assert!(message.contains("several files"), "{message}");
    assert!(file(b"x\xfe").exists() && file(b"x\xff").exists());
    let bytes = serde_json::json!({ "pathBytes": listed[2].path_bytes.clone().unwrap() });
    let (_, stat) = agent.rpc("/filesystem.Filesystem/Stat", &bytes.to_string());
    assert!(stat.contains(r#""size":"3""#), "{stat}");
    let (head, _) = agent.rpc("/filesystem.Filesystem/Remove", &bytes.to_string());
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert!(file(b"x\xfe").exists() && !file(b"x\xff").exists());
    // A query can contain arbitrary bytes.
    let query = format!("{}/x%FE", agent.path("d"));
    let (head, body) = agent.raw(&format!("GET /files?path={query}"), &[], b"");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert_eq!(body, b"one");
    let (head, _) = agent.raw(&format!("POST /files?path={query}"), &[], b"new");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert_eq!(std::fs::read(file(b"x\xfe")).unwrap(), b"new");
}

#[tokio::test]
async fn a_directory_of_any_depth_is_removed() {
    let agent = TestAgent::new();
    // Deeper than the maximum length of a path.
    let line = format!(
        "cd {}; for n in $(seq 1500); do mkdir deep; cd deep; done; touch f",
        agent.directory.path().display()
    );
    agent.shell(&line).await;
    agent
        .client
        .remove(&agent.path("deep"), None)
        .await
        .unwrap();
    assert!(!std::fs::exists(agent.path("deep")).unwrap());
}

#[tokio::test]
async fn a_user_may_name_a_group_for_commands_and_files() {
    let agent = TestAgent::new();
    let mut spec = ProcessSpec::new("/bin/sh", ["-c", "id -u; id -g; id -G"]);
    spec.user = Some("1500:27".into());
    spec.cwd = Some("/".into());
    let process = agent.client.start(&spec).await.unwrap();
    let (_, stdout, _) = process.output(1000).await.unwrap();
    assert_eq!(String::from_utf8(stdout).unwrap(), "1500\n27\n27\n");
    let path = agent.path("d");
    agent.client.make_dir(&path, Some("1500:27")).await.unwrap();
    let found = std::fs::metadata(path).unwrap();
    assert_eq!((found.uid(), found.gid()), (1500, 27));
    spec.user = Some("1500:no-such-group".into());
    let refused = agent.client.start(&spec).await;
    assert!(matches!(
        refused,
        Err(ClientError::Rpc {
            code: RpcCode::Unauthenticated,
            ..
        })
    ));
}
