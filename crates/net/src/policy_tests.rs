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
    let policy = Policy::new(&NetworkRules::default(), &[]).unwrap();
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
        "::1",
        "2001:db8::1",
    ] {
        assert!(!policy.allows(ip(never)), "{never}");
    }
}

#[test]
fn what_is_allowed_wins_over_what_is_denied() {
    let policy = Policy::new(&rules(&["9.9.9.9"], &["0.0.0.0/0"], true), &[]).unwrap();
    assert!(policy.allows(ip("9.9.9.9")) && !policy.allows(ip("9.9.9.8")));
    let closed = Policy::new(&rules(&[], &[], false), &[]).unwrap();
    assert!(!closed.allows(ip("9.9.9.9")) && !closed.reaches_anything());
    let some = Policy::new(&rules(&["9.9.9.0/24"], &["9.9.9.9"], false), &[]).unwrap();
    assert!(some.allows(ip("9.9.9.9")) && !some.allows(ip("8.8.8.8")));
}

#[test]
fn only_the_hosts_owner_opens_private_ranges() {
    let granted = ["10.5.0.0/16".parse().unwrap()];
    let open = Policy::new(&NetworkRules::default(), &granted).unwrap();
    assert!(open.allows(ip("10.5.1.1")) && !open.allows(ip("10.6.1.1")));
    let inside = Policy::new(&rules(&["10.5.1.0/24"], &[], false), &granted).unwrap();
    assert!(inside.allows(ip("10.5.1.1")) && !inside.allows(ip("10.5.2.1")));
    let denied = Policy::new(&rules(&[], &["10.5.1.0/24"], true), &granted).unwrap();
    assert!(!denied.allows(ip("10.5.1.1")));
    let outside = Policy::new(&rules(&["10.6.1.0/24"], &[], true), &granted);
    assert_eq!(outside, Err(RulesError::Private("10.6.1.0/24".into())));
    // What is wider allows what is public in it.
    let all = Policy::new(&rules(&["0.0.0.0/0"], &[], false), &[]).unwrap();
    assert!(all.allows(ip("1.1.1.1")) && !all.allows(ip("10.6.1.1")));
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let refused = |rules| Policy::new(&rules, &[]).unwrap_err();
    let name = refused(rules(&["*."], &[], true));
    assert_eq!(name, RulesError::Name("*.".into()));
    let six = refused(rules(&["2001:db8::/32"], &[], true));
    assert_eq!(six, RulesError::Version6("2001:db8::/32".into()));
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
        &[],
    );
    let script = policy.unwrap().script(10);
    assert!(script.contains("ip daddr { 9.0.0.0/8 } accept"), "{script}");
    assert!(script.contains("ip saddr { 9.0.0.0/8 } accept"), "{script}");
}

#[test]
fn names_decide_where_addresses_do_not() {
    let policy = Policy::new(
        &rules(&["*.example.com", "9.9.9.9"], &["0.0.0.0/0"], true),
        &[],
    );
    let policy = policy.unwrap();
    assert!(policy.allows_name("a.example.com") && !policy.allows_name("example.com"));
    // An address is asked for by any name.
    assert!(policy.answers("other.example") && !policy.allows(ip("8.8.8.8")));
    let script = policy.script(10);
    assert!(
        script.contains("tcp dport 443 redirect to :3443"),
        "{script}"
    );
    let only = Policy::new(&rules(&["a.example"], &[], false), &[]).unwrap();
    assert!(only.answers("A.example.") && !only.answers("secret.evil.example"));
    // Whatever it is called.
    assert!(only.permits_by_name(Ipv4Addr::new(8, 8, 8, 8)));
    for never in [
        Ipv4Addr::new(10, 0, 0, 1),
        Ipv4Addr::new(169, 254, 169, 254),
    ] {
        assert!(!only.permits_by_name(never));
    }
    // Where everything may be reached there is nothing to decide.
    let open = Policy::new(&rules(&["a.example"], &[], true), &[]).unwrap();
    assert!(!open.script(10).contains("redirect"));
}
