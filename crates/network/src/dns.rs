//! DNS server of a guest: it forwards questions, within the guest's rules.
//!
//! Its sockets are in the guest's namespace, so the socket identifies the guest, and no other can
//! ask. Its own questions leave from the host's namespace.

use crate::connections::ConnectionRecorder;
use crate::guest::GATEWAY;
use crate::policy::EgressPolicy;
use crate::rate_limiter::RateLimiter;
use crate::upstream::{self, Upstreams};
use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{RData, Record, RecordType};
use jiffy_engine_api::RefusalReason;
use jiffy_proto::internal::is_api_host;
use std::io;
use std::net::{self, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;

const PORT: u16 = 53;
/// Most questions of one guest in flight; further ones are dropped, and resolvers repeat them.
const MAX_QUESTIONS: usize = 64;
/// Questions of one guest that are forwarded at once after a pause; the others wait.
const BURST: u32 = 256;
/// Time between two questions, by how full the host's table of connections is. Each is an entry
/// there for half a minute at least.
const INTERVALS: [Duration; 3] = [
    Duration::from_millis(10),
    Duration::from_millis(50),
    Duration::from_millis(500),
];
/// Time between two questions of one guest that are read, after a burst of as many: what comes
/// faster stays in the kernel's buffer, which drops what it has no room for, and takes no processor
/// time that others want.
const READ_INTERVAL: Duration = Duration::from_millis(2);
/// Most TCP connections of one guest at the same time.
const MAX_CONNECTIONS: usize = 16;
/// Time for which a connection may be idle (RFC 7766 6.2.3).
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Seconds for which resolvers may remember the address of the control plane's name.
const API_HOST_TTL_S: u32 = 60;
/// Longest question over UDP that is parsed; real ones have some dozens of bytes.
const MAX_QUESTION_BYTES: usize = 4096;

/// Sockets at the gateway's address, before the server runs.
#[derive(Debug)]
pub(crate) struct DnsSockets {
    udp: net::UdpSocket,
    tcp: net::TcpListener,
}

impl DnsSockets {
    /// Opens them in the network namespace of this thread.
    pub fn open() -> io::Result<Self> {
        let udp = net::UdpSocket::bind((GATEWAY, PORT))?;
        let tcp = net::TcpListener::bind((GATEWAY, PORT))?;
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        Ok(Self { udp, tcp })
    }
}

/// Settings of the server of one slot.
#[derive(Debug)]
struct DnsRules {
    /// None: the guest has no identity yet.
    policy: watch::Receiver<Option<EgressPolicy>>,
    host: Arc<Upstreams>,
    record: Arc<ConnectionRecorder>,
    pace: RateLimiter,
    intake: RateLimiter,
}

/// The server of one slot; it ends with this.
#[derive(Debug)]
pub(crate) struct DnsServer {
    #[cfg(test)]
    rules: Arc<DnsRules>,
    tasks: [AbortHandle; 2],
}

impl Drop for DnsServer {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl DnsServer {
    /// Starts answering; everything is refused until there is a policy. Must be called inside a
    /// tokio runtime.
    pub fn start(
        sockets: DnsSockets,
        policy: watch::Receiver<Option<EgressPolicy>>,
        host: Arc<Upstreams>,
        record: Arc<ConnectionRecorder>,
    ) -> io::Result<Self> {
        let rules = Arc::new(DnsRules {
            policy,
            host,
            record,
            pace: RateLimiter::new(BURST),
            intake: RateLimiter::new(BURST),
        });
        let udp = Arc::new(UdpSocket::from_std(sockets.udp)?);
        let tcp = TcpListener::from_std(sockets.tcp)?;
        let tasks = [
            tokio::spawn(datagrams(udp, rules.clone())).abort_handle(),
            tokio::spawn(connections(tcp, rules.clone())).abort_handle(),
        ];
        Ok(Self {
            #[cfg(test)]
            rules,
            tasks,
        })
    }
}

impl DnsRules {
    /// Waits until the next question may be read.
    async fn wait_for_intake(&self) {
        let delay = self.intake.delay(Instant::now(), READ_INTERVAL);
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
    }

    /// Name servers for `name`, and whether it can be reached over IPv6; none: it is refused.
    fn upstreams(&self, name: &str) -> (Vec<SocketAddr>, bool) {
        let policy = self.policy.borrow().clone();
        match policy.filter(|policy| policy.answers(name)) {
            Some(policy) => (policy.upstreams(&self.host), policy.ipv6()),
            None => (Vec::new(), false),
        }
    }

    /// Answers `question`; none: it is malformed.
    async fn answer(&self, question: &[u8], over: upstream::DnsTransport) -> Option<Vec<u8>> {
        let asked = Message::from_vec(question).ok()?;
        if asked.metadata.message_type != MessageType::Query {
            return None;
        }
        let refuse = |code| {
            let (id, op) = (asked.metadata.id, asked.metadata.op_code);
            let mut refusal = Message::error_msg(id, op, code);
            refusal.add_queries(asked.queries.iter().cloned());
            refusal.to_vec().ok()
        };
        let (OpCode::Query, [query]) = (asked.metadata.op_code, asked.queries.as_slice()) else {
            return refuse(ResponseCode::NotImp);
        };
        let name = query.name().to_ascii();
        let kind = query.query_type().to_string();
        if is_api_host(&name) {
            return self.answer_api_host(&asked, query, &name, kind);
        }
        let (upstreams, ipv6) = self.upstreams(&name);
        let refusal = upstreams.is_empty().then_some(RefusalReason::Rules);
        self.record.question(&name, kind, refusal);
        if upstreams.is_empty() {
            return refuse(ResponseCode::Refused);
        }
        // An empty answer: programs would try addresses without a route.
        if query.query_type() == RecordType::AAAA && !ipv6 {
            return refuse(ResponseCode::NoError);
        }
        let interval = INTERVALS[self.host.gauge.get() as usize];
        tokio::time::sleep(self.pace.delay(Instant::now(), interval)).await;
        match upstream::ask(question, &asked, &upstreams, over).await {
            Some(answer) => Some(answer),
            None => refuse(ResponseCode::ServFail),
        }
    }

    /// Answers for the control plane's name, about which no other server is asked: it leads to the
    /// gateway, from where connections to port 80 go to the proxy.
    fn answer_api_host(
        &self,
        asked: &Message,
        query: &Query,
        name: &str,
        kind: String,
    ) -> Option<Vec<u8>> {
        let policy = self.policy.borrow().clone();
        let is_reached = policy.is_some_and(|policy| policy.control_plane().is_some());
        let refusal = (!is_reached).then_some(RefusalReason::Rules);
        self.record.question(name, kind, refusal);
        let code = match is_reached {
            true => ResponseCode::NoError,
            false => ResponseCode::Refused,
        };
        let mut answer = Message::error_msg(asked.metadata.id, OpCode::Query, code);
        answer.metadata.recursion_desired = asked.metadata.recursion_desired;
        answer.metadata.recursion_available = true;
        answer.add_query(query.clone());
        if is_reached && query.query_type() == RecordType::A {
            let address = RData::A(A(GATEWAY));
            answer.add_answer(Record::from_rdata(
                query.name().clone(),
                API_HOST_TTL_S,
                address,
            ));
        }
        answer.to_vec().ok()
    }
}

async fn datagrams(socket: Arc<UdpSocket>, rules: Arc<DnsRules>) {
    let permits = Arc::new(Semaphore::new(MAX_QUESTIONS));
    let mut buffer = vec![0; MAX_QUESTION_BYTES];
    loop {
        rules.wait_for_intake().await;
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
            // An error of the socket from the guest's reaction to an earlier answer.
            tokio::task::yield_now().await;
            continue;
        };
        let Ok(permit) = permits.clone().try_acquire_owned() else {
            continue;
        };
        let question = buffer.get(..length).unwrap_or_default().to_vec();
        let (socket, rules) = (socket.clone(), rules.clone());
        tokio::spawn(async move {
            if let Some(answer) = rules.answer(&question, upstream::DnsTransport::Udp).await {
                let _ = socket.send_to(&answer, from).await;
            }
            drop(permit);
        });
    }
}

async fn connections(listener: TcpListener, rules: Arc<DnsRules>) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // Further connections wait for a free permit.
        let Ok(permit) = permits.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let rules = rules.clone();
                tokio::spawn(async move {
                    // The guest sees any end as a close.
                    let _ = connection(stream, &rules).await;
                    drop(permit);
                });
            }
            // For example, no descriptor is left.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Answers one question after the other (RFC 1035 4.2.2).
async fn connection(mut stream: TcpStream, rules: &DnsRules) -> io::Result<()> {
    loop {
        rules.wait_for_intake().await;
        let length = tokio::time::timeout(IDLE_TIMEOUT, stream.read_u16()).await??;
        let mut question = vec![0; usize::from(length)];
        tokio::time::timeout(IDLE_TIMEOUT, stream.read_exact(&mut question)).await??;
        let Some(answer) = rules.answer(&question, upstream::DnsTransport::Tcp).await else {
            return Ok(());
        };
        let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
        stream.write_u16(length).await?;
        stream.write_all(&answer).await?;
    }
}

#[cfg(test)]
#[path = "dns_tests.rs"]
mod tests;
