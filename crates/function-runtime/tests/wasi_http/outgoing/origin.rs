//! Server that receives requests of components.

use std::io::{BufRead, BufReader, Read, Result, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Truncated response.
const PARTIAL: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc";
/// Response with two lengths. Its transfer coding determines the length.
const TWO_LENGTHS: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 100\r\n\
    transfer-encoding: chunked\r\n\r\n0\r\n\r\n";
/// First frame of an HTTP/2 server.
const HTTP2_SETTINGS: &[u8] = b"\0\0\0\x04\0\0\0\0\0";

/// Server on the loopback interface.
pub struct Origin {
    pub address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
}

impl Origin {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let heads = Arc::new(Mutex::new(Vec::new()));
        let seen = heads.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, seen) = (stream.unwrap(), seen.clone());
                // Clients of some requests disconnect before the answer.
                std::thread::spawn(move || answer(stream, &seen).unwrap_or_default());
            }
        });
        Self { address, heads }
    }

    /// Returns the heads of requests. The header lines are in lower case.
    pub fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

/// Answers a request as its path requires, and records its head.
fn answer(stream: TcpStream, heads: &Mutex<Vec<String>>) -> Result<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let head = head.to_ascii_lowercase();
    heads.lock().unwrap().push(line.clone() + &head);
    let mut words = line.split(' ').map(str::to_owned);
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let body = if head.contains("transfer-encoding: chunked") {
        chunks(&mut reader)?
    } else {
        Vec::new()
    };
    let stream = reader.get_mut();
    match path.as_str() {
        "/silent" => {}
        "/partial" => stream.write_all(PARTIAL)?,
        "/cut" => return stream.write_all(PARTIAL),
        "/twice" => return stream.write_all(TWO_LENGTHS),
        "/other" => return stream.write_all(HTTP2_SETTINGS),
        _ => {
            let body = match method.as_str() {
                "GET" => format!("GET {path}").into_bytes(),
                _ => body,
            };
            let length = body.len();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            return stream.write_all(&[head.as_bytes(), &body].concat());
        }
    }
    // Reads until the client disconnects.
    reader.read_to_end(&mut Vec::new()).map(drop)
}

/// Reads a body in the chunked transfer encoding.
fn chunks(reader: &mut impl BufRead) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let length = usize::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
        let mut chunk = vec![0; length + 2];
        reader.read_exact(&mut chunk)?;
        if length == 0 {
            return Ok(body);
        }
        body.extend_from_slice(&chunk[..length]);
    }
}
