//! Finds the host name in the first bytes of a guest's connection: in a TLS ClientHello (SNI), or
//! in the `Host` header of an HTTP request. The bytes come from the guest and are untrusted.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use httparse::Status;
use rustls::server::Acceptor;
use std::io;

/// Maximum number of bytes read. The head of a request may be longer if the `Host` header is within
/// them.
pub(crate) const MAX_HEAD_BYTES: usize = 16 * 1024;

/// Protocol of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SniffProtocol {
    Http,
    Tls,
}

impl SniffProtocol {
    /// Returns the port of connections with this protocol.
    pub fn port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Tls => 443,
        }
    }
}

/// Result of sniffing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SniffResult {
    /// More bytes are required.
    Incomplete,
    /// The host name.
    Name(String),
    /// The client sent no host name, or uses another protocol.
    NoName,
}

/// Parses `head`, all bytes received so far.
pub(crate) fn sniff(protocol: SniffProtocol, head: &[u8]) -> SniffResult {
    let result = match protocol {
        SniffProtocol::Http => http(head),
        SniffProtocol::Tls => tls(head),
    };
    match result {
        SniffResult::Incomplete if head.len() >= MAX_HEAD_BYTES => SniffResult::NoName,
        other => other,
    }
}

/// Parses the server name (SNI) of a TLS ClientHello.
fn tls(head: &[u8]) -> SniffResult {
    let mut acceptor = Acceptor::default();
    let mut rest = head;
    while !rest.is_empty() {
        match acceptor.read_tls(&mut rest as &mut dyn io::Read) {
            // The acceptor takes no more bytes, or the record is invalid.
            Ok(0) | Err(_) => return SniffResult::NoName,
            Ok(_) => {}
        }
        match acceptor.accept() {
            Ok(Some(accepted)) => {
                let name = accepted.client_hello().server_name().map(str::to_owned);
                return name.map_or(SniffResult::NoName, SniffResult::Name);
            }
            Ok(None) => {}
            Err(_) => return SniffResult::NoName,
        }
    }
    SniffResult::Incomplete
}

/// Parses the `Host` header of an HTTP request whose head may be incomplete.
fn http(head: &[u8]) -> SniffResult {
    if head.len() < MAX_HEAD_BYTES {
        return http_host(head);
    }
    // The head may be longer than the maximum: parse its complete lines.
    let lines = head
        .iter()
        .rposition(|&b| b == b'\n')
        .map_or(0, |end| end + 1);
    let mut whole = head.get(..lines).unwrap_or_default().to_vec();
    whole.extend(b"\r\n");
    http_host(&whole)
}

/// Returns the host in the head of a request.
fn http_host(head: &[u8]) -> SniffResult {
    // Each header has a line, so the number of lines is an upper bound.
    let max_headers = head.iter().filter(|&&b| b == b'\n').count();
    let mut headers = vec![httparse::EMPTY_HEADER; max_headers];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(Status::Partial) => return SniffResult::Incomplete,
        Ok(Status::Complete(_)) => {}
        Err(_) => return SniffResult::NoName,
    }
    let mut hosts = request
        .headers
        .iter()
        .filter(|h| h.name.eq_ignore_ascii_case("host"));
    // Several `Host` headers are ambiguous: servers may choose different ones.
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return SniffResult::NoName;
    };
    // A request to a proxy has its target in the request line.
    if !request.path.is_some_and(|p| p.starts_with('/') || p == "*") {
        return SniffResult::NoName;
    }
    match std::str::from_utf8(host.value) {
        Ok(host) => {
            let host = host.trim();
            // Names contain no colon, so a colon starts the port.
            let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
            SniffResult::Name(name.to_owned())
        }
        Err(_) => SniffResult::NoName,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a ClientHello (RFC 8446 4.1.2) with or without a server name.
    fn hello(name: Option<&str>) -> Vec<u8> {
        let mut extensions = Vec::new();
        if let Some(name) = name {
            let n = name.len() as u16;
            extensions.extend([0, 0]);
            for length in [n + 5, n + 3] {
                extensions.extend(length.to_be_bytes());
            }
            extensions.push(0);
            extensions.extend(n.to_be_bytes());
            extensions.extend(name.as_bytes());
        }
        // supported_groups, signature_algorithms and supported_versions, which a ClientHello must
        // have.
        extensions.extend([
            0, 10, 0, 4, 0, 2, 0, 29, 0, 13, 0, 4, 0, 2, 4, 3, 0, 43, 0, 3, 2, 3, 4,
        ]);
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0, 0, 2, 0x13, 1, 1, 0]);
        body.extend((extensions.len() as u16).to_be_bytes());
        body.extend(extensions);
        let mut message = vec![1, 0];
        message.extend((body.len() as u16).to_be_bytes());
        message.extend(body);
        let mut record = vec![22, 3, 1];
        record.extend((message.len() as u16).to_be_bytes());
        record.extend(message);
        record
    }

    #[test]
    fn a_tls_connection_goes_to_its_server_name() {
        let hello = hello(Some("a.example.com"));
        let to = SniffResult::Name("a.example.com".to_owned());
        assert_eq!(sniff(SniffProtocol::Tls, &hello), to);
        for length in 0..hello.len() {
            assert_eq!(
                sniff(SniffProtocol::Tls, &hello[..length]),
                SniffResult::Incomplete,
                "{length}"
            );
        }
    }

    #[test]
    fn a_head_without_a_host_name_goes_nowhere() {
        assert_eq!(sniff(SniffProtocol::Tls, &hello(None)), SniffResult::NoName);
        assert_eq!(
            sniff(SniffProtocol::Tls, b"GET / HTTP/1.1\r\n\r\n"),
            SniffResult::NoName
        );
        for head in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n",
            b"GET http://a/ HTTP/1.1\r\nHost: b\r\n\r\n",
            b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
            b"\x16\x03\x01\x00",
            &[b'a'; MAX_HEAD_BYTES],
        ] {
            assert_eq!(sniff(SniffProtocol::Http, head), SniffResult::NoName);
        }
    }

    #[test]
    fn a_long_head_goes_to_the_host_at_its_start() {
        let to = SniffResult::Name("a.example".to_owned());
        let start = "GET / HTTP/1.1\r\nHost: a.example\r\n".to_owned();
        let many = start.clone() + &"X-Y: z\r\n".repeat(500) + "\r\n";
        assert_eq!(sniff(SniffProtocol::Http, many.as_bytes()), to);
        let long = start + "Cookie: " + &"c".repeat(2 * MAX_HEAD_BYTES);
        let (short, read) = (&long.as_bytes()[..100], &long.as_bytes()[..MAX_HEAD_BYTES]);
        assert_eq!(sniff(SniffProtocol::Http, short), SniffResult::Incomplete);
        assert_eq!(sniff(SniffProtocol::Http, read), to);
        let late = "GET / HTTP/1.1\r\nX: ".to_owned() + &long + "\r\nHost: a.example\r\n";
        assert_eq!(
            sniff(SniffProtocol::Http, late.as_bytes()),
            SniffResult::NoName
        );
        // The second of two host names is incomplete.
        let two = "GET / HTTP/1.1\r\nHost: a.example\r\nHost: b.exa".to_owned();
        assert_eq!(
            sniff(SniffProtocol::Http, two.as_bytes()),
            SniffResult::Incomplete
        );
    }

    #[test]
    fn a_request_goes_to_its_host() {
        let whole = b"GET /x HTTP/1.1\r\nA: b\r\nHost: A.example:80\r\n\r\nbody";
        let to = SniffResult::Name("A.example".to_owned());
        assert_eq!(sniff(SniffProtocol::Http, whole), to);
        assert_eq!(
            sniff(SniffProtocol::Http, &whole[..30]),
            SniffResult::Incomplete
        );
    }
}
