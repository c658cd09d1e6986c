//! Tests for outgoing requests of functions and the checks of the broker.
//!
//! The *broker* is a thread of the daemon for one tenant. The tenant's process has no network. It
//! requests each connection from the broker by host and port, and the broker checks the function's
//! list of allowed hosts.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::{HTTP, OWNER, TestClient, TestTenant, program};
use jiffy_function_manager::DeployQuota;
use jiffy_function_manager::compile_slots::CompileSlots;
use jiffy_function_manager::compiler::{self, CompilerSettings};
use jiffy_function_manager::egress::{EgressSettings, NameOverrides};
use jiffy_function_manager::tenant_process::{HTTP_SOCKET, TenantProcess};
use jiffy_proto::function::{CompileLimits, FunctionLimits, LoadSettings};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Answers of the guest. The second letter is the case of `error-code` in wasi:http (A for the
/// first): HTTP-request-denied, destination-IP-prohibited, connection-refused,
/// connection-limit-reached.
const DENIED: &str = "EP";
const PROHIBITED: &str = "EE";
const REFUSED: &str = "EG";
const TOO_MANY: &str = "EL";

/// Server on the loopback interface. It counts requests, and answers with `answer` or not at all.
struct Server {
    address: SocketAddr,
    requests: Arc<AtomicUsize>,
}

fn server(answer: Option<&'static str>) -> Server {
    serve(TcpListener::bind("127.0.0.1:0").unwrap(), answer)
}

/// Answers each connection with `answer`. Without an answer, the connections stay open.
fn serve(listener: TcpListener, answer: Option<&'static str>) -> Server {
    let address = listener.local_addr().unwrap();
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    std::thread::spawn(move || {
        let mut retained = Vec::new();
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            match answer {
                Some(answer) => respond(stream, answer, &counted),
                None => retained.push(stream),
            }
        }
    });
    Server { address, requests }
}

/// Answers a request that has a `Host` header, and counts the request.
fn respond(stream: TcpStream, answer: &str, requests: &AtomicUsize) {
    let mut reader = BufReader::new(stream);
    let (mut line, mut host) = (String::new(), false);
    while reader.read_line(&mut line).is_ok_and(|length| length > 2) {
        host |= line.to_ascii_lowercase().starts_with("host: ");
        line.clear();
    }
    assert!(host, "the request has a host header");
    requests.fetch_add(1, Ordering::SeqCst);
    let _ = reader.get_mut().write_all(answer.as_bytes());
}

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// Returns the settings of a function that may connect to the hosts `allow`, with a time limit of
/// `wall_ms` per request.
fn settings(allow: &[&str], wall_ms: u32) -> LoadSettings {
    LoadSettings {
        limits: FunctionLimits {
            wall_ms,
            concurrency: 256,
            cpu_ms: 5000,
            ..FunctionLimits::default()
        },
        allow: allow.iter().map(|host| (*host).to_owned()).collect(),
        ..LoadSettings::default()
    }
}

/// Starts a tenant with the function `http` and the granted ranges `granted`.
fn tenant(granted: &[&str], allow: &[&str]) -> TestTenant {
    let name = |name: &str, addresses: &[&str]| {
        let addresses = addresses.iter().map(|a| a.parse().unwrap()).collect();
        (name.to_owned(), addresses)
    };
    let names = BTreeMap::from([
        name("rebound.test", &["127.0.0.1"]),
        name("mixed.test", &["169.254.169.254", "::1", "127.0.0.1"]),
        name("nowhere.test", &[]),
    ]);
    tenant_with(granted, allow, Arc::new(names))
}

/// Starts a tenant whose function `http` may reach the hosts in `allow`. The host's owner grants
/// the networks in `granted`, and `names` replaces the name server.
fn tenant_with(granted: &[&str], allow: &[&str], names: Arc<dyn NameOverrides>) -> TestTenant {
    let mut tenant = TestTenant::start();
    tenant.process.set_egress(EgressSettings {
        granted: granted.iter().map(|net| net.parse().unwrap()).collect(),
        names: Some(names),
        ..EgressSettings::default()
    });
    let compiled = tenant.compile(HTTP).unwrap();
    let file = File::open(&compiled.0).unwrap();
    let loaded = tenant
        .process
        .load("http", &file, &compiled.1, settings(allow, 20_000));
    loaded.unwrap();
    tenant
}

/// Lets the function send a request to `authority`. Returns the first two characters of its answer:
/// `R` with the first digit of the status, or `E` with the kind of the error.
fn fetch(tenant: &TestTenant, authority: &str) -> String {
    let answer = tenant.connect().get("http", &format!("/f{authority}"));
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.text()[..2].to_owned()
}

#[test]
fn a_function_reaches_listed_hosts_only() {
    let (listed, other) = (server(Some(OK)), server(Some(OK)));
    let entry = listed.address.to_string();
    let named = format!("rebound.test:{}", listed.address.port());
    let tenant = tenant(&["127.0.0.0/8"], &[&entry, &named]);
    assert_eq!(fetch(&tenant, &entry), "R2");
    assert_eq!(fetch(&tenant, &named), "R2");
    assert_eq!(fetch(&tenant, &other.address.to_string()), DENIED);
    assert_eq!(fetch(&tenant, "example.com"), DENIED);
    let counts = [&listed, &other].map(|server| server.requests.load(Ordering::SeqCst));
    assert_eq!(counts, [2, 0]);
}

#[test]
fn a_listed_host_outside_of_the_internet_is_not_reached() {
    let server = server(Some(OK));
    let port = server.address.port();
    let hosts = [
        format!("127.0.0.1:{port}"),
        format!("[::1]:{port}"),
        format!("[::ffff:127.0.0.1]:{port}"),
        format!("0.0.0.0:{port}"),
        format!("rebound.test:{port}"),
        format!("mixed.test:{port}"),
        "169.254.169.254".to_owned(),
        "[::ffff:169.254.169.254]".to_owned(),
        "10.0.0.1".to_owned(),
        "224.0.0.1".to_owned(),
    ];
    let listed: Vec<_> = hosts.iter().map(String::as_str).collect();
    let tenant = tenant(&[], &listed);
    for host in &hosts {
        assert_eq!(fetch(&tenant, host), PROHIBITED, "{host}");
    }
    assert_eq!(server.requests.load(Ordering::SeqCst), 0);
}

#[test]
fn only_permitted_addresses_of_a_name_are_tried() {
    let server = server(Some(OK));
    let mixed = format!("mixed.test:{}", server.address.port());
    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    let hosts = [mixed.as_str(), closed.as_str(), "nowhere.test", "127.1"];
    let tenant = tenant(&["127.0.0.0/8"], &hosts[..3]);
    assert_eq!(fetch(&tenant, &mixed), "R2");
    assert_eq!(fetch(&tenant, &closed), REFUSED);
    // A name without any address has no permitted address either.
    assert_eq!(fetch(&tenant, "nowhere.test"), PROHIBITED);
    // A short form of 127.0.0.1. It is not one of the allowed hosts.
    assert_eq!(fetch(&tenant, "127.1"), DENIED);
    let bad = tenant.compile(HTTP).unwrap();
    let file = File::open(&bad.0).unwrap();
    let loaded = tenant
        .process
        .load("http", &file, &bad.1, settings(&["127.1"], 1000));
    assert!(loaded.unwrap_err().to_string().contains("not a valid host"));
    // The previous version keeps its hosts.
    assert_eq!(fetch(&tenant, &mixed), "R2");
}

/// Name that resolves to two addresses in alternation.
#[derive(Debug)]
struct Rebinding {
    addresses: [IpAddr; 2],
    lookups: AtomicUsize,
}

impl NameOverrides for Rebinding {
    fn addresses(&self, _: &str) -> Option<Vec<IpAddr>> {
        let lookup = self.lookups.fetch_add(1, Ordering::SeqCst);
        Some(vec![self.addresses[lookup % 2]])
    }
}

/// Starts two servers with the same port on two addresses.
fn servers_of_one_port(addresses: [IpAddr; 2]) -> [Server; 2] {
    loop {
        let first = TcpListener::bind((addresses[0], 0)).unwrap();
        let port = first.local_addr().unwrap().port();
        // Another program may use the port on the other address.
        if let Ok(second) = TcpListener::bind((addresses[1], port)) {
            return [first, second].map(|listener| serve(listener, Some(OK)));
        }
    }
}

/// A second lookup for the connection would let the first request reach a forbidden address.
#[test]
fn dns_rebinding_does_not_reach_loopback() {
    let addresses = ["127.0.0.2", "127.0.0.1"].map(|address| address.parse().unwrap());
    let servers = servers_of_one_port(addresses);
    let names = Arc::new(Rebinding {
        addresses,
        lookups: AtomicUsize::new(0),
    });
    let host = format!("rebinding.test:{}", servers[0].address.port());
    let tenant = tenant_with(&["127.0.0.2/32"], &[&host], names.clone());
    for expected in ["R2", PROHIBITED, "R2", PROHIBITED] {
        assert_eq!(fetch(&tenant, &host), expected);
    }
    assert_eq!(names.lookups.load(Ordering::SeqCst), 4);
    let counts = servers.map(|server| server.requests.load(Ordering::SeqCst));
    assert_eq!(counts, [2, 0]);
}

#[test]
fn a_redirect_is_not_followed() {
    let target = server(Some(OK));
    let answer = format!(
        "HTTP/1.1 302 Found\r\nlocation: http://{}/\r\ncontent-length: 0\r\n\r\n",
        target.address
    );
    let redirecting = server(Some(answer.leak()));
    let entry = redirecting.address.to_string();
    let tenant = tenant(&["127.0.0.0/8"], &[&entry]);
    assert_eq!(fetch(&tenant, &entry), "R3");
    assert_eq!(target.requests.load(Ordering::SeqCst), 0);
}

#[test]
fn outgoing_connections_are_bounded_and_close_with_their_requests() {
    let silent = server(None);
    let entry = silent.address.to_string();
    let tenant = tenant(&["127.0.0.0/8"], &[&entry]);
    let compiled = tenant.compile(HTTP).unwrap();
    let file = File::open(&compiled.0).unwrap();
    let short = settings(&[&entry], 4000);
    tenant
        .process
        .load("http", &file, &compiled.1, short)
        .unwrap();
    let answers: Vec<_> = std::thread::scope(|scope| {
        let ask = || tenant.connect().get("http", &format!("/f{entry}"));
        let all: Vec<_> = (0..90).map(|_| scope.spawn(ask)).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let refused = answers
        .iter()
        .filter(|a| a.status == 200 && a.text().starts_with(TOO_MANY));
    let ended = answers.iter().filter(|answer| answer.status == 504);
    // Of 90 requests, 64 have a connection, which is the maximum of a tenant.
    assert_eq!((refused.count(), ended.count()), (26, 64));
    // The connections of completed requests are free again.
    let listed = server(Some(OK));
    let entry = listed.address.to_string();
    tenant
        .process
        .allow("http", std::slice::from_ref(&entry))
        .unwrap();
    let start = std::time::Instant::now();
    while fetch(&tenant, &entry) != "R2" {
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn an_adopted_process_reaches_no_host_until_hosts_are_allowed() {
    let listed = server(Some(OK));
    let entry = listed.address.to_string();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let limits = jiffy_proto::function::TenantLimits::default();
    let granted = EgressSettings {
        granted: vec!["127.0.0.0/8".parse().unwrap()],
        ..EgressSettings::default()
    };
    let ask = || {
        let mut client = TestClient::connect(&path.join(HTTP_SOCKET));
        client.get("http", &format!("/f{entry}")).text()[..2].to_owned()
    };
    let mut first = TenantProcess::start(&crate::support::settings(limits), path).unwrap();
    first.set_egress(granted.clone());
    std::fs::write(path.join("module"), wat::parse_bytes(HTTP).unwrap()).unwrap();
    let (module, target) = (
        File::open(path.join("module")).unwrap(),
        path.join("compiled"),
    );
    let compiling = CompilerSettings {
        program: program(),
        owner: OWNER,
        limits: CompileLimits::default(),
        jailed: true,
    };
    let (quota, slots) = (DeployQuota::default(), CompileSlots::new(1));
    let digest = compiler::compile(&compiling, module, &target, &quota, &slots).unwrap();
    let file = File::open(&target).unwrap();
    first
        .load("http", &file, &digest, settings(&[&entry], 20_000))
        .unwrap();
    assert_eq!(ask(), "R2");
    first.detach();
    drop(first);
    let mut second = TenantProcess::adopt(path).unwrap();
    second.set_egress(granted);
    assert_eq!(ask(), DENIED);
    second.allow("http", std::slice::from_ref(&entry)).unwrap();
    assert_eq!(ask(), "R2");
    assert_eq!(listed.requests.load(Ordering::SeqCst), 2);
}
