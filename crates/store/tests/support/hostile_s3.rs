//! S3 server with endless responses.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Response of the server to each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// A body with this status that never ends.
    Endless(u16),
    /// A page of a listing with this number of keys, after this delay. A further page always
    /// exists.
    Page(usize, Duration),
    /// A range of an object that is longer than any requested range.
    LongRange,
    /// An object that is sent one byte at a time.
    Trickle,
}

#[derive(Debug)]
struct Shared {
    answer: Mutex<Answer>,
    requests: AtomicU64,
    sent: AtomicU64,
    closed: AtomicBool,
}

/// Server on the loopback device.
#[derive(Debug)]
pub struct HostileS3 {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

impl HostileS3 {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            answer: Mutex::new(Answer::Endless(200)),
            requests: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            closed: AtomicBool::new(false),
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

    /// Sets the response. Returns the numbers of requests and bytes since the last call.
    pub fn answer(&self, answer: Answer) -> (u64, u64) {
        *self.shared.answer.lock().unwrap() = answer;
        self.counts()
    }

    /// Returns the numbers of requests and bytes since the last call.
    pub fn counts(&self) -> (u64, u64) {
        (
            self.shared.requests.swap(0, Ordering::SeqCst),
            self.shared.sent.swap(0, Ordering::SeqCst),
        )
    }
}

impl Drop for HostileS3 {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    /// Serves one request. Each request has its own connection.
    fn serve(&self, mut client: TcpStream) -> std::io::Result<()> {
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") {
            client.read_exact(&mut byte)?;
            head.push(byte[0]);
        }
        self.requests.fetch_add(1, Ordering::SeqCst);
        let close = "Connection: close\r\n";
        let answer = *self.answer.lock().unwrap();
        match answer {
            Answer::Endless(status) => {
                let head = format!("HTTP/1.1 {status} Hostile\r\n{close}\r\n<ListBucketResult>");
                self.send(&mut client, head.as_bytes())?;
                let piece = "<Contents><Key>a</Key></Contents>".repeat(2000);
                loop {
                    self.send(&mut client, piece.as_bytes())?;
                }
            }
            Answer::Page(keys, pause) => {
                std::thread::sleep(pause);
                let page = page(keys);
                let length = page.len();
                let head = format!("HTTP/1.1 200 OK\r\n{close}Content-Length: {length}\r\n\r\n");
                self.send(&mut client, head.as_bytes())?;
                self.send(&mut client, page.as_bytes())
            }
            Answer::LongRange => {
                let head = format!(
                    "HTTP/1.1 206 Partial\r\n{close}Content-Length: {0}\r\n\
                     Content-Range: bytes 0-18446744073709551615/18446744073709551615\r\n\
                     Last-Modified: Tue, 01 Jan 2030 00:00:00 GMT\r\nETag: \"a\"\r\n\r\n",
                    1u64 << 40
                );
                self.send(&mut client, head.as_bytes())?;
                loop {
                    self.send(&mut client, &[0; 64 << 10])?;
                }
            }
            Answer::Trickle => {
                let head = format!(
                    "HTTP/1.1 200 OK\r\n{close}Content-Length: 100000\r\n\
                     Last-Modified: Tue, 01 Jan 2030 00:00:00 GMT\r\nETag: \"a\"\r\n\r\n"
                );
                self.send(&mut client, head.as_bytes())?;
                loop {
                    std::thread::sleep(Duration::from_millis(20));
                    self.send(&mut client, b"a")?;
                }
            }
        }
    }

    fn send(&self, client: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        client.write_all(bytes)?;
        self.sent.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        Ok(())
    }
}

/// Returns a page of a listing, which names a further page.
fn page(keys: usize) -> String {
    let key = |number| {
        format!(
            "<Contents><Key>some/prefix/tenants/{number}</Key><Size>1</Size>\
             <LastModified>2030-01-01T00:00:00.000Z</LastModified></Contents>"
        )
    };
    let keys: String = (0..keys).map(key).collect();
    format!(
        "<ListBucketResult><IsTruncated>true</IsTruncated>{keys}\
         <NextContinuationToken>more</NextContinuationToken></ListBucketResult>"
    )
}
