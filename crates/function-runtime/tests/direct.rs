//! Tests for direct requests to public functions. The process serves the connection, and the
//! answers equal the answers through the gateway.
//!
//! A *direct* connection is passed from the daemon to the process of the tenant, which then serves
//! its requests without the gateway.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::constant;
use jiffy_function_manager::egress::EgressSettings;
use jiffy_function_manager::{
    BoxConnectionPermit, ConnectionPermit, DeployChanges, FunctionError, FunctionHostSettings,
    Functions, owner,
};
use jiffy_proto::function::{CompileLimits, TenantLimits};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Id of the API key that owns the functions.
const KEY: Option<&str> = Some("k1");
/// Module of jiffy-core/1 that answers with the received message, which it receives directly behind
/// the head of its response. A request whose path starts with `/t` traps.
const MIRROR: &str = r#"(module (memory (export "memory") 2)
    (data (i32.const 4091) "200\n\n")
    (func (export "jiffy_buf") (param i32) (result i32) (i32.const 4096))
    (func (export "jiffy_handle") (param $at i32) (param $length i32) (result i32)
        (if (i32.eq (i32.load8_u offset=5 (local.get $at)) (i32.const 116))
            (then (unreachable)))
        (i32.add (local.get $length) (i32.const 5)))
    (func (export "jiffy_out") (result i32) (i32.const 4091)))"#;

/// Permit of a connection, by which the host counts open and busy connections.
struct Permit {
    _open: Arc<()>,
    is_busy: watch::Sender<bool>,
}

impl ConnectionPermit for Permit {
    fn set_busy(&mut self, is_busy: bool) {
        self.is_busy.send_replace(is_busy);
    }
}

/// Host of functions, which passes direct connections to their process.
struct DirectHost {
    functions: Functions,
    directory: tempfile::TempDir,
    /// Reference held by each open connection.
    permits: Arc<()>,
    /// Last reported state of the connection.
    is_busy: watch::Sender<bool>,
}

/// Opens a host of functions with this data directory.
fn open(directory: &tempfile::TempDir) -> Functions {
    Functions::open(FunctionHostSettings {
        directory: directory.path().to_owned(),
        program: Some(crate::support::program().to_owned()),
        jailed: true,
        cgroups: None,
        limits: TenantLimits::default(),
        compile: CompileLimits::default(),
        idle: Duration::from_secs(600),
        grace: Duration::from_secs(10),
        egress: EgressSettings::default(),
    })
}

/// Returns the host name, with the port, by which clients address a function.
fn host(name: &str) -> String {
    format!("{}.fn.localhost:80", owner::label(KEY, name))
}

impl DirectHost {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self {
            functions: open(&directory),
            directory,
            permits: Arc::default(),
            is_busy: watch::Sender::new(true),
        }
    }

    async fn deploy(&self, name: &str, module: &[u8], public: bool) {
        let mut upload = self.functions.upload().unwrap();
        upload.write(&wat::parse_bytes(module).unwrap()).unwrap();
        let changes = DeployChanges {
            public: Some(public),
            ..DeployChanges::default()
        };
        let deployed = self.functions.deploy(KEY, name, changes, upload);
        deployed.await.unwrap();
    }

    /// Opens a client connection to a function.
    async fn connect(&self, name: &str) -> Result<DirectClient, FunctionError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let stream = OwnedFd::from(accepted.unwrap().0.into_std().unwrap());
        let record = self.functions.find(KEY, name).unwrap();
        let permit: BoxConnectionPermit = Box::new(Permit {
            _open: self.permits.clone(),
            is_busy: self.is_busy.clone(),
        });
        let host = host(name);
        let handed_over = self.functions.hand_over(&record, &host, &stream, permit);
        handed_over.await?;
        Ok(DirectClient {
            stream: client.unwrap(),
            host,
        })
    }

    fn connections(&self) -> usize {
        Arc::strong_count(&self.permits) - 1
    }

    async fn wait_until_closed(&self) {
        until(|| self.connections() == 0).await;
    }

    /// Waits until the last reported state of the only connection equals `is_busy`.
    async fn wait_for_busy_state(&self, is_busy: bool) {
        let mut reported = self.is_busy.subscribe();
        let reported = reported.wait_for(|reported| *reported == is_busy);
        let limit = Duration::from_secs(20);
        drop(
            tokio::time::timeout(limit, reported)
                .await
                .unwrap()
                .unwrap(),
        );
    }

    async fn requests(&self, name: &str) -> u64 {
        self.functions.metrics(KEY, name).await.unwrap().requests
    }
}

async fn until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(
            Instant::now() < deadline,
            "timed out waiting for the condition"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Direct connection to a function.
struct DirectClient {
    stream: TcpStream,
    host: String,
}

struct DirectResponse {
    status: u16,
    head: String,
    body: String,
}

impl DirectResponse {
    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(n, _)| *n == name).map(|(_, value)| value)
    }
}

impl DirectClient {
    /// Sends a request and returns the response. `None` if the connection is closed.
    async fn request(&mut self, head: &str, body: &str) -> Option<DirectResponse> {
        let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        // The connection may be closed already.
        let _ = self.stream.write_all(request.as_bytes()).await;
        let mut read = Vec::new();
        loop {
            if let Some(response) = complete(&read) {
                return Some(response);
            }
            match self.stream.read_buf(&mut read).await {
                Ok(0) => return None,
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return None,
                read => drop(read.unwrap()),
            }
        }
    }

    async fn get(&mut self, path: &str) -> Option<DirectResponse> {
        let head = format!("GET {path} HTTP/1.1\r\nhost: {}\r\n", self.host);
        self.request(&head, "").await
    }
}

/// Returns the response in the received data. `None` if the data is incomplete.
fn complete(read: &[u8]) -> Option<DirectResponse> {
    let text = String::from_utf8_lossy(read);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let response = DirectResponse {
        // The status follows `HTTP/1.1 `.
        status: head.get(9..12)?.parse().unwrap(),
        head: head.to_owned(),
        body: body.to_owned(),
    };
    let length: usize = response.header("content-length")?.parse().unwrap();
    (response.body.len() == length).then_some(response)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_public_function_answers_with_its_own_ids_counts_and_forwarding_headers() {
    let host = DirectHost::new();
    host.deploy("probe", MIRROR.as_bytes(), true).await;
    let before = host.requests("probe").await;
    let mut client = host.connect("probe").await.unwrap();
    let key = "e2b_0123456789abcdef0123456789abcdef01234567";
    let head = format!(
        "POST /echo?a=b HTTP/1.1\r\nHost: {}\r\nx-request-id: mine\r\nX-API-KEY: {key}\r\n\
         connection: keep-alive, x-hop\r\nx-hop: 1\r\nforwarded: for=1.2.3.4\r\n\
         x-forwarded-for: 1.2.3.4\r\njiffy-function: other\r\ncookie: jiffy_a=1; b=2\r\n",
        client.host
    );
    let mut ids = Vec::new();
    for _ in 0..3 {
        let response = client.request(&head, "hello").await.unwrap();
        assert_eq!(response.status, 200, "{}", response.head);
        let seen = response.body.to_ascii_lowercase();
        assert!(seen.starts_with("post /echo?a=b\n"), "{seen}");
        for expected in [
            format!("host: {}\n", client.host),
            format!("x-forwarded-host: {}\n", client.host),
            "x-forwarded-for: 127.0.0.1\n".to_owned(),
            "x-forwarded-proto: http\n".to_owned(),
            "cookie: b=2\n".to_owned(),
            "\n\nhello".to_owned(),
        ] {
            assert!(seen.contains(&expected), "{expected:?} in {seen}");
        }
        for hidden in ["e2b_", "x-hop", "1.2.3.4", "jiffy", "mine"] {
            assert!(!seen.contains(hidden), "{hidden} in {seen}");
        }
        let id = response.header("x-request-id").unwrap().to_owned();
        assert!(id.len() == 32 && seen.contains(&format!("x-request-id: {id}\n")));
        ids.push(id);
    }
    ids.dedup();
    assert_eq!(ids.len(), 3);
    assert_eq!(host.requests("probe").await, before + 3);
    // A failure has the usual answer, and is logged under the id that the client received.
    let failed = client.get("/trap").await.unwrap();
    assert_eq!(failed.status, 502);
    assert!(failed.body.contains("function_trap"), "{}", failed.body);
    let logs = host.functions.logs(KEY, "probe", 0, Duration::ZERO);
    let (entries, _) = logs.await.unwrap();
    let id = failed.header("x-request-id").unwrap();
    assert!(entries.iter().any(|entry| entry.request_id == id));
    assert_eq!(host.connections(), 1);
    drop(client);
    host.wait_until_closed().await;
    host.functions.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_direct_connection_is_busy_while_a_request_is_in_flight() {
    let host = DirectHost::new();
    host.deploy("probe", MIRROR.as_bytes(), true).await;
    let mut client = host.connect("probe").await.unwrap();
    assert!(*host.is_busy.borrow(), "a new connection is busy");
    assert_eq!(client.get("/").await.unwrap().status, 200);
    host.wait_for_busy_state(false).await;
    for _ in 0..2 {
        // The function waits for the remaining body.
        let head = format!("POST / HTTP/1.1\r\nhost: {}\r\n", client.host);
        let partial = format!("{head}content-length: 4\r\n\r\nab");
        client.stream.write_all(partial.as_bytes()).await.unwrap();
        host.wait_for_busy_state(true).await;
        client.stream.write_all(b"cd").await.unwrap();
        let mut read = Vec::new();
        while complete(&read).is_none() {
            client.stream.read_buf(&mut read).await.unwrap();
        }
        host.wait_for_busy_state(false).await;
    }
    assert_eq!(host.connections(), 1);
    drop(client);
    host.wait_until_closed().await;
    host.functions.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_direct_connection_is_for_one_public_function_only() {
    let host = DirectHost::new();
    host.deploy("open", &constant("open"), true).await;
    host.deploy("closed", &constant("closed"), false).await;
    let mut client = host.connect("open").await.unwrap();
    assert_eq!(client.get("/").await.unwrap().body, "open");
    // Another function of the same owner, and unknown hosts.
    for other in [self::host("closed"), "localhost".to_owned(), String::new()] {
        let head = format!("GET / HTTP/1.1\r\nhost: {other}\r\n");
        let refused = client.request(&head, "").await.unwrap();
        assert_eq!(refused.status, 421);
        assert!(refused.body.contains("misdirected_request"));
        assert!(refused.header("x-request-id").is_some());
    }
    // The process itself rejects requests to functions that are not public.
    let mut hidden = host.connect("closed").await.unwrap();
    let refused = hidden.get("/").await.unwrap();
    assert_eq!(refused.status, 404);
    assert!(refused.body.contains("function_not_found"));

    // Changes apply to open connections.
    host.functions.enable(KEY, "open", false).await.unwrap();
    let refused = client.get("/").await.unwrap();
    assert_eq!(refused.status, 503);
    assert!(refused.body.contains("function_disabled"));
    host.functions.enable(KEY, "open", true).await.unwrap();
    assert_eq!(client.get("/").await.unwrap().body, "open");
    host.deploy("open", &constant("second"), true).await;
    assert_eq!(client.get("/").await.unwrap().body, "second");
    host.functions.roll_back(KEY, "open", None).await.unwrap();
    assert_eq!(client.get("/").await.unwrap().body, "open");
    host.deploy("open", &constant("third"), false).await;
    assert_eq!(client.get("/").await.unwrap().status, 404);
    host.deploy("open", &constant("fourth"), true).await;
    assert_eq!(client.get("/").await.unwrap().body, "fourth");
    host.functions.remove(KEY, "open").await.unwrap();
    assert_eq!(client.get("/").await.unwrap().status, 404);
    host.functions.stop_all().await;
    host.wait_until_closed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn direct_connections_close_with_process_or_daemon_and_can_be_reopened() {
    let mut host = DirectHost::new();
    host.deploy("hello", &constant("hello"), true).await;
    let mut client = host.connect("hello").await.unwrap();
    assert_eq!(client.get("/").await.unwrap().body, "hello");
    let (_, id) = host.functions.process_ids()[0];
    kill(Pid::from_raw(id as i32), Signal::SIGKILL).unwrap();
    assert!(client.get("/").await.is_none());
    host.wait_until_closed().await;
    let mut client = host.connect("hello").await.unwrap();
    assert_eq!(client.get("/").await.unwrap().body, "hello");

    // A detached process closes its connections, and serves connections of the next daemon.
    let (_, id) = host.functions.process_ids()[0];
    host.functions.detach_all().await;
    assert_eq!(host.connections(), 0);
    let deadline = Instant::now() + Duration::from_secs(20);
    // The request in flight is answered.
    while client.get("/").await.is_some() {
        assert!(Instant::now() < deadline, "the connection remains open");
    }
    host.functions = open(&host.directory);
    assert_eq!(host.functions.process_ids()[0].1, id);
    let mut client = host.connect("hello").await.unwrap();
    assert_eq!(client.get("/").await.unwrap().body, "hello");
    assert!(host.requests("hello").await >= 2);
    host.functions.stop_all().await;
    host.wait_until_closed().await;
}
