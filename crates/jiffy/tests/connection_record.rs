//! Tests for connection records of real guests in a simulated internet.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::support::lab::HOST;
use crate::support::network_probe::{create, networked, python, reach};
use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};
use std::time::Instant;

/// Returns the connection record of a sandbox.
fn connection_record(test_home: &TestHome, id: &str) -> Value {
    test_home.json(&["logs", id, "--network"])
}

/// Waits for a record line that contains all of `parts`, and returns it.
fn line(test_home: &TestHome, id: &str, parts: &Value) -> Value {
    let parts = parts.as_object().unwrap();
    wait_for(&format!("a line with {parts:?}"), || {
        let all = connection_record(test_home, id);
        let lines = all["connections"].as_array().unwrap();
        let fits = |line: &&Value| parts.iter().all(|(name, value)| line[name] == *value);
        lines.iter().find(fits).cloned()
    })
}

/// Sends the given number of bytes, and reads them back after the greeting.
const EXCHANGE: &str = r#"
def exchange(host, port, greeting, count):
    with socket.create_connection((host, port), 20) as s:
        s.sendall(greeting + b"x" * count)
        s.shutdown(socket.SHUT_WR)
        total = 0
        while data := s.recv(65536): total += len(data)
        return total
"#;

#[jiffy_test(lab)]
fn connections_are_recorded_with_their_bytes_and_denials_with_their_reason() {
    networked(&[], |test_home, _| {
        let rules = json!({ "allowOut": ["9.9.9.9", "good.example"], "denyOut": ["0.0.0.0/0"] });
        let id = create(test_home, json!({ "network": rules }));
        let say = |what: &str| python(test_home, &id, &format!("{EXCHANGE}\nprint({what})"));

        // A connection to an address: the kernel counts packets with their headers.
        let back: u64 = say("exchange('9.9.9.9', 80, b'', 100000)").parse().unwrap();
        let direct = line(
            test_home,
            &id,
            &json!({ "address": "9.9.9.9", "port": 80, "host": null, "verdict": "allowed" }),
        );
        let (out, inward) = (direct["bytesOut"].as_u64(), direct["bytesIn"].as_u64());
        let (out, inward) = (out.unwrap(), inward.unwrap());
        assert!((100_000..120_000).contains(&out), "{direct}");
        assert!((back..back + 20_000).contains(&inward), "{direct}");
        assert_eq!(
            (&direct["protocol"], &direct["times"]),
            (&json!("tcp"), &json!(1))
        );

        // A connection to a name: its line has the requested name, the destination, and the bytes
        // that the proxy transferred, without headers of packets.
        let head = "GET / HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n";
        // The guest's Python program decodes each `\r\n` to two bytes.
        let length = head.replace("\\r\\n", "  ").len() as u64;
        let back: u64 = say(&format!("exchange('8.8.8.8', 80, b'{head}', 5000)"))
            .parse()
            .unwrap();
        let named = line(
            test_home,
            &id,
            &json!({ "host": "good.example", "protocol": "tcp" }),
        );
        assert_eq!(
            (&named["address"], &named["verdict"]),
            (&json!("9.9.9.9"), &json!("allowed"))
        );
        assert_eq!(
            (named["bytesOut"].as_u64(), named["bytesIn"].as_u64()),
            (Some(length + 5000), Some(back))
        );
        say("exchange('8.8.8.8', 80, b'GET / HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n', 0)");
        let evil = line(test_home, &id, &json!({ "host": "evil.example" }));
        assert_eq!(
            (&evil["address"], &evil["verdict"], &evil["reason"]),
            (&json!("8.8.8.8"), &json!("refused"), &json!("rules"))
        );

        // Connections that rules deny have one line, regardless of the number of attempts.
        assert_eq!(
            say("[tcp('8.8.8.8', 7) for _ in range(3)][0]"),
            "ConnectionRefusedError"
        );
        let refused = json!({ "address": "8.8.8.8", "port": 7, "verdict": "refused", "reason": "rules", "times": 3 });
        assert_eq!(line(test_home, &id, &refused)["bytesOut"], Value::Null);

        // Only the four connections above have lines. The guest's packets to the proxy and to the
        // name server have none.
        let resolve = "\ntry: socket.gethostbyname('some.example')\nexcept OSError: pass";
        python(test_home, &id, resolve);
        line(
            test_home,
            &id,
            &json!({ "protocol": "dns", "host": "some.example", "question": "A", "verdict": "allowed" }),
        );
        let all = connection_record(test_home, &id);
        let lines = all["connections"].as_array().unwrap();
        let others = lines.iter().filter(|l| l["protocol"] != "dns").count();
        assert_eq!(others, 4, "{all}");
        // The record is complete, and the host's kernel provides all information. `untold` lists
        // missing information.
        assert_eq!((&all["missing"], &all["untold"]), (&json!(0), &json!([])));
        let shown = test_home.ok(&["logs", &id, "--network"]);
        assert!(shown.contains("refused (rules)  8.8.8.8:7 "), "{shown}");

        // A pause retains the record. A new daemon starts a new record with the open connections.
        test_home.ok(&["pause", &id]);
        test_home.ok(&["resume", &id]);
        assert_eq!(
            line(test_home, &id, &json!({ "bytesOut": out }))["bytesIn"],
            inward
        );
        line(test_home, &id, &refused);
        test_home.kill_daemon();
        let after = connection_record(test_home, &id);
        assert!(after["since"].as_str() > all["since"].as_str(), "{after}");
        assert_eq!(after["connections"], json!([]));
        say("tcp('8.8.8.8', 7)");
        line(
            test_home,
            &id,
            &json!({ "address": "8.8.8.8", "port": 7, "times": 1 }),
        );
    });
}

#[jiffy_test(lab)]
fn denied_questions_and_addresses_of_the_host_are_recorded_as_refused() {
    networked(&[], |test_home, _| {
        let closed = create(test_home, json!({ "allow_internet_access": false }));
        let resolve = "\ntry: socket.gethostbyname('secret.example')\nexcept OSError: pass";
        python(test_home, &closed, resolve);
        let request = json!({ "protocol": "dns", "host": "secret.example", "question": "A", "verdict": "refused" });
        assert_eq!(line(test_home, &closed, &request)["reason"], "rules");

        let open = test_home.ok(&["create"]);
        assert_eq!(reach(test_home, &open, HOST), "ConnectionRefusedError");
        line(
            test_home,
            &open,
            &json!({ "address": HOST, "verdict": "refused", "reason": "host" }),
        );
        // Ports of the guest's gateway, whose address is inside the slot, also refuse connections.
        assert_eq!(
            reach(test_home, &open, "169.254.0.22"),
            "ConnectionRefusedError"
        );
        line(
            test_home,
            &open,
            &json!({ "address": "169.254.0.22", "port": 80, "reason": "rules" }),
        );
    });
}

/// Returns the processor time of a process in seconds.
fn processor_time(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let ticks: Vec<u64> = fields
        .split(' ')
        .skip(11)
        .take(2)
        .map(|t| t.parse().unwrap())
        .collect();
    // USER_HZ is always 100 per second.
    (ticks[0] + ticks[1]) as f64 / 100.0
}

#[jiffy_test(lab)]
fn a_flood_of_denied_packets_does_not_fill_the_record_or_a_processor() {
    networked(&[], |test_home, _| {
        let id = test_home.ok(&["create"]);
        assert_eq!(reach(test_home, &id, "9.9.9.9"), "internet");
        line(test_home, &id, &json!({ "address": "9.9.9.9" }));
        let flood = "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
            began, n = time.monotonic(), 0\n\
            while time.monotonic() - began < 5:\n\
            \x20   n += 1\n\
            \x20   try: s.sendto(b'x', ('10.0.%d.%d' % (n >> 8 & 255, n & 255), n % 60000 + 1))\n\
            \x20   except OSError: pass\n\
            print(n)";
        let (before, began) = (processor_time(test_home.daemon()), Instant::now());
        let sent: u64 = python(test_home, &id, flood).parse().unwrap();
        let took = began.elapsed().as_secs_f64();
        let share = (processor_time(test_home.daemon()) - before) / took;
        let all = connection_record(test_home, &id);
        let lines = all["connections"].as_array().unwrap();
        let missing = all["missing"].as_u64().unwrap();
        eprintln!(
            "{sent} packets: {} lines, {missing} more, {:.1} % of a processor",
            lines.len(),
            share * 100.0
        );
        // A record has at most 1,000 lines.
        assert!(lines.len() <= 1000 && missing > 1000, "{all}");
        assert!(share < 0.25, "{share}");
        // Earlier lines still exist.
        line(
            test_home,
            &id,
            &json!({ "address": "9.9.9.9", "verdict": "allowed" }),
        );
    });
}
