//! Tests for private networks. The guests are network namespaces, so that a test can send any
//! packet from them. A *member* of a network is a sandbox that has joined it.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. A daemon *adopts* the guests that continued to run while no
//! daemon ran.

use crate::support::lab::{PUBLIC, output, with_lab};
use crate::support::network_probe::assert_clean;
use crate::support::wait_for;
use jiffy_engine_api::{NetworkMembership, NetworkRules};
use jiffy_network::{Network, NetworkConfig, NicKind, SlotLease, guest};
use jiffy_test_attributes::jiffy_test;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use tokio::runtime::Runtime;

/// Timeout for a packet or connection that must arrive.
const LIMIT: Duration = Duration::from_secs(10);
/// Time after which a packet that must not arrive is considered lost.
const SILENCE: Duration = Duration::from_millis(300);

/// Guest in a network namespace, with the rules of its sandbox.
struct Member {
    lease: SlotLease,
    rules: NetworkRules,
    namespace: PathBuf,
}

impl Member {
    /// Takes a slot for the member with the last byte `last` of its address.
    fn new(runtime: &Runtime, network: &Network, owner: &str, last: u8, name: &str) -> Self {
        let lease = runtime.block_on(network.take(NicKind::Veth)).unwrap();
        let rules = NetworkRules {
            internet: false,
            owner: Some(owner.to_owned()),
            membership: Some(NetworkMembership {
                network: "lab".to_owned(),
                address: address(last),
                id: format!("id{last}"),
                name: Some(name.to_owned()),
            }),
            ..NetworkRules::default()
        };
        let namespace = lease.namespace().unwrap();
        runtime.block_on(lease.replace(&rules)).unwrap();
        lease.open().unwrap();
        Self {
            lease,
            rules,
            namespace,
        }
    }

    /// Runs `work` in the namespace of the guest.
    fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let enter = || {
            let file = File::open(&self.namespace).unwrap();
            nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            work()
        };
        thread::scope(|scope| scope.spawn(enter).join().unwrap())
    }

    fn connect(&self, to: impl Into<SocketAddr>) -> Result<TcpStream, String> {
        let to = to.into();
        let stream = self.run(|| TcpStream::connect_timeout(&to, LIMIT));
        let stream = stream.map_err(|e| format!("{:?}", e.kind()))?;
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Ok(stream)
    }

    fn listen(&self) -> TcpListener {
        self.run(|| TcpListener::bind(("0.0.0.0", 80)).unwrap())
    }

    /// Returns the address of a name, or the code of the answer.
    fn resolve(&self, name: &str) -> Result<Ipv4Addr, u8> {
        // Id of the message, flag "recursion desired", and one question (RFC 1035 4.1.1).
        let mut question = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00".to_vec();
        for label in name.split('.') {
            question.push(u8::try_from(label.len()).unwrap());
            question.extend(label.as_bytes());
        }
        // End of the name, type A and class IN (RFC 1035 4.1.2).
        question.extend(b"\0\0\x01\0\x01");
        let answer = self.run(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.set_read_timeout(Some(LIMIT)).unwrap();
            socket.send_to(&question, (guest::GATEWAY, 53)).unwrap();
            let mut answer = vec![0; 512];
            let length = socket.recv(&mut answer).unwrap();
            answer.truncate(length);
            answer
        });
        // Bytes 3 and 7 contain the response code and the number of records (RFC 1035 4.1.1). The
        // data of the only record is at the end of the answer.
        match (answer[3] & 15, answer[7]) {
            (0, 1) => {
                let data: [u8; 4] = answer[answer.len() - 4..].try_into().unwrap();
                Ok(data.into())
            }
            (code, _) => Err(code),
        }
    }
}

/// Returns the address of a member in its private network.
fn address(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(169, 254, 64, last)
}

/// Passes a line over a new connection and checks the addresses that both ends see.
fn is_connected(from: &Member, from_address: Ipv4Addr, listener: &TcpListener, to: Ipv4Addr) {
    let mut stream = from.connect((to, 80)).unwrap();
    let (mut accepted, peer) = listener.accept().unwrap();
    assert_eq!(peer.ip(), from_address);
    stream.write_all(b"line").unwrap();
    let mut line = [0; 4];
    accepted.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"line");
}

/// Returns an IPv4 packet with a UDP datagram to port 7.
fn datagram(from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    // Header without options (RFC 791). Bytes 10 and 11 receive the checksum.
    let mut packet = vec![0x45, 0, 0, 32, 0, 77, 0, 0, 64, 17, 0, 0];
    packet.extend(from.octets());
    packet.extend(to.octets());
    let words = packet
        .chunks(2)
        .map(|w| u32::from(w[0]) << 8 | u32::from(w[1]));
    let sum: u32 = words.sum();
    let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    // UDP header: ports 5000 and 7, 12 bytes, no checksum.
    packet.extend([0x13, 0x88, 0, 7, 0, 12, 0, 0]);
    packet.extend(b"raw!");
    packet
}

/// Sends frames to the gateway of the slot from the guest, with any source addresses.
fn send_raw(from: &Member, frames: &[Vec<u8>]) {
    from.run(|| {
        let socket = nix::sys::socket::socket(
            nix::sys::socket::AddressFamily::Packet,
            nix::sys::socket::SockType::Raw,
            nix::sys::socket::SockFlag::empty(),
            None,
        )
        .unwrap();
        let index = nix::net::if_::if_nametoindex("eth0").unwrap();
        let mut link = [0_u8; 20];
        // Address family AF_PACKET, protocol IPv4 and device (packet(7)).
        link[..2].copy_from_slice(&17_u16.to_ne_bytes());
        link[2..4].copy_from_slice(&0x0800_u16.to_be_bytes());
        link[4..8].copy_from_slice(&index.to_ne_bytes());
        for frame in frames {
            let mut bytes = guest::GATEWAY_MAC.to_vec();
            bytes.extend(guest::MAC);
            bytes.extend([8, 0]);
            bytes.extend(frame);
            use std::os::fd::AsRawFd;
            // SAFETY: both buffers are valid for the duration of the call, and `link` is a
            // `sockaddr_ll` of 20 bytes.
            let sent = unsafe {
                nix::libc::sendto(
                    socket.as_raw_fd(),
                    bytes.as_ptr().cast(),
                    bytes.len(),
                    0,
                    link.as_ptr().cast(),
                    20,
                )
            };
            assert_eq!(usize::try_from(sent).ok(), Some(bytes.len()));
        }
    });
}

/// Returns the source of the next datagram. `None` if there is none.
fn next_source(socket: &UdpSocket) -> Option<Ipv4Addr> {
    socket.set_read_timeout(Some(SILENCE)).unwrap();
    match socket.recv_from(&mut [0; 64]) {
        Ok((_, SocketAddr::V4(from))) => Some(*from.ip()),
        _ => None,
    }
}

/// Returns the names of the private networks of the data directory that has the namespace `one`.
fn networks(one: &Path) -> Vec<String> {
    let own = one.file_name().unwrap().to_str().unwrap();
    let prefix = format!("{}-net-", own.split('-').next().unwrap());
    let directory = one.parent().unwrap().read_dir();
    let names = directory.into_iter().flatten();
    let names = names.map(|e| e.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with(&prefix)).collect()
}

#[jiffy_test(engine = "none", lab)]
fn members_of_a_private_network_reach_each_other_and_nothing_else() {
    with_lab(|_| {
        let home = tempfile::tempdir().unwrap();
        let config = NetworkConfig {
            ready: 1,
            nic: NicKind::Veth,
            ..NetworkConfig::new(home.path())
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let network = Network::open(&config).unwrap();
        let new = |owner, last, name| Member::new(&runtime, &network, owner, last, name);
        // Arguments: owner, last byte of the address, and name.
        let (a, b) = (new("one", 2, "a"), new("one", 3, "b"));
        let (stranger, other) = (new("two", 2, "a"), new("two", 9, "other"));
        // Each owner has a network of the name `lab`.
        assert_eq!(networks(&a.namespace).len(), 2);

        // Members connect by name and by address, in both directions and to themselves. Each end
        // sees the address of the other.
        let (at_a, at_b) = (a.listen(), b.listen());
        let at_other = other.listen();
        for name in ["b", "B", "id3", "b.net.jiffy.internal"] {
            assert_eq!(a.resolve(name), Ok(address(3)), "{name}");
        }
        is_connected(&a, address(2), &at_b, address(3));
        is_connected(&b, address(3), &at_a, address(2));
        // A member resolves its own name to its address inside the slot. The guest reaches itself
        // through the gateway of the slot, too, with its address in the network.
        assert_eq!(b.resolve("b"), Ok(guest::ADDRESS));
        is_connected(&b, guest::GATEWAY, &at_b, address(3));

        // Another owner's network of the same name is another network.
        assert_eq!(stranger.resolve("other"), Ok(address(9)));
        is_connected(&stranger, address(2), &at_other, address(9));
        // Codes of DNS answers: 5 = `REFUSED`, 3 = `NXDOMAIN`.
        assert_eq!(a.resolve("other"), Err(5));
        assert_eq!(a.resolve("other.net.jiffy.internal"), Err(3));
        assert_eq!(stranger.resolve("b.net.jiffy.internal"), Err(3));
        let refused = |member: &Member, to: &str| {
            let connected = member.connect(to.parse::<SocketAddr>().unwrap());
            assert_eq!(
                connected.err().as_deref(),
                Some("ConnectionRefused"),
                "{to}"
            );
        };
        refused(&stranger, "169.254.64.3:80");
        refused(&a, "169.254.64.9:80");
        // A does not reach the host, the gateway of the network or the internet over the link.
        let slot = format!("{}:80", network.range().network());
        for to in [
            "169.254.64.1:80",
            "169.254.127.255:80",
            "169.254.0.22:80",
            &slot,
        ] {
            refused(&a, to);
        }
        refused(&a, &format!("{}:80", PUBLIC[0]));

        // The slot drops packets with any source other than the guest's address inside the slot,
        // even with the member's own address in the network. It translates the inside address to
        // the member's address.
        let datagrams = b.run(|| UdpSocket::bind("0.0.0.0:7").unwrap());
        let sources = [
            address(3),
            address(9),
            address(2),
            guest::GATEWAY,
            Ipv4Addr::LOCALHOST,
        ];
        let forged = sources.map(|source| datagram(source, address(3)));
        send_raw(&a, &forged);
        assert_eq!(next_source(&datagrams), None);
        send_raw(&a, &[datagram(guest::ADDRESS, address(3))]);
        assert_eq!(next_source(&datagrams), Some(address(2)));
        // No packet passes through a member to another network: B's slot forwards to its guest
        // only.
        let through = [
            PUBLIC[0].parse().unwrap(),
            guest::GATEWAY,
            Ipv4Addr::BROADCAST,
        ];
        let through = through.map(|to| datagram(guest::ADDRESS, to));
        send_raw(&a, &through);
        assert_eq!(next_source(&datagrams), None);

        rules_hold(&runtime, &a, &b, &at_a, &at_b);

        // A member that is replaced, as by a pause and a resume, keeps its address. Connections of
        // its former slot are reset.
        let mut kept = a.connect((address(3), 80)).unwrap();
        let mut accepted = at_b.accept().unwrap().0;
        accepted.set_read_timeout(Some(LIMIT)).unwrap();
        kept.write_all(b"1").unwrap();
        accepted.read_exact(&mut [0]).unwrap();
        drop((at_a, a));
        refused(&b, "169.254.64.2:80");
        assert_eq!(b.resolve("a"), Err(5));
        let a = new("one", 2, "a");
        accepted.write_all(b"2").unwrap();
        let reset = accepted.read(&mut [0]).unwrap_err();
        assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionReset);
        drop(kept);
        let at_a = a.listen();
        is_connected(&b, address(3), &at_a, address(2));

        next_daemon(
            &runtime,
            network,
            &config,
            ([a, b], at_b),
            [stranger, other],
        );
    });
}

/// Checks that rules apply to members, in both directions and to open connections.
fn rules_hold(runtime: &Runtime, a: &Member, b: &Member, at_a: &TcpListener, at_b: &TcpListener) {
    let mut open = a.connect((address(3), 80)).unwrap();
    let mut accepted = at_b.accept().unwrap().0;
    let denied = |deny: &[&str], allow: &[&str]| {
        let list = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
        let rules = NetworkRules {
            deny_out: list(deny),
            allow_out: list(allow),
            ..a.rules.clone()
        };
        runtime.block_on(a.lease.replace(&rules)).unwrap();
    };
    denied(&["169.254.64.0/24"], &[]);
    let refused = a.connect((address(3), 80)).map(drop);
    assert_eq!(refused, Err("ConnectionRefused".to_owned()));
    open.write_all(b"x").ok();
    accepted.set_read_timeout(Some(SILENCE)).unwrap();
    assert!(accepted.read(&mut [0]).is_err());
    let to = SocketAddr::from((address(2), 80));
    assert!(b.run(|| TcpStream::connect_timeout(&to, SILENCE)).is_err());
    // An allowed address takes precedence, and the denial of all addresses denies no member.
    for (deny, allow) in [
        (&["169.254.64.0/24"], &["169.254.64.3"][..]),
        (&["0.0.0.0/0"], &[]),
    ] {
        denied(deny, allow);
        is_connected(a, address(2), at_b, address(3));
        is_connected(b, address(3), at_a, address(2));
    }
    runtime.block_on(a.lease.replace(&a.rules)).unwrap();
}

/// Checks that the next daemon adopts members, and that networks end with their last member.
fn next_daemon(
    runtime: &Runtime,
    network: Network,
    config: &NetworkConfig,
    (members, at_b): ([Member; 2], TcpListener),
    others: [Member; 2],
) {
    let namespace = members[1].namespace.clone();
    let rules = members.each_ref().map(|member| member.rules.clone());
    let numbers = members.each_ref().map(|member| member.lease.number());
    for member in members.iter().chain(&others) {
        member.lease.retain();
    }
    let namespaces = members.each_ref().map(|member| member.namespace.clone());
    drop((members, others));
    network.close();
    assert_eq!(networks(&namespace).len(), 2);

    let network = Network::open(config).unwrap();
    let adopt = |i: usize| {
        let lease = runtime
            .block_on(network.adopt(numbers[i], &rules[i]))
            .unwrap();
        Member {
            lease,
            rules: rules[i].clone(),
            namespace: namespaces[i].clone(),
        }
    };
    let [a, b] = [adopt(0), adopt(1)];
    assert_eq!(a.resolve("b"), Ok(address(3)));
    is_connected(&a, address(2), &at_b, address(3));
    // The other members were not adopted: their slots and their network are removed.
    network.reclaim(NicKind::Veth, &numbers);
    wait_for("the network without members to be removed", || {
        (networks(&namespace).len() == 1).then_some(())
    });
    for member in [&a, &b] {
        member.lease.release();
    }
    drop((at_b, a, b));
    wait_for("the last network to be removed", || {
        networks(&namespace).is_empty().then_some(())
    });
    network.close();
    assert_clean();
    // The test runs in the network namespace of the lab's host.
    assert!(
        output("ip", &["-br", "link"])
            .lines()
            .all(|line| !line.starts_with("jf"))
    );
}
