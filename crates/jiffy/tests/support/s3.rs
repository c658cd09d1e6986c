//! Real S3 server: versitygw with a directory, on the loopback device. A proxy counts its requests
//! and injects faults.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Secret of the access key `test`.
pub const SECRET: &str = "testsecret";
/// Maximum length of the head of a request or answer in bytes.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Returns the program that `scripts/test-servers` builds.
fn program() -> Option<PathBuf> {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/versitygw");
    let program = std::env::var_os("JIFFY_VERSITYGW").map_or(built, PathBuf::from);
    let is_ci = std::env::var_os("CI").is_some();
    assert!(
        program.exists() || !is_ci,
        "versitygw is missing: run scripts/test-servers"
    );
    program.exists().then_some(program)
}

/// Server with the bucket `bucket`, which can be stopped and started.
pub struct S3Server {
    program: PathBuf,
    dir: PathBuf,
    pub address: SocketAddr,
    child: Option<Child>,
}

impl S3Server {
    /// Starts a server with the directory `dir`. Its file system must support extended attributes
    /// of users, which conditional writes require. `None` if the program was not built.
    pub fn start(dir: &Path) -> Option<Self> {
        std::fs::create_dir_all(dir.join("bucket")).unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut server = Self {
            program: program()?,
            dir: dir.to_owned(),
            address: free.local_addr().unwrap(),
            child: None,
        };
        drop(free);
        server.run();
        Some(server)
    }

    /// Starts the server at the same address.
    pub fn run(&mut self) {
        let child = Command::new(&self.program)
            .args(["--port", &self.address.to_string(), "--quiet"])
            .args(["--access", "test", "--secret", SECRET])
            .arg("posix")
            .arg(&self.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = self.child.insert(child.unwrap());
        super::wait_for("versitygw", || {
            let ended = child.try_wait().unwrap();
            assert!(
                ended.is_none(),
                "versitygw ended: {ended:?}; has TMPDIR extended attributes?"
            );
            TcpStream::connect(self.address).ok()
        });
    }

    /// Stops the server.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the environment of a program that uses the server at `address`. The URL contains the
/// name `localhost`, so that the program resolves a name.
pub fn variables(address: SocketAddr, secret: &str) -> Vec<(&'static str, String)> {
    vec![
        (
            "AWS_ENDPOINT_URL",
            format!("http://localhost:{}", address.port()),
        ),
        ("AWS_ALLOW_HTTP", "true".into()),
        ("AWS_REGION", "us-east-1".into()),
        ("AWS_ACCESS_KEY_ID", "test".into()),
        ("AWS_SECRET_ACCESS_KEY", secret.into()),
    ]
}

/// Fault injected into a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// The answer has this status.
    Status(u16),
    /// The connection is closed after half of the answer.
    Cut,
    /// The answer is delayed.
    Slow(Duration),
    /// The request is not answered until the faults are changed.
    Hold,
}

/// Answered request.
#[derive(Debug, Clone)]
pub struct Request {
    pub path: String,
    /// Requested range of bytes.
    pub range: Option<Range<u64>>,
    /// Length of the answer's body in bytes.
    pub bytes: u64,
}

impl Request {
    /// Returns whether the request reads a range of a pack. A pack is an object with chunks of
    /// snapshots.
    pub fn is_of_pack(&self) -> bool {
        self.path.contains("/packs/") && self.range.is_some()
    }

    /// Returns the length of the requested range in bytes. 0 without a range.
    pub fn range_bytes(&self) -> u64 {
        self.range
            .as_ref()
            .map_or(0, |range| range.end - range.start)
    }
}

type Decide = dyn FnMut(&Request) -> Fault + Send;

/// State that the threads of a proxy share.
struct Shared {
    server: SocketAddr,
    closed: AtomicBool,
    /// Number of held requests.
    held: AtomicUsize,
    /// Number of changes of the faults, and the function that selects the fault of a request.
    decide: Mutex<(u64, Box<Decide>)>,
    requests: Mutex<Vec<Request>>,
}

/// Proxy of a server. Each client request has its own connection.
pub struct S3Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl S3Proxy {
    pub fn new(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            server,
            closed: AtomicBool::new(false),
            held: AtomicUsize::new(0),
            decide: Mutex::new((0, Box::new(|_| Fault::None))),
            requests: Mutex::default(),
        });
        let serving = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if serving.closed.load(Ordering::SeqCst) {
                    return;
                }
                let shared = serving.clone();
                std::thread::spawn(move || shared.serve(client));
            }
        });
        Self { address, shared }
    }

    /// Sets the faults of further requests. Held requests are decided again.
    pub fn on(&self, decide: impl FnMut(&Request) -> Fault + Send + 'static) {
        let mut current = lock(&self.shared.decide);
        *current = (current.0 + 1, Box::new(decide));
    }

    /// Forwards all later requests without a fault.
    pub fn clear_faults(&self) {
        self.on(|_| Fault::None);
    }

    /// Waits until a request is held.
    pub fn wait_for_held(&self) {
        super::wait_for("a held request", || {
            (self.shared.held.load(Ordering::SeqCst) > 0).then_some(())
        });
    }

    /// Returns the requests since the last call.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut lock(&self.shared.requests))
    }
}

impl Drop for S3Proxy {
    fn drop(&mut self) {
        self.clear_faults();
        self.shared.closed.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn serve(&self, mut client: TcpStream) -> io::Result<()> {
        let head = read_head(&mut client)?;
        let mut body = vec![0; header(&head, "content-length").unwrap_or(0)];
        client.read_exact(&mut body)?;
        let mut request = parse(&head);
        let fault = self.wait_for_fault(&request);
        match fault {
            Fault::Status(status) => {
                let text = "<Error><Code>Injected</Code><Message>by a test</Message></Error>";
                let length = text.len();
                return write!(
                    client,
                    "HTTP/1.1 {status} Injected\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{text}"
                );
            }
            Fault::Slow(time) => std::thread::sleep(time),
            _ => {}
        }
        let mut server = TcpStream::connect(self.server)?;
        let (first, rest) = head.split_once("\r\n").unwrap_or((&head, ""));
        // The remaining header lines are signed, and therefore unchanged.
        write!(server, "{first}\r\nConnection: close\r\n{rest}")?;
        server.write_all(&body)?;
        let mut answer = Vec::new();
        server.read_to_end(&mut answer)?;
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
        request.bytes = (answer.len() - end.map_or(0, |end| end + 4)) as u64;
        lock(&self.requests).push(request);
        if fault == Fault::Cut {
            answer.truncate(answer.len() / 2 + 1);
        }
        client.write_all(&answer)
    }

    /// Returns the fault of a request. A held request waits until the faults are changed.
    fn wait_for_fault(&self, request: &Request) -> Fault {
        loop {
            let (number, fault) = {
                let mut decide = lock(&self.decide);
                (decide.0, decide.1(request))
            };
            if fault != Fault::Hold {
                return fault;
            }
            self.held.fetch_add(1, Ordering::SeqCst);
            while lock(&self.decide).0 == number {
                std::thread::sleep(Duration::from_millis(5));
            }
            self.held.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

fn read_head(client: &mut TcpStream) -> io::Result<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && head.len() < MAX_HEAD_BYTES {
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

fn header<T: std::str::FromStr>(head: &str, wanted: &str) -> Option<T> {
    let mut lines = head.lines().filter_map(|line| line.split_once(':'));
    let found = lines.find(|(name, _)| name.eq_ignore_ascii_case(wanted));
    found.and_then(|(_, value)| value.trim().parse().ok())
}

/// Parses the head of a request.
fn parse(head: &str) -> Request {
    let path = head.split(' ').nth(1).unwrap_or_default();
    let range: Option<String> = header(head, "range");
    let range = range.and_then(|range| {
        let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some(from.parse().ok()?..to.parse::<u64>().ok()? + 1)
    });
    Request {
        path: path.to_owned(),
        range,
        bytes: 0,
    }
}
