//! [`ConnectionRecorder`]: the bounded record of the connections of one guest, for clients of the
//! API. The parent module describes its sources.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use super::connection_sockets::{ConnectionSockets, MissingSources};
use super::line_ring::LineRing;
use super::{flow, refused_packet};
use crate::namespace;
use crate::{NetError, host_address};
use jiffy_engine_api::now_ms;
use jiffy_engine_api::{
    ConnectionLog, ConnectionProtocol, ConnectionRecord, ConnectionRecords, HeaderUse,
    RefusalReason,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of lines per category (passed, refused, DNS questions, headers). No category
/// displaces another.
const MAX_LINES: [usize; 4] = [500, 250, 150, 100];
/// Maximum number of datagrams read per pass from each socket.
const MAX_DATAGRAMS: usize = 256;
/// Maximum length of a recorded name (RFC 1035 2.3.4).
const MAX_NAME_CHARS: usize = 253;

/// Record of one guest's connections. The two locks are never held at the same time.
#[derive(Debug)]
pub(crate) struct ConnectionRecorder {
    /// Start of the record, in milliseconds since 1970.
    since_ms: u64,
    /// Sources that this host does not have.
    missing: MissingSources,
    /// Namespace of the slot and its sockets, while the slot exists.
    source: Mutex<Option<(String, Arc<ConnectionSockets>)>>,
    lines: Mutex<RecordLines>,
}

/// Lines of the record and counters of lost messages.
#[derive(Debug)]
struct RecordLines {
    /// Ended connections that the rules permitted.
    passed: LineRing,
    /// Rejected packets and connections.
    refused: LineRing,
    /// DNS questions.
    questions: LineRing,
    /// Requests whose host has rules for headers.
    header_uses: LineRing,
    /// Open connections of the proxy by serial number, with their byte counters.
    carried: HashMap<u64, (ConnectionRecord, Arc<CarriedBytes>)>,
    /// Next serial number in `carried`.
    next_number: u64,
    /// Next expected sequence number of rejected packets.
    next_refusal: u32,
    /// Number of lost messages about rejected packets.
    lost_refusals: u64,
    /// Number of lost messages about deleted connections.
    lost_deletions: u64,
}

/// Byte counters of a connection that the proxy forwards.
#[derive(Debug, Default)]
pub(crate) struct CarriedBytes {
    /// Bytes from the guest to the server.
    pub out: AtomicU64,
    /// Bytes from the server to the guest.
    pub back: AtomicU64,
}

/// Connection that the proxy forwards. Dropping this value records the end of the connection.
pub(crate) struct CarriedConnection {
    record: Arc<ConnectionRecorder>,
    /// Number of the connection in the record.
    number: u64,
    pub bytes: Arc<CarriedBytes>,
}

/// Returns a name for the record: bounded, with only printable characters.
fn printable(name: &str) -> String {
    let shown = |c: char| if c.is_ascii_graphic() { c } else { '?' };
    let name = name.strip_suffix('.').unwrap_or(name);
    name.chars().take(MAX_NAME_CHARS).map(shown).collect()
}

/// Returns a new entry of the connection record.
fn line(
    protocol: ConnectionProtocol,
    host: Option<&str>,
    refused: Option<RefusalReason>,
) -> ConnectionRecord {
    ConnectionRecord {
        at_ms: now_ms(),
        protocol,
        address: None,
        port: None,
        host: host.map(printable),
        question: None,
        bytes: None,
        refused,
        header_use: None,
        times: 1,
    }
}

/// Returns a new entry of a TCP connection to `to`.
fn line_to(
    to: Option<SocketAddr>,
    host: Option<&str>,
    refused: Option<RefusalReason>,
) -> ConnectionRecord {
    ConnectionRecord {
        address: to.map(|to| to.ip()),
        port: to.map(|to| to.port()),
        ..line(ConnectionProtocol::Tcp, host, refused)
    }
}

impl ConnectionRecorder {
    /// Creates the record of the guest in the slot with this namespace. `logs_refusals` states
    /// whether the slot's table logs rejected packets.
    pub fn new(namespace: String, sockets: Arc<ConnectionSockets>, logs_refusals: bool) -> Self {
        let [passed, refused, questions, header_uses] = MAX_LINES.map(LineRing::new);
        Self {
            since_ms: now_ms(),
            missing: sockets.missing.with_refusals(!logs_refusals),
            source: Mutex::new(Some((namespace, sockets))),
            lines: Mutex::new(RecordLines {
                passed,
                refused,
                questions,
                header_uses,
                carried: HashMap::new(),
                next_number: 0,
                next_refusal: 0,
                lost_refusals: 0,
                lost_deletions: 0,
            }),
        }
    }

    /// Records a DNS question of type `kind` for `name`.
    pub fn question(&self, name: &str, kind: String, refused: Option<RefusalReason>) {
        let question = ConnectionRecord {
            question: Some(kind),
            ..line(ConnectionProtocol::Dns, Some(name), refused)
        };
        self.lines.lock().questions.count(question);
    }

    /// Records a request to `host`, whose rules name headers.
    pub fn header_use(&self, host: &str, port: u16, used: HeaderUse) {
        let line = ConnectionRecord {
            port: Some(port),
            header_use: Some(used),
            ..line(ConnectionProtocol::Http, Some(host), None)
        };
        self.lines.lock().header_uses.count(line);
    }

    /// Records a connection to `to` with the name `name` that the proxy rejected.
    pub fn refused_by_name(
        &self,
        to: Option<SocketAddr>,
        name: Option<&str>,
        reason: RefusalReason,
    ) {
        let line = line_to(to, name, Some(reason));
        self.lines.lock().refused.count(line);
    }

    /// Records a connection to `to` that the proxy forwards. `name` is the name that it sent.
    pub fn carry(
        self: &Arc<Self>,
        to: Option<SocketAddr>,
        name: Option<&str>,
    ) -> CarriedConnection {
        let bytes = Arc::<CarriedBytes>::default();
        let mut lines = self.lines.lock();
        let number = lines.next_number;
        lines.next_number += 1;
        let line = line_to(to, name, None);
        lines.carried.insert(number, (line, bytes.clone()));
        CarriedConnection {
            record: self.clone(),
            number,
            bytes,
        }
    }

    /// Reads the kernel's messages. Returns true if more may be available.
    pub fn read_messages(&self) -> bool {
        let source = self.source.lock().clone();
        source.is_some_and(|(_, sockets)| self.drain(&sockets))
    }

    /// Reads pending messages of the kernel into the record. Returns whether more may be pending.
    fn drain(&self, sockets: &ConnectionSockets) -> bool {
        let (now_ms, mut more) = (now_ms(), false);
        let mut lines = self.lines.lock();
        if let Some(socket) = &sockets.flows {
            more |= socket.drain(MAX_DATAGRAMS, |message| {
                if let Some(flow) = flow::parse_deleted(&message) {
                    lines.passed.push(Some(flow.id), flow.line(now_ms));
                }
            });
            // The socket counts since it was opened, so the new total replaces the earlier one.
            lines.lost_deletions = socket.lost();
        }
        if let Some(socket) = &sockets.refused {
            more |= socket.drain(MAX_DATAGRAMS, |message| {
                if let Some(packet) = refused_packet::RefusedPacket::read(&message) {
                    // A gap in the sequence numbers is the number of lost messages. The numbers may
                    // wrap.
                    let gap = packet.number.wrapping_sub(lines.next_refusal);
                    lines.lost_refusals = lines.lost_refusals.saturating_add(gap.into());
                    lines.next_refusal = packet.number.wrapping_add(1);
                    lines.refused.count(packet.line(now_ms));
                }
            });
        }
        more
    }

    /// Returns the open connections, and whether the list is complete. `None` if they cannot be
    /// read.
    fn open(&self, namespace: &str) -> Option<(Vec<flow::ConntrackFlow>, bool)> {
        let all = namespace::enter(namespace, || {
            flow::list_all().map_err(NetError::host("listing connections"))
        });
        all.inspect_err(|e| tracing::debug!(namespace, error = %e, "cannot list open connections"))
            .ok()
    }

    /// Adds the open connections to the record as closed ones, before the slot is removed. Later
    /// messages of the kernel are not read.
    pub fn close(&self) {
        let Some((namespace, sockets)) = self.source.lock().take() else {
            return;
        };
        // As in `read`, list before reading the messages: a connection that ends in between appears
        // twice rather than not at all.
        let open = self.open(&namespace).map(|(flows, _)| flows);
        self.drain(&sockets);
        let now_ms = now_ms();
        let mut lines = self.lines.lock();
        for flow in open.into_iter().flatten() {
            // The kernel may have reported this connection as deleted since the listing.
            if !flow.is_among(&lines.passed) {
                lines.passed.push(Some(flow.id), flow.line(now_ms));
            }
        }
    }
}

impl ConnectionLog for ConnectionRecorder {
    fn read(&self) -> ConnectionRecords {
        let source = self.source.lock().clone();
        let mut open = Vec::new();
        let mut missing = 0;
        if let Some((namespace, sockets)) = source {
            // List before reading the messages: a connection that ends in between then appears
            // twice rather than not at all. The filter below drops the listed copy if the kernel
            // recorded the start.
            match self.open(&namespace) {
                Some((flows, true)) => open = flows,
                // The number of unlisted connections is unknown: count at least one.
                Some((flows, false)) => (open, missing) = (flows, 1),
                None => {}
            }
            self.drain(&sockets);
        }
        let now_ms = now_ms();
        let lines = self.lines.lock();
        let open = open.into_iter().filter(|f| !f.is_among(&lines.passed));
        let carried = lines
            .carried
            .values()
            .map(|(line, bytes)| ConnectionRecord {
                bytes: Some(bytes.now()),
                ..line.clone()
            });
        let rings = [
            &lines.passed,
            &lines.refused,
            &lines.questions,
            &lines.header_uses,
        ];
        let mut list: Vec<ConnectionRecord> = open.map(|flow| flow.line(now_ms)).collect();
        list.extend(carried);
        list.extend(rings.iter().flat_map(|ring| ring.lines()));
        let dropped = rings.iter().map(|ring| ring.dropped);
        let missing = dropped.fold(
            missing + lines.lost_refusals + lines.lost_deletions,
            u64::saturating_add,
        );
        drop(lines);
        // Do not hold the lock, because this opens a socket for each address.
        mark_host_addresses(&mut list);
        // `extend` also sorts the lines by time and enforces the maximum of the API.
        let mut all = ConnectionRecords::default();
        all.extend(ConnectionRecords {
            since_ms: Some(self.since_ms),
            list,
            missing,
            unavailable: self.missing.names(),
        });
        all
    }
}

/// Marks connections to the host's own addresses: the slot passed them and the host rejected them.
fn mark_host_addresses(list: &mut [ConnectionRecord]) {
    let mut own_addresses: HashMap<IpAddr, bool> = HashMap::new();
    for line in list.iter_mut().filter(|line| line.refused.is_none()) {
        let Some(address) = line.address else {
            continue;
        };
        let is_host = *own_addresses
            .entry(address)
            .or_insert_with(|| host_address::is_own_address(address));
        if is_host {
            (line.refused, line.bytes) = (Some(RefusalReason::Host), None);
        }
    }
}

impl CarriedConnection {
    /// Records that the connection was rejected instead of forwarded.
    pub fn refuse(self, reason: RefusalReason) {
        let mut lines = self.record.lines.lock();
        if let Some((line, _)) = lines.carried.remove(&self.number) {
            let refused = Some(reason);
            lines.refused.count(ConnectionRecord { refused, ..line });
        }
    }

    /// Counts bytes of the guest that were read before.
    pub fn count_read(&self, bytes: usize) {
        // Relaxed: an independent statistic. The cast is lossless on 64-bit hosts.
        self.bytes.out.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl CarriedBytes {
    /// Returns the numbers of bytes that the guest sent and received.
    fn now(&self) -> (u64, u64) {
        // Relaxed: the counters are independent statistics that guard no other data.
        let count = |bytes: &AtomicU64| bytes.load(Ordering::Relaxed);
        (count(&self.out), count(&self.back))
    }
}

impl Drop for CarriedConnection {
    fn drop(&mut self) {
        let mut lines = self.record.lines.lock();
        if let Some((line, bytes)) = lines.carried.remove(&self.number) {
            let bytes = Some(bytes.now());
            lines.passed.push(None, ConnectionRecord { bytes, ..line });
        }
    }
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
