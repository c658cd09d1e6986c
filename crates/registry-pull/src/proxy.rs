//! HTTP proxy of the host (`HTTPS_PROXY`), for pulls that the host's owner requests.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use crate::cancel::Cancel;
use crate::connection_gate::direct;
use nix::poll::PollFlags;
use std::env;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Timeout of the `CONNECT` exchange. It starts when the TCP connection to the proxy is
/// established.
const PROXY_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum length of a proxy's response in bytes.
const MAX_RESPONSE_BYTES: usize = 8 << 10;

/// Proxy that tunnels TCP connections by `CONNECT` requests (RFC 9110 9.3.6).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HttpProxy {
    host: String,
    port: u16,
    /// Hosts and domains that bypass the proxy.
    except: Vec<String>,
}

impl HttpProxy {
    /// Returns the proxy in `HTTPS_PROXY` or `ALL_PROXY`, in upper or lower case.
    pub fn from_environment() -> Option<Self> {
        let var = |name: &str| {
            let value = env::var(name).or_else(|_| env::var(name.to_ascii_lowercase()));
            value.ok().filter(|v| !v.is_empty())
        };
        let address = var("HTTPS_PROXY").or_else(|| var("ALL_PROXY"))?;
        Self::parse(&address, &var("NO_PROXY").unwrap_or_default())
    }

    /// Parses the address of the proxy and the list of exceptions. Returns `None` if the form of
    /// the address is not supported.
    fn parse(address: &str, except: &str) -> Option<Self> {
        let address = address.strip_prefix("http://").unwrap_or(address);
        let address = address.trim_end_matches('/');
        // Other schemes and URLs with passwords are not supported: the check of characters below
        // rejects their `/` or `@`.
        let (host, port) = address.rsplit_once(':')?;
        let good = |c: char| c.is_ascii_alphanumeric() || "-._[]:".contains(c);
        if host.is_empty() || !host.chars().all(good) {
            return None;
        }
        let except = except.split([',', ' ']).filter(|e| !e.is_empty());
        Some(Self {
            host: host.trim_matches(['[', ']']).to_owned(),
            port: port.parse().ok()?,
            except: except
                .map(|e| e.trim_start_matches('.').to_owned())
                .collect(),
        })
    }

    /// Returns true if a connection uses the proxy: TLS to hosts that are not in `NO_PROXY`.
    pub fn applies_to(&self, host: &str, port: u16) -> bool {
        // Loopback addresses mean this host, not the proxy's host.
        let local = host == "localhost"
            || host
                .parse()
                .is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
        let below = |domain: &String| {
            domain == "*" || host == domain || host.ends_with(&format!(".{domain}"))
        };
        // Other ports are not proxied: registries on them are usually in a local network.
        port == 443 && !local && !self.except.iter().any(below)
    }

    /// Connects through the proxy.
    pub fn connect(&self, host: &str, port: u16, cancel: &Cancel) -> Result<TcpStream, String> {
        // The host's owner configured the proxy, so each of its addresses is permitted.
        let stream = direct(&self.host, self.port, &|_| true, cancel)?;
        let tunnel = self.open_tunnel(&stream, host, port, cancel);
        let failed = |e| format!("the proxy {}:{}: {e}", self.host, self.port);
        tunnel.map_err(failed)?;
        Ok(stream)
    }

    /// Sends a `CONNECT` request and reads the response.
    fn open_tunnel(
        &self,
        mut stream: &TcpStream,
        host: &str,
        port: u16,
        cancel: &Cancel,
    ) -> io::Result<()> {
        let deadline = Instant::now() + PROXY_TIMEOUT;
        let at = if host.contains(':') {
            format!("[{host}]:{port}")
        } else {
            format!("{host}:{port}")
        };
        let request = format!("CONNECT {at} HTTP/1.1\r\nHost: {at}\r\n\r\n");
        // The request is shorter than the send buffer of a new connection, so the write does not
        // block.
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            // Reads from the stream do not block. This call waits instead: it has a deadline, and
            // can be cancelled.
            let waited = cancel.wait(stream.as_fd(), PollFlags::POLLIN, deadline);
            waited.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
            // Read the head byte by byte, because the bytes after it belong to the tunnelled
            // connection.
            let mut byte = [0];
            match stream.read(&mut byte) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => answer.extend(byte),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
            // A hostile proxy must not exhaust the memory.
            if answer.len() > MAX_RESPONSE_BYTES {
                return Err(io::Error::other("the response is too long"));
            }
        }
        let text = String::from_utf8_lossy(&answer);
        match text.split(' ').nth(1) {
            Some(status) if status.starts_with('2') => Ok(()),
            _ => Err(io::Error::other("the proxy rejected the request")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_proxy_is_used_for_tls_to_hosts_that_are_not_excepted() {
        let proxy =
            HttpProxy::parse("http://p.example:3128/", ".internal.example, r.example").unwrap();
        assert!(proxy.applies_to("ghcr.io", 443));
        for (host, port) in [
            ("ghcr.io", 5000),
            ("localhost", 443),
            ("127.0.0.1", 443),
            ("r.example", 443),
            ("a.internal.example", 443),
        ] {
            assert!(!proxy.applies_to(host, port), "{host}:{port}");
        }
        for unknown in ["socks5://p:1", "http://u:p@p.example:1", "p.example", ""] {
            assert_eq!(HttpProxy::parse(unknown, ""), None, "{unknown}");
        }
    }

    #[test]
    fn bytes_after_the_response_of_a_proxy_are_not_lost() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.extend(byte);
            }
            stream.write_all(b"HTTP/1.1 200 ok\r\n\r\nhello").unwrap();
            String::from_utf8(request).unwrap()
        });
        let proxy = HttpProxy::parse(&at, "").unwrap();
        let cancel = Cancel::new().unwrap();
        let mut stream = proxy.connect("r.example", 443, &cancel).unwrap();
        assert!(server.join().unwrap().starts_with("CONNECT r.example:443 "));
        stream.set_nonblocking(false).unwrap();
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "hello");
    }
}
