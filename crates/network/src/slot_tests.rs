//! Tests that a slot created over netlink equals a slot created by `ip`, in network namespaces.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::program;
use crate::test_slot::in_slot;
use jiffy_engine_api::NetworkRules;
use serde_json::Value;
use std::thread;

/// Returns a configuration of slots, with IPv6 if `ipv6`.
fn config(ipv6: bool) -> SlotConfig {
    let default_policy = crate::test_slot::policy(&NetworkRules::default(), ipv6);
    SlotConfig {
        tag: "0a0b0c".to_owned(),
        range: "198.18.0.0/19".parse().unwrap(),
        mtu: 1400,
        connections: 4096,
        rules: Arc::new(SlotRules::new(&default_policy, 4096, true)),
        policies: Arc::default(),
        default_policy,
        logs_refusals: true,
    }
}

/// Executes commands of `ip`.
fn ip(commands: &str) {
    program::run("ip", &["-batch", "-"], commands).unwrap();
}

/// Runs `work` in another network namespace.
fn in_another<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let inside = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            work()
        };
        scope.spawn(inside).join().unwrap()
    })
}

/// Returns the output of `ip` without random and time-dependent values.
fn shown() -> Vec<Value> {
    let show = |what: &[&str]| {
        let output = program::run("ip", &[&["-d", "-j"], what].concat(), "").unwrap();
        let mut value: Value = serde_json::from_str(&output).unwrap_or_default();
        for entry in value.as_array_mut().into_iter().flatten() {
            let entry = entry.as_object_mut().unwrap();
            for name in ["ifindex", "link_index", "link_netnsid", "link", "operstate"] {
                entry.remove(name);
            }
            // The kernel updates carrier flags later.
            if let Some(flags) = entry.get_mut("flags").and_then(Value::as_array_mut) {
                let later = ["NO-CARRIER", "LOWER_UP", "linkdown"];
                flags.retain(|flag| !later.iter().any(|name| flag == name));
            }
        }
        // Neighbours are listed in the order of a hash table with a random seed.
        if let Some(entries) = value.as_array_mut() {
            entries.sort_by_key(Value::to_string);
        }
        value
    };
    vec![
        show(&["addr"]),
        show(&["link"]),
        show(&["-4", "route", "show", "table", "all"]),
        show(&["-6", "route", "show", "table", "all"]),
        show(&["neigh", "show", "nud", "permanent"]),
    ]
}

/// Returns `ip` commands that create the same slot as `configure` and `configure_host_end`: first
/// those in the slot's namespace, then those in the host's. `outside` is a thread id of the host's
/// namespace.
fn commands(config: &SlotConfig, number: u32, outside: i32) -> (String, String) {
    let (host, own) = config.pair(number);
    let name = config.name(number);
    let (mtu, one_queue) = (config.mtu, "numtxqueues 1 numrxqueues 1");
    let mut inside = format!(
        "link set lo up
         link set tap0 address 02:4a:49:46:46:02 mtu 1500 addrgenmode none
         link set tap0 up
         addr add 169.254.0.22/30 dev tap0
         neigh add 169.254.0.21 lladdr 02:4a:49:46:46:01 dev tap0 nud permanent
         link add up0 {one_queue} address 02:4a:49:46:46:03 mtu {mtu} type veth \
             peer name {name} {one_queue} address 02:4a:49:46:46:04 mtu {mtu} netns {outside}
         addr add {own}/31 dev up0
         link set up0 addrgenmode none
         link set up0 up
         route add default via {host} dev up0
         addr add fd6a:6966:6679::22/126 dev tap0 nodad
         neigh add fd6a:6966:6679::21 lladdr 02:4a:49:46:46:01 dev tap0 nud permanent\n"
    );
    let mut other = format!("link set {name} addrgenmode none\naddr add {host}/31 dev {name}\n");
    if config.ipv6() {
        let (host, own) = config.pair6(number);
        inside += &format!(
            "addr add {own}/127 dev up0 nodad
             neigh add {host} lladdr 02:4a:49:46:46:04 dev up0 nud permanent
             route add default via {host} dev up0\n"
        );
        other += &format!(
            "addr add {host}/127 dev {name} nodad
             neigh add {own} lladdr 02:4a:49:46:46:03 dev {name} nud permanent\n"
        );
    }
    (inside, other)
}

#[test]
fn a_slot_created_by_netlink_equals_a_slot_created_by_ip() {
    if !supports_ipv6() {
        eprintln!("skipped: this kernel has no IPv6");
        return;
    }
    for ipv6 in [false, true] {
        let config = config(ipv6);
        // Each slot is created in a new namespace. A second new namespace takes the role of the
        // host's.
        let by_ip = in_slot(|| {
            enable_forwarding(&config).unwrap();
            // `configure` also writes this setting; `ip` cannot.
            set(&format!("{IPV6_SYSCTL_DIR}/conf/{TAP}/disable_ipv6"), "0").unwrap();
            let slot = namespace::current().unwrap();
            in_another(|| {
                let (inside, other) = commands(&config, 7, nix::unistd::gettid().as_raw());
                let inside = in_namespace(&slot, || {
                    ip(&inside);
                    shown()
                });
                ip(&other);
                (inside, shown())
            })
        });
        let Some(by_ip) = by_ip else {
            return;
        };
        let by_netlink = in_slot(|| {
            enable_forwarding(&config).unwrap();
            let slot = namespace::current().unwrap();
            in_another(|| {
                let host = namespace::current().unwrap();
                let inside = in_namespace(&slot, || {
                    configure(&config, 7, host.as_fd()).unwrap();
                    shown()
                });
                configure_host_end(&config, 7).unwrap();
                (inside, shown())
            })
        });
        let by_netlink = by_netlink.unwrap();
        for (one, other) in by_ip.0.iter().zip(&by_netlink.0) {
            assert_eq!(pretty(one), pretty(other));
        }
        for (one, other) in by_ip.1.iter().zip(&by_netlink.1) {
            assert_eq!(pretty(one), pretty(other));
        }
        let addresses = pretty(&by_netlink.0[0]);
        assert!(addresses.contains("\"up0\"") && !addresses.contains("fe80:"));
    }
}

/// Formats a value with one line per field, so that a failed comparison is readable.
fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap()
}

/// Runs `work` on a thread in the given namespace.
fn in_namespace<T: Send>(namespace: &File, work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let inside = || {
            nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            work()
        };
        scope.spawn(inside).join().unwrap()
    })
}

#[test]
fn an_error_names_the_failed_change() {
    let message = in_slot(|| {
        let mut changes = RouteBatch::default();
        changes.add_default_route(LOOPBACK_INDEX, GATEWAY.into());
        changes.send().unwrap_err().to_string()
    });
    if let Some(message) = message {
        assert!(
            message.starts_with("adding a default route via 169.254.0.22 on link 1: "),
            "{message}"
        );
    }
}

#[test]
fn sandboxes_of_all_owners_without_rules_use_the_table_of_prepared_slots() {
    let config = config(true);
    let policy = |rules: &NetworkRules| crate::test_slot::policy(rules, true);
    let owned = NetworkRules {
        owner: Some("key".to_owned()),
        ..NetworkRules::default()
    };
    let rules = policy(&owned);
    assert_ne!(rules, config.default_policy);
    assert!(config.has_same_table(&rules, &config.default_policy));
    for other in [
        NetworkRules {
            internet: false,
            ..owned.clone()
        },
        NetworkRules {
            deny_out: vec!["9.9.9.9".to_owned()],
            ..owned.clone()
        },
        NetworkRules {
            egress_mbps: Some(1),
            ..owned
        },
    ] {
        assert!(!config.has_same_table(&policy(&other), &config.default_policy));
    }
}
