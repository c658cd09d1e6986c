//! Tests of the record of a guest's connections, without a slot. The record has a line for each
//! destination, with the number of its connections, and a line for each DNS question.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

#![allow(clippy::unwrap_used)]
use super::*;

/// Maximum number of lines of refused connections.
const MAX_REFUSED_LINES: usize = MAX_LINES[1];

/// Returns a record without a slot.
fn record() -> Arc<ConnectionRecorder> {
    let record = ConnectionRecorder::new(
        "nobody".to_owned(),
        Arc::new(ConnectionSockets::none()),
        true,
    );
    *record.source.lock() = None;
    Arc::new(record)
}

/// Returns an address of the documentation network 192.0.2.0/24.
fn to(last: u8, port: u16) -> Option<SocketAddr> {
    Some(([192, 0, 2, last], port).into())
}

#[test]
fn equal_connections_are_one_line_and_dropped_lines_are_counted() {
    let record = record();
    for _ in 0..3 {
        record.refused_by_name(to(1, 80), Some("a.example"), RefusalReason::Rules);
    }
    record.question("b.example.", "A".to_owned(), None);
    let read = record.read();
    assert_eq!((read.list.len(), read.missing), (2, 0));
    assert_eq!(read.list[0].times + read.list[1].times, 4);
    assert!(read.since_ms.is_some());
    for port in 1..=2000 {
        record.refused_by_name(to(2, port), None, RefusalReason::Rules);
    }
    let read = record.read();
    // Refused connections do not displace the question. Of 3 + 2000 refused connections, those
    // without a line are counted.
    assert_eq!(read.list.len(), MAX_REFUSED_LINES + 1);
    assert_eq!(read.missing, 2003 - MAX_REFUSED_LINES as u64);
    assert!(read.list.iter().any(|line| line.question.is_some()));
    assert_eq!(read.list.last().unwrap().port, Some(2000));
}

#[test]
fn a_proxied_connection_is_counted_while_open_and_recorded_when_closed() {
    let record = record();
    let carrying = record.carry(to(3, 443), Some("c.example"));
    carrying.bytes.out.fetch_add(10, Ordering::Relaxed);
    let assert_bytes = |bytes| {
        let list = record.read().list;
        assert_eq!((list.len(), list[0].bytes), (1, Some(bytes)));
        assert_eq!(list[0].host.as_deref(), Some("c.example"));
    };
    assert_bytes((10, 0));
    carrying.bytes.back.fetch_add(20, Ordering::Relaxed);
    drop(carrying);
    assert_bytes((10, 20));
}

#[test]
fn a_name_is_short_and_printable() {
    assert_eq!(printable("good.example."), "good.example");
    assert_eq!(printable("a\x1b[2J\u{202e}b c"), "a?[2J?b?c");
    assert_eq!(printable(&"x".repeat(5000)).len(), MAX_NAME_CHARS);
}

#[test]
fn an_address_of_this_host_is_recognised() {
    assert!(host_address::is_own_address([127, 0, 0, 1].into()));
    assert!(!host_address::is_own_address([192, 0, 2, 77].into()));
}
