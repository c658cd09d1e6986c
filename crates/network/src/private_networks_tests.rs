//! Tests of the names of members. A *member* of a private network is a running sandbox that has
//! joined it. A member may have several slots (network namespaces) while its guest is replaced.

use super::*;
use MemberLookup::{Absent, Foreign, Found};

/// Returns the membership of the sandbox `id` with the address 169.254.64.`last`.
fn membership(last: u8, id: &str, name: Option<&str>) -> NetworkMembership {
    NetworkMembership {
        network: "lab".to_owned(),
        address: Ipv4Addr::new(169, 254, 64, last),
        id: id.to_owned(),
        name: name.map(str::to_owned),
    }
}

#[test]
fn names_lead_to_running_members_of_the_same_network() {
    let networks = PrivateNetworks::default();
    let own = NetworkId::new(Some("a"), "lab");
    let others = NetworkId::new(Some("b"), "lab");
    networks.set(&own, 1, &membership(2, "id1", Some("web")));
    networks.set(&own, 2, &membership(3, "id2", None));
    networks.set(&own, 3, &membership(4, "id3", Some("a.b")));
    networks.set(&others, 4, &membership(2, "id4", Some("db")));
    let address = |last| Found(Ipv4Addr::new(169, 254, 64, last));
    for (question, expected) in [
        ("web.", address(2)),
        ("WEB", address(2)),
        ("web.net.jiffy.internal.", address(2)),
        ("id1.net.jiffy.INTERNAL", address(2)),
        // A guest finds itself at the address of its interface.
        ("id2.", Found(guest::ADDRESS)),
        // A name with a dot could hide a public name.
        ("a.b.", Foreign),
        ("a.b.net.jiffy.internal.", address(4)),
        ("db.", Foreign),
        ("db.net.jiffy.internal.", Absent),
        ("x.web.net.jiffy.internal.", Absent),
        (".net.jiffy.internal.", Absent),
        ("net.jiffy.internal.", Foreign),
        ("web.net.jiffy.internal.example.", Foreign),
        ("", Foreign),
    ] {
        assert_eq!(networks.resolve(&own, 2, question), expected, "{question}");
    }
    networks.remove(&own, 1, Ipv4Addr::new(169, 254, 64, 2));
    assert_eq!(networks.resolve(&own, 2, "web."), Foreign);
}

#[test]
fn a_member_is_not_removed_with_another_slot_of_its_sandbox() {
    let networks = PrivateNetworks::default();
    let network = NetworkId::new(None, "lab");
    let member = membership(2, "id", Some("web"));
    let slot = || networks.slot(&network, member.address);
    networks.set(&network, 1, &member);
    networks.set(&network, 5, &member);
    assert_eq!(slot(), Some(5));
    // The replacement has failed.
    networks.remove(&network, 5, member.address);
    assert_eq!(slot(), Some(1));
    networks.set(&network, 6, &member);
    networks.set(&network, 1, &member);
    networks.remove(&network, 1, member.address);
    assert_eq!(slot(), Some(6));
    assert_eq!(networks.resolve(&network, 7, "web"), Found(member.address));
    // A network with members is not cleaned.
    networks.clean(|_| panic!("the network has a member"));
    networks.remove(&network, 6, member.address);
    let removed = Mutex::new(Vec::new());
    let remove = |network: &NetworkId| {
        removed.lock().push(network.clone());
        removed.lock().len() > 1
    };
    // A namespace that could not be removed is removed later.
    networks.clean(remove);
    networks.clean(remove);
    networks.clean(remove);
    assert_eq!(*removed.lock(), [network.clone(), network]);
}

#[test]
fn the_exact_spelling_is_preferred() {
    let networks = PrivateNetworks::default();
    let network = NetworkId::new(None, "lab");
    networks.set(&network, 1, &membership(2, "id1", Some("Web")));
    networks.set(&network, 2, &membership(3, "id2", Some("web")));
    let address = |last| Found(Ipv4Addr::new(169, 254, 64, last));
    assert_eq!(networks.resolve(&network, 9, "web"), address(3));
    assert_eq!(networks.resolve(&network, 9, "Web"), address(2));
    assert_eq!(networks.resolve(&network, 9, "WEB"), address(2));
}
