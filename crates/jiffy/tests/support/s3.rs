//! A real S3 server: versitygw over a directory, on the loopback device, and a proxy before it that
//! counts requests and makes them fail.

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
/// Longest head of a request or answer in bytes.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// The program that `scripts/test-servers` builds.
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
    /// Starts a server over `dir`, whose file system has extended attributes of users: without them
    /// there are no conditional writes. `None` if the program was not built.
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

    /// Ends it.
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

/// Variables of a program that uses the server at `address`, by a name that has to be resolved.
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

/// Fate of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Answered with this status.
    Status(u16),
    /// The connection ends after half of the answer.
    Cut,
    /// The answer comes after so long.
    Slow(Duration),
    /// No answer, until the faults are others.
    Hold,
}

/// Request that was answered.
#[derive(Debug, Clone)]
pub struct Request {
    pub path: String,
    /// Range of bytes that it asks for.
    pub range: Option<Range<u64>>,
    /// Bytes of the answer's body.
    pub bytes: u64,
}

impl Request {
    /// True if it reads a range of a pack.
    pub fn is_of_pack(&self) -> bool {
        self.path.contains("/packs/") && self.range.is_some()
    }

    /// Bytes of the range that it asks for; 0 if it asks for none.
    pub fn range_bytes(&self) -> u64 {
        self.range
            .as_ref()
            .map_or(0, |range| range.end - range.start)
    }
}

type Decide = dyn FnMut(&Request) -> Fault + Send;

struct Shared {
    server: SocketAddr,
    closed: AtomicBool,
    /// Requests that are held.
    held: AtomicUsize,
    decide: Mutex<(u64, Box<Decide>)>,
    requests: Mutex<Vec<Request>>,
}

/// Proxy before a server. A request of a client has a connection of its own.
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

    /// From here on requests have these fates; those that are held are decided anew.
    pub fn on(&self, decide: impl FnMut(&Request) -> Fault + Send + 'static) {
        let mut current = lock(&self.shared.decide);
        *current = (current.0 + 1, Box::new(decide));
    }

    pub fn heal(&self) {
        self.on(|_| Fault::None);
    }

    /// Waits until a request is held.
    pub fn wait_for_held(&self) {
        super::wait_for("a request that is held", || {
            (self.shared.held.load(Ordering::SeqCst) > 0).then_some(())
        });
    }

    /// Requests since the last call.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut lock(&self.shared.requests))
    }
}

impl Drop for S3Proxy {
    fn drop(&mut self) {
        self.heal();
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
        let fault = self.fate(&request);
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
        // The rest is signed as it is.
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

    fn fate(&self, request: &Request) -> Fault {
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
