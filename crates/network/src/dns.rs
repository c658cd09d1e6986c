//! DNS server of one guest. It forwards questions to name servers if the guest's rules permit the
//! name.
//!
//! The server's sockets are in the guest's network namespace, so that the socket identifies the
//! guest and no other guest can reach it. Forwarded questions leave from the host's namespace.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! A *permit* counts towards a limit until it is dropped.
//!
//! The *members* of a private network are the sandboxes that it connects.

use crate::connections::ConnectionRecorder;
use crate::guest::GATEWAY;
use crate::policy::EgressPolicy;
use crate::private_networks::{MemberLookup, PrivateNetworks};
use crate::rate_limiter::RateLimiter;
use crate::resolved_addresses::ResolvedAddresses;
use crate::upstream::{self, Upstreams};
use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{RData, Record, RecordType};
use jiffy_engine_api::RefusalReason;
use jiffy_proto::internal::is_api_host;
use std::io;
use std::net::{self, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;

/// Port of name servers.
const PORT: u16 = 53;
/// Maximum number of questions of one guest in flight. Further ones are dropped, and resolvers
/// repeat them.
const MAX_QUESTIONS: usize = 64;
/// Number of questions of one guest that are forwarded without delay after a pause.
const BURST: u32 = 256;
/// Minimum interval between questions by fill level of the host's connection tracking table. Each
/// question has an entry in that table for at least half a minute.
const INTERVALS: [Duration; 3] = [
    Duration::from_millis(10),
    Duration::from_millis(50),
    Duration::from_millis(500),
];
/// Minimum interval between reads of one guest's questions after a burst. The kernel buffers or
/// drops faster questions, so that they consume no processor time.
const READ_INTERVAL: Duration = Duration::from_millis(2);
/// Maximum number of concurrent TCP connections of one guest.
const MAX_CONNECTIONS: usize = 16;
/// Idle timeout of a connection (RFC 7766 6.2.3).
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// TTL in seconds of the address of the control plane's name.
const API_HOST_TTL_S: u32 = 60;
/// TTL in seconds of the addresses of members of a private network. It is short, because a name can
/// be given to another sandbox.
const MEMBER_TTL_S: u32 = 5;
/// Maximum size of a parsed UDP question. Real questions have some dozens of bytes.
const MAX_QUESTION_BYTES: usize = 4096;

/// Sockets at the address of the slot's default gateway, before the server starts.
#[derive(Debug)]
pub(crate) struct DnsSockets {
    udp: net::UdpSocket,
    tcp: net::TcpListener,
}

impl DnsSockets {
    /// Opens the sockets in the network namespace of this thread.
    pub fn open() -> io::Result<Self> {
        let udp = net::UdpSocket::bind((GATEWAY, PORT))?;
        let tcp = net::TcpListener::bind((GATEWAY, PORT))?;
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        Ok(Self { udp, tcp })
    }
}

/// Names of the private network of one slot's guest.
#[derive(Debug, Clone)]
pub(crate) struct MemberNames {
    pub networks: Arc<PrivateNetworks>,
    /// Number of the slot.
    pub slot: u32,
}

/// State that the tasks of one slot's server share.
#[derive(Debug)]
struct DnsRules {
    /// `None` if the guest has no identity yet.
    policy: watch::Receiver<Option<EgressPolicy>>,
    /// Name servers of the host, with the fill level of its connection tracking table.
    host: Arc<Upstreams>,
    /// Addresses in answers, for rules that name hosts with ports.
    resolved: Arc<ResolvedAddresses>,
    members: MemberNames,
    /// Record of the guest's connections.
    record: Arc<ConnectionRecorder>,
    /// Limits the rate of forwarded questions.
    forward_limiter: RateLimiter,
    /// Limits the rate at which the server reads questions.
    read_limiter: RateLimiter,
}

/// DNS server of one slot. Dropping this value stops it.
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
    /// Starts the server. It refuses all questions until a policy is set. Must be called inside a
    /// tokio runtime.
    pub fn start(
        sockets: DnsSockets,
        policy: watch::Receiver<Option<EgressPolicy>>,
        host: Arc<Upstreams>,
        resolved: Arc<ResolvedAddresses>,
        members: MemberNames,
        record: Arc<ConnectionRecorder>,
    ) -> io::Result<Self> {
        let rules = Arc::new(DnsRules {
            policy,
            host,
            resolved,
            members,
            record,
            forward_limiter: RateLimiter::new(BURST),
            read_limiter: RateLimiter::new(BURST),
        });
        let udp = Arc::new(UdpSocket::from_std(sockets.udp)?);
        let tcp = TcpListener::from_std(sockets.tcp)?;
        let tasks = [
            tokio::spawn(serve_udp(udp, rules.clone())).abort_handle(),
            tokio::spawn(serve_tcp(tcp, rules.clone())).abort_handle(),
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
    async fn wait_for_read(&self) {
        let delay = self.read_limiter.delay(Instant::now(), READ_INTERVAL);
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
    }

    /// Returns the name servers for `name` and whether IPv6 is reachable. Empty if the name is
    /// refused.
    fn upstreams(&self, name: &str) -> (Vec<SocketAddr>, bool) {
        let policy = self.policy.borrow().clone();
        match policy.filter(|policy| policy.may_resolve(name)) {
            Some(policy) => (policy.upstreams(&self.host), policy.ipv6()),
            None => (Vec::new(), false),
        }
    }

    /// Answers `question`. `None` if the question is malformed.
    async fn answer(&self, question: &[u8], over: upstream::DnsTransport) -> Option<Vec<u8>> {
        // Questions that cannot be parsed have no id to which an answer could refer.
        let message = Message::from_vec(question).ok()?;
        // Answering an answer could start an endless exchange.
        if message.metadata.message_type != MessageType::Query {
            return None;
        }
        let refuse = |code| {
            let (id, op) = (message.metadata.id, message.metadata.op_code);
            let mut refusal = Message::error_msg(id, op, code);
            refusal.add_queries(message.queries.iter().cloned());
            refusal.to_vec().ok()
        };
        let (OpCode::Query, [query]) = (message.metadata.op_code, message.queries.as_slice())
        else {
            return refuse(ResponseCode::NotImp);
        };
        let name = query.name().to_ascii();
        let kind = query.query_type().to_string();
        if is_api_host(&name) {
            return self.answer_api_host(&message, query, &name, kind);
        }
        if let Some(answer) = self.answer_member(&message, query, &name) {
            return Some(answer);
        }
        let (upstreams, ipv6) = self.upstreams(&name);
        let refusal = upstreams.is_empty().then_some(RefusalReason::Rules);
        self.record.question(&name, kind, refusal);
        if upstreams.is_empty() {
            return refuse(ResponseCode::Refused);
        }
        // Return an empty answer: otherwise programs would try addresses without a route.
        if query.query_type() == RecordType::AAAA && !ipv6 {
            return refuse(ResponseCode::NoError);
        }
        // Read the epoch before the question is sent: the answer must not be recorded after a
        // rollback, which changes the epoch.
        let epoch = *self.resolved.epoch().borrow();
        // The fill levels are in the order of `INTERVALS`.
        let interval = INTERVALS[self.host.gauge.get() as usize];
        tokio::time::sleep(self.forward_limiter.delay(Instant::now(), interval)).await;
        match upstream::resolve(question, &message, &upstreams, over).await {
            Some(answer) => {
                // Record the addresses before the guest receives the answer and connects.
                self.record_addresses(epoch, &name, &answer);
                Some(answer)
            }
            None => refuse(ResponseCode::ServFail),
        }
    }

    /// Records the addresses in `answer` if rules permit connections to addresses of `name`.
    fn record_addresses(&self, epoch: u64, name: &str, answer: &[u8]) {
        let policy = self.policy.borrow().clone();
        if policy.is_some_and(|policy| policy.records_addresses_of(name))
            && let Ok(answer) = Message::from_vec(answer)
        {
            (self.resolved).record(epoch, name, &answer, Instant::now());
        }
    }

    /// Answers questions for the control plane's name without forwarding them. The answer is the
    /// address of the slot's default gateway, from which connections to port 80 are redirected to
    /// the control plane.
    fn answer_api_host(
        &self,
        message: &Message,
        query: &Query,
        name: &str,
        kind: String,
    ) -> Option<Vec<u8>> {
        let policy = self.policy.borrow().clone();
        let is_reached = policy.is_some_and(|policy| policy.control_plane().is_some());
        let refusal = (!is_reached).then_some(RefusalReason::Rules);
        self.record.question(name, kind, refusal);
        if is_reached {
            own_answer(
                message,
                query,
                ResponseCode::NoError,
                Some((GATEWAY, API_HOST_TTL_S)),
            )
        } else {
            own_answer(message, query, ResponseCode::Refused, None)
        }
    }

    /// Answers questions for names of members of the guest's private network, also if the rules
    /// permit no questions. Names with the suffix of members are not forwarded, even if no member
    /// has them. `None` if the name is no name of a member.
    fn answer_member(&self, message: &Message, query: &Query, name: &str) -> Option<Vec<u8>> {
        let network = self.policy.borrow().as_ref()?.network()?;
        let MemberNames { networks, slot } = &self.members;
        let (code, address) = match networks.resolve(&network, *slot, name) {
            MemberLookup::Found(address) => (ResponseCode::NoError, Some(address)),
            MemberLookup::Absent => (ResponseCode::NXDomain, None),
            MemberLookup::Foreign => return None,
        };
        self.record
            .question(name, query.query_type().to_string(), None);
        own_answer(message, query, code, address.map(|a| (a, MEMBER_TTL_S)))
    }
}

/// Returns an answer to a question that is not forwarded: `code` and, for a question for IPv4
/// addresses, an address with its TTL in seconds.
fn own_answer(
    message: &Message,
    query: &Query,
    code: ResponseCode,
    address: Option<(Ipv4Addr, u32)>,
) -> Option<Vec<u8>> {
    let mut answer = Message::error_msg(message.metadata.id, OpCode::Query, code);
    answer.metadata.recursion_desired = message.metadata.recursion_desired;
    answer.metadata.recursion_available = true;
    answer.add_query(query.clone());
    if let Some((address, ttl)) = address.filter(|_| query.query_type() == RecordType::A) {
        let data = RData::A(A(address));
        answer.add_answer(Record::from_rdata(query.name().clone(), ttl, data));
    }
    answer.to_vec().ok()
}

/// Answers DNS questions of the guest over UDP.
async fn serve_udp(socket: Arc<UdpSocket>, rules: Arc<DnsRules>) {
    let permits = Arc::new(Semaphore::new(MAX_QUESTIONS));
    let mut buffer = vec![0; MAX_QUESTION_BYTES];
    loop {
        rules.wait_for_read().await;
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
            // The socket reports an ICMP error, for example a closed port, of an earlier answer.
            // Yield, so that repeated errors do not occupy the runtime's thread.
            tokio::task::yield_now().await;
            continue;
        };
        // Too many questions are in flight: drop this one. The guest's resolver repeats it.
        let Ok(permit) = permits.clone().try_acquire_owned() else {
            continue;
        };
        let question = buffer.get(..length).unwrap_or_default().to_vec();
        let (socket, rules) = (socket.clone(), rules.clone());
        tokio::spawn(async move {
            if let Some(answer) = rules.answer(&question, upstream::DnsTransport::Udp).await {
                // Ignore the error: the guest repeats the question.
                let _ = socket.send_to(&answer, from).await;
            }
            drop(permit);
        });
    }
}

/// Answers DNS questions of the guest over TCP.
async fn serve_tcp(listener: TcpListener, rules: Arc<DnsRules>) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // Further connections wait in the backlog for a permit.
        let Ok(permit) = permits.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let rules = rules.clone();
                tokio::spawn(async move {
                    // Ignore the error: the guest sees a closed connection.
                    let _ = serve_connection(stream, &rules).await;
                    drop(permit);
                });
            }
            // For example, the process has no free descriptors.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Answers the questions of a connection in order (RFC 1035 4.2.2).
async fn serve_connection(mut stream: TcpStream, rules: &DnsRules) -> io::Result<()> {
    // The UDP server and all connections of the guest share one rate limit.
    loop {
        rules.wait_for_read().await;
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
