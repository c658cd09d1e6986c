//! Checks of rules by name and port, for the test of names in `network.rs`.
//!
//! The host's proxy accepts all connections to a port of such a rule (22). It resets a connection
//! that no rule permits (`ConnectionResetError`). The firewall rejects connections to other ports
//! (`ConnectionRefusedError`).

use crate::network::GREET;
use crate::support::network_probe::{call, python};
use crate::support::test_home::TestHome;
use serde_json::{Value, json};

/// Checks the rules with the port 22 of the sandbox `id`, also after a rollback and in a clone.
pub fn check_named_ports(test_home: &TestHome, id: &str, rules: &Value) {
    let say = |id: &str, what: &str| python(test_home, id, &format!("{GREET}\nprint({what})"));
    test_home.ok(&["snapshot", id, "--name", "unresolved"]);
    let (unresolved, resolved) = ("tcp('9.9.9.9', 22)", "tcp('a.git.example', 22)");
    assert_eq!(say(id, unresolved), "ConnectionResetError");
    // Names without this port, and other ports of the name, do not permit the address.
    let others = "resolve('good.example'), tcp('9.9.9.9', 22), http('a.git.example'), tcp('a.git.example', 7)";
    assert_eq!(
        say(id, others),
        "9.9.9.9 ConnectionResetError HTTP/1.1 ConnectionRefusedError"
    );
    let all = format!("{resolved}, {unresolved}, tcp('8.8.8.8', 22)");
    assert_eq!(say(id, &all), "internet internet ConnectionResetError");
    // A name must not lead to a private or special-purpose address (DNS rebinding). The lab
    // resolves names with `trap` and a digit to such an address. Port 22 of the lab's servers is
    // reached directly, without the host's proxy.
    let traps = "resolve('trap5.example'), tcp('trap5.example', 22), tcp('trap1.git.example', 22)";
    assert_eq!(
        say(id, traps),
        "168.63.129.16 ConnectionRefusedError ConnectionRefusedError"
    );
    let record = test_home.json(&["logs", id, "--network"]);
    let of_port = |line: &&Value| line["port"] == 22 && line["host"] == "a.git.example";
    let lines = record["connections"].as_array().unwrap().iter();
    let carried: Vec<&Value> = lines.filter(of_port).collect();
    assert!(
        carried
            .iter()
            .all(|line| line["address"] == "9.9.9.9" && line["verdict"] == "allowed")
            && !carried.is_empty(),
        "{record}"
    );
    // A denied range wins over the addresses of a name.
    let path = format!("/sandboxes/{id}/network");
    let mut denied = rules.clone();
    denied["denyOut"] = json!(["0.0.0.0/0", "9.9.0.0/16"]);
    assert_eq!(call(test_home, "PUT", &path, &denied).0, 204);
    assert_eq!(say(id, resolved), "ConnectionResetError");
    assert_eq!(call(test_home, "PUT", &path, rules).0, 204);
    assert_eq!(say(id, unresolved), "internet");
    // After a rollback and in a clone, no address is permitted until it is resolved again.
    test_home.ok(&["rollback", id, "unresolved"]);
    let copy = test_home.ok(&["fork", id]);
    for id in [id, &copy] {
        let again = format!("{unresolved}, {resolved}, {unresolved}");
        assert_eq!(say(id, &again), "ConnectionResetError internet internet");
    }
    test_home.ok(&["kill", &copy]);
}
