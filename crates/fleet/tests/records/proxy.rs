//! HTTP proxy with faults. It forwards each request through a connection of its own.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Treatment of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Requests are forwarded.
    Forward,
    /// The next request is forwarded, but its response is dropped.
    LoseNextAnswer,
    /// Requests are read and not answered.
    Silent,
    /// Requests are forwarded after this time, even if the client has left.
    Delay(Duration),
    /// Requests are answered with 503 and not forwarded.
    Unavailable,
}

pub struct Proxy {
    pub address: SocketAddr,
    mode: Arc<Mutex<Mode>>,
    forwarded: watch::Receiver<u64>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Proxy {
    pub async fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mode = Arc::new(Mutex::new(Mode::Forward));
        let (count, forwarded) = watch::channel(0);
        let shared = mode.clone();
        let task = tokio::spawn(async move {
            let count = Arc::new(count);
            while let Ok((client, _)) = listener.accept().await {
                let (mode, count) = (shared.clone(), count.clone());
                tokio::spawn(async move {
                    let _ = serve(client, server, &mode, &count).await;
                });
            }
        });
        Self {
            address,
            mode,
            forwarded,
            task,
        }
    }

    pub fn set(&self, mode: Mode) {
        *self.mode.lock().unwrap() = mode;
    }

    /// Returns the number of requests that the server has answered.
    pub fn forwarded(&self) -> u64 {
        *self.forwarded.borrow()
    }

    /// Waits until the server has answered more than `number` requests.
    pub async fn wait_for_more(&self, number: u64) {
        let mut forwarded = self.forwarded.clone();
        forwarded.wait_for(|count| *count > number).await.unwrap();
    }
}

/// Serves one request of a client according to the current mode.
async fn serve(
    mut client: TcpStream,
    server: SocketAddr,
    mode: &Mutex<Mode>,
    count: &watch::Sender<u64>,
) -> io::Result<()> {
    let request = read_request(&mut client).await?;
    let current = {
        let mut mode = mode.lock().unwrap();
        let current = *mode;
        if current == Mode::LoseNextAnswer {
            *mode = Mode::Forward;
        }
        current
    };
    match current {
        Mode::Silent => std::future::pending().await,
        Mode::Unavailable => {
            let answer = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\
                           Connection: close\r\n\r\n";
            return client.write_all(answer).await;
        }
        Mode::Delay(time) => tokio::time::sleep(time).await,
        Mode::Forward | Mode::LoseNextAnswer => {}
    }
    let mut upstream = TcpStream::connect(server).await?;
    upstream.write_all(&request).await?;
    let mut answer = Vec::new();
    upstream.read_to_end(&mut answer).await?;
    count.send_modify(|count| *count += 1);
    if current != Mode::LoseNextAnswer {
        client.write_all(&answer).await?;
    }
    Ok(())
}

/// Reads a request, and replaces its connection header: the server closes after its response.
async fn read_request(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at;
        }
        if client.read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    };
    let body = bytes.split_off(end + 4);
    let head = String::from_utf8(bytes).map_err(|_| io::ErrorKind::InvalidData)?;
    let (mut length, mut lines) = (0, Vec::new());
    for line in head.trim_end().split("\r\n") {
        let name = line.split(':').next().unwrap_or("").to_ascii_lowercase();
        if name == "content-length" {
            let text = line.split(':').nth(1).unwrap_or("");
            length = text
                .trim()
                .parse()
                .map_err(|_| io::ErrorKind::InvalidData)?;
        }
        if name != "connection" {
            lines.push(line);
        }
    }
    let mut request = format!("{}\r\nConnection: close\r\n\r\n", lines.join("\r\n")).into_bytes();
    request.extend_from_slice(&body);
    let mut rest = vec![0; usize::saturating_sub(length, body.len())];
    client.read_exact(&mut rest).await?;
    request.extend_from_slice(&rest);
    Ok(request)
}
