//! Whom a connection wants to reach, as its first bytes say.

use httparse::Status;
use rustls::server::Acceptor;
use std::io;

/// Most bytes that are waited for.
pub(crate) const LONGEST: usize = 16 * 1024;

/// How a connection begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http,
    Tls,
}

/// What the first bytes of a connection say.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Greeting {
    /// More has to come.
    Unfinished,
    /// This name.
    To(String),
    /// No name, or nothing that this protocol begins with.
    Nobody,
}

/// Reads `head`, all that came so far.
pub(crate) fn read(protocol: Protocol, head: &[u8]) -> Greeting {
    let greeting = match protocol {
        Protocol::Http => http(head),
        Protocol::Tls => tls(head),
    };
    match greeting {
        Greeting::Unfinished if head.len() >= LONGEST => Greeting::Nobody,
        other => other,
    }
}

fn tls(head: &[u8]) -> Greeting {
    let mut acceptor = Acceptor::default();
    let mut rest = head;
    while !rest.is_empty() {
        match acceptor.read_tls(&mut rest as &mut dyn io::Read) {
            Ok(0) | Err(_) => return Greeting::Nobody,
            Ok(_) => {}
        }
        match acceptor.accept() {
            Ok(Some(accepted)) => {
                let name = accepted.client_hello().server_name().map(str::to_owned);
                return name.map_or(Greeting::Nobody, Greeting::To);
            }
            Ok(None) => {}
            Err(_) => return Greeting::Nobody,
        }
    }
    Greeting::Unfinished
}

fn http(head: &[u8]) -> Greeting {
    let mut headers = [httparse::EMPTY_HEADER; 100];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(Status::Partial) => return Greeting::Unfinished,
        Ok(Status::Complete(_)) => {}
        Err(_) => return Greeting::Nobody,
    }
    let mut hosts = request
        .headers
        .iter()
        .filter(|h| h.name.eq_ignore_ascii_case("host"));
    // Two of them: each reader would choose its own.
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return Greeting::Nobody;
    };
    // A request to a proxy names its target elsewhere.
    if !request.path.is_some_and(|p| p.starts_with('/') || p == "*") {
        return Greeting::Nobody;
    }
    match std::str::from_utf8(host.value) {
        Ok(host) => {
            let host = host.trim();
            let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
            Greeting::To(name.to_owned())
        }
        Err(_) => Greeting::Nobody,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ClientHello (RFC 8446 4.1.2) with or without a server name.
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
        // supported_groups, signature_algorithms and supported_versions, without which it is no greeting.
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
        let to = Greeting::To("a.example.com".to_owned());
        assert_eq!(read(Protocol::Tls, &hello), to);
        for length in 0..hello.len() {
            assert_eq!(
                read(Protocol::Tls, &hello[..length]),
                Greeting::Unfinished,
                "{length}"
            );
        }
    }

    #[test]
    fn what_names_nobody_goes_nowhere() {
        assert_eq!(read(Protocol::Tls, &hello(None)), Greeting::Nobody);
        assert_eq!(
            read(Protocol::Tls, b"GET / HTTP/1.1\r\n\r\n"),
            Greeting::Nobody
        );
        for head in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n",
            b"GET http://a/ HTTP/1.1\r\nHost: b\r\n\r\n",
            b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
            b"\x16\x03\x01\x00",
            &[b'a'; LONGEST],
        ] {
            assert_eq!(read(Protocol::Http, head), Greeting::Nobody);
        }
    }

    #[test]
    fn a_request_goes_to_its_host() {
        let whole = b"GET /x HTTP/1.1\r\nA: b\r\nHost: A.example:80\r\n\r\nbody";
        let to = Greeting::To("A.example".to_owned());
        assert_eq!(read(Protocol::Http, whole), to);
        assert_eq!(read(Protocol::Http, &whole[..30]), Greeting::Unfinished);
    }
}
