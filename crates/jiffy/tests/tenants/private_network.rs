//! Tests for private networks of two tenants: members find each other by name through the life of
//! their sandboxes.

use super::two_keys::TwoKeys;
use crate::support::lab::with_lab;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};

/// Answers each connection with the host name and the address of the client.
const SERVE: &str = r#"
import socket, threading
s = socket.create_server(("", 80))
open("/tmp/ready", "w").close()
while True:
    c, who = s.accept()
    c.sendall(f"{socket.gethostname()} {who[0]}\n".encode()); c.close()
"#;

/// Returns the answer of the server with this name or address.
const REACH: &str = r#"
import socket, sys
try: print(socket.create_connection((sys.argv[1], 80), 10).makefile().read().strip())
except OSError as e: print(type(e).__name__)
"#;

/// Daemon with two tenants in a simulated internet.
struct Lab {
    keys: TwoKeys,
}

impl Lab {
    /// Creates a sandbox without internet access.
    fn create(&self, key: &str, name: &str) -> String {
        let create = [
            "create",
            "--name",
            name,
            "--join",
            "lab",
            "--network",
            "off",
        ];
        self.keys.ok(key, &create)
    }

    /// Starts a server in a sandbox.
    fn serve(&self, key: &str, id: &str) {
        let begin = "nohup python3 -c \"$0\" >/dev/null 2>&1 & \
                     while [ ! -e /tmp/ready ]; do sleep 0.05; done";
        let user = ["exec", "--user", "root", id, "--", "sh", "-c", begin, SERVE];
        self.keys.ok(key, &user);
    }

    fn reach(&self, key: &str, from: &str, to: &str) -> String {
        self.keys
            .ok(key, &["exec", from, "--", "python3", "-c", REACH, to])
    }

    /// Returns the address of a sandbox in its network.
    fn address(&self, key: &str, id: &str) -> String {
        let path = format!("/sandboxes/{id}");
        let (status, info) = self.keys.http(key, "GET", &path, &Value::Null);
        assert_eq!(
            (status, &info["network"]["join"]),
            (200, &json!("lab")),
            "{info}"
        );
        info["network"]["address"].as_str().unwrap().to_owned()
    }
}

#[jiffy_test(engine = "each", lab)]
fn members_of_a_private_network_find_each_other_by_name_through_their_lives() {
    with_lab(|_| {
        let options = ["--network", "on", "--warm-pool", "0"];
        let mut lab = Lab {
            keys: TwoKeys::new(&options),
        };
        let (alice, mallory) = (lab.keys.alice.clone(), lab.keys.mallory.clone());
        let (web, db) = (lab.create(&alice, "web"), lab.create(&alice, "db"));
        lab.serve(&alice, &web);
        let own = lab.address(&alice, &db);
        let answer = |id: &str| format!("{id} {own}");
        let at_web = lab.address(&alice, &web);
        for to in ["web", "web.net.jiffy.internal", &web, &at_web] {
            assert_eq!(lab.reach(&alice, &db, to), answer(&web), "{to}");
        }
        let shown = lab.keys.ok(&alice, &["inspect", &web]);
        assert!(shown.contains(&format!("lab, as {at_web}")), "{shown}");

        // The network of the same name of another key is another network.
        let probe = lab.create(&mallory, "probe");
        for to in ["web", "db.net.jiffy.internal"] {
            assert_eq!(lab.reach(&mallory, &probe, to), "gaierror", "{to}");
        }
        for to in [&at_web, &own] {
            assert_eq!(lab.reach(&mallory, &probe, to), "ConnectionRefusedError");
        }

        // A fork joins with an address of its own, under its id and its new name.
        let fork = lab.keys.ok(&alice, &["fork", &web]);
        let fork = fork.lines().next().unwrap().to_owned();
        assert_ne!(lab.address(&alice, &fork), at_web);
        assert_eq!(lab.reach(&alice, &db, &fork), answer(&fork));
        lab.keys.ok(&alice, &["rename", &fork, "web2"]);
        assert_eq!(lab.reach(&alice, &db, "web2"), answer(&fork));
        assert_eq!(lab.reach(&alice, &db, "web"), answer(&web));

        // A paused sandbox has no name. It keeps its address.
        lab.keys.ok(&alice, &["pause", &web]);
        assert_eq!(lab.reach(&alice, &db, "web.net.jiffy.internal"), "gaierror");
        assert_eq!(lab.reach(&alice, &db, &at_web), "ConnectionRefusedError");
        lab.keys.ok(&alice, &["resume", &web]);
        assert_eq!(lab.reach(&alice, &db, "web"), answer(&web));
        assert_eq!(lab.address(&alice, &web), at_web);

        let snapshot = lab.keys.ok(&alice, &["snapshot", &web]);
        lab.keys.ok(&alice, &["rollback", &web, &snapshot]);
        assert_eq!(lab.reach(&alice, &db, &at_web), answer(&web));

        lab.keys.restart(&options);
        for (to, id) in [("web", &web), ("web2", &fork)] {
            assert_eq!(lab.reach(&alice, &db, to), answer(id), "{to}");
        }
        assert_eq!(
            lab.reach(&mallory, &probe, &at_web),
            "ConnectionRefusedError"
        );

        // Denied members stay denied.
        let rules = json!({ "denyOut": [at_web], "allow_internet_access": false });
        let path = format!("/sandboxes/{db}/network");
        let (status, body) = lab.keys.http(&alice, "PUT", &path, &rules);
        assert_eq!(status, 204, "{body}");
        assert_eq!(lab.reach(&alice, &db, "web"), "ConnectionRefusedError");
        assert_eq!(lab.reach(&alice, &db, "web2"), answer(&fork));
        lab.keys.ok(&alice, &["kill", &fork]);
        assert_eq!(
            lab.reach(&alice, &db, "web2.net.jiffy.internal"),
            "gaierror"
        );
    });
}
