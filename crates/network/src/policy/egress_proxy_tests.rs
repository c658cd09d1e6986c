//! Tests of rules that name an egress proxy.

#![allow(clippy::unwrap_used)]
use super::*;

/// Returns rules with an egress proxy.
fn with_proxy(address: &str, allow: &[&str], deny: &[&str]) -> NetworkRules {
    NetworkRules {
        egress_proxy: Some(EgressProxy {
            address: address.to_owned(),
            tls: None,
            sealed_credentials: None,
        }),
        allow_out: allow.iter().map(|&entry| entry.to_owned()).collect(),
        deny_out: deny.iter().map(|&entry| entry.to_owned()).collect(),
        ..NetworkRules::default()
    }
}

#[test]
fn no_packet_leaves_directly_if_rules_name_an_egress_proxy() {
    let reach = HostReachability {
        granted: vec!["10.5.0.0/16".parse().unwrap()],
        uses_proxies: true,
        ..HostReachability::default()
    };
    for (allow, deny) in [
        (&[][..], &[][..]),
        (&["9.9.9.9", "a.example:22"], &["0.0.0.0/0"]),
    ] {
        let rules = with_proxy("proxy.example:1080", allow, deny);
        let policy = EgressPolicy::new(&rules, &reach).unwrap();
        assert!(policy.has_names());
        // At most 10 connections, and refused packets are not recorded.
        let script = policy.script(10, false);
        let chain = |name: &str| {
            let text = script
                .split(&format!("  chain {name} {{\n"))
                .nth(1)
                .unwrap();
            text.split("  }\n").next().unwrap()
        };
        // The chain `out` is for packets of the guest that leave directly, `back` for packets to
        // the guest. `by_name` redirects connections to the proxy that decides by name.
        assert!(!chain("out").contains("accept") && chain("out").ends_with("goto refuse\n"));
        assert_eq!(chain("back"), "    drop\n");
        // All TCP connections are redirected to the proxy of the slot (port 3443), which connects
        // through the egress proxy.
        let by_name = chain("by_name");
        assert!(
            by_name.ends_with("meta l4proto tcp redirect to :3443\n"),
            "{by_name}"
        );
        // The DNS server remains reachable over TCP, also if the host's owner opened ranges.
        assert!(
            by_name.contains("ip daddr 169.254.0.22 return"),
            "{by_name}"
        );
        assert_eq!(
            policy.records_addresses_of("other.example"),
            deny.is_empty()
        );
    }
}

#[test]
fn an_egress_proxy_has_a_permitted_address() {
    let reach = HostReachability {
        granted: vec!["10.5.0.0/16".parse().unwrap()],
        uses_proxies: true,
        ..HostReachability::default()
    };
    let check = |address| EgressPolicy::new(&with_proxy(address, &[], &[]), &reach).map(drop);
    for good in ["proxy.example:1080", "9.9.9.9:1080", "10.5.0.1:1080"] {
        assert_eq!(check(good), Ok(()), "{good}");
    }
    for bad in [
        "10.6.0.1:1080",
        "127.0.0.1:1080",
        "169.254.169.254:80",
        "169.254.0.22:53",
        "[::1]:1080",
        // The host has no IPv6.
        "[2600::1]:1080",
        "proxy.example",
        ":1080",
    ] {
        assert_eq!(check(bad), Err(RulesError::Proxy(bad.to_owned())), "{bad}");
    }
    let none = HostReachability::default();
    let refused = EgressPolicy::new(&with_proxy("proxy.example:1080", &[], &[]), &none);
    assert_eq!(refused, Err(RulesError::Proxies));
}
