//! TCP connections of a guest that is cloned, rolled back or resumed.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::wire::{self, CMDLINE, HOST};
use crate::support::{Guest, base, size, skip};
use jiffy_engine_api::SandboxIdentity;
use jiffy_engines::{PreparedTemplate, SandboxSpec};
use jiffy_microvm_engine::{MemoryPolicy, MicroVm, NetSpec, SnapshotSpec};
use jiffy_proto::snapshot::AfterSnapshot;
use jiffy_snapshot::{Durability, Store};
use std::io;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc;
use std::time::Duration;

/// Port of the host's echo service.
const ECHO: u16 = 7;
/// IPv6 addresses of host and guest. The IPv4 addresses are in [`wire`].
const HOST6: &str = "fd00:4a49::1";
const GUEST6: &str = "fd00:4a49::2";

/// Port of the host for *marks*: datagrams that the guest sends, so that the test knows which
/// frames arrived before them.
const MARK: u16 = 9;

/// Program that holds connections. It reports over a Unix socket whether a word sent over each
/// connection is received, or which error occurs.
const HOLD: &str = r#"
import ctypes, errno, os, select, socket, sys, threading
def dial(address, family=socket.AF_INET):
    s = socket.socket(family); s.settimeout(20); s.connect(address); return s
def pair(address, family=socket.AF_INET):
    l = socket.socket(family); l.bind((address, 0)); l.listen()
    return dial(l.getsockname()[:2], family), l.accept()[0]
def echo(s):
    while data := s.recv(100): s.sendall(data)
def echoed(s):
    s.settimeout(20); s.sendall(b'word'); assert s.recv(100) == b'word'
def crossed(ends):
    ends[0].settimeout(20); ends[1].sendall(b'word'); assert ends[0].recv(100) == b'word'
held = {}
"#;
/// Second part of the program: serves the reports.
const SERVE: &str = r#"
def tell(name):
    how, what = held[name]
    try: how(what); return 'alive'
    except OSError as e: return errno.errorcode.get(e.errno, str(e))
l = socket.socket(socket.AF_UNIX); l.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o777); l.listen()
while True:
    c = l.accept()[0]; c.sendall(' '.join(f'{n}={tell(n)}' for n in held).encode()); c.close()
"#;

/// Starts programs in the guest that hold connections. `host` and `host6` lead to the host over
/// IPv4 and IPv6. `lo` and `lo6` use loopback addresses. `boxed` leads into a named network
/// namespace. `alone` and `alone-lo` are inside an unnamed network namespace. The argument
/// `0x40000000` of `setns` is `CLONE_NEWNET`.
async fn hold(guest: &Guest) {
    let mine = format!(
        r#"{HOLD}
held['host'] = (echoed, dial(('{HOST}', {ECHO})))
held['host6'] = (echoed, dial(('{HOST6}', {ECHO}), socket.AF_INET6))
held['lo'] = (crossed, pair('127.0.0.1'))
held['lo6'] = (crossed, pair('::1', socket.AF_INET6))
libc = ctypes.CDLL(None, use_errno=True)
home, box = os.open('/proc/self/ns/net', 0), os.open('/run/netns/box', 0)
assert libc.setns(box, 0x40000000) == 0
l = socket.socket(); l.bind(('10.99.0.2', 1)); l.listen()
assert libc.setns(home, 0x40000000) == 0
outer = dial(('10.99.0.2', 1)); inner = l.accept()[0]; l.close()
held['boxed'] = (crossed, (inner, outer))
{SERVE}"#
    );
    let alone = format!(
        "{HOLD}\nheld['alone'] = (crossed, pair('10.98.0.1'))\nheld['alone-lo'] = (crossed, pair('127.0.0.1'))\n{SERVE}"
    );
    let script = format!(
        "set -e
        ip -6 addr add {GUEST6}/64 dev eth0 nodad
        ip netns add box
        ip link add outer type veth peer name inner netns box
        ip addr add 10.99.0.1/24 dev outer; ip link set outer up
        ip -n box addr add 10.99.0.2/24 dev inner; ip -n box link set inner up
        setsid python3 -c \"$1\" /tmp/mine >/tmp/mine.log 2>&1 &
        setsid unshare -n sh -c 'ip link set lo up; ip link add d0 type dummy; ip addr add 10.98.0.1/24 dev d0; ip link set d0 up
            exec python3 -c \"$1\" /tmp/alone' sh \"$2\" >/tmp/alone.log 2>&1 &
        for s in mine alone; do
            n=0; until [ -S /tmp/$s ]; do sleep 0.1; n=$((n + 1)); [ $n -lt 300 ] || {{ cat /tmp/$s.log; exit 1; }}; done
        done"
    );
    guest.run(&["sh", "-c", &script, "sh", &mine, &alone]).await;
}

/// Queries the programs about their connections.
async fn connection_states(guest: &Guest) -> String {
    let program = "import socket
for name in 'mine', 'alone':
    s = socket.socket(socket.AF_UNIX); s.connect('/tmp/' + name)
    while data := s.recv(1000): print(data.decode(), end=' ')";
    let states = guest.python(program).await;
    // Both ends of the connection `alone` are in the guest, and both are reset. The second end may
    // receive the reset of the first end instead.
    states
        .trim()
        .replace("alone=ECONNRESET", "alone=ECONNABORTED")
}

/// States of the connections of [`hold`] before a clone or rollback.
const ALL_ALIVE: &str =
    "host=alive host6=alive lo=alive lo6=alive boxed=alive alone=alive alone-lo=alive";
/// States afterwards: only connections over loopback addresses survive.
const ALL_RESET: &str = "host=ECONNABORTED host6=ECONNABORTED lo=alive lo6=alive boxed=ECONNABORTED \
     alone=ECONNABORTED alone-lo=alive";

/// Host's end of a tap: an echo service, a socket that receives marks, and all frames that the tap
/// receives.
struct HostEnd {
    mark: UdpSocket,
    frames: mpsc::Receiver<Vec<u8>>,
}

impl HostEnd {
    fn start() -> Self {
        let address = [
            "-6",
            "addr",
            "add",
            &format!("{HOST6}/64"),
            "dev",
            "tap0",
            "nodad",
        ];
        wire::ip(&address).unwrap();
        for host in [HOST, HOST6] {
            let listener = TcpListener::bind((host, ECHO)).unwrap();
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    std::thread::spawn(move || {
                        let mut from = stream.unwrap();
                        let mut to = from.try_clone().unwrap();
                        // Ignore the error: the guest reports broken connections.
                        let _ = io::copy(&mut from, &mut to);
                    });
                }
            });
        }
        let mark = UdpSocket::bind((HOST, MARK)).unwrap();
        mark.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        Self {
            mark,
            frames: sniff(),
        }
    }
}

/// Returns a receiver of all frames that arrive in this namespace.
fn sniff() -> mpsc::Receiver<Vec<u8>> {
    let all = (libc::ETH_P_ALL as u16).to_be();
    // SAFETY: the call has no pointer arguments.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, i32::from(all)) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the descriptor was just created and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let (sender, frames) = mpsc::channel();
    std::thread::spawn(move || {
        let mut frame = vec![0; 65_536];
        loop {
            // SAFETY: the pointer and length describe `frame`.
            let n = unsafe {
                libc::recv(
                    socket.as_raw_fd(),
                    frame.as_mut_ptr().cast(),
                    frame.len(),
                    0,
                )
            };
            let Ok(length) = usize::try_from(n) else {
                return;
            };
            if sender.send(frame[..length].to_vec()).is_err() {
                return;
            }
        }
    });
    frames
}

/// Returns whether an Ethernet frame carries TCP. Bytes 12 and 13 are the EtherType (IPv4 or IPv6).
/// The protocol is in byte 9 of an IPv4 header or byte 6 of an IPv6 header. TCP is protocol 6.
fn is_tcp(frame: &[u8]) -> bool {
    match frame.get(12..14) {
        Some([0x08, 0x00]) => frame.get(23) == Some(&6),
        Some([0x86, 0xdd]) => frame.get(20) == Some(&6),
        _ => false,
    }
}

/// Waits until all earlier packets of the guest have arrived. Returns the number of TCP segments
/// among them.
async fn segments(guest: &Guest, far: &HostEnd) -> usize {
    let program = format!(
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'mark', ('{HOST}', {MARK}))"
    );
    guest.python(&program).await;
    far.mark.recv(&mut [0; 100]).unwrap();
    let mut count = 0;
    let frames = || far.frames.recv_timeout(Duration::from_secs(20)).unwrap();
    loop {
        let frame = frames();
        count += usize::from(is_tcp(&frame));
        if frame.ends_with(b"mark") {
            return count;
        }
    }
}

/// Template, size and snapshot store of a test.
struct Bench {
    prepared: PreparedTemplate,
    spec: SandboxSpec,
    store: Store,
    _dir: tempfile::TempDir,
}

impl Bench {
    fn new(test: &str) -> Option<Self> {
        let prepared = base(test)?;
        let mut spec = size(2, 512);
        spec.extra_cmdline = CMDLINE.to_owned();
        let dir = tempfile::tempdir_in(jiffy_image::Home::locate().unwrap().run()).unwrap();
        Some(Self {
            prepared,
            spec,
            store: Store::open(dir.path()).unwrap(),
            _dir: dir,
        })
    }

    /// Takes snapshot `id` of a guest.
    async fn snapshot(&self, vm: &MicroVm, id: &str, then: AfterSnapshot) {
        let spec = SnapshotSpec {
            id: id.to_owned(),
            template: "base".to_owned(),
            then,
            durability: Durability::PageCache,
            max_bytes: None,
            working_set: false,
            disk_only: false,
        };
        vm.snapshot(&self.store, &spec).await.unwrap();
    }

    /// Restores a guest as sandbox `id`. `rewound` is true for a rollback of this sandbox.
    async fn restore(&self, snapshot: &str, id: &str, rewound: bool, net: NetSpec) -> Guest {
        let sandbox_identity = SandboxIdentity {
            id: id.to_owned(),
            rewound,
            ..SandboxIdentity::default()
        };
        let vm = self.prepared.restore_as(
            &sandbox_identity,
            &self.spec,
            &self.store,
            snapshot,
            MemoryPolicy::Map,
            Some(net),
        );
        Guest::of(vm.await.unwrap())
    }
}

/// Creates a tap. `None` if this machine does not permit it.
fn create_tap(test: &str) -> Option<(NetSpec, HostEnd)> {
    match wire::create_tap(1500, HostEnd::start) {
        Ok(created) => Some(created),
        Err(e) => {
            skip(test, &format!("no tap in a network namespace: {e}"));
            None
        }
    }
}

#[tokio::test]
async fn a_clone_silently_closes_inherited_connections_and_its_parent_keeps_them() {
    let test = "a_clone_silently_closes_inherited_connections_and_its_parent_keeps_them";
    let Some(bench) = Bench::new(test) else {
        return;
    };
    let Some((net, _far)) = create_tap(test) else {
        return;
    };
    let parent = Guest::with(&bench.prepared, &bench.spec, Some(net)).await;
    hold(&parent).await;
    assert_eq!(connection_states(&parent).await, ALL_ALIVE);
    bench
        .snapshot(&parent.vm, "one", AfterSnapshot::Resume)
        .await;

    let (net, far) = create_tap(test).unwrap();
    let clone = bench.restore("one", "clone", false, net).await;
    // If the kernel of the clone had sent resets, the connections of the parent would break.
    assert_eq!(segments(&clone, &far).await, 0);
    assert_eq!(connection_states(&clone).await, ALL_RESET);
    // The network of the clone is open again.
    let program = format!(
        "import socket; s = socket.create_connection(('{HOST}', {ECHO}), 20); s.sendall(b'x'); print(s.recv(9))"
    );
    assert_eq!(clone.python(&program).await, "b'x'\n");
    assert_eq!(connection_states(&parent).await, ALL_ALIVE);
    clone.finish().await;
    parent.finish().await;
}

#[tokio::test]
async fn connections_survive_a_resume_but_not_a_rollback() {
    let test = "connections_survive_a_resume_but_not_a_rollback";
    let Some(bench) = Bench::new(test) else {
        return;
    };
    let Some((net, _far)) = create_tap(test) else {
        return;
    };
    let same_net = || NetSpec {
        tap: net.tap.try_clone().unwrap(),
        ..net
    };
    // A booted guest has a random id. The guest of the test has a known id, for the resume and the
    // rollback, so it is restored from a snapshot.
    let vm = bench
        .prepared
        .boot_with(&bench.spec, Some(same_net()))
        .await
        .unwrap();
    bench.snapshot(&vm, "booted", AfterSnapshot::Stop).await;
    vm.ended().await;
    drop(vm);
    let guest = bench.restore("booted", "sandbox", false, same_net()).await;
    hold(&guest).await;
    assert_eq!(connection_states(&guest).await, ALL_ALIVE);
    bench
        .snapshot(&guest.vm, "paused", AfterSnapshot::Stop)
        .await;
    guest.vm.ended().await;
    drop(guest);

    let resumed = bench.restore("paused", "sandbox", false, same_net()).await;
    assert_eq!(connection_states(&resumed).await, ALL_ALIVE);
    // The guest continues to run and is then rolled back to the pause: its connections are not
    // restored.
    resumed.vm.stop().await;
    let rewound = bench.restore("paused", "sandbox", true, same_net()).await;
    assert_eq!(connection_states(&rewound).await, ALL_RESET);
    rewound.finish().await;
}
