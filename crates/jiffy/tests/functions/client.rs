//! Client of functions with its own HTTP implementation, because host names and headers are tested.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Timeout of reads.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Response to a request.
#[derive(Debug, Clone)]
pub struct FunctionResponse {
    pub status: u16,
    /// Head in lower case.
    pub head: String,
    pub body: Vec<u8>,
}

impl FunctionResponse {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Returns the status and the error code of an error response.
    pub fn refusal(&self) -> (u16, String) {
        let body: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        assert_eq!(body["code"], self.status, "{self:?}");
        let code = body["error_code"].as_str();
        (self.status, code.unwrap_or_default().to_owned())
    }

    pub fn header(&self, name: &str) -> Option<String> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        let found = lines.find(|(n, _)| *n == name);
        found.map(|(_, value)| value.to_owned())
    }
}

/// Connection to the daemon.
pub struct FunctionClient {
    stream: BufReader<TcpStream>,
    headers: String,
}

impl FunctionClient {
    /// Connects to `url`. `headers` are sent with each request. Each header must end with CR LF.
    pub fn connect(url: &str, headers: &str) -> Self {
        let address = url.trim_end_matches('/').trim_start_matches("http://");
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream: BufReader::new(stream),
            headers: headers.to_owned(),
        }
    }

    pub fn get(&mut self, path: &str) -> io::Result<FunctionResponse> {
        self.send("GET", path, b"")
    }

    pub fn send(&mut self, method: &str, path: &str, body: &[u8]) -> io::Result<FunctionResponse> {
        let mut request = self.head(method, path, body.len()).into_bytes();
        request.extend_from_slice(body);
        // An error response may arrive before the body is sent.
        let _ = self.stream.get_mut().write_all(&request);
        self.response()
    }

    /// Sends the head of a request whose body has `length` bytes.
    pub fn begin(&mut self, method: &str, path: &str, length: usize) {
        let head = self.head(method, path, length);
        self.stream.get_mut().write_all(head.as_bytes()).unwrap();
    }

    /// Sends the body of the started request, and reads the response.
    pub fn finish(&mut self, body: &[u8]) -> io::Result<FunctionResponse> {
        self.stream.get_mut().write_all(body).unwrap();
        self.response()
    }

    fn head(&self, method: &str, path: &str, length: usize) -> String {
        let headers = &self.headers;
        format!("{method} {path} HTTP/1.1\r\n{headers}content-length: {length}\r\n\r\n")
    }

    /// Reads a response: its head, and a body with a length or in chunks.
    fn response(&mut self) -> io::Result<FunctionResponse> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if self.stream.read_line(&mut head)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let head = head.to_ascii_lowercase();
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok());
        let status = status.ok_or(io::ErrorKind::InvalidData)?;
        let mut response = FunctionResponse {
            status,
            head,
            body: Vec::new(),
        };
        if status == 204 {
            return Ok(response);
        }
        if let Some(length) = response.header("content-length") {
            let length = length.parse().map_err(io::Error::other)?;
            response.body = vec![0; length];
            self.stream.read_exact(&mut response.body)?;
            return Ok(response);
        }
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line)?;
            let length = usize::from_str_radix(line.trim(), 16).map_err(io::Error::other)?;
            // CR LF follows the data of each chunk.
            let mut chunk = vec![0; length + 2];
            self.stream.read_exact(&mut chunk)?;
            if length == 0 {
                return Ok(response);
            }
            response.body.extend_from_slice(&chunk[..length]);
        }
    }
}
