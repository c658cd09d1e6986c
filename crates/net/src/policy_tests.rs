#![allow(clippy::unwrap_used)]
use super::*;

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
fn the_internet_is_open_and_what_is_private_is_not() {
    let policy = Policy::new(&NetworkRules::default(), &Reach::default()).unwrap();
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
fn what_is_allowed_wins_over_what_is_denied() {
    let policy = Policy::new(
        &rules(&["9.9.9.9"], &["0.0.0.0/0"], true),
        &Reach::default(),
    )
    .unwrap();
    assert!(policy.allows(ip("9.9.9.9")) && !policy.allows(ip("9.9.9.8")));
    let closed = Policy::new(&rules(&[], &[], false), &Reach::default()).unwrap();
    assert!(!closed.allows(ip("9.9.9.9")) && !closed.reaches_anything());
    let some = Policy::new(
        &rules(&["9.9.9.0/24"], &["9.9.9.9"], false),
        &Reach::default(),
    )
    .unwrap();
    assert!(some.allows(ip("9.9.9.9")) && !some.allows(ip("8.8.8.8")));
}

#[test]
fn only_the_hosts_owner_opens_private_ranges() {
    let granted = Reach {
        granted: vec![
            "10.5.0.0/16".parse().unwrap(),
            "fd00:5::/32".parse().unwrap(),
        ],
        version6: true,
    };
    let open = Policy::new(&NetworkRules::default(), &granted).unwrap();
    assert!(open.allows(ip("10.5.1.1")) && !open.allows(ip("10.6.1.1")));
    assert!(open.allows(ip("fd00:5::1")) && !open.allows(ip("fd00:6::1")));
    let script = open.script(10, true);
    for one in [
        "8000::/1 } ip6 daddr != { fd00:5::/32 } goto refuse",
        "224.0.0.0/3 } ip daddr != { 10.5.0.0/16 } goto refuse",
    ] {
        assert!(script.contains(one), "{script}");
    }
    let inside = Policy::new(&rules(&["10.5.1.0/24"], &[], false), &granted).unwrap();
    assert!(inside.allows(ip("10.5.1.1")) && !inside.allows(ip("10.5.2.1")));
    let denied = Policy::new(&rules(&[], &["10.5.1.0/24"], true), &granted).unwrap();
    assert!(!denied.allows(ip("10.5.1.1")));
    let outside = Policy::new(&rules(&["10.6.1.0/24"], &[], true), &granted);
    assert_eq!(outside, Err(RulesError::Private("10.6.1.0/24".into())));
    // What is wider allows what is public in it.
    let all = Policy::new(&rules(&["0.0.0.0/0"], &[], false), &Reach::default()).unwrap();
    assert!(all.allows(ip("1.1.1.1")) && !all.allows(ip("10.6.1.1")));
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let refused = |rules| Policy::new(&rules, &Reach::default()).unwrap_err();
    let name = refused(rules(&["*."], &[], true));
    assert_eq!(name, RulesError::Name("*.".into()));
    let six = refused(rules(&["2a00:5::/32"], &[], true));
    assert_eq!(six, RulesError::Version6("2a00:5::/32".into()));
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
}

#[test]
fn overlapping_lists_become_disjoint_sets() {
    let policy = Policy::new(
        &rules(&["9.9.9.9", "9.9.9.0/24", "9.9.9.9/8"], &[], true),
        &Reach::default(),
    );
    let script = policy.unwrap().script(10, true);
    assert!(script.contains("ip daddr { 9.0.0.0/8 } accept"), "{script}");
    assert!(script.contains("ip saddr { 9.0.0.0/8 } accept"), "{script}");
}

#[test]
fn names_decide_where_addresses_do_not() {
    let policy = Policy::new(
        &rules(&["*.example.com", "9.9.9.9"], &["0.0.0.0/0"], true),
        &Reach::default(),
    );
    let policy = policy.unwrap();
    assert!(policy.allows_name("a.example.com") && !policy.allows_name("example.com"));
    // An address is asked for by any name.
    assert!(policy.answers("other.example") && !policy.allows(ip("8.8.8.8")));
    let script = policy.script(10, true);
    assert!(
        script.contains("tcp dport 443 redirect to :3443"),
        "{script}"
    );
    let only = Policy::new(&rules(&["a.example"], &[], false), &Reach::default()).unwrap();
    assert!(only.answers("A.example.") && !only.answers("secret.evil.example"));
    // Whatever it is called.
    assert!(only.permits_by_name(ip("8.8.8.8")));
    for never in ["10.0.0.1", "169.254.169.254", "fd00::1", "2600::1"] {
        assert!(!only.permits_by_name(ip(never)));
    }
    // Where everything may be reached there is nothing to decide.
    let open = Policy::new(&rules(&["a.example"], &[], true), &Reach::default()).unwrap();
    assert!(!open.script(10, true).contains("redirect"));
}

#[test]
fn a_host_with_ipv6_opens_it_to_what_is_public() {
    let six = Reach {
        version6: true,
        ..Reach::default()
    };
    let open = Policy::new(&NetworkRules::default(), &six).unwrap();
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
    let some = Policy::new(&rules(&["2600::/32"], &["0.0.0.0/0"], true), &six).unwrap();
    assert!(
        some.allows(ip("2600::1")) && !some.allows(ip("2a00::1")) && !some.allows(ip("9.9.9.9"))
    );
    let all = Policy::new(&rules(&["0.0.0.0/0"], &[], false), &six).unwrap();
    assert!(all.allows(ip("2a00::1")) && all.allows(ip("9.9.9.9")));
    let but = Policy::new(&rules(&["a.example"], &["2600::1"], true), &six).unwrap();
    assert!(!but.allows(ip("2600::1")) && but.allows(ip("2600::2")));
    let script = but.script(10, true);
    for one in [
        "    meta nfproto ipv4 return",
        "    ip6 daddr != { 2600::1/128 } return",
    ] {
        assert!(script.contains(one), "{script}");
    }
    let private = Policy::new(&rules(&["fd00::/8"], &[], true), &six);
    assert_eq!(private, Err(RulesError::Private("fd00::/8".into())));
}
