//! Connects a stream of the host to a TCP port inside the guest (`jiffy_proto::agent::TCP_PORT`).
//! The gateway uses this for servers that listen on loopback addresses only. A stream may also name
//! a socket for programs of the guest ([`crate::guest_sockets`]).

use crate::guest_sockets::GuestSockets;
use crate::sys;
use jiffy_proto::agent::{MAX_SOCKET_REQUEST, SocketListener, TCP_OK};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional_with_sizes};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

/// Maximum number of digits of a port number.
const MAX_PORT_DIGITS: usize = 5;
/// Size of the buffer for each direction of a connection.
const COPY_BUFFER_BYTES: usize = 16 * 1024;
/// Timeout of the first attempt to connect, before the random factor. The next attempt follows
/// immediately.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(20);
/// Maximum timeout of later attempts, before the random factor.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Timeout for a server to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(120);

/// Target of a stream.
enum StreamTarget {
    /// Connection to a TCP port.
    Port(u16),
    /// Connection of a program to a socket.
    Socket(SocketListener),
}

/// Serves one stream.
pub async fn serve(mut stream: UnixStream, sockets: Rc<GuestSockets>) {
    // Ignore the error: a peer that closes the connection is normal.
    let _ = forward(&mut stream, &sockets).await;
}

/// Reads the number of a port, connects to it, and copies data in both directions. A socket is
/// served instead if the host names one.
async fn forward(stream: &mut UnixStream, sockets: &GuestSockets) -> io::Result<()> {
    // A client that sends no complete line in time is disconnected without an error message.
    let opening = timeout(Duration::from_secs(10), read_target(stream)).await;
    let mut tcp = match opening {
        Err(_) => return Ok(()),
        Ok(Err(reason)) => return send_error(stream, &reason).await,
        Ok(Ok(StreamTarget::Socket(request))) => return sockets.serve(stream, &request).await,
        Ok(Ok(StreamTarget::Port(port))) => match connect(port).await {
            Ok(tcp) => tcp,
            Err(e) => {
                return send_error(stream, &format!("cannot connect to port {port}: {e}")).await;
            }
        },
    };
    tcp.set_nodelay(true)?;
    stream.write_all(TCP_OK.as_bytes()).await?;
    copy_bidirectional_with_sizes(stream, &mut tcp, COPY_BUFFER_BYTES, COPY_BUFFER_BYTES).await?;
    Ok(())
}

/// Sends the reason of a failure to the host.
async fn send_error(stream: &mut UnixStream, reason: &str) -> io::Result<()> {
    stream.write_all(format!("ERR {reason}\n").as_bytes()).await
}

/// Reads the line with the port or the socket. It is read byte by byte, because later bytes belong
/// to the TCP connection.
async fn read_target(stream: &mut UnixStream) -> Result<StreamTarget, String> {
    let mut line = String::new();
    loop {
        let byte = stream.read_u8().await.map_err(|e| e.to_string())?;
        match byte {
            b'\n' => {
                return line
                    .parse()
                    .ok()
                    .filter(|port| *port != 0)
                    .map(StreamTarget::Port)
                    .ok_or_else(|| format!("'{line}' is not a port number"));
            }
            b'{' if line.is_empty() => return read_socket(stream).await,
            b'0'..=b'9' if line.len() < MAX_PORT_DIGITS => line.push(char::from(byte)),
            _ => return Err("expected a port number and a newline".to_owned()),
        }
    }
}

/// Reads the rest of a JSON line after its first byte, `{`.
async fn read_socket(stream: &mut UnixStream) -> Result<StreamTarget, String> {
    let mut line = vec![b'{'];
    while line.len() < MAX_SOCKET_REQUEST {
        match stream.read_u8().await.map_err(|e| e.to_string())? {
            b'\n' => {
                let request = serde_json::from_slice(&line).map_err(|e| e.to_string())?;
                return Ok(StreamTarget::Socket(request));
            }
            byte => line.push(byte),
        }
    }
    Err("the request for a socket is too long".to_owned())
}

/// Connects to a server. The first attempt uses IPv4; some servers listen only on `::1`.
async fn connect(port: u16) -> io::Result<TcpStream> {
    // The timeout applies to both attempts together.
    let began = Instant::now();
    match connect_with_retry((IpAddr::V4(Ipv4Addr::LOCALHOST), port).into(), began).await {
        Ok(tcp) => Ok(tcp),
        Err(first) => connect_with_retry((IpAddr::V6(Ipv6Addr::LOCALHOST), port).into(), began)
            .await
            // The error of IPv4 is more useful, since most servers listen on IPv4.
            .map_err(|_| first),
    }
}

/// Connects to a server on the loopback device, where a connection succeeds immediately or not at
/// all: a server whose backlog is full (Python's default is five) drops the SYN. The kernel would
/// repeat the SYN after one second and after two more seconds. This function repeats the attempt
/// earlier, with random delays between concurrent attempts, for [`CONNECT_TIMEOUT`] since `began`.
async fn connect_with_retry(to: SocketAddr, began: Instant) -> io::Result<TcpStream> {
    let mut delay = FIRST_RETRY_DELAY;
    loop {
        let mut random = [0; 1];
        sys::random(&mut random)?;
        let wait = delay.mul_f64(0.5 + f64::from(random[0]) / 256.0);
        match timeout(wait, TcpStream::connect(to)).await {
            Ok(done) => return done,
            Err(_) if began.elapsed() > CONNECT_TIMEOUT => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(_) => delay = (delay * 5 / 4).min(MAX_RETRY_DELAY),
        }
    }
}
