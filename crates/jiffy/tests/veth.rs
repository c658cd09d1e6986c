//! Tests for guests without a virtual machine: their network card is in a network namespace, with
//! the same network access as all guests.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::support::lab::{HOST, PRIVATE, PUBLIC, PUBLIC6, output, with_lab6};
use crate::support::network_probe::assert_clean;
use crate::support::wait_for;
use jiffy_engine_api::NetworkRules;
use jiffy_network::{Network, NetworkConfig, NicKind, guest};
use jiffy_test_attributes::jiffy_test;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream, UdpSocket};
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Returns the number of namespaces of this namespace's data directory.
fn namespaces(one: &Path) -> usize {
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    let own = name(one);
    let prefix = own.split_inclusive('-').next().unwrap();
    // The directory is removed with the last namespace.
    let all = std::fs::read_dir(one.parent().unwrap());
    let all = all.into_iter().flatten();
    all.filter(|entry| name(&entry.as_ref().unwrap().path()).starts_with(prefix))
        .count()
}

/// Runs `work` in a network namespace.
fn run_in_namespace<T: Send>(namespace: &Path, work: impl FnOnce() -> T + Send) -> T {
    let enter = || {
        let file = File::open(namespace).unwrap();
        nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(enter).join().unwrap())
}

/// Returns the name of the server at TCP port 80 of `host`, or the kind of the error.
fn reach(host: &str) -> String {
    let address = (host.parse::<IpAddr>().unwrap(), 80).into();
    let mut line = [0; 100];
    let received = TcpStream::connect_timeout(&address, Duration::from_secs(10))
        .and_then(|mut stream| stream.read(&mut line));
    match received {
        Ok(length) => {
            let line = String::from_utf8_lossy(&line[..length]);
            line.split(' ').next().unwrap_or_default().to_owned()
        }
        Err(e) => format!("{:?}", e.kind()),
    }
}

/// Returns the address of a name according to the gateway.
fn resolve() -> Option<Ipv4Addr> {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let limit = Some(Duration::from_secs(10));
    socket.set_read_timeout(limit).unwrap();
    // A recursive question for the address of some.example (RFC 1035 4.1).
    let question =
        b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04some\x07example\x00\x00\x01\x00\x01";
    socket.send_to(question, (guest::GATEWAY, 53)).unwrap();
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer).unwrap();
    let address = &answer[question.len()..length];
    // The record starts with its name (a pointer), type, class, validity and length: 12 bytes.
    let address: [u8; 4] = address.get(12..16)?.try_into().ok()?;
    Some(address.into())
}

/// Sends more data than fits into any buffer to an echo server, and checks the answer.
fn is_echoed(host: &str) -> bool {
    let sent: Vec<u8> = (0..4_u32 << 20).map(|i| (i ^ (i >> 8)) as u8).collect();
    let mut stream = TcpStream::connect((host, 80)).unwrap();
    // The first line contains the name of the server.
    let mut byte = [0];
    while byte != *b"\n" {
        stream.read_exact(&mut byte).unwrap();
    }
    let mut writer = stream.try_clone().unwrap();
    let mut received = vec![0; sent.len()];
    thread::scope(|scope| {
        scope.spawn(|| writer.write_all(&sent).unwrap());
        stream.read_exact(&mut received).unwrap();
    });
    received == sent
}

#[jiffy_test(engine = "none", lab)]
fn a_guest_in_a_namespace_has_the_same_network_as_a_virtual_machine() {
    with_lab6(|_| {
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
        let usual = NetworkRules::default();
        let closed = NetworkRules {
            internet: false,
            ..usual.clone()
        };

        let network = Network::open(&config).unwrap();
        let take = |card| runtime.block_on(network.take(card)).unwrap();
        let (mut lease, mut tap, remaining) =
            (take(NicKind::Veth), take(NicKind::Tap), take(NicKind::Veth));
        assert!(tap.take_tap().is_some() && tap.namespace().is_none());
        assert!(lease.take_tap().is_none());
        let card = lease.namespace().unwrap();
        let addresses = run_in_namespace(&card, || output("ip", &["-br", "addr"]));
        let addresses: Vec<Vec<&str>> = (addresses.lines())
            .map(|line| line.split_whitespace().skip(2).collect())
            .collect();
        assert_eq!(
            addresses,
            [
                ["127.0.0.1/8", "::1/128"],
                ["169.254.0.21/30", "fd6a:6966:6679::21/126"]
            ]
        );
        // Names are not resolved before the lease is opened.
        assert_eq!(run_in_namespace(&card, resolve), None);

        let set_rules = |rules| runtime.block_on(lease.replace(rules)).unwrap();
        set_rules(&usual);
        lease.open().unwrap();
        for host in PUBLIC.iter().chain(&PUBLIC6) {
            assert_eq!(
                run_in_namespace(&card, || reach(host)),
                "internet",
                "{host}"
            );
        }
        for host in PRIVATE.iter().chain(&[HOST, "169.254.0.22", "198.18.0.0"]) {
            assert_eq!(
                run_in_namespace(&card, || reach(host)),
                "ConnectionRefused",
                "{host}"
            );
        }
        assert_eq!(
            run_in_namespace(&card, resolve),
            Some(Ipv4Addr::new(9, 9, 9, 9))
        );
        assert!(run_in_namespace(&card, || is_echoed(PUBLIC[1])));
        set_rules(&closed);
        assert_eq!(
            run_in_namespace(&card, || reach(PUBLIC[1])),
            "ConnectionRefused"
        );

        // The next daemon finds the namespace, and removes namespaces without a guest.
        let number = lease.number();
        [&lease, &remaining]
            .into_iter()
            .for_each(|lease| lease.retain());
        drop((lease, remaining, tap));
        network.close();
        let network = Network::open(&config).unwrap();
        let adopted = network.adopt(number, &usual);
        let adopted = runtime.block_on(adopted).unwrap();
        assert_eq!(adopted.namespace().as_deref(), Some(card.as_path()));
        assert_eq!(run_in_namespace(&card, || reach(PUBLIC[1])), "internet");
        assert_eq!(
            run_in_namespace(&card, resolve),
            Some(Ipv4Addr::new(9, 9, 9, 9))
        );
        network.reclaim(NicKind::Tap, &[]);
        network.reclaim(NicKind::Veth, &[number]);
        // The slot in use and a slot created in advance remain, with two namespaces each.
        wait_for("the remaining namespace to be removed", || {
            (namespaces(&card) == 4).then_some(())
        });
        adopted.release();
        drop(adopted);
        network.close();
        assert_clean();
        assert_eq!(namespaces(&card), 0);
    });
}
