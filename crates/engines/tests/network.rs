//! Network interface of a guest whose tap is connected to services of the host.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::wire::{self, CMDLINE, GUEST, HOST, MAC};
use crate::support::{Guest, base, size, skip, until};
use std::io::Write;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{io, thread};

/// Ports of the host's services, as assigned by RFCs 862 to 864. `DISCARD` answers with the number
/// of bytes that it received, and `SOURCE` sends [`BULK`] bytes.
const ECHO: u16 = 7;
const DISCARD: u16 = 9;
const SOURCE: u16 = 19;
/// Number of bytes for measuring the throughput.
const BULK: usize = 256 << 20;
/// Maximum time of a command in a flooded guest.
const PATIENCE: Duration = Duration::from_secs(20);

/// Services of the host. Their threads exit with this process.
struct Services {
    /// Socket in the namespace that can send to the guest.
    udp: UdpSocket,
}

impl Services {
    fn start() -> Self {
        serve(ECHO, |mut from| {
            let mut to = from.try_clone()?;
            io::copy(&mut from, &mut to).map(drop)
        });
        serve(DISCARD, |mut from| {
            let bytes = io::copy(&mut from, &mut io::sink())?;
            from.write_all(&bytes.to_le_bytes())
        });
        serve(SOURCE, |mut to| {
            let chunk = vec![0x5a; 1 << 20];
            (0..BULK / chunk.len()).try_for_each(|_| to.write_all(&chunk))
        });
        let echo = UdpSocket::bind((HOST, ECHO)).unwrap();
        thread::spawn(move || {
            let mut packet = [0; 65_536];
            while let Ok((length, from)) = echo.recv_from(&mut packet) {
                // Ignore the error: a datagram that does not fit is lost, which UDP permits.
                let _ = echo.send_to(&packet[..length], from);
            }
        });
        Self {
            udp: UdpSocket::bind((HOST, 0)).unwrap(),
        }
    }
}

/// Calls `work` for each connection to `port`, in a thread of its own.
fn serve(port: u16, work: impl Fn(TcpStream) -> io::Result<()> + Send + Sync + 'static) {
    let listener = TcpListener::bind((HOST, port)).unwrap();
    let work = Arc::new(work);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let work = work.clone();
            // Ignore the result: the guest detects a broken connection.
            thread::spawn(move || work(stream.unwrap()));
        }
    });
}

/// Boots a guest with a network interface and starts the host's services. `None` if this machine
/// does not support it.
async fn boot_with_network(test: &str, mtu: u16) -> Option<(Guest, Services)> {
    let prepared = base(test)?;
    let (net, services) = match wire::create_tap(mtu, Services::start) {
        Ok(created) => created,
        Err(e) => {
            skip(test, &format!("no tap in a network namespace: {e}"));
            return None;
        }
    };
    let mut spec = size(2, 512);
    spec.extra_cmdline = CMDLINE.to_owned();
    let guest = Guest::with(&prepared, &spec, Some(net)).await;
    Some((guest, services))
}

/// Returns a program that sends 10 MiB to the echo service and receives them at the same time. It
/// compares the checksums.
fn tcp_echo() -> String {
    format!(
        r#"
import hashlib, os, socket, threading
data = os.urandom(10 << 20)
s = socket.create_connection(("{HOST}", {ECHO}), 60)
def send():
    s.sendall(data)
    s.shutdown(socket.SHUT_WR)
threading.Thread(target=send).start()
back = hashlib.sha256()
while chunk := s.recv(1 << 16):
    back.update(chunk)
assert back.digest() == hashlib.sha256(data).digest()
print("same")
"#
    )
}

#[tokio::test]
async fn bytes_cross_the_network_unchanged_in_both_directions() {
    let Some((guest, _services)) =
        boot_with_network("bytes_cross_the_network_unchanged_in_both_directions", 1500).await
    else {
        return;
    };
    assert_eq!(guest.python(&tcp_echo()).await, "same\n");
    let program = format!(
        r#"
import os, socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
s.connect(("{HOST}", {ECHO}))
took = []
for length in [56] * 500 + [1, 1472, 1473, 8000, 60000]:
    data = os.urandom(length)
    began = time.perf_counter()
    s.send(data)
    assert s.recv(65536) == data, length
    took.append(time.perf_counter() - began)
print(int(sorted(took[:500])[250] * 1e6))
"#
    );
    let median: u32 = guest.python(&program).await.trim().parse().unwrap();
    println!("udp: 56 bytes there and back in {median} us (median of 500)");
    guest.finish().await;
}

#[tokio::test]
async fn the_guest_has_the_configured_address_and_frame_size() {
    for mtu in [576, 1400, 9000] {
        let Some((guest, _services)) =
            boot_with_network("the_guest_has_the_configured_address_and_frame_size", mtu).await
        else {
            return;
        };
        let card = "/sys/class/net/eth0";
        let output = guest
            .run(&["cat", &format!("{card}/mtu"), &format!("{card}/address")])
            .await;
        let mac = MAC.map(|b| format!("{b:02x}")).join(":");
        assert_eq!(output, format!("{mtu}\n{mac}\n"));
        let routes = guest.run(&["ip", "-4", "route", "show", "default"]).await;
        assert!(routes.contains(&format!("via {HOST} dev eth0")), "{routes}");
        // The largest datagram that fits is sent unfragmented; the guest rejects a larger one. The
        // headers of IP and UDP have 28 bytes.
        let fits = mtu - 28;
        let program = format!(
            r#"
import errno, socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER: never fragment
s.settimeout(5)
s.connect(("{HOST}", {ECHO}))
s.send(b"x" * {fits})
assert len(s.recv(65536)) == {fits}
try:
    s.send(b"x" * ({fits} + 1))
except OSError as e:
    assert e.errno == errno.EMSGSIZE
else:
    raise AssertionError("sent")
"#
        );
        guest.python(&program).await;
        assert_eq!(guest.python(&tcp_echo()).await, "same\n");
        guest.finish().await;
    }
}

#[tokio::test]
async fn throughput_is_measured_and_nothing_is_lost() {
    let Some((guest, _services)) =
        boot_with_network("throughput_is_measured_and_nothing_is_lost", 1500).await
    else {
        return;
    };
    let program = format!(
        r#"
import socket, struct, time
def timed(port, work):
    s = socket.create_connection(("{HOST}", port), 120)
    began = time.perf_counter()
    work(s)
    return {BULK} / (time.perf_counter() - began) / 1e6
def send(s):
    chunk = bytes(1 << 20)
    for _ in range({BULK} >> 20):
        s.sendall(chunk)
    s.shutdown(socket.SHUT_WR)
    assert struct.unpack("<Q", s.recv(8, socket.MSG_WAITALL))[0] == {BULK}
def receive(s):
    buffer, got = bytearray(1 << 20), 0
    while n := s.recv_into(buffer):
        got += n
    assert got == {BULK}, got
print(round(timed({DISCARD}, send)), round(timed({SOURCE}, receive)))
"#
    );
    let figures = guest.python(&program).await;
    let (out, back) = figures.trim().split_once(' ').unwrap();
    println!("tcp: guest to host {out} MB/s, host to guest {back} MB/s (256 MiB, one stream)");
    guest.finish().await;
}

/// Runs a small command repeatedly until `during` completes. Returns the longest duration.
async fn slowest_command(guest: &Guest, during: impl Future) -> Duration {
    tokio::pin!(during);
    let mut slowest = Duration::ZERO;
    loop {
        let started_at = Instant::now();
        tokio::select! {
            _ = &mut during => return slowest,
            _ = guest.run(&["true"]) => slowest = slowest.max(started_at.elapsed()),
        }
    }
}

#[tokio::test]
async fn a_guest_that_floods_the_network_remains_usable() {
    let Some((guest, _services)) =
        boot_with_network("a_guest_that_floods_the_network_remains_usable", 1500).await
    else {
        return;
    };
    let resident = guest.resident();
    // Two processes broadcast raw frames of several lengths with random content for three seconds.
    let flood = r#"
import os, socket, time
os.fork()
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(("eth0", 0x0800))
frames = [b"\xff" * 6 + os.urandom(n) for n in (8, 50, 300, 1500)]
sent, end = 0, time.monotonic() + 3
while time.monotonic() < end:
    for frame in frames:
        try:
            s.send(frame)
            sent += 1
        except OSError:
            pass  # the card's queue is full
assert sent > 1000
print(sent, flush=True)
"#;
    let slowest = slowest_command(&guest, async {
        println!("flood: frames per process: {:?}", guest.python(flood).await);
    })
    .await;
    println!("flood: slowest command meanwhile {slowest:?}");
    assert!(slowest < PATIENCE, "{slowest:?}");
    assert!(
        guest.resident() < resident + 256,
        "{} MiB resident, {resident} before",
        guest.resident()
    );
    assert_eq!(guest.python(&tcp_echo()).await, "same\n");
    guest.finish().await;
}

#[tokio::test]
async fn a_guest_that_is_flooded_from_the_network_remains_usable() {
    let Some((guest, services)) = boot_with_network(
        "a_guest_that_is_flooded_from_the_network_remains_usable",
        1500,
    )
    .await
    else {
        return;
    };
    let is_over = Arc::new(AtomicBool::new(false));
    let (flooding, udp) = (is_over.clone(), services.udp);
    let flood = thread::spawn(move || {
        let mut sent = 0u64;
        while !flooding.load(Ordering::Relaxed) {
            // Full queues are intended.
            sent += u64::from(udp.send_to(&[0x5a; 1400], (GUEST, 9)).is_ok());
        }
        sent
    });
    let slowest = slowest_command(&guest, tokio::time::sleep(Duration::from_secs(3))).await;
    is_over.store(true, Ordering::Relaxed);
    let sent = flood.join().unwrap();
    println!("flooded: {sent} datagrams, slowest command meanwhile {slowest:?}");
    assert!(sent > 1000 && slowest < PATIENCE, "{sent}, {slowest:?}");
    let received = || async {
        let counters = guest.run(&["cat", "/sys/class/net/eth0/statistics/rx_packets"]);
        counters.await.trim().parse::<u64>().unwrap()
    };
    until("frames to arrive", received, |n| *n > 1000).await;
    assert_eq!(guest.python(&tcp_echo()).await, "same\n");
    guest.finish().await;
}
