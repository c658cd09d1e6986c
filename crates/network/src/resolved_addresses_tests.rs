//! Tests of the addresses that a guest may connect to after it has resolved a name.
//!
//! The *epoch* of a table counts how often all of its addresses were removed. It starts with 0. An
//! answer is recorded only if the epoch has not changed since the question.

#![allow(clippy::unwrap_used)]
use super::*;
use hickory_proto::op::{MessageType, OpCode, Query};
use hickory_proto::rr::rdata::{A, AAAA, CNAME};

/// Parses a domain name.
fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

/// Returns a DNS record of the name `owner`.
fn record(owner: &str, ttl: u32, data: RData) -> Record {
    Record::from_rdata(name(owner), ttl, data)
}

/// Returns the address 9.0.0.0 + `number`.
fn v4(number: u32) -> IpAddr {
    IpAddr::V4((0x0900_0000 + number).into())
}

/// Returns a record with the address `v4(number)` of the name `owner`.
fn address(owner: &str, ttl: u32, number: u32) -> Record {
    let data = match v4(number) {
        IpAddr::V4(address) => RData::A(A(address)),
        IpAddr::V6(address) => RData::AAAA(AAAA(address)),
    };
    record(owner, ttl, data)
}

/// Returns a record by which `owner` is an alias of `target`.
fn alias(owner: &str, ttl: u32, target: &str) -> Record {
    record(owner, ttl, RData::CNAME(CNAME(name(target))))
}

/// Returns the answer to a question for the addresses of `asked`.
fn answer(asked: &str, records: Vec<Record>) -> Message {
    let mut message = Message::new(1, MessageType::Response, OpCode::Query);
    message.add_query(Query::query(name(asked), RecordType::A));
    message.add_answers(records);
    // As received: over the wire, names are absolute.
    Message::from_vec(&message.to_vec().unwrap()).unwrap()
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

#[test]
fn an_address_is_permitted_for_its_ttl_within_bounds() {
    let (table, now) = (ResolvedAddresses::default(), Instant::now());
    // Names of an address after some seconds.
    let names = |number, after| table.names_of(v4(number), now + seconds(after));
    let records = vec![
        address("a.example.", 0, 1),
        address("a.example.", 300, 2),
        address("a.example.", u32::MAX, 3),
    ];
    table.record(0, "A.example.", &answer("a.example.", records), now);
    // The bounds are a minute (`MIN_TTL`) and an hour (`MAX_TTL`).
    for (number, lifetime) in [(1, 60), (2, 300), (3, 3600)] {
        assert_eq!(names(number, lifetime - 1), ["a.example"]);
        assert!(names(number, lifetime).is_empty(), "{number}");
    }
    assert!(names(4, 0).is_empty());
    // A later answer with a shorter TTL does not shorten the time of an earlier one.
    let again = answer("a.example.", vec![address("a.example.", 0, 2)]);
    table.record(0, "a.example", &again, now + seconds(1));
    assert_eq!(names(2, 299), ["a.example"]);
}

#[test]
fn aliases_lead_to_addresses_and_records_of_other_names_do_not() {
    let records = vec![
        address("c.example.", 200, 1),
        alias("B.example.", 100, "c.example."),
        alias("a.example.", 300, "b.example."),
        address("other.example.", 300, 2),
    ];
    let found = addresses_in(&answer("A.example.", records));
    assert_eq!(found, [(v4(1), seconds(100))]);
    let cycle = vec![
        alias("a.example.", 300, "b.example."),
        alias("b.example.", 300, "a.example."),
    ];
    assert!(addresses_in(&answer("a.example.", cycle)).is_empty());
    let mut failed = answer("a.example.", vec![address("a.example.", 300, 1)]);
    failed.metadata.response_code = ResponseCode::NXDomain;
    assert!(addresses_in(&failed).is_empty());
    let mut other_class = answer("a.example.", vec![address("a.example.", 300, 1)]);
    other_class.answers[0].dns_class = DNSClass::CH;
    assert!(addresses_in(&other_class).is_empty());
}

#[test]
fn the_numbers_of_addresses_are_bounded() {
    let (table, now) = (ResolvedAddresses::default(), Instant::now());
    let count = || -> usize {
        let names = table.names.lock();
        names.values().map(|name| name.addresses.len()).sum()
    };
    for number in 0..200 {
        let records = vec![address("a.example.", 300, number)];
        let now = now + Duration::from_millis(number.into());
        table.record(0, "a.example", &answer("a.example.", records), now);
    }
    assert_eq!(count(), MAX_PER_NAME);
    // The most recent addresses remain: the last 64 of 200.
    assert!(table.names_of(v4(135), now).is_empty());
    assert_eq!(table.names_of(v4(136), now), ["a.example"]);
    for number in 0..2000 {
        let owner = format!("n{number}.example.");
        let records = vec![address(&owner, 300, 1000 + number)];
        let now = now + seconds(1) + Duration::from_millis(number.into());
        table.record(0, &owner, &answer(&owner, records), now);
    }
    assert_eq!(count(), MAX_ADDRESSES);
    assert_eq!(table.names_of(v4(2999), now), ["n1999.example"]);
    assert!(table.names_of(v4(1000), now).is_empty());
    // Expired addresses are removed.
    let later = now + seconds(3601);
    let records = vec![address("a.example.", 300, 1)];
    table.record(0, "a.example", &answer("a.example.", records), later);
    assert_eq!(count(), 1);
}

#[test]
fn an_answer_to_a_question_before_a_rollback_permits_nothing() {
    let (table, now) = (ResolvedAddresses::default(), Instant::now());
    let answer = answer("a.example.", vec![address("a.example.", 300, 1)]);
    let before = *table.epoch().borrow();
    table.record(before, "a.example", &answer, now);
    assert_eq!(table.names_of(v4(1), now), ["a.example"]);
    let mut epoch = table.epoch();
    table.clear();
    assert!(epoch.has_changed().unwrap());
    assert!(table.names_of(v4(1), now).is_empty());
    table.record(before, "a.example", &answer, now);
    assert!(table.names_of(v4(1), now).is_empty());
    let after = *epoch.borrow_and_update();
    table.record(after, "a.example", &answer, now);
    assert_eq!(table.names_of(v4(1), now), ["a.example"]);
}
