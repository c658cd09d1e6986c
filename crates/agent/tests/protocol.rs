//! Tests of authentication, errors, limits and the count of commands.

use crate::common::TestAgent;
use jiffy_agent_client::{ProcessSpec, PtySize};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Paths of calls that start and list processes.
const START: &str = "/process.Process/Start";
const LIST: &str = "/process.Process/List";
/// Header of calls that send or receive a stream of messages.
const STREAM: &str = "Content-Type: application/connect+json";

#[test]
fn malformed_messages_are_refused_with_a_code() {
    let agent = TestAgent::new();
    let (head, body) = agent.rpc("/filesystem.Filesystem/Stat", "{nope");
    assert!(head.starts_with("HTTP/1.1 400"), "{head}");
    assert!(body.contains(r#""code":"invalid_argument""#), "{body}");
    let frames = agent.stream(START, &[], b"{nope");
    assert!(
        frames[0].starts_with(r#"2{"error":{"code":"invalid_argument""#),
        "{frames:?}"
    );
    let frames = agent.stream(START, &["connect-timeout-ms: soon"], b"{}");
    assert!(
        frames[0].starts_with(r#"2{"error":{"code":"invalid_argument""#),
        "{frames:?}"
    );
    for (bad, code) in [
        // The header, of 5 bytes, is too short.
        (&b"\0\0\0"[..], "invalid_argument"),
        // The message is shorter than its length.
        (&b"\0\0\0\0\x09{}"[..], "invalid_argument"),
        (&b""[..], "invalid_argument"),
        // The flag means that the message is compressed.
        (&b"\x01\0\0\0\x02{}"[..], "unimplemented"),
        // The length exceeds the limit.
        (&b"\0\xff\xff\xff\xff"[..], "resource_exhausted"),
    ] {
        let (_, body) = agent.raw(&format!("POST {START}"), &[STREAM], bad);
        let frames = crate::common::frames(&body);
        assert!(
            frames[0].starts_with(&format!(r#"2{{"error":{{"code":"{code}""#)),
            "{frames:?}"
        );
    }
}

#[test]
fn a_request_with_several_messages_is_rejected_before_a_process_starts() {
    let agent = TestAgent::new();
    let mark = agent.path("started");
    let message = format!(r#"{{"process":{{"cmd":"/bin/touch","args":["{mark}"]}}}}"#);
    let twice = crate::common::frame(message.as_bytes()).repeat(2);
    let (_, body) = agent.raw(&format!("POST {START}"), &[STREAM], &twice);
    let frames = crate::common::frames(&body);
    assert!(
        frames[0].starts_with(r#"2{"error":{"code":"invalid_argument""#),
        "{frames:?}"
    );
    assert!(!std::path::Path::new(&mark).exists());
}

#[test]
fn a_connection_is_reusable_after_a_stream_whose_request_ended_late() {
    let agent = TestAgent::new();
    let mut stream = UnixStream::connect(agent.socket()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let message = crate::common::frame(br#"{"process":{"cmd":"/bin/true"}}"#);
    let head = format!(
        "POST {START} HTTP/1.1\r\nHost: x\r\n{STREAM}\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n",
        message.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&message).unwrap();
    // Long enough for a response that does not wait for the end of the request.
    std::thread::sleep(Duration::from_millis(300));
    stream.write_all(b"\r\n0\r\n\r\n").unwrap();
    let first = crate::common::until(&mut stream, b"0\r\n\r\n");
    assert!(first.starts_with("HTTP/1.1 200"), "{first}");
    assert!(first.contains(r#""exited":true"#), "{first}");
    stream
        .write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    let second = crate::common::until(&mut stream, b"\r\n\r\n");
    assert!(second.starts_with("HTTP/1.1 204"), "{second}");
}

#[test]
fn an_oversized_message_is_rejected_and_not_retried() {
    let agent = TestAgent::new();
    // The limit of a message is 4 MiB.
    let long = vec![b' '; 5 * 1024 * 1024];
    let (head, body) = agent.raw(
        &format!("POST {LIST}"),
        &["Content-Type: application/json"],
        &long,
    );
    assert!(head.starts_with("HTTP/1.1 429"), "{head}");
    assert!(head.contains("should-retry: false"), "{head}");
    assert!(
        String::from_utf8(body)
            .unwrap()
            .contains("resource_exhausted")
    );
}

#[test]
fn a_refusal_reaches_a_client_after_a_large_body() {
    let agent = TestAgent::with(&["--token", "secret"]);
    let long = vec![b'x'; 3 * 1024 * 1024];
    for (head, status) in [
        ("POST /process.Process/List", "401"),
        ("POST /files?path=/tmp/x", "401"),
        ("POST /nope", "401"),
    ] {
        let answer = agent.raw(head, &[], &long).0;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{answer}"
        );
    }
    let token = "X-Access-Token: secret";
    let answer = agent.raw("POST /files?path=/tmp", &[token], &long).0;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
}

#[test]
fn unknown_methods_paths_and_types_are_refused() {
    let agent = TestAgent::new();
    let (head, body) = agent.rpc("/process.Process/Nope", "{}");
    assert!(head.starts_with("HTTP/1.1 501") && body.contains("unimplemented"));
    let (head, body) = agent.raw("GET /nope", &[], b"");
    assert!(head.starts_with("HTTP/1.1 404"), "{head}");
    assert!(String::from_utf8(body).unwrap().contains(r#""code":404"#));
    assert!(
        agent
            .raw(&format!("GET {LIST}"), &[], b"")
            .0
            .starts_with("HTTP/1.1 405")
    );
    let (head, _) = agent.raw(
        &format!("POST {LIST}"),
        &["Content-Type: application/proto"],
        b"",
    );
    assert!(head.starts_with("HTTP/1.1 415"), "{head}");
    assert!(
        agent
            .raw("GET /health", &[], b"")
            .0
            .starts_with("HTTP/1.1 204")
    );
}

#[test]
fn unknown_processes_and_watchers_are_not_found() {
    let agent = TestAgent::new();
    for (path, body) in [
        (
            "/process.Process/SendSignal",
            r#"{"process":{"pid":999999},"signal":"SIGNAL_SIGKILL"}"#,
        ),
        (
            "/process.Process/SendInput",
            r#"{"process":{"tag":"x"},"input":{"stdin":"aGk="}}"#,
        ),
        (
            "/process.Process/CloseStdin",
            r#"{"process":{"pid":"999999"}}"#,
        ),
        ("/process.Process/Update", r#"{"process":{"pid":999999}}"#),
        (
            "/filesystem.Filesystem/GetWatcherEvents",
            r#"{"watcherId":"x"}"#,
        ),
        (
            "/filesystem.Filesystem/RemoveWatcher",
            r#"{"watcherId":"x"}"#,
        ),
        ("/filesystem.Filesystem/Stat", r#"{"path":"/no/such"}"#),
    ] {
        let (head, answer) = agent.rpc(path, body);
        assert!(head.starts_with("HTTP/1.1 404"), "{path}: {head}");
        assert!(
            answer.starts_with(r#"{"code":"not_found""#),
            "{path}: {answer}"
        );
    }
    let (head, _) = agent.rpc(
        "/process.Process/SendSignal",
        r#"{"process":{},"signal":"SIGNAL_SIGKILL"}"#,
    );
    assert!(head.starts_with("HTTP/1.1 400"));
    let (head, _) = agent.rpc(
        "/process.Process/SendSignal",
        r#"{"process":{"pid":1},"signal":"SIGNAL_X"}"#,
    );
    assert!(head.starts_with("HTTP/1.1 400"));
}

#[test]
fn with_a_token_all_requests_but_the_health_check_require_it() {
    let agent = TestAgent::with(&["--token", "secret"]);
    let json = "Content-Type: application/json";
    for (head, ok) in [
        ("GET /health", true),
        ("GET /metrics", false),
        ("GET /envs", false),
    ] {
        assert_eq!(
            agent.raw(head, &[], b"").0.starts_with("HTTP/1.1 20"),
            ok,
            "{head}"
        );
    }
    let list = format!("POST {LIST}");
    let (head, body) = agent.raw(&list, &[json], b"{}");
    assert!(head.starts_with("HTTP/1.1 401"), "{head}");
    assert!(String::from_utf8(body).unwrap().contains("unauthenticated"));
    assert!(
        agent
            .raw(&list, &[json, "X-Access-Token: secreT"], b"{}")
            .0
            .starts_with("HTTP/1.1 401")
    );
    assert!(
        agent
            .raw(&list, &[json, "X-Access-Token: secret"], b"{}")
            .0
            .starts_with("HTTP/1.1 200")
    );
    assert!(
        agent
            .raw("GET /files?path=/etc/passwd", &[], b"")
            .0
            .starts_with("HTTP/1.1 401")
    );
}

#[test]
fn a_signature_stands_for_the_token_until_it_expires() {
    use jiffy_agent::rest::signature::{SignatureClaim, sign};
    let agent = TestAgent::with(&["--token", "secret"]);
    std::fs::write(agent.path("f"), "content").unwrap();
    let path = agent.path("f");
    let url = |operation, expiry: Option<u64>, for_path: &str| {
        let signature = sign(
            SignatureClaim {
                path: for_path,
                operation,
                user: "root",
                expiry,
            },
            "secret",
        )
        .replace('+', "%2B");
        let expiry = expiry.map_or(String::new(), |e| format!("&signature_expiration={e}"));
        format!("/files?path={path}&username=root&signature={signature}{expiry}")
    };
    let get = |url: String| agent.raw(&format!("GET {url}"), &[], b"").0;
    assert!(get(url("read", None, &path)).starts_with("HTTP/1.1 200"));
    assert!(get(url("read", Some(99_999_999_999), &path)).starts_with("HTTP/1.1 200"));
    assert!(get(url("read", Some(1_000_000_000), &path)).starts_with("HTTP/1.1 401"));
    let refused = |url: String| {
        let (head, body) = agent.raw(&format!("GET {url}"), &[], b"");
        assert!(head.starts_with("HTTP/1.1 401"), "{head}");
        serde_json::from_slice::<serde_json::Value>(&body).unwrap()["message"].clone()
    };
    // Text that E2B's clients compare.
    assert_eq!(
        refused(url("read", Some(1_000_000_000), &path)),
        "signature is already expired"
    );
    assert_eq!(refused(url("write", None, &path)), "invalid signature");
    assert!(get(url("write", None, &path)).starts_with("HTTP/1.1 401"));
    assert!(get(url("read", None, "/etc/shadow")).starts_with("HTTP/1.1 401"));
    let post = format!("POST {}", url("write", None, &path));
    assert!(agent.raw(&post, &[], b"new").0.starts_with("HTTP/1.1 200"));
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
}

#[test]
fn an_unknown_user_is_refused_with_the_text_of_envd() {
    let agent = TestAgent::new();
    let (head, body) = agent.raw("GET /files?path=/etc/passwd&username=ghost", &[], b"");
    assert!(head.starts_with("HTTP/1.1 401"), "{head}");
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    let expected = "error looking up user 'ghost': user: unknown user ghost";
    assert_eq!(body["message"], expected);
    // Base64 of `ghost:`.
    let headers = [
        "Content-Type: application/json",
        "Authorization: Basic Z2hvc3Q6",
    ];
    let stat = "POST /filesystem.Filesystem/Stat";
    let (head, body) = agent.raw(stat, &headers, br#"{"path":"/"}"#);
    assert!(head.starts_with("HTTP/1.1 401"), "{head}");
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body["message"], "invalid username: 'ghost'");
    assert_eq!(body["code"], "unauthenticated");
}

#[test]
fn the_host_can_change_environment_and_token() {
    let agent = TestAgent::new();
    let init = br#"{"envVars":{"A":"1"},"accessToken":"t"}"#;
    assert!(
        agent
            .raw("POST /init", &[], init)
            .0
            .starts_with("HTTP/1.1 204")
    );
    assert!(
        agent
            .raw("GET /envs", &[], b"")
            .0
            .starts_with("HTTP/1.1 401")
    );
    let (_, body) = agent.raw("GET /envs", &["X-Access-Token: t"], b"");
    assert_eq!(body, br#"{"A":"1"}"#);
}

#[test]
fn metrics_are_plausible() {
    let agent = TestAgent::new();
    let (_, body) = agent.raw("GET /metrics", &[], b"");
    let metrics: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert!(metrics["cpu_count"].as_u64().unwrap() >= 1);
    assert!(metrics["mem_used"].as_u64() < metrics["mem_total"].as_u64());
    assert!(metrics["disk_used"].as_u64() <= metrics["disk_total"].as_u64());
    assert!((0.0..=100.0).contains(&metrics["cpu_used_pct"].as_f64().unwrap()));
}

#[test]
fn a_forwarded_stream_reaches_the_port_or_reports_the_reason() {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::net::UnixStream;
    let agent = TestAgent::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let echo = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        stream.write_all(&bytes).unwrap();
    });
    let open = |line: String| {
        let stream = UnixStream::connect(agent.path("tcp.sock")).unwrap();
        (&stream).write_all(line.as_bytes()).unwrap();
        BufReader::new(stream)
    };
    let mut stream = open(format!("{port}\n"));
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    assert_eq!(line, "OK\n");
    stream.get_ref().write_all(b"ping").unwrap();
    stream
        .get_ref()
        .shutdown(std::net::Shutdown::Write)
        .unwrap();
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    assert_eq!(back, b"ping");
    echo.join().unwrap();
    for bad in [
        format!("{port}\n"),
        "0\n".into(),
        "99999\n".into(),
        "GET / HTTP/1.1\n".into(),
    ] {
        let mut answer = String::new();
        open(bad).read_line(&mut answer).unwrap();
        assert!(answer.starts_with("ERR "), "{answer}");
    }
}

#[test]
fn an_invalid_grace_period_is_rejected_and_terminates_nothing() {
    let agent = TestAgent::new();
    for grace in ["x", "-1", "1.5"] {
        let (head, _) = agent.raw(&format!("POST /restart?grace_ms={grace}"), &[], b"");
        assert!(head.starts_with("HTTP/1.1 400"), "{grace}: {head}");
    }
}

#[tokio::test]
async fn running_commands_are_counted_without_terminals_and_services() {
    let agent = TestAgent::new();
    let none = agent.client.commands().await.unwrap();
    assert_eq!((none.running, none.ended_ms_ago), (0, None));
    let waiting = |is_service, pty| ProcessSpec {
        is_service,
        pty,
        stdin: true,
        ..ProcessSpec::new("cat", [] as [&str; 0])
    };
    let size = PtySize { cols: 80, rows: 24 };
    let service = agent.client.start(&waiting(true, None)).await.unwrap();
    let terminal = waiting(false, Some(size));
    let terminal = agent.client.start(&terminal).await.unwrap();
    assert_eq!(agent.client.commands().await.unwrap(), none);
    let command = agent.client.start(&waiting(false, None)).await.unwrap();
    // A command counts until it ends, also without a client.
    let pid = command.pid();
    drop(command);
    assert_eq!(agent.client.commands().await.unwrap().running, 1);
    for pid in [service.pid(), terminal.pid(), pid] {
        agent.client.signal(pid, libc::SIGKILL).await.unwrap();
    }
    let ended = loop {
        let commands = agent.client.commands().await.unwrap();
        if commands.running == 0 {
            break commands.ended_ms_ago;
        }
        tokio::task::yield_now().await;
    };
    assert!(ended.unwrap() < 60_000, "{ended:?}");
}
