//! Receiver of datagrams that guests send during their whole life. An *incarnation* is one running
//! copy of a sandbox: at most one may exist.

use super::client::in_network;
use std::collections::BTreeMap;
use std::net::{IpAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Port of the sink.
const PORT: u16 = 9999;
/// Interval at which the sink checks whether it was dropped.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Maximum number of values that a restored guest may repeat: the values that it sent after its
/// state was saved and before it stopped. A guest sends 100 values in a second.
const MAX_REPEATED: u64 = 100;

/// Counter of a guest.
#[derive(Debug, Clone)]
pub struct Count {
    /// Latest value.
    pub value: u64,
    /// Hosts from which it came, in the order of their first datagrams.
    hosts: Vec<IpAddr>,
}

/// Datagrams that arrived.
#[derive(Default)]
struct Received {
    counts: BTreeMap<String, Count>,
    /// Descriptions of datagrams that came from a second incarnation.
    foreign: Vec<String>,
}

/// Server outside of all hosts that receives `NAME COUNTER` from guests.
///
/// In this laboratory, no guest returns to a former host. Datagrams from a former host therefore
/// come from a second incarnation. Much lower values come from an incarnation that was started from
/// an older state.
pub struct Sink {
    pub address: String,
    received: Arc<Mutex<Received>>,
    is_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Sink {
    /// Starts a server in the network of a process.
    pub fn start(network: u32, address: &str) -> Self {
        let socket = in_network(network, || UdpSocket::bind((address, PORT)).unwrap());
        socket.set_read_timeout(Some(CHECK_INTERVAL)).unwrap();
        let received: Arc<Mutex<Received>> = Arc::default();
        let is_ended = Arc::new(AtomicBool::new(false));
        let (shared, end) = (received.clone(), is_ended.clone());
        let thread = std::thread::spawn(move || {
            let mut buffer = [0; 256];
            while !end.load(Ordering::Relaxed) {
                if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                    let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                    record(&shared, &text, from.ip());
                }
            }
        });
        Self {
            address: format!("{address}/{PORT}"),
            received,
            is_ended,
            thread: Some(thread),
        }
    }

    /// Returns the script by which a guest counts. It sends `name` and a counter every 10 ms.
    pub fn script(&self, name: &str) -> String {
        let target = &self.address;
        let count = format!(
            "n=0; while :; do n=$((n+1)); echo {name} $n > /dev/udp/{target}; sleep 0.01; done"
        );
        format!("setsid bash -c '{count}' > /dev/null 2>&1 < /dev/null &")
    }

    /// Returns the latest counter of a guest.
    pub fn count(&self, name: &str) -> Option<Count> {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        received.counts.get(name).cloned()
    }

    /// Fails if two incarnations of a guest have sent.
    #[track_caller]
    pub fn assert_single_incarnations(&self) {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(received.foreign.is_empty(), "{:?}", received.foreign);
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.is_ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Records a datagram, and detects a second incarnation of its guest.
fn record(received: &Mutex<Received>, text: &str, host: IpAddr) {
    let mut words = text.split_whitespace();
    let (Some(name), Some(Ok(value))) = (words.next(), words.next().map(str::parse)) else {
        return;
    };
    let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
    let Received { counts, foreign } = &mut *received;
    let count = counts.entry(name.to_owned()).or_insert_with(|| Count {
        value,
        hosts: vec![host],
    });
    let is_current = count.hosts.last() == Some(&host);
    let is_former = !is_current && count.hosts.contains(&host);
    if is_former || value + MAX_REPEATED < count.value {
        foreign.push(format!(
            "{name} sent {value} from {host} after {} from {:?}",
            count.value, count.hosts
        ));
    }
    if !is_current && !is_former {
        count.hosts.push(host);
    }
    count.value = value;
}
