//! A secret that is created on one host, and used by a sandbox on another host.

use super::client::{Client, in_network};
use super::laboratory::{Laboratory, report};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Host of the rules.
const NAME: &str = "secret.example";
/// Interval at which the servers check whether they were dropped.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Name server that returns one address for all names, and web server at this address. The body of
/// its answer is the header `Authorization` of the request, in reverse, because the guest must not
/// receive the secret.
struct Servers {
    is_ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Servers {
    fn start(laboratory: &Laboratory, address: IpAddr) -> Self {
        let (names, web) = in_network(laboratory.network, || {
            let names = UdpSocket::bind((address, 53)).unwrap();
            (names, TcpListener::bind((address, 443)).unwrap())
        });
        let config = Arc::new(laboratory.authority.server(&[NAME]));
        names.set_read_timeout(Some(CHECK_INTERVAL)).unwrap();
        web.set_nonblocking(true).unwrap();
        let is_ended = Arc::new(AtomicBool::new(false));
        let (first, second) = (is_ended.clone(), is_ended.clone());
        let threads = vec![
            std::thread::spawn(move || answer_names(&names, address, &first)),
            std::thread::spawn(move || answer_requests(&web, &config, &second)),
        ];
        Self { is_ended, threads }
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.is_ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Answers DNS questions (RFC 1035, 4.1): an address of version 4 for each name.
fn answer_names(socket: &UdpSocket, address: IpAddr, is_ended: &AtomicBool) {
    let IpAddr::V4(address) = address else { return };
    let mut question = [0; 512];
    while !is_ended.load(Ordering::Relaxed) {
        let Ok((length, from)) = socket.recv_from(&mut question) else {
            continue;
        };
        if length < 17 {
            continue;
        }
        // The name ends with an empty label. Type and class follow.
        let Some(end) = question[12..length].iter().position(|byte| *byte == 0) else {
            continue;
        };
        let end = 12 + end + 5;
        let is_address = question.get(end - 4..end - 2) == Some(&[0, 1]);
        let mut answer = question[..end].to_vec();
        // An answer without errors, to one question.
        answer[2..4].copy_from_slice(&[0x81, 0x80]);
        answer[4..12].copy_from_slice(&[0, 1, 0, u8::from(is_address), 0, 0, 0, 0]);
        if is_address {
            // The name of the question, type A, class IN, 60 s, 4 bytes.
            answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
            answer.extend(address.octets());
        }
        let _ = socket.send_to(&answer, from);
    }
}

/// Answers HTTPS requests one after the other.
fn answer_requests(listener: &TcpListener, config: &Arc<ServerConfig>, is_ended: &AtomicBool) {
    while !is_ended.load(Ordering::Relaxed) {
        match listener.accept() {
            // A client that does not trust the certificate closes the connection.
            Ok((stream, _)) => drop(answer_request(stream, config.clone())),
            Err(_) => std::thread::sleep(CHECK_INTERVAL),
        }
    }
}

fn answer_request(stream: TcpStream, config: Arc<ServerConfig>) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let connection = ServerConnection::new(config).unwrap();
    let mut stream = BufReader::new(StreamOwned::new(connection, stream));
    let mut found = "none".to_owned();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line)?;
        let (name, value) = match line.trim_end() {
            "" => break,
            line => line.split_once(": ").unwrap_or_default(),
        };
        if name.eq_ignore_ascii_case("authorization") {
            found = value.chars().rev().collect();
        }
    }
    let length = found.len();
    write!(
        stream.get_mut(),
        "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{found}"
    )?;
    stream.get_mut().flush()
}

/// Returns a create whose requests to [`NAME`] receive a secret.
fn sandbox_with_rule(address: IpAddr) -> Value {
    let inject = json!({
        "header": "Authorization", "secret": "${e2b.secrets.fleet-token}", "format": "Bearer ${SECRET}"
    });
    json!({
        "templateID": "base",
        "timeout": 600,
        "network": {
            "allowOut": [NAME],
            "dnsServers": [address],
            "rules": [{
                "match": { "host": NAME },
                "action": { "allow": true, "inject": [inject] }
            }]
        }
    })
}

/// Returns the answer to a request of a guest.
fn requested(laboratory: &Laboratory, client: &Client, id: &str) -> String {
    let script = format!("curl -s --max-time 20 https://{NAME}/");
    laboratory.sh(client, id, &script).unwrap()
}

/// Creates, replaces and removes a secret through three hosts, while a sandbox uses it.
pub fn a_secret_is_used_on_all_hosts_until_it_is_removed(laboratory: &Laboratory) {
    let started = Instant::now();
    let address: IpAddr = laboratory.server.parse().unwrap();
    let _servers = Servers::start(laboratory, address);
    let [first, second, third] = &laboratory.hosts[..] else {
        panic!("the laboratory has three hosts");
    };
    let [first_client, second_client] = [first, second].map(|host| laboratory.at(host));
    let create = sandbox_with_rule(address);
    // A secret must exist before a rule can name it.
    first_client.call("POST", "/sandboxes", &create).expect(400);
    let new = json!({ "name": "Fleet-Token", "value": "one" });
    first_client.call("POST", "/secrets", &new).expect(201);
    second_client.call("POST", "/secrets", &new).expect(409);
    let id = laboratory.only_on(third, || {
        let made = second_client.call("POST", "/sandboxes", &create);
        made.expect(201)["sandboxID"].as_str().unwrap().to_owned()
    });
    assert!(first_client.running_on(third).contains(&id));
    let front = laboratory.front();
    assert_eq!(requested(laboratory, &front, &id), "eno reraeB");
    let path = "/secrets/fleet-token";
    let value = json!({ "value": "two" });
    let changed = second_client.call("POST", path, &value).expect(200);
    assert!(!changed.to_string().contains("two"), "{changed}");
    assert_eq!(requested(laboratory, &front, &id), "owt reraeB");
    let third_client = laboratory.at(third);
    third_client.call("DELETE", path, &Value::Null).expect(204);
    for client in [&first_client, &second_client, &front] {
        assert_eq!(client.get("/secrets").expect(200), json!([]));
        client.call("POST", "/sandboxes", &create).expect(400);
    }
    // The proxy answers instead of the server.
    let without = requested(laboratory, &front, &id);
    assert!(!without.contains("reraeB"), "{without}");
    front.kill(&id).expect(204);
    report("use of a secret on all hosts", started.elapsed());
}
