//! Simulated host and internet in network namespaces, which exist as long as their threads and
//! processes. No traffic of a test leaves this machine.

use super::engine;
use super::requirements::{set_test_name, test_name};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

/// Address of the host. Documentation addresses cannot be used, because the lab's internet must
/// have addresses that count as public.
pub const HOST: &str = "11.0.0.2";
/// Addresses of servers in the lab's internet, at TCP ports 22, 80 and 443, and UDP port 7.
pub const PUBLIC: [&str; 3] = ["11.0.0.1", "8.8.8.8", "9.9.9.9"];
/// Private addresses of servers. Sandboxes must reach them only if a rule permits it.
pub const PRIVATE: [&str; 9] = [
    "10.9.9.9",
    "172.16.9.9",
    "192.168.9.9",
    "169.254.169.254",
    "100.64.9.9",
    "168.63.129.16",
    "192.0.2.9",
    "198.51.100.9",
    "203.0.113.9",
];
/// Address of the name server, over UDP. Over TCP, the server reports its name, as at port 80.
pub const RESOLVER: &str = PUBLIC[1];
/// IPv6 address of the host, and addresses of servers, in a lab with IPv6.
pub const HOST6: &str = "2a00:1::2";
pub const PUBLIC6: [&str; 2] = ["2a00:1::1", "2a00:9::9"];
/// Private IPv6 addresses of servers. Sandboxes must reach them only if a rule permits it.
pub const PRIVATE6: [&str; 3] = ["fd00:9::9", "2001:db8:9::9", "3fff:9::9"];
/// Answer of the name server to every question.
const ANSWER: Ipv4Addr = Ipv4Addr::new(9, 9, 9, 9);

/// Running lab, and the requests received in its internet.
pub struct Lab {
    /// Sender and content of each datagram to port 7.
    pub datagrams: Receiver<(SocketAddr, Vec<u8>)>,
    /// Thread in the internet's namespace.
    internet: i32,
}

impl Lab {
    /// Runs `work` on a thread in the internet's namespace, which threads of `work` inherit.
    pub fn in_internet<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let namespace = format!("/proc/self/task/{}/ns/net", self.internet);
        thread::scope(|scope| {
            let inside = scope.spawn(move || {
                let namespace = fs::File::open(namespace).unwrap();
                nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
                work()
            });
            inside.join().unwrap()
        })
    }
}

/// Runs `work` on a thread in the network namespace of the lab's host, which child processes
/// inherit. The test must require `lab`.
pub fn with_lab(work: impl FnOnce(&Lab) + Send) {
    run(false, work);
}

/// Like `with_lab`, with IPv6.
pub fn with_lab6(work: impl FnOnce(&Lab) + Send) {
    run(true, work);
}

/// Runs the internet and the host in one thread each.
fn run(ipv6: bool, work: impl FnOnce(&Lab) + Send) {
    let (datagram_sender, datagrams) = mpsc::channel();
    let (ready, number) = mpsc::channel();
    let (stop, stopped) = mpsc::channel::<()>();
    let (engine, test) = (engine::wanted(), test_name());
    thread::scope(|scope| {
        scope.spawn(move || internet(ipv6, &ready, datagram_sender, &stopped));
        let host = scope.spawn(move || {
            engine::want(engine);
            set_test_name(test);
            let internet = number.recv().unwrap();
            host(internet);
            // The second number states that the other side of the link is up.
            number.recv().unwrap();
            if ipv6 {
                ip(&format!(
                    "addr add {HOST6}/64 dev eth0 nodad\nroute add default via {}",
                    PUBLIC6[0]
                ));
                serve_tcp_at(HOST6, 80, "host");
            }
            work(&Lab {
                datagrams,
                internet,
            });
        });
        let outcome = host.join();
        // Without the sender, the wait of the internet's thread ends.
        drop(stop);
        outcome.unwrap();
    });
}

/// Returns the reason why a lab is not possible, or `None`.
pub fn missing() -> Option<String> {
    if !nix::unistd::Uid::effective().is_root() {
        return Some("network namespaces require root".to_owned());
    }
    for program in ["ip", "nft"] {
        let found = Command::new(program).arg("-V").output();
        if found.is_err() {
            return Some(format!("`{program}` is not installed"));
        }
    }
    (!std::path::Path::new("/dev/net/tun").exists())
        .then(|| "/dev/net/tun does not exist".to_owned())
}

/// Moves this thread to a new network namespace.
fn unshare() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
}

/// Gives this thread and its children separate mounts and a separate `/run` with the given
/// propagation.
pub fn mount_separate_run(propagation: MsFlags) {
    let none = None::<&str>;
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    // The copy has mounts below `/run`, which the new `/run` would only hide: unmount them.
    let mounts = fs::read_to_string("/proc/thread-self/mounts").unwrap();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    for point in points.filter(|point| point.starts_with("/run/")) {
        let _ = umount2(point, MntFlags::MNT_DETACH);
    }
    mount(Some("run"), "/run", Some("tmpfs"), MsFlags::empty(), none).unwrap();
    mount(none, "/run", none, propagation, none).unwrap();
}

/// Runs ip(8) with one command per line.
pub fn ip(commands: &str) {
    let mut child = Command::new("ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(commands.as_bytes())
        .unwrap();
    assert!(child.wait().unwrap().success(), "{commands}");
}

/// Returns the output of a program in the lab's host.
pub fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Creates the namespace of the host, and a link to the namespace of the internet.
fn host(internet: i32) {
    unshare();
    // A new namespace has the settings of the initial namespace.
    fs::write("/proc/sys/net/ipv4/ip_forward", "0").unwrap();
    ip(&format!(
        "link set lo up\n\
         link add eth0 type veth peer name eth0 netns {internet}\n\
         addr add {HOST}/24 dev eth0\n\
         link set eth0 up\n\
         route add default via {}",
        PUBLIC[0]
    ));
    serve_http("host");
    name_servers(true)
        .iter()
        .for_each(|address| serve_dns(address));
}

/// Creates the namespace of the internet, and serves until the test is over. Sends its thread id
/// first, and any number when its link is up.
fn internet(
    ipv6: bool,
    ready: &Sender<i32>,
    datagrams: Sender<(SocketAddr, Vec<u8>)>,
    stopped: &Receiver<()>,
) {
    unshare();
    ready.send(nix::unistd::gettid().as_raw()).unwrap();
    super::wait_for("the wire", || {
        fs::read_to_string("/proc/thread-self/net/dev")
            .unwrap()
            .contains("eth0")
            .then_some(())
    });
    let mut commands = format!(
        "link set lo up\naddr add {}/24 dev eth0\nlink set eth0 up\n",
        PUBLIC[0]
    );
    // The lab also has the name servers of this machine's resolv.conf.
    for address in PUBLIC[1..]
        .iter()
        .chain(&PRIVATE)
        .map(|a| (*a).to_owned())
        .chain(name_servers(false))
    {
        commands += &format!("addr replace {address}/32 dev lo\n");
    }
    ip(&commands);
    if ipv6 {
        ip(&format!(
            "addr add {}/64 dev eth0 nodad\naddr add {}/128 dev lo nodad",
            PUBLIC6[0], PUBLIC6[1]
        ));
        for address in PRIVATE6 {
            ip(&format!("addr add {address}/128 dev lo nodad"));
        }
        for address in PUBLIC6.iter().chain(&PRIVATE6) {
            [22, 80, 443]
                .into_iter()
                .for_each(|port| serve_tcp_at(address, port, "internet"));
        }
    }
    serve_http("internet");
    let udp = UdpSocket::bind("0.0.0.0:7").unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = udp.recv_from(&mut buffer) {
            let _ = udp.send_to(&buffer[..length], from);
            if datagrams.send((from, buffer[..length].to_vec())).is_err() {
                return;
            }
        }
    });
    serve_tcp(53, "internet");
    serve_tcp(22, "internet");
    let mut resolvers = name_servers(false);
    if !resolvers.iter().any(|address| address == RESOLVER) {
        resolvers.push(RESOLVER.to_owned());
    }
    resolvers.iter().for_each(|address| serve_dns(address));
    ready.send(0).unwrap();
    // The servers run until the test is over.
    let _ = stopped.recv();
}

/// Returns the name servers of this machine with loopback addresses, or with other addresses.
fn name_servers(loopback: bool) -> Vec<String> {
    let text = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let named = text.lines().filter_map(|l| l.strip_prefix("nameserver "));
    let mut all: Vec<Ipv4Addr> = named.filter_map(|a| a.trim().parse().ok()).collect();
    if all.is_empty() {
        all.push(Ipv4Addr::LOCALHOST);
    }
    all.retain(|a| a.is_loopback() == loopback);
    all.iter().map(Ipv4Addr::to_string).collect()
}

/// Names with this part resolve to an address of [`PRIVATE`]. The digit that follows is its index:
/// `trap5.example` resolves to 168.63.129.16. Without a digit, the index is 0.
const TRAP: &[u8] = b"trap";
/// Names with this part resolve only to an IPv6 address.
const SIX: &[u8] = b"six";

/// Returns the private address for a question that contains [`TRAP`].
fn private_address(question: &[u8]) -> Ipv4Addr {
    let at = question.windows(TRAP.len()).position(|w| w == TRAP);
    let digit = question[at.unwrap() + TRAP.len()];
    let number = char::from(digit).to_digit(10).unwrap_or(0);
    PRIVATE[number as usize].parse().unwrap()
}

/// Names with this part resolve to the internet and to a slot, the network namespace of a sandbox,
/// alternately.
const REBIND: &[u8] = b"rebind";

/// Returns the address for the next question that contains [`REBIND`].
fn rebinding_address() -> Ipv4Addr {
    static ASKED: AtomicU8 = AtomicU8::new(0);
    match ASKED.fetch_add(1, Ordering::Relaxed) {
        asked if asked % 2 == 0 => ANSWER,
        asked => Ipv4Addr::new(198, 18, 0, asked % 16),
    }
}

/// Sends each client the name of the server and the client's address, and then echoes its input.
fn serve_http(name: &'static str) {
    [80, 443].into_iter().for_each(|port| serve_tcp(port, name));
}

/// Starts a server on all addresses of the current network namespace. See `echo`.
fn serve_tcp(port: u16, name: &'static str) {
    serve_tcp_at("0.0.0.0", port, name);
}

/// Like [`serve_tcp`], on one address.
fn serve_tcp_at(address: &str, port: u16, name: &'static str) {
    let listener = TcpListener::bind((address, port)).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || echo(stream?, name));
        }
    });
}

/// Sends the name of the server and the address of the client, and then echoes the input.
fn echo(mut stream: TcpStream, name: &str) -> io::Result<()> {
    let peer = stream.peer_addr()?.ip();
    writeln!(stream, "{name} {peer}")?;
    let mut buffer = [0; 4096];
    loop {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            return Ok(());
        }
        stream.write_all(&buffer[..length])?;
    }
}

/// Answers every question with an address.
fn serve_dns(address: &str) {
    // Bound to this address, because answers from other addresses are ignored.
    let socket = UdpSocket::bind((address, 53)).unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let mut answer = buffer[..length].to_vec();
            // Retain only the question: labels, a zero, type and class after the header (RFC 1035
            // 4.1).
            let end = answer[12..].iter().position(|b| *b == 0).unwrap() + 12 + 5;
            answer.truncate(end);
            // The question ends with two bytes of type and two bytes of class. This is the second
            // byte of the type. The first one is 0 for both types of addresses.
            let asked_type = answer[end - 3];
            let contains = |name: &[u8]| buffer[..length].windows(name.len()).any(|w| w == name);
            // Type of the record (1: A, 28: AAAA), and the address.
            let (kind, found): (u8, Vec<u8>) = if contains(SIX) {
                (28, PUBLIC6[1].parse::<Ipv6Addr>().unwrap().octets().into())
            } else if contains(REBIND) && asked_type == 1 {
                (1, rebinding_address().octets().into())
            } else if contains(TRAP) {
                (1, private_address(&buffer[..length]).octets().into())
            } else {
                (1, ANSWER.octets().into())
            };
            let has_address = asked_type == kind;
            // Flags of a response without an error, and the numbers of questions, answers,
            // authorities and additional records.
            answer[2..12].copy_from_slice(&[
                0x81,
                0x80,
                0,
                1,
                0,
                u8::from(has_address),
                0,
                0,
                0,
                0,
            ]);
            if has_address {
                // Pointer to the name in the question, type, class, and a lifetime of 60 s.
                answer.extend([0xc0, 12, 0, kind, 0, 1, 0, 0, 0, 60, 0]);
                answer.push(found.len().try_into().unwrap());
                answer.extend(found);
            }
            let _ = socket.send_to(&answer, from);
        }
    });
}
