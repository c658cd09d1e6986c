//! A webhook that is created on one host, and receives an event of another host.

use super::client::in_network;
use super::laboratory::{Host, Laboratory, report};
use crate::support::wait_for;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

/// Port of the server of the webhook.
const PORT: u16 = 8099;

/// Reads a request, and answers it. Returns its body.
fn received(stream: TcpStream) -> Value {
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let (name, value) = match line.trim_end() {
            "" => break,
            line => line.split_once(": ").unwrap_or_default(),
        };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let answer = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n";
    reader.get_mut().write_all(answer).unwrap();
    serde_json::from_slice(&body).unwrap()
}

/// Creates a webhook on a host, and ends a sandbox on another host.
pub fn a_webhook_receives_the_events_of_all_hosts(laboratory: &Laboratory) {
    let started = Instant::now();
    let address = laboratory.server.clone();
    let listener = in_network(laboratory.network, || {
        TcpListener::bind((&*address, PORT)).unwrap()
    });
    listener.set_nonblocking(true).unwrap();
    let front = laboratory.front();
    let id = front.created();
    let has_sandbox = |host: &&Host| front.running_on(host).contains(&id);
    let host = laboratory.hosts.iter().find(has_sandbox).unwrap();
    let others = laboratory.others(host);
    let [first, second] = [&others[0], &others[1]].map(|other| laboratory.at(other));
    let new = json!({
        "name": "fleet", "url": format!("http://{address}:{PORT}/"), "signatureSecret": "secret",
        "events": ["sandbox.lifecycle.killed"]
    });
    let made = first.call("POST", "/events/webhooks", &new).expect(201);
    let path = format!("/events/webhooks/{}", made["id"].as_str().unwrap());
    front.kill(&id).expect(204);
    let (stream, _) = wait_for("the event", || listener.accept().ok());
    stream.set_nonblocking(false).unwrap();
    let event = received(stream);
    assert_eq!(event["sandboxId"], id.as_str(), "{event}");
    assert_eq!(event["type"], "sandbox.lifecycle.killed");
    wait_for("the end of the delivery", || {
        let deliveries = second.get(&format!("{path}/deliveries")).expect(200);
        (deliveries == json!([])).then_some(())
    });
    second.call("DELETE", &path, &Value::Null).expect(200);
    for host in &laboratory.hosts {
        let webhooks = laboratory.at(host).get("/events/webhooks").expect(200);
        assert_eq!(webhooks, json!([]));
    }
    report("event of another host", started.elapsed());
}
