//! Tests of file systems that do not answer. A call of the agent on such a file system is *stuck*
//! if it makes no progress for the time `--patience-ms`. The client then receives an error,
//! although the thread remains blocked in the kernel.
#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

use crate::common::{TestAgent, wait_for};
use jiffy_agent_client::{ClientError, ProcessSpec, RpcCode};
use std::time::{Duration, Instant};

/// Shell script that mounts a FUSE file system on `$1/fuse` that answers no request. The agent
/// inherits the descriptor of its server without using it.
const HANGING_FUSE: &str = "mkdir $1/fuse; exec 9<>/dev/fuse; \
    mount -i -t fuse -o fd=9,rootmode=40000,user_id=0,group_id=0,allow_other hang $1/fuse";
/// Shell script that puts named pipes in place of the user database.
const PIPES_FOR_USERS: &str =
    "mkfifo $1/p; mount --bind $1/p /etc/passwd; mount --bind $1/p /etc/group";

/// Returns whether this host lets the test mount file systems.
fn can_mount(test: &str) -> bool {
    let fuse = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/fuse");
    let unshared = std::process::Command::new("unshare")
        .args(["-m", "true"])
        .status();
    let can = fuse.is_ok() && unshared.is_ok_and(|s| s.success());
    if !can {
        eprintln!("SKIPPED {test}: no FUSE, or no privilege to mount");
    }
    can
}

/// Returns the number of stuck calls from the agent's metrics.
fn stuck_calls(agent: &TestAgent) -> u64 {
    let (_, body) = agent.raw("GET /metrics", &[], b"");
    let metrics: serde_json::Value = serde_json::from_slice(&body).unwrap();
    metrics["stuck_calls"].as_u64().unwrap()
}

/// Sends a request. Returns the status and the body of the response.
fn send_request(agent: &TestAgent, line: &str, body: &str) -> (u16, String) {
    let kind = if line.contains("WatchDir") || line.contains("Start") {
        "Content-Type: application/connect+json"
    } else {
        "Content-Type: application/json"
    };
    let body = if kind.contains("connect") {
        crate::common::frame(body.as_bytes())
    } else {
        body.as_bytes().to_vec()
    };
    let (head, body) = agent.raw(line, &[kind], &body);
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn an_unresponsive_file_system_affects_only_the_calls_on_it() {
    if !can_mount("an_unresponsive_file_system_affects_only_the_calls_on_it") {
        return;
    }
    let agent = TestAgent::with_mounts(&["--patience-ms", "1000"], HANGING_FUSE);
    let at = agent.path("fuse");
    let path = format!(r#"{{"path":"{at}"}}"#);
    let below = format!(r#"{{"path":"{at}/f"}}"#);
    let list = "POST /filesystem.Filesystem/ListDir";
    let calls = [
        (list.to_owned(), path.clone()),
        ("POST /filesystem.Filesystem/Stat".to_owned(), below.clone()),
        (
            "POST /filesystem.Filesystem/MakeDir".to_owned(),
            below.clone(),
        ),
        (
            "POST /filesystem.Filesystem/Remove".to_owned(),
            below.clone(),
        ),
        (
            "POST /filesystem.Filesystem/Move".to_owned(),
            format!(r#"{{"source":"{at}/f","destination":"{at}/g"}}"#),
        ),
        (
            "POST /filesystem.Filesystem/WatchDir".to_owned(),
            format!(r#"{{"path":"{}","recursive":true}}"#, agent.path("")),
        ),
        (format!("GET /files?path={at}/f"), String::new()),
        (format!("POST /files?path={at}/f"), "content".to_owned()),
        (
            "POST /files/compose".to_owned(),
            format!(r#"{{"source_paths":["{at}/f"],"destination":"{at}/g"}}"#),
        ),
        (format!("GET /archive?path={at}"), String::new()),
        (format!("PUT /archive?path={at}"), String::new()),
        (
            "POST /process.Process/Start".to_owned(),
            format!(r#"{{"process":{{"cmd":"/bin/true","cwd":"{at}"}}}}"#),
        ),
        (
            "POST /process.Process/Start".to_owned(),
            format!(r#"{{"process":{{"cmd":"{at}/program"}}}}"#),
        ),
    ];
    std::thread::scope(|scope| {
        let agent = &agent;
        let answers: Vec<_> = calls
            .iter()
            .map(|(line, body)| (line, scope.spawn(move || send_request(agent, line, body))))
            .collect();
        for (line, answer) in answers {
            let (status, body) = answer.join().unwrap();
            let is_stream = line.contains("WatchDir") || line.contains("Start");
            assert_eq!(status, if is_stream { 200 } else { 504 }, "{line}: {body}");
            assert!(
                body.contains(r#""reason":"file_system_not_responding""#),
                "{line}: {body}"
            );
        }
    });
    // From now on, the agent rejects calls on this file system immediately. All other calls work.
    let began = Instant::now();
    let (_, body) = send_request(&agent, list, &path);
    assert!(body.contains("has not answered earlier calls"), "{body}");
    let listed = agent.client.list_dir("/etc", None, 1).await.unwrap();
    assert!(listed.len() > 3);
    let file = agent.path("f");
    agent.client.write(&file, None, "content").await.unwrap();
    assert_eq!(agent.client.read(&file, None, 10).await.unwrap(), "content");
    let (status, out, _) = agent.shell("echo works").await;
    assert_eq!((status.exit_code, out.as_slice()), (0, &b"works\n"[..]));
    // These calls have not waited for the stuck file system. The limit leaves a margin.
    assert!(began.elapsed() < Duration::from_secs(1), "{began:?}");
    let mut spec = ProcessSpec::new("/bin/true", [""; 0]);
    spec.cwd = Some(at.clone());
    let error = agent.client.start(&spec).await.err().unwrap();
    assert!(
        matches!(&error, ClientError::FileSystemNotResponding(_)),
        "{error:?}"
    );
    let stuck = stuck_calls(&agent);
    // The agent rejects calls on a file system on which two calls are stuck. The 13 calls above
    // started at the same time, before any of them was stuck, and may exceed this limit.
    assert!((2..=13).contains(&stuck), "{stuck}");
    // The remedy in the error message works, and no stuck thread remains.
    let (status, ..) = agent
        .shell(&format!("umount -f {at} || umount -l {at}"))
        .await;
    assert_eq!(status.exit_code, 0);
    wait_for("the end of stuck calls", || stuck_calls(&agent) == 0);
    // Calls that were stuck may have continued and created an entry in the directory below the
    // mount point.
    agent.client.list_dir(&at, None, 1).await.unwrap();
    let threads = || {
        std::fs::read_dir(format!("/proc/{}/task", agent.pid()))
            .unwrap()
            .count()
    };
    // The event loop and one permanent thread for calls remain.
    wait_for("the end of idle threads", || threads() == 2);
}

#[tokio::test]
async fn named_pipes_in_place_of_the_user_database_block_no_call() {
    if !can_mount("named_pipes_in_place_of_the_user_database_block_no_call") {
        return;
    }
    let agent = TestAgent::with_mounts(&[], PIPES_FOR_USERS);
    let (status, out, _) = agent.shell("id -u").await;
    assert_eq!((status.exit_code, out.as_slice()), (0, &b"0\n"[..]));
    let found = agent.client.stat("/etc/passwd", None).await.unwrap();
    assert_eq!(found.owner, "0");
    let unknown = agent.client.stat("/etc", Some("somebody")).await;
    assert!(matches!(
        unknown,
        Err(ClientError::Rpc {
            code: RpcCode::Unauthenticated,
            ..
        })
    ));
}

#[tokio::test]
async fn a_long_listing_is_complete_and_other_calls_do_not_wait_for_it() {
    let agent = TestAgent::new();
    let count = 20_000;
    std::fs::create_dir(agent.path("d")).unwrap();
    for n in 0..count {
        std::fs::write(agent.path(&format!("d/{n:05}")), "").unwrap();
    }
    let path = agent.path("d");
    let client = agent.client.clone();
    let listing = tokio::spawn(async move { client.list_dir(&path, None, 1).await });
    let mut longest = Duration::ZERO;
    while !listing.is_finished() {
        let began = Instant::now();
        agent.client.health().await.unwrap();
        longest = longest.max(began.elapsed());
        tokio::task::yield_now().await;
    }
    let entries = listing.await.unwrap().unwrap();
    let expected = (0..count).map(|n| format!("{n:05}"));
    assert!(entries.into_iter().map(|e| e.name).eq(expected));
    // A call during the listing is answered at once. The limit leaves a margin for a busy host.
    assert!(longest < Duration::from_millis(250), "{longest:?}");
}
