//! What is known of the connections of one guest, bounded whatever the guest does.

use super::ring::Ring;
use super::{Blind, Sockets, flow, refused};
use crate::namespace;
use crate::{NetError, host};
use jiffy_engine::{Connection, ConnectionLog, Connections, Protocol, Refusal};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Lines of each sort that are kept, so that none pushes others out: passed, refused, questions.
const KEPT: [usize; 3] = [500, 250, 250];
/// Datagrams that are read at once from each socket.
const AT_ONCE: usize = 256;
/// Longest name that is kept (RFC 1035 2.3.4).
const LONGEST_NAME: usize = 253;

/// The record of one guest's connections.
#[derive(Debug)]
pub(crate) struct Record {
    since_ms: u64,
    blind: Blind,
    /// Namespace of the slot and sockets there, while it is there.
    source: Mutex<Option<(String, Arc<Sockets>)>>,
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    passed: Ring,
    refused: Ring,
    questions: Ring,
    /// By a number of ours: what our proxy carries now, and how much of it.
    carried: HashMap<u64, (Connection, Arc<Carried>)>,
    next: u64,
    /// How many packets have been told so far, and how many more there were.
    told: u32,
    untold: u64,
    /// How many connections ended that nobody told.
    missed: u64,
}

/// Bytes of a connection that our proxy carries.
#[derive(Debug, Default)]
pub(crate) struct Carried {
    pub out: AtomicU64,
    pub back: AtomicU64,
}

/// A connection that our proxy carries; it has ended when this is dropped.
pub(crate) struct Carrying {
    record: Arc<Record>,
    number: u64,
    pub bytes: Arc<Carried>,
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A name as it is kept: whoever reads it should see it, and nothing else.
fn clean(name: &str) -> String {
    let shown = |c: char| if c.is_ascii_graphic() { c } else { '?' };
    let name = name.strip_suffix('.').unwrap_or(name);
    name.chars().take(LONGEST_NAME).map(shown).collect()
}

fn line(protocol: Protocol, host: Option<&str>, refused: Option<Refusal>) -> Connection {
    Connection {
        at_ms: now_ms(),
        protocol,
        address: None,
        port: None,
        host: host.map(clean),
        question: None,
        bytes: None,
        refused,
        times: 1,
    }
}

fn towards(to: Option<SocketAddr>, host: Option<&str>, refused: Option<Refusal>) -> Connection {
    Connection {
        address: to.map(|to| to.ip()),
        port: to.map(|to| to.port()),
        ..line(Protocol::Tcp, host, refused)
    }
}

impl Record {
    /// An empty one of the guest in the slot with that namespace, whose table tells what it refuses if `tells`.
    pub fn new(namespace: String, sockets: Arc<Sockets>, tells: bool) -> Self {
        let [passed, refused, questions] = KEPT.map(Ring::new);
        Self {
            since_ms: now_ms(),
            blind: sockets.blind.or_refusals(!tells),
            source: Mutex::new(Some((namespace, sockets))),
            kept: Mutex::new(Kept {
                passed,
                refused,
                questions,
                carried: HashMap::new(),
                next: 0,
                told: 0,
                untold: 0,
                missed: 0,
            }),
        }
    }

    /// Its guest asked for `kind` of `name`.
    pub fn question(&self, name: &str, kind: String, refused: Option<Refusal>) {
        let question = Connection {
            question: Some(kind),
            ..line(Protocol::Dns, Some(name), refused)
        };
        lock(&self.kept).questions.count(question);
    }

    /// Our proxy did not carry a connection on, which the guest began to `to` and which said `name`.
    pub fn refused_by_name(&self, to: Option<SocketAddr>, name: Option<&str>) {
        let line = towards(to, name, Some(Refusal::Rules));
        lock(&self.kept).refused.count(line);
    }

    /// Our proxy carries a connection for `name` to `to`.
    pub fn carry(self: &Arc<Self>, to: Option<SocketAddr>, name: &str) -> Carrying {
        let bytes = Arc::<Carried>::default();
        let mut kept = lock(&self.kept);
        let number = kept.next;
        kept.next += 1;
        let line = towards(to, Some(name), None);
        kept.carried.insert(number, (line, bytes.clone()));
        Carrying {
            record: self.clone(),
            number,
            bytes,
        }
    }

    /// Takes up what the kernel told; whether there may be more.
    pub fn take_up(&self) -> bool {
        let source = lock(&self.source).clone();
        source.is_some_and(|(_, sockets)| self.drain(&sockets))
    }

    fn drain(&self, sockets: &Sockets) -> bool {
        let (now_ms, mut more) = (now_ms(), false);
        let mut kept = lock(&self.kept);
        if let Some(socket) = &sockets.flows {
            more |= socket.drain(AT_ONCE, |message| {
                if let Some(flow) = flow::gone(&message) {
                    kept.passed.push(Some(flow.id), flow.line(now_ms));
                }
            });
            kept.missed = socket.lost();
        }
        if let Some(socket) = &sockets.refused {
            more |= socket.drain(AT_ONCE, |message| {
                if let Some(packet) = refused::Packet::read(&message) {
                    let gap = packet.number.wrapping_sub(kept.told);
                    kept.untold = kept.untold.saturating_add(gap.into());
                    kept.told = packet.number.wrapping_add(1);
                    kept.refused.count(packet.line(now_ms));
                }
            });
        }
        more
    }

    /// Connections there are now; none: they cannot be told.
    fn open(&self, namespace: &str) -> Option<(Vec<flow::Flow>, bool)> {
        let all = namespace::enter(namespace, || {
            flow::all().map_err(NetError::host("listing connections"))
        });
        all.inspect_err(|e| tracing::debug!("{e}")).ok()
    }

    /// The slot is about to go: what is open ends now.
    pub fn close(&self) {
        let Some((namespace, sockets)) = lock(&self.source).take() else {
            return;
        };
        let open = self.open(&namespace).map(|(flows, _)| flows);
        self.drain(&sockets);
        let now_ms = now_ms();
        let mut kept = lock(&self.kept);
        for flow in open.into_iter().flatten() {
            if !flow.is_among(&kept.passed) {
                kept.passed.push(Some(flow.id), flow.line(now_ms));
            }
        }
    }
}

impl flow::Flow {
    fn is_among(&self, ring: &Ring) -> bool {
        self.began_ms.is_some_and(|began| ring.has(self.id, began))
    }
}

impl ConnectionLog for Record {
    fn read(&self) -> Connections {
        let source = lock(&self.source).clone();
        let mut open = Vec::new();
        let mut missing = 0;
        if let Some((namespace, sockets)) = source {
            // In this order: what ends in between is seen twice rather than never.
            match self.open(&namespace) {
                Some((flows, true)) => open = flows,
                Some((flows, false)) => (open, missing) = (flows, 1),
                None => {}
            }
            self.drain(&sockets);
        }
        let now_ms = now_ms();
        let kept = lock(&self.kept);
        let open = open.into_iter().filter(|f| !f.is_among(&kept.passed));
        let carried = kept.carried.values().map(|(line, bytes)| Connection {
            bytes: Some(bytes.now()),
            ..line.clone()
        });
        let rings = [&kept.passed, &kept.refused, &kept.questions];
        let mut list: Vec<Connection> = open.map(|flow| flow.line(now_ms)).collect();
        list.extend(carried);
        list.extend(rings.iter().flat_map(|ring| ring.lines()));
        let gone = rings.iter().map(|ring| ring.gone);
        let missing = gone.fold(missing + kept.untold + kept.missed, u64::saturating_add);
        drop(kept);
        mark_of_host(&mut list);
        let mut all = Connections::default();
        all.extend(Connections {
            since_ms: Some(self.since_ms),
            list,
            missing,
            untold: self.blind.words(),
        });
        all
    }
}

/// What the slot let pass and the host refused: its own addresses.
fn mark_of_host(list: &mut [Connection]) {
    let mut known: HashMap<IpAddr, bool> = HashMap::new();
    for line in list.iter_mut().filter(|line| line.refused.is_none()) {
        let Some(address) = line.address else {
            continue;
        };
        let is_host = *known.entry(address).or_insert_with(|| host::has(address));
        if is_host {
            (line.refused, line.bytes) = (Some(Refusal::Host), None);
        }
    }
}

impl Carried {
    /// Sent by the guest and got by it.
    fn now(&self) -> (u64, u64) {
        let count = |bytes: &AtomicU64| bytes.load(Ordering::Relaxed);
        (count(&self.out), count(&self.back))
    }
}

impl Drop for Carrying {
    fn drop(&mut self) {
        let mut kept = lock(&self.record.kept);
        if let Some((line, bytes)) = kept.carried.remove(&self.number) {
            let bytes = Some(bytes.now());
            kept.passed.push(None, Connection { bytes, ..line });
        }
    }
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
