//! Forwards DNS questions to the name servers of the host, for guests and for the proxy's own
//! lookups.

use crate::conntrack::PressureGauge;
use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, RecordType};
use nix::net::if_::if_nametoindex;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

/// Timeout of one server. Resolvers in guests repeat a question after 5 s, which is longer than two
/// timeouts.
const SERVER_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of passes over all servers.
const MAX_ATTEMPTS: usize = 2;

/// Name servers of the host.
#[derive(Debug)]
pub(crate) struct Upstreams {
    /// `resolv.conf` of the host. It is read for every question, because it changes with a laptop's
    /// network.
    file: PathBuf,
    /// Fill level of the host's connection tracking table, in which every question has an entry.
    pub gauge: Arc<PressureGauge>,
}

impl Upstreams {
    pub fn in_file(file: impl Into<PathBuf>) -> Self {
        Self {
            file: file.into(),
            gauge: Arc::default(),
        }
    }

    /// Returns the name servers in the file (resolv.conf(5)). Defaults to the host itself.
    pub fn get(&self) -> Vec<SocketAddr> {
        let text = std::fs::read_to_string(&self.file).unwrap_or_default();
        let mut servers = parse(&text);
        // The C library also uses the host itself if the file names no server.
        if servers.is_empty() {
            servers.push((Ipv4Addr::LOCALHOST, 53).into());
        }
        servers
    }
}

/// Parses the `nameserver` lines of a resolv.conf(5). Invalid addresses are ignored.
fn parse(text: &str) -> Vec<SocketAddr> {
    let lines = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let address = words
            .next()
            .filter(|w| *w == "nameserver")
            .and(words.next())?;
        parse_address(address)
    });
    lines.collect()
}

/// Parses the address of a name server. A link-local address has a zone: the name or the number of
/// an interface of the host, as in `fe80::1%eth0`.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let Some((address, zone)) = text.split_once('%') else {
        return Some((text.parse::<IpAddr>().ok()?, 53).into());
    };
    let zone = zone.parse().ok().or_else(|| if_nametoindex(zone).ok())?;
    Some(SocketAddrV6::new(address.parse().ok()?, 53, 0, zone).into())
}

/// Transport of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DnsTransport {
    Udp,
    Tcp,
}

/// Returns true if `answer` is a failure of this server only, so that another server may answer the
/// question. The C library continues with the next server in these cases.
fn is_failure(answer: &[u8]) -> bool {
    Message::from_vec(answer).is_ok_and(|answer| {
        matches!(
            answer.metadata.response_code,
            ResponseCode::ServFail | ResponseCode::NotImp | ResponseCode::Refused
        )
    })
}

/// Forwards `question`, whose parsed form is `message`, to one server after the other. Returns the
/// first answer that is not a failure, or the last failure. `None` if no server answers.
pub(crate) async fn resolve(
    question: &[u8],
    message: &Message,
    servers: &[SocketAddr],
    over: DnsTransport,
) -> Option<Vec<u8>> {
    // A server that fails or is silent is followed by the next one.
    for _ in 0..MAX_ATTEMPTS {
        let mut failure = None;
        for server in servers {
            let answer = async {
                match over {
                    DnsTransport::Udp => over_udp(question, message, *server).await,
                    DnsTransport::Tcp => over_tcp(question, *server).await,
                }
            };
            match tokio::time::timeout(SERVER_TIMEOUT, answer).await {
                Ok(Ok(answer)) if is_failure(&answer) => failure = Some(answer),
                Ok(Ok(answer)) => return Some(answer),
                Ok(Err(_)) | Err(_) => {}
            }
        }
        if failure.is_some() {
            return failure;
        }
    }
    None
}

/// Returns the addresses of `name`: IPv4 first, then IPv6 if `ipv6` is set.
pub(crate) async fn addresses(name: &str, servers: &[SocketAddr], ipv6: bool) -> Vec<IpAddr> {
    let v6 = async {
        if ipv6 {
            resolve_type(name, RecordType::AAAA, servers).await
        } else {
            Vec::new()
        }
    };
    let (mut addresses, v6) = tokio::join!(resolve_type(name, RecordType::A, servers), v6);
    addresses.extend(v6);
    addresses
}

/// Resolves the addresses of `name` of one record type. Empty if no server answers.
async fn resolve_type(name: &str, wanted: RecordType, servers: &[SocketAddr]) -> Vec<IpAddr> {
    let Ok(mut name) = Name::from_ascii(name) else {
        return Vec::new();
    };
    // Without a final dot, the name would be relative to the search domains.
    name.set_fqdn(true);
    let mut message = Message::new(0, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name, wanted));
    let Ok(question) = message.to_vec() else {
        return Vec::new();
    };
    let over = async |transport| {
        let answer = resolve(&question, &message, servers, transport).await?;
        Message::from_vec(&answer).ok()
    };
    let mut answer = over(DnsTransport::Udp).await;
    if answer.as_ref().is_some_and(|a| a.metadata.truncation) {
        // The answer was truncated: repeat the question over TCP. If that fails, use the truncated
        // answer.
        answer = over(DnsTransport::Tcp).await.or(answer);
    }
    let records = answer.map(|answer| answer.answers).unwrap_or_default();
    let addresses = records.iter().filter_map(|record| match &record.data {
        RData::A(address) => Some(IpAddr::V4(address.0)),
        RData::AAAA(address) => Some(IpAddr::V6(address.0)),
        _ => None,
    });
    addresses.collect()
}

/// Sends a question and returns its answer, with the question's own id. The sent id and the port
/// are random: guests cannot guess them to forge an answer (RFC 5452).
async fn over_udp(question: &[u8], sent: &Message, server: SocketAddr) -> io::Result<Vec<u8>> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // A new socket has a random port.
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    let mut number = [0; 2];
    getrandom::fill(&mut number).map_err(io::Error::other)?;
    socket.send(&with_id(question, number)).await?;
    let mut buffer = vec![0; usize::from(u16::MAX)];
    // Ignore datagrams that do not answer this question, until the caller's timeout.
    loop {
        let length = socket.recv(&mut buffer).await?;
        let answer = buffer.get(..length).unwrap_or_default();
        let fits = Message::from_vec(answer).is_ok_and(|a| {
            a.metadata.message_type == MessageType::Response
                && a.metadata.id == u16::from_be_bytes(number)
                // Some servers omit the question in errors.
                && (a.queries.is_empty() || a.queries == sent.queries)
        });
        if fits {
            return Ok(with_id(answer, sent.metadata.id.to_be_bytes()));
        }
    }
}

/// Replaces the id of a message, its first two bytes (RFC 1035 4.1.1).
fn with_id(message: &[u8], number: [u8; 2]) -> Vec<u8> {
    let mut message = message.to_vec();
    if let Some(first) = message.get_mut(..2) {
        first.copy_from_slice(&number);
    }
    message
}

/// Sends a DNS question over TCP, for example after a truncated answer over UDP. In TCP, the length
/// precedes each message.
async fn over_tcp(question: &[u8], server: SocketAddr) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(question.len()).map_err(io::Error::other)?;
    stream.write_u16(length).await?;
    stream.write_all(question).await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use hickory_proto::rr::Record;
    use hickory_proto::rr::rdata::A;
    use std::net;

    #[test]
    fn name_servers_are_parsed_like_the_c_librarys() {
        let text = "# c\nnameserver 10.0.0.1\nsearch x\nnameserver ::1\nnameserver bad\n";
        let servers: Vec<String> = parse(text).iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["10.0.0.1:53", "[::1]:53"]);
    }

    #[test]
    fn link_local_name_servers_have_a_zone() {
        let text = "nameserver fe80::1%lo\nnameserver fe80::2%7\nnameserver fe80::3%no-such-if\n";
        let lo = if_nametoindex("lo").unwrap();
        let zones: Vec<u32> = parse(text)
            .iter()
            .map(|server| match server {
                SocketAddr::V6(server) => server.scope_id(),
                SocketAddr::V4(_) => 0,
            })
            .collect();
        assert_eq!(zones, [lo, 7]);
    }

    /// Starts a name server that answers one question over UDP with `code`, and with one address if
    /// the code is `NoError`.
    fn answering_server(code: ResponseCode) -> SocketAddr {
        let udp = net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = udp.local_addr().unwrap();
        udp.set_nonblocking(true).unwrap();
        tokio::spawn(async move {
            let udp = UdpSocket::from_std(udp).unwrap();
            let mut question = [0; 512];
            let (length, from) = udp.recv_from(&mut question).await.unwrap();
            let count = u8::from(code == ResponseCode::NoError);
            let text = answer(&question[..length], count, false);
            let mut message = Message::from_vec(&text).unwrap();
            message.metadata.response_code = code;
            udp.send_to(&message.to_vec().unwrap(), from).await.unwrap();
        });
        address
    }

    #[tokio::test]
    async fn a_server_that_reports_a_failure_is_followed_by_the_next_one() {
        for code in [ResponseCode::ServFail, ResponseCode::Refused] {
            let servers = [code, ResponseCode::NoError].map(answering_server);
            assert_eq!(addresses("a.example", &servers, false).await.len(), 1);
        }
        // The name does not exist: other servers receive no query.
        let servers = [ResponseCode::NXDomain, ResponseCode::NoError].map(answering_server);
        assert!(addresses("a.example", &servers, false).await.is_empty());
        // A failure of the only server is returned without a second attempt.
        let mut message = Message::new(9, MessageType::Query, OpCode::Query);
        let name = Name::from_ascii("a.example.").unwrap();
        message.add_query(Query::query(name, RecordType::A));
        let question = message.to_vec().unwrap();
        let servers = [answering_server(ResponseCode::ServFail)];
        let answer = resolve(&question, &message, &servers, DnsTransport::Udp).await;
        let answer = Message::from_vec(&answer.unwrap()).unwrap();
        assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    }

    /// Returns an answer with `count` addresses, truncated if `truncated`.
    fn answer(question: &[u8], count: u8, truncated: bool) -> Vec<u8> {
        let mut answer = Message::from_vec(question).unwrap();
        answer.metadata.message_type = MessageType::Response;
        answer.metadata.truncation = truncated;
        let name = answer.queries[0].name().clone();
        for n in 0..count {
            let address = RData::A(A(Ipv4Addr::new(192, 0, 2, n)));
            answer.add_answer(Record::from_rdata(name.clone(), 60, address));
        }
        answer.to_vec().unwrap()
    }

    /// Starts a name server that answers over UDP with truncated messages, and over TCP completely
    /// if `with_tcp`.
    fn truncating_server(with_tcp: bool) -> SocketAddr {
        let tcp = net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = tcp.local_addr().unwrap();
        let udp = net::UdpSocket::bind(address).unwrap();
        udp.set_nonblocking(true).unwrap();
        tcp.set_nonblocking(true).unwrap();
        tokio::spawn(async move {
            let udp = UdpSocket::from_std(udp).unwrap();
            let mut question = [0; 512];
            let (length, from) = udp.recv_from(&mut question).await.unwrap();
            let part = answer(&question[..length], 2, true);
            udp.send_to(&part, from).await.unwrap();
            let tcp = with_tcp.then(|| tokio::net::TcpListener::from_std(tcp).unwrap());
            let Some(tcp) = tcp else { return };
            let (mut stream, _) = tcp.accept().await.unwrap();
            let mut question = vec![0; stream.read_u16().await.unwrap().into()];
            stream.read_exact(&mut question).await.unwrap();
            let whole = answer(&question, 60, false);
            let length = u16::try_from(whole.len()).unwrap();
            stream.write_u16(length).await.unwrap();
            stream.write_all(&whole).await.unwrap();
        });
        address
    }

    #[tokio::test]
    async fn a_truncated_answer_is_fetched_over_tcp() {
        let servers = [truncating_server(true)];
        assert_eq!(addresses("many.example", &servers, false).await.len(), 60);
        // Without TCP, the truncated answer is used.
        let servers = [truncating_server(false)];
        assert_eq!(addresses("many.example", &servers, false).await.len(), 2);
    }
}
