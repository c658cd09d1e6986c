//! Tests of recorded rules: constructed messages of the kernel, without a network namespace.
//!
//! `linux/netfilter/nf_tables.h` defines the kinds of the attributes.

#![allow(clippy::unwrap_used)]
use super::objects::{INET, ObjectKind, RulesetObject, SetReference, table_name};
use super::*;

/// Returns an attribute with a string.
fn text(kind: u16, value: &str) -> Vec<u8> {
    attribute(kind, &[value.as_bytes(), b"\0"].concat())
}

/// Encodes a netlink attribute: length, kind, value, and padding to 4 bytes.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap();
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Returns a message about an object of a table, with these attributes.
fn message(attributes: &[Vec<u8>]) -> Vec<u8> {
    [header(INET, 0), attributes.concat()].concat()
}

#[test]
fn the_kernels_own_attributes_are_left_out_and_unknown_ones_are_refused() {
    // This is the handle of the table (`NFTA_TABLE_HANDLE`), which the kernel assigns.
    let own = attribute(4, &7_u64.to_be_bytes());
    let payload = message(&[text(1, "jiffy"), own]);
    let table = RulesetObject::parse(ObjectKind::Table, &payload).unwrap();
    assert_eq!(table.request(1), table_name("jiffy"));
    assert_eq!(table.to_string(), "creating table jiffy");
    assert!(table.is_in(RulesetScope::InetTable("jiffy")));
    assert!(!table.is_in(RulesetScope::InetTable("other")));
    // Attribute 7 is the owner of a table (`NFTA_TABLE_OWNER`), which Jiffy never sets.
    let unknown = message(&[text(1, "jiffy"), attribute(7, &[0; 4])]);
    let why = RulesetObject::parse(ObjectKind::Table, &unknown).unwrap_err();
    assert_eq!(why, "attribute 7 of Table is unknown");
}

#[test]
fn elements_are_sorted_independently_of_the_kernels_order() {
    let set = message(&[text(1, "jiffy"), text(2, "__set0")]);
    let set = RulesetObject::parse(ObjectKind::Set, &set).unwrap();
    let set = SetReference::of(&set).unwrap();
    // Returns an element with its key (1) and flags (3). Flag 1 marks the end of an interval.
    let element = |key: u8, end: bool| {
        let key = attribute(1, &attribute(1, &[key]));
        let flags = attribute(3, &u32::from(end).to_be_bytes());
        attribute(1, &[key, flags].concat())
    };
    let collected = |elements: &[Vec<u8>]| {
        let list = attribute(3, &elements.concat());
        let payload = message(&[text(1, "jiffy"), text(2, "__set0"), list]);
        let dumped = RulesetObject::parse(ObjectKind::Elements, &payload).unwrap();
        set.collect(&[dumped]).unwrap()
    };
    let ascending = [
        element(1, false),
        element(4, true),
        element(4, false),
        element(9, true),
    ];
    let descending: Vec<Vec<u8>> = ascending.iter().rev().cloned().collect();
    assert_eq!(collected(&ascending), collected(&descending));
    let many: Vec<Vec<u8>> = (0..2000).map(|_| element(3, false)).collect();
    assert!(collected(&many).len() > 1);
    // An element with a timeout (4) is rejected.
    let list = attribute(3, &attribute(1, &attribute(4, &[0; 8])));
    let payload = message(&[list]);
    let dumped = RulesetObject::parse(ObjectKind::Elements, &payload).unwrap();
    assert!(set.collect(&[dumped]).is_err());
}

#[test]
fn truncated_and_invalid_messages_cause_no_panic() {
    // An expression has a name (1) and data (2). Data 5 and 7 are flags and the source register.
    let option = [
        text(1, "exthdr"),
        attribute(2, &[attribute(5, &[0; 4]), attribute(7, &[0; 4])].concat()),
    ];
    // A rule has the name of its table (1) and chain (2), and a list of expressions (4).
    let expressions = attribute(4, &attribute(1, &option.concat()));
    let payload = message(&[text(1, "jiffy"), text(2, "out"), expressions]);
    for kind in [
        ObjectKind::Rule,
        ObjectKind::Elements,
        ObjectKind::Set,
        ObjectKind::Chain,
    ] {
        for length in 0..payload.len() {
            let _ = RulesetObject::parse(kind, &payload[..length]).map(|object| object.to_string());
        }
        for at in 0..payload.len() {
            for value in [0, 1, 3, 0x7f, 0xff] {
                let mut payload = payload.clone();
                payload[at] = value;
                let _ = RulesetObject::parse(kind, &payload).map(|object| object.request(1));
            }
        }
    }
    let rule = RulesetObject::parse(ObjectKind::Rule, &payload).unwrap();
    // The flags of the written option are omitted. They have 8 bytes.
    assert_eq!(
        rule.request(1).len(),
        payload.len() - header(INET, 0).len() - 8
    );
}
