//! Tests of the event log: order, pages, limits, and events after a restart.

use super::*;
use crate::log::MAX_ENTRY_BYTES;
use std::time::Duration;

/// Retention that removes no event of these tests.
const RETENTION: Retention = Retention {
    max_bytes: 256 << 20,
    max_age: Duration::from_secs(7 * 24 * 3600),
};

/// Returns an event of a sandbox.
fn event(owner: &str, sandbox: &str) -> Event {
    Event {
        owner: Some(owner.to_owned()),
        sandbox: Some(sandbox.to_owned()),
        ..Event::new(EventType::SandboxPaused)
    }
}

/// Returns a query of the first page, of at most `limit` events.
fn query(limit: usize) -> PageQuery {
    PageQuery {
        limit,
        ..PageQuery::default()
    }
}

/// Returns the sandbox of each event of a page.
fn sandboxes(page: &Page<Event>) -> Vec<&str> {
    let entries = page.entries.iter();
    entries
        .map(|(_, e)| e.sandbox.as_deref().unwrap())
        .collect()
}

#[test]
fn events_survive_the_process_and_have_ascending_ids() {
    let directory = tempfile::tempdir().unwrap();
    let feed = EventFeed::open(directory.path(), None, RETENTION).unwrap();
    for n in 0..5 {
        feed.append(event("k", &format!("s{n}")));
    }
    let host = feed.host().clone();
    // Forget the feed without a shutdown, as SIGKILL does.
    std::mem::forget(feed);
    let feed = EventFeed::open(directory.path(), None, RETENTION).unwrap();
    assert_eq!(*feed.host(), host);
    feed.append(event("k", "s5"));
    let page = feed.page(&query(10), &EventFilter::default()).unwrap();
    assert_eq!(sandboxes(&page), ["s0", "s1", "s2", "s3", "s4", "s5"]);
    let ids: Vec<String> = page.entries.iter().map(|(id, _)| id.to_string()).collect();
    assert!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
    assert!(!page.more);
    assert_eq!(page.dropped, None);
}

#[test]
fn joined_pages_are_all_events_in_both_orders_from_files_and_memory() {
    let directory = tempfile::tempdir().unwrap();
    let feed = EventFeed::open(directory.path(), Some("h1"), RETENTION).unwrap();
    for n in 0..30 {
        feed.append(event(["k", "l"][n % 2], &format!("s{n}")));
    }
    let reopened = EventFeed::open(directory.path(), Some("h1"), RETENTION).unwrap();
    for feed in [&feed, &reopened] {
        for order in [Order::Ascending, Order::Descending] {
            let filter = EventFilter {
                owner: Some("k".to_owned()),
                ..EventFilter::default()
            };
            let mut position = PageQuery { order, ..query(4) };
            let mut seen = Vec::new();
            loop {
                let page = feed.page(&position, &filter).unwrap();
                seen.extend(sandboxes(&page).into_iter().map(str::to_owned));
                match order {
                    Order::Ascending => position.after = page.next,
                    Order::Descending => position.before = page.next,
                }
                if !page.more {
                    break;
                }
            }
            let mut expected: Vec<_> = (0..30).step_by(2).map(|n| format!("s{n}")).collect();
            if order == Order::Descending {
                expected.reverse();
            }
            assert_eq!(seen, expected, "{order:?}");
        }
    }
}

#[test]
fn the_oldest_events_are_dropped_by_size_and_reported_by_count_and_time() {
    let directory = tempfile::tempdir().unwrap();
    let retention = Retention {
        max_bytes: 256 << 10,
        ..RETENTION
    };
    let feed = EventFeed::open(directory.path(), None, retention).unwrap();
    let cause = "x".repeat(900);
    for n in 0..600 {
        feed.append(event("k", &format!("s{n}")).because(&cause));
    }
    let feed = EventFeed::open(directory.path(), None, retention).unwrap();
    let page = feed.page(&query(1000), &EventFilter::default()).unwrap();
    let dropped = page.dropped.unwrap();
    let first: u64 = sandboxes(&page)[0][1..].parse().unwrap();
    assert_eq!(dropped.count, first);
    assert!(first > 0 && dropped.until_us < page.entries[0].1.time_us);
    assert_eq!(page.entries.len() as u64, 600 - first);
    let bytes: u64 = std::fs::read_dir(directory.path())
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    // The events are removed by whole segments (files), which have at least 64 KiB.
    assert!(bytes <= retention.max_bytes + (64 << 10), "{bytes}");
    // A reader that has seen the last dropped event misses nothing.
    let after = PageQuery {
        after: Some(EntryId {
            time_us: dropped.until_us,
            host: feed.host().clone(),
        }),
        ..query(10)
    };
    let page = feed.page(&after, &EventFilter::default()).unwrap();
    assert_eq!(page.dropped, None);
    assert_eq!(sandboxes(&page)[0], format!("s{first}"));
}

#[test]
fn the_oldest_events_are_dropped_by_age() {
    let directory = tempfile::tempdir().unwrap();
    let retention = Retention {
        max_age: Duration::ZERO,
        ..RETENTION
    };
    let feed = EventFeed::open(directory.path(), None, retention).unwrap();
    for n in 0..10 {
        feed.append(event("k", &format!("s{n}")));
    }
    let feed = EventFeed::open(directory.path(), None, retention).unwrap();
    let page = feed.page(&query(100), &EventFilter::default()).unwrap();
    // The newest events remain: only complete segments are removed.
    assert!(page.dropped.unwrap().count > 0);
    assert!(page.entries.len() < 10);
}

#[test]
fn an_event_that_cannot_be_written_counts_as_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let feed = EventFeed::open(directory.path(), None, RETENTION).unwrap();
    feed.append(event("k", "s0"));
    feed.append(event("k", &"x".repeat(MAX_ENTRY_BYTES)));
    feed.append(event("k", "s2"));
    let page = feed.page(&query(10), &EventFilter::default()).unwrap();
    assert_eq!(sandboxes(&page), ["s0", "s2"]);
    assert_eq!(page.dropped.unwrap().count, 1);
}

#[test]
fn a_host_that_joins_a_fleet_continues_its_log_under_its_new_name() {
    let directory = tempfile::tempdir().unwrap();
    let feed = EventFeed::open(directory.path(), None, RETENTION).unwrap();
    feed.append(event("k", "s0"));
    let before = feed.host().clone();
    let feed = EventFeed::open(directory.path(), Some("h3"), RETENTION).unwrap();
    feed.append(event("k", "s1"));
    let page = feed.page(&query(10), &EventFilter::default()).unwrap();
    let hosts: Vec<_> = page.entries.iter().map(|(id, _)| &*id.host).collect();
    assert_eq!(hosts, [&*before, "h3"]);
    assert_eq!(page.dropped, None);
}

#[test]
fn a_feed_in_memory_retains_recent_events() {
    let feed = EventFeed::in_memory();
    assert_eq!(feed.newest(), None);
    for n in 0..MAX_RECENT + 5 {
        feed.append(event("k", &format!("s{n}")));
    }
    let page = feed.page(&query(2000), &EventFilter::default()).unwrap();
    assert_eq!(page.entries.len(), MAX_RECENT);
    assert_eq!(sandboxes(&page)[0], "s5");
    assert_eq!(page.next, feed.newest());
}
