//! Tests of egress policies: verdicts on addresses and names, and the resulting `nft` scripts.

#![allow(clippy::unwrap_used)]
use super::*;
use jiffy_engine_api::NetworkMembership;
// Arguments of `EgressPolicy::script`: a limit of connections, and logs of rejected packets.
const CONNECTIONS: u32 = 10;
const LOGGED: bool = true;

/// Returns rules with these lists of allowed and denied destinations.
fn rules(allow: &[&str], deny: &[&str], internet: bool) -> NetworkRules {
    let own = |list: &[&str]| list.iter().map(|&s| s.to_owned()).collect();
    NetworkRules {
        internet,
        allow_out: own(allow),
        deny_out: own(deny),
        ..NetworkRules::default()
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn the_internet_is_open_and_private_ranges_are_not() {
    let policy = EgressPolicy::new(&NetworkRules::default(), &HostReachability::default()).unwrap();
    assert!(policy.allows(ip("1.1.1.1")) && policy.reaches_anything());
    for never in [
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "224.0.0.1",
        "255.255.255.255",
        "198.18.0.3",
        "0.0.0.0",
        "168.63.129.16",
        "192.0.2.1",
        "198.51.100.1",
        "203.0.113.1",
        "::1",
        "2001:db8::1",
    ] {
        assert!(!policy.allows(ip(never)), "{never}");
    }
}

#[test]
fn allowed_addresses_win_over_denied_ones() {
    let policy = EgressPolicy::new(
        &rules(&["9.9.9.9"], &["0.0.0.0/0"], true),
        &HostReachability::default(),
    )
    .unwrap();
    assert!(policy.allows(ip("9.9.9.9")) && !policy.allows(ip("9.9.9.8")));
    let closed = EgressPolicy::new(&rules(&[], &[], false), &HostReachability::default()).unwrap();
    assert!(!closed.allows(ip("9.9.9.9")) && !closed.reaches_anything());
    let some = EgressPolicy::new(
        &rules(&["9.9.9.0/24"], &["9.9.9.9"], false),
        &HostReachability::default(),
    )
    .unwrap();
    assert!(some.allows(ip("9.9.9.9")) && !some.allows(ip("8.8.8.8")));
}

#[test]
fn only_the_hosts_owner_opens_private_ranges() {
    let granted = HostReachability {
        granted: vec![
            "10.5.0.0/16".parse().unwrap(),
            "fd00:5::/32".parse().unwrap(),
        ],
        ipv6: true,
        ..HostReachability::default()
    };
    let open = EgressPolicy::new(&NetworkRules::default(), &granted).unwrap();
    assert!(open.allows(ip("10.5.1.1")) && !open.allows(ip("10.6.1.1")));
    assert!(open.allows(ip("fd00:5::1")) && !open.allows(ip("fd00:6::1")));
    let script = open.script(CONNECTIONS, LOGGED);
    for one in [
        "8000::/1 } ip6 daddr != { fd00:5::/32 } goto refuse",
        "224.0.0.0/3 } ip daddr != { 10.5.0.0/16 } goto refuse",
    ] {
        assert!(script.contains(one), "{script}");
    }
    let inside = EgressPolicy::new(&rules(&["10.5.1.0/24"], &[], false), &granted).unwrap();
    assert!(inside.allows(ip("10.5.1.1")) && !inside.allows(ip("10.5.2.1")));
    let denied = EgressPolicy::new(&rules(&[], &["10.5.1.0/24"], true), &granted).unwrap();
    assert!(!denied.allows(ip("10.5.1.1")));
    let outside = EgressPolicy::new(&rules(&["10.6.1.0/24"], &[], true), &granted);
    assert_eq!(outside, Err(RulesError::Private("10.6.1.0/24".into())));
    // A wider range permits its public part.
    let all = EgressPolicy::new(
        &rules(&["0.0.0.0/0"], &[], false),
        &HostReachability::default(),
    )
    .unwrap();
    assert!(all.allows(ip("1.1.1.1")) && !all.allows(ip("10.6.1.1")));
}

#[test]
fn all_of_ipv6_permits_no_ipv4() {
    let six = HostReachability {
        ipv6: true,
        ..HostReachability::default()
    };
    let allowed = EgressPolicy::new(&rules(&["::/0"], &[], false), &six).unwrap();
    assert!(allowed.allows(ip("2600::1")) && !allowed.allows(ip("1.1.1.1")));
    let denied = EgressPolicy::new(&rules(&[], &["::/0"], true), &six).unwrap();
    assert!(!denied.allows(ip("2600::1")) && !denied.allows(ip("1.1.1.1")));
    let four = HostReachability::default();
    let refused = EgressPolicy::new(&rules(&["::/0"], &[], false), &four).unwrap_err();
    assert_eq!(refused, RulesError::NoIpv6("::/0".into()));
}

#[test]
fn rules_that_cannot_be_enforced_are_refused() {
    let refused = |rules| EgressPolicy::new(&rules, &HostReachability::default()).unwrap_err();
    let name = refused(rules(&["*."], &[], true));
    assert_eq!(name, RulesError::Name("*.".into()));
    let six = refused(rules(&["2a00:5::/32"], &[], true));
    assert_eq!(six, RulesError::NoIpv6("2a00:5::/32".into()));
    for special in [
        "203.0.113.7",
        "168.63.129.16",
        "2001:db8::/32",
        "192.88.99.1/32",
    ] {
        let refused = refused(rules(&[special], &[], true));
        assert_eq!(refused, RulesError::Private(special.into()));
    }
    let server = NetworkRules {
        dns_servers: vec![ip("127.0.0.1")],
        ..NetworkRules::default()
    };
    assert_eq!(refused(server), RulesError::NameServer(ip("127.0.0.1")));
    let server = NetworkRules {
        dns_servers: vec![ip("2600::1")],
        ..NetworkRules::default()
    };
    assert_eq!(refused(server), RulesError::NameServer(ip("2600::1")));
}

#[test]
fn naming_a_name_server_permits_questions_to_it_and_nothing_else() {
    // This example is in the documentation of E2B's SDKs.
    let named = NetworkRules {
        dns_servers: vec![ip("1.1.1.1")],
        ..rules(&["api.example.com"], &["0.0.0.0/0"], true)
    };
    let reach = HostReachability::default();
    let policy = EgressPolicy::new(&named, &reach).unwrap();
    let host = Upstreams::in_file("/nonexistent");
    assert_eq!(policy.upstreams(&host), [(ip("1.1.1.1"), 53).into()]);
    assert!(policy.may_resolve("api.example.com") && !policy.may_resolve("other.example"));
    assert!(!policy.allows(ip("1.1.1.1")));
    let closed = NetworkRules {
        dns_servers: vec![ip("1.1.1.1")],
        ..rules(&[], &[], false)
    };
    let closed = EgressPolicy::new(&closed, &reach).unwrap();
    assert!(!closed.may_resolve("api.example.com") && !closed.allows(ip("1.1.1.1")));
}

#[test]
fn overlapping_lists_become_disjoint_sets() {
    let rules = rules(&["9.9.9.9", "9.9.9.0/24", "9.9.9.9/8"], &[], true);
    let policy = EgressPolicy::new(&rules, &HostReachability::default());
    let script = policy.unwrap().script(CONNECTIONS, LOGGED);
    assert!(script.contains("ip daddr { 9.0.0.0/8 } accept"), "{script}");
    assert!(script.contains("ip saddr { 9.0.0.0/8 } accept"), "{script}");
}

#[test]
fn names_decide_if_addresses_do_not() {
    let policy = EgressPolicy::new(
        &rules(&["*.example.com", "9.9.9.9"], &["0.0.0.0/0"], true),
        &HostReachability::default(),
    );
    let policy = policy.unwrap();
    assert!(policy.allows_name("a.example.com", 443) && !policy.allows_name("example.com", 443));
    // Any name may be resolved, because addresses are permitted, too.
    assert!(policy.may_resolve("other.example") && !policy.allows(ip("8.8.8.8")));
    let script = policy.script(CONNECTIONS, LOGGED);
    assert!(
        script.contains("tcp dport 443 redirect to :3443"),
        "{script}"
    );
    let only = EgressPolicy::new(
        &rules(&["a.example"], &[], false),
        &HostReachability::default(),
    )
    .unwrap();
    assert!(only.may_resolve("A.example.") && !only.may_resolve("secret.evil.example"));
    // A permitted name may resolve to any public address.
    assert!(only.permits_by_name(ip("8.8.8.8")));
    for never in ["10.0.0.1", "169.254.169.254", "fd00::1", "2600::1"] {
        assert!(!only.permits_by_name(ip(never)));
    }
    // If all addresses are permitted, names need not be checked.
    let open = EgressPolicy::new(
        &rules(&["a.example"], &[], true),
        &HostReachability::default(),
    )
    .unwrap();
    assert!(!open.script(CONNECTIONS, LOGGED).contains("redirect"));
}

#[test]
fn a_host_with_ipv6_permits_public_ipv6_addresses() {
    let six = HostReachability {
        ipv6: true,
        ..HostReachability::default()
    };
    let open = EgressPolicy::new(&NetworkRules::default(), &six).unwrap();
    assert!(open.allows(ip("2600::1")) && open.allows(ip("2a00::1")));
    for never in [
        "::1",
        "::",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2001::1",
        "2002:a00:1::",
        "fd00::1",
        "fe80::1",
        "fec0::1",
        "ff02::1",
        "4000::1",
    ] {
        assert!(!open.allows(ip(never)), "{never}");
    }
    let some = EgressPolicy::new(&rules(&["2600::/32"], &["0.0.0.0/0"], true), &six).unwrap();
    assert!(
        some.allows(ip("2600::1")) && !some.allows(ip("2a00::1")) && !some.allows(ip("9.9.9.9"))
    );
    let all = EgressPolicy::new(&rules(&["0.0.0.0/0"], &[], false), &six).unwrap();
    assert!(all.allows(ip("2a00::1")) && all.allows(ip("9.9.9.9")));
    let but = EgressPolicy::new(&rules(&["a.example"], &["2600::1"], true), &six).unwrap();
    assert!(!but.allows(ip("2600::1")) && but.allows(ip("2600::2")));
    let script = but.script(CONNECTIONS, LOGGED);
    for one in [
        "    meta nfproto ipv4 return",
        "    ip6 daddr != { 2600::1/128 } return",
    ] {
        assert!(script.contains(one), "{script}");
    }
    let private = EgressPolicy::new(&rules(&["fd00::/8"], &[], true), &six);
    assert_eq!(private, Err(RulesError::Private("fd00::/8".into())));
}

#[test]
fn the_control_plane_requires_an_owner_and_its_name_in_the_rules() {
    let of = |owner: Option<&str>, allow: &[&str], deny: &[&str], internet| {
        let rules = NetworkRules {
            owner: owner.map(str::to_owned),
            ..rules(allow, deny, internet)
        };
        EgressPolicy::new(&rules, &HostReachability::default()).unwrap()
    };
    let to_proxy = "ip daddr 169.254.0.22 tcp dport 80 redirect to :3180";
    for (deny, internet) in [(&[][..], true), (&[], false), (&["0.0.0.0/0"], true)] {
        let named = of(Some("k"), &["API.jiffy.internal."], deny, internet);
        assert_eq!(named.control_plane(), Some("k"));
        assert!(named.has_names() && named.allows_name("api.jiffy.internal", 80));
        assert!(named.script(CONNECTIONS, LOGGED).contains(to_proxy));
        // The control plane's name permits no other name and no DNS question about another name.
        assert!(!named.allows_name("other.jiffy.internal", 80));
        assert_eq!(named.may_resolve("a.example"), internet && deny.is_empty());
        assert!(!named.allows(ip("169.254.0.22")) && !named.permits_by_name(ip("127.0.0.1")));
        let others = [
            of(None, &["api.jiffy.internal"], deny, internet),
            of(
                Some("k"),
                &["*.internal", "*.jiffy.internal"],
                deny,
                internet,
            ),
            of(Some("k"), &[], deny, internet),
        ];
        for other in others {
            assert_eq!(other.control_plane(), None);
            assert!(!other.allows_name("api.jiffy.internal", 80));
            assert!(!other.script(CONNECTIONS, LOGGED).contains(to_proxy));
        }
    }
}

#[test]
fn a_name_with_a_port_permits_its_addresses_at_that_port() {
    let reach = HostReachability::default();
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    let rules = rules(
        &["git.example:22", "*.db.example:5432", "9.9.9.9"],
        &["0.0.0.0/0", "8.8.8.0/24"],
        true,
    );
    let policy = EgressPolicy::new(&rules, &reach).unwrap();
    assert!(policy.permits_resolved("git.example", at("9.9.9.8:22")));
    assert!(policy.permits_resolved("a.db.example", at("9.9.9.8:5432")));
    for (name, address) in [
        ("git.example", "9.9.9.8:5432"),
        ("git.example", "9.9.9.8:443"),
        ("other.example", "9.9.9.8:22"),
        ("api.jiffy.internal", "9.9.9.8:22"),
        // A denied range takes precedence over a name, unless the range has all addresses.
        ("git.example", "8.8.8.8:22"),
        // A name must not lead to a private address (DNS rebinding).
        ("git.example", "10.0.0.1:22"),
        ("git.example", "169.254.169.254:22"),
        ("git.example", "169.254.0.22:22"),
        ("git.example", "127.0.0.1:22"),
        ("git.example", "[2600::1]:22"),
        ("git.example", "[::ffff:10.0.0.1]:22"),
    ] {
        assert!(
            !policy.permits_resolved(name, at(address)),
            "{name} {address}"
        );
    }
    assert!(policy.records_addresses_of("GIT.example.") && policy.has_resolved_port(22));
    assert!(!policy.records_addresses_of("other.example") && !policy.has_resolved_port(443));
    assert!(!policy.allows_name("git.example", 443) && !policy.allows(ip("9.9.9.8")));
    let script = policy.script(CONNECTIONS, LOGGED);
    let chain = script.split("chain by_name").nth(1).unwrap();
    let position = |text: &str| {
        chain
            .find(text)
            .unwrap_or_else(|| panic!("{text}: {chain}"))
    };
    // Connections to addresses that a rule permits do not pass through the proxy. With rules for
    // headers, this does not apply to ports 80 and 443.
    assert!(position("{ 9.9.9.9/32 } return") < position("tcp dport 22 redirect to :3443"));
    assert!(
        chain.contains("tcp dport 5432 redirect to :3443"),
        "{chain}"
    );
    assert!(
        !chain.contains("tcp dport 443") && !chain.contains("tcp dport 80"),
        "{chain}"
    );
    for bad in [
        "git.example:0",
        "git.example:70000",
        "9.9.9.9:22",
        "api.jiffy.internal:80",
    ] {
        let refused = EgressPolicy::new(&self::rules(&[bad], &[], true), &reach);
        assert_eq!(refused, Err(RulesError::Name(bad.to_owned())));
    }
}

#[test]
fn only_names_with_ports_permit_questions_for_them_only() {
    let only = EgressPolicy::new(
        &rules(&["git.example:22", "web.example:443"], &[], false),
        &HostReachability::default(),
    );
    let only = only.unwrap();
    assert!(only.may_resolve("git.example") && !only.may_resolve("secret.evil.example"));
    assert!(only.allows_name("web.example", 443) && !only.allows_name("web.example", 80));
    assert!(only.has_names() && only.reaches_anything());
    let script = only.script(CONNECTIONS, LOGGED);
    assert!(
        script.contains("tcp dport 443 redirect to :3443"),
        "{script}"
    );
}

#[test]
fn headers_and_names_with_ports_are_redirected_together() {
    let reach = HostReachability {
        adds_headers: true,
        ..HostReachability::default()
    };
    let rules = with_headers(&["9.9.9.9", "git.example:22"], &["0.0.0.0/0"]);
    let policy = EgressPolicy::new(&rules, &reach).unwrap();
    let script = policy.script(CONNECTIONS, !LOGGED);
    let chain = script.split("chain by_name").nth(1).unwrap();
    let position = |text: &str| {
        chain
            .find(text)
            .unwrap_or_else(|| panic!("{text}: {chain}"))
    };
    let (web, allowed) = (
        position("dport 443 redirect"),
        position("9.9.9.9/32 } return"),
    );
    assert!(
        web < allowed && allowed < position("dport 22 redirect"),
        "{chain}"
    );
    assert_eq!(chain.matches("redirect").count(), 3);
}

/// Returns rules that add headers to requests to `a.example`.
fn with_headers(allow: &[&str], deny: &[&str]) -> NetworkRules {
    let rule = jiffy_api_types::HeaderRule {
        host: "a.example".to_owned(),
        ..Default::default()
    };
    let headers = jiffy_engine_api::HeaderRules {
        rules: vec![rule],
        certificate: String::new(),
        sealed_key: String::new(),
        workload: None,
    };
    NetworkRules {
        headers: Some(headers),
        ..rules(allow, deny, true)
    }
}

#[test]
fn rules_for_headers_redirect_all_connections_to_web_ports() {
    let reach = HostReachability {
        adds_headers: true,
        ..HostReachability::default()
    };
    for rules in [
        with_headers(&[], &[]),
        with_headers(&["9.9.9.9"], &["0.0.0.0/0"]),
    ] {
        let policy = EgressPolicy::new(&rules, &reach).unwrap();
        let script = policy.script(CONNECTIONS, !LOGGED);
        let chain = script.split("chain by_name").nth(1).unwrap();
        assert!(chain.contains("tcp dport 443 redirect to :3443"), "{chain}");
        assert!(!chain.contains("9.9.9.9"), "{chain}");
        assert!(policy.has_names() && policy.headers_for("A.example").is_some());
        assert!(policy.headers_for("b.example").is_none());
    }
}

#[test]
fn rules_for_headers_permit_no_address() {
    let reach = HostReachability {
        adds_headers: true,
        ..HostReachability::default()
    };
    let policy = |rules: &NetworkRules| EgressPolicy::new(rules, &reach).unwrap();
    let at = |ip: [u8; 4]| SocketAddr::from((ip, 443));
    let (public, private) = (at([9, 9, 9, 9]), at([10, 1, 2, 3]));
    let open = policy(&with_headers(&[], &[]));
    assert!(open.permits_header_host("a.example", public));
    // A name must not lead to a private address (DNS rebinding).
    assert!(!open.permits_header_host("a.example", private));
    let closed = policy(&with_headers(&[], &["0.0.0.0/0"]));
    assert!(!closed.permits_header_host("a.example", public));
    let named = policy(&with_headers(&["a.example"], &["0.0.0.0/0"]));
    assert!(named.permits_header_host("a.example", public));
    assert!(!named.permits_header_host("a.example", private));
    let unable = EgressPolicy::new(&with_headers(&[], &[]), &HostReachability::default());
    assert_eq!(unable.unwrap_err(), RulesError::Headers);
}

#[test]
fn members_of_a_private_network_are_reached_over_its_link_unless_a_range_denies_them() {
    let membership = NetworkMembership {
        network: "lab".to_owned(),
        address: [169, 254, 64, 2].into(),
        id: "id".to_owned(),
        name: None,
    };
    let joined = |allow: &[&str], deny: &[&str]| {
        let rules = NetworkRules {
            membership: Some(membership.clone()),
            ..rules(allow, deny, false)
        };
        EgressPolicy::new(&rules, &HostReachability::default())
    };
    let policy = joined(&[], &["0.0.0.0/0"]).unwrap();
    let script = policy.script(CONNECTIONS, !LOGGED);
    assert!(script.contains("goto to_members"), "{script}");
    assert!(
        !script.contains("saddr { 0.0.0.0/0 } drop\n    accept"),
        "{script}"
    );
    // Other addresses of the range, and without a membership the whole range, stay private.
    let script = joined(&["169.254.64.9"], &["169.254.64.0/24", "9.9.9.9"]);
    let script = script.unwrap().script(CONNECTIONS, !LOGGED);
    for rules in [
        "    ip daddr { 169.254.64.9/32 } accept\n    ip daddr { 169.254.64.0/24 } goto refuse\n    accept",
        "    ip saddr { 169.254.64.9/32 } accept\n    ip saddr { 169.254.64.0/24 } drop\n    accept",
    ] {
        assert!(script.contains(rules), "{script}");
    }
    assert!(!joined(&["169.254.64.9"], &[]).unwrap().reaches_anything());
    for private in ["169.254.0.0/16", "169.254.169.254"] {
        assert!(matches!(
            joined(&[private], &[]),
            Err(RulesError::Private(_))
        ));
    }
    let alone = EgressPolicy::new(&rules(&["169.254.64.9"], &[], true), &Default::default());
    assert!(matches!(alone, Err(RulesError::Private(_))));
    let alone = EgressPolicy::new(&rules(&[], &[], true), &Default::default()).unwrap();
    assert!(!alone.script(CONNECTIONS, !LOGGED).contains("net0"));
}
