//! HTTP client of an API key, in the network of the laboratory (the fleet of `jiffy fleet try`).

use nix::sched::{CloneFlags, setns};
use serde_json::Value;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Maximum time until a host of the laboratory accepts a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Maximum time until an answer is complete. A resume may wait for a verdict, the decision that a
/// host is dead.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Answer to a call.
#[derive(Debug, Clone)]
pub struct Reply {
    /// 0 if there was no answer.
    pub status: u16,
    pub body: Value,
    pub took: Duration,
}

impl Reply {
    /// Returns the body of an answer with this status.
    #[track_caller]
    pub fn expect(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        self.body
    }

    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    pub fn code(&self) -> &str {
        self.body["error_code"].as_str().unwrap_or_default()
    }
}

/// Address of a host or front, and an API key. A front is a process without sandboxes that passes
/// requests to the hosts.
#[derive(Debug, Clone)]
pub struct Client {
    /// Process in the network of the laboratory.
    pub network: u32,
    pub address: SocketAddr,
    pub key: String,
}

impl Client {
    /// Calls the control plane.
    pub fn call(&self, method: &str, path: &str, body: &Value) -> Reply {
        let started = Instant::now();
        let (status, body) = match self.exchange(method, path, body) {
            Ok(answer) => answer,
            Err(error) => (0, Value::String(error.to_string())),
        };
        Reply {
            status,
            body,
            took: started.elapsed(),
        }
    }

    pub fn get(&self, path: &str) -> Reply {
        self.call("GET", path, &Value::Null)
    }

    /// Returns the URL of the host or front.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Opens the stream of the events of the key, and returns it after the head of the answer.
    pub fn events(&self) -> OpenStream {
        let mut stream = connect(self.network, self.address).unwrap();
        stream.set_read_timeout(Some(ANSWER_LIMIT)).unwrap();
        write!(
            stream,
            "GET /events HTTP/1.1\r\nHost: {}\r\nX-API-Key: {}\r\nAccept: text/event-stream\r\n\r\n",
            self.address, self.key
        )
        .unwrap();
        let mut stream = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(stream.read_line(&mut head).unwrap() > 0, "{head}");
        }
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        OpenStream(stream)
    }

    /// Sends a request and reads the response. Returns status and body.
    fn exchange(&self, method: &str, path: &str, body: &Value) -> io::Result<(u16, Value)> {
        let mut stream = connect(self.network, self.address)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        let text = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        write!(
            stream,
            "{method} {path} HTTP/1.0\r\nHost: {}\r\nX-API-Key: {}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{text}",
            self.address,
            self.key,
            text.len()
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let incomplete = || io::Error::new(io::ErrorKind::UnexpectedEof, answer.clone());
        let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(incomplete)?;
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok());
        let body = serde_json::from_str(body).unwrap_or_else(|_| Value::String(body.to_owned()));
        Ok((status.ok_or_else(incomplete)?, body))
    }
}

/// Open answer of a server.
pub struct OpenStream(BufReader<TcpStream>);

impl OpenStream {
    /// Reads until the server closes the stream.
    pub fn until_closed(&mut self, limit: Duration) {
        let end = Instant::now() + limit;
        self.0.get_ref().set_read_timeout(Some(limit)).unwrap();
        let mut buffer = [0; 4096];
        loop {
            match self.0.read(&mut buffer) {
                Ok(0) => return,
                Ok(_) => assert!(Instant::now() < end, "the stream is open"),
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return,
                Err(e) => panic!("the stream is open: {e}"),
            }
        }
    }
}

/// Connects to an address in the network of a process.
fn connect(network: u32, address: SocketAddr) -> io::Result<TcpStream> {
    in_network(network, || {
        TcpStream::connect_timeout(&address, CONNECT_LIMIT)
    })
}

/// Runs `work` on a thread in the network of a process.
pub fn in_network<T: Send>(process: u32, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let inside = scope.spawn(move || {
            let namespace = File::open(format!("/proc/{process}/ns/net")).unwrap();
            setns(namespace, CloneFlags::CLONE_NEWNET).unwrap();
            work()
        });
        inside.join().unwrap()
    })
}
