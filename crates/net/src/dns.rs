//! The name server that a guest sees: it passes questions on, as the guest's rules allow.
//!
//! Its sockets are in the guest's namespace, so who asks is known by where the question arrives, and nobody else can ask. What it asks
//! itself leaves from the host's.

use crate::connections::Record;
use crate::guest::GATEWAY;
use crate::pace::Pace;
use crate::policy::Policy;
use crate::upstream::{self, Upstreams};
use hickory_proto::op::{Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::RecordType;
use jiffy_engine::Refusal;
use std::io;
use std::net::{self, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;

const PORT: u16 = 53;
/// Questions of one guest that are asked at the same time; more are dropped, and asked again by whoever wants to know.
const QUESTIONS: usize = 64;
/// Questions of one guest that are asked at once after a rest; the others wait.
const BURST: u32 = 256;
/// Time between two questions, by how full the host's table of connections is. Each is an entry there for half a minute at least.
const INTERVALS: [Duration; 3] = [
    Duration::from_millis(10),
    Duration::from_millis(50),
    Duration::from_millis(500),
];
/// Connections of one guest at the same time.
const CONNECTIONS: usize = 16;
/// How long a connection may be idle (RFC 7766 6.2.3).
const IDLE: Duration = Duration::from_secs(10);
/// Longest question over UDP that is looked at; real ones have some dozens of bytes.
const LONGEST: usize = 4096;

/// Sockets at the gateway's address, before anybody answers there.
#[derive(Debug)]
pub(crate) struct Sockets {
    udp: net::UdpSocket,
    tcp: net::TcpListener,
}

impl Sockets {
    /// In the network namespace of this thread.
    pub fn open() -> io::Result<Self> {
        let udp = net::UdpSocket::bind((GATEWAY, PORT))?;
        let tcp = net::TcpListener::bind((GATEWAY, PORT))?;
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        Ok(Self { udp, tcp })
    }
}

/// What the server of one slot goes by.
#[derive(Debug)]
struct Rules {
    /// None: nobody has said yet who the guest is.
    policy: watch::Receiver<Option<Policy>>,
    host: Arc<Upstreams>,
    record: Arc<Record>,
    pace: Pace,
}

/// The server of one slot; it ends with this.
#[derive(Debug)]
pub(crate) struct Server {
    #[cfg(test)]
    rules: Arc<Rules>,
    tasks: [AbortHandle; 2],
}

impl Drop for Server {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Server {
    /// Begins to answer; everything is refused until there is a policy. Must be called inside a tokio runtime.
    pub fn start(
        sockets: Sockets,
        policy: watch::Receiver<Option<Policy>>,
        host: Arc<Upstreams>,
        record: Arc<Record>,
    ) -> io::Result<Self> {
        let rules = Arc::new(Rules {
            policy,
            host,
            record,
            pace: Pace::new(BURST),
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

impl Rules {
    /// Name servers to ask for `name`, and whether it can be reached over IPv6; none: it is not to be asked for.
    fn upstreams(&self, name: &str) -> (Vec<SocketAddr>, bool) {
        let policy = self.policy.borrow().clone();
        match policy.filter(|policy| policy.answers(name)) {
            Some(policy) => (policy.upstreams(&self.host), policy.version6()),
            None => (Vec::new(), false),
        }
    }

    /// The answer to `question`; none: it is none that could be answered.
    async fn answer(&self, question: &[u8], over: upstream::Over) -> Option<Vec<u8>> {
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
        let (upstreams, version6) = self.upstreams(&name);
        let refusal = upstreams.is_empty().then_some(Refusal::Rules);
        let kind = query.query_type().to_string();
        self.record.question(&name, kind, refusal);
        if upstreams.is_empty() {
            return refuse(ResponseCode::Refused);
        }
        // "It has none": programs would try addresses that lead nowhere.
        if query.query_type() == RecordType::AAAA && !version6 {
            return refuse(ResponseCode::NoError);
        }
        let interval = INTERVALS[self.host.gauge.get() as usize];
        tokio::time::sleep(self.pace.delay(Instant::now(), interval)).await;
        match upstream::ask(question, &asked, &upstreams, over).await {
            Some(answer) => Some(answer),
            None => refuse(ResponseCode::ServFail),
        }
    }
}

async fn datagrams(socket: Arc<UdpSocket>, rules: Arc<Rules>) {
    let places = Arc::new(Semaphore::new(QUESTIONS));
    let mut buffer = vec![0; LONGEST];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
            // What the guest answered to an earlier answer, as an error of the socket.
            tokio::task::yield_now().await;
            continue;
        };
        let Ok(place) = places.clone().try_acquire_owned() else {
            continue;
        };
        let question = buffer.get(..length).unwrap_or_default().to_vec();
        let (socket, rules) = (socket.clone(), rules.clone());
        tokio::spawn(async move {
            if let Some(answer) = rules.answer(&question, upstream::Over::Udp).await {
                let _ = socket.send_to(&answer, from).await;
            }
            drop(place);
        });
    }
}

async fn connections(listener: TcpListener, rules: Arc<Rules>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        // Whoever comes when all are taken waits.
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let rules = rules.clone();
                tokio::spawn(async move {
                    // However it ends, the guest sees that it is closed.
                    let _ = connection(stream, &rules).await;
                    drop(place);
                });
            }
            // No descriptor is left, say.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Answers one question after the other (RFC 1035 4.2.2).
async fn connection(mut stream: TcpStream, rules: &Rules) -> io::Result<()> {
    loop {
        let length = tokio::time::timeout(IDLE, stream.read_u16()).await??;
        let mut question = vec![0; usize::from(length)];
        tokio::time::timeout(IDLE, stream.read_exact(&mut question)).await??;
        let Some(answer) = rules.answer(&question, upstream::Over::Tcp).await else {
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
