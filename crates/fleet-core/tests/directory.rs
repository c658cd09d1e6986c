//! Directory of the coordinator: memory of a row, streams of changes from members, gaps and full
//! lists. The directory has one row per sandbox, with its host and state. A *list* is a complete
//! transmission of a member's rows, in pages in the order of the hashes. Members number their
//! changes, and the coordinator numbers the lists that it requests.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::match_bool,
    reason = "a panic is a failed test"
)]

use crate::random::Random;
use jiffy_fleet_core::{
    Directory, MAX_REVISION, MemberId, Revision, Row, RowChange, RowMessage, RowReceiver,
    RowRequest, RowSender, RowState, SandboxHash,
};
use std::collections::BTreeMap;

const H1: MemberId = MemberId(1);
const H2: MemberId = MemberId(2);

/// Returns the hash of the id of a random sandbox.
fn hash(random: &mut Random) -> SandboxHash {
    let value = u128::from(random.next()) << 64 | u128::from(random.next());
    SandboxHash(value.to_be_bytes())
}

fn row(hash: SandboxHash, revision: u64, state: RowState) -> Row {
    Row {
        hash,
        revision: Revision(revision),
        state,
    }
}

/// `JIFFY_ROWS=5000000` measures the documented size.
#[test]
fn a_sandbox_occupies_at_most_32_bytes_at_any_size() {
    let rows = std::env::var("JIFFY_ROWS").map_or(300_000, |rows| rows.parse().unwrap());
    let mut random = Random::new(1);
    let mut directory = Directory::new();
    let mut largest = 0.0_f64;
    for count in 1..=rows {
        let host = MemberId(random.below(1_000));
        let row = row(hash(&mut random), count, RowState::Stored);
        directory.put(host, &row).unwrap();
        // Measure at some sizes, except small ones, whose fixed part would dominate.
        if count >= 100_000 && count % 10_007 == 0 {
            largest = largest.max(directory.heap_bytes() as f64 / count as f64);
        }
    }
    println!(
        "{rows} rows: {:.1} MiB, at most {largest:.2} bytes per row",
        directory.heap_bytes() as f64 / f64::from(1 << 20)
    );
    assert_eq!(directory.len() as u64, rows);
    assert!(largest <= 32.0, "{largest}");
}

#[test]
fn a_directory_equals_a_map_under_random_changes() {
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let hashes: Vec<_> = (0..500).map(|_| hash(&mut random)).collect();
        let mut directory = Directory::new();
        let mut map = BTreeMap::new();
        for _ in 0..20_000 {
            let hash = hashes[random.below(500) as usize];
            let host = MemberId(random.below(4));
            if random.below(3) == 0 {
                let is_there = map.get(&hash).is_some_and(|(other, _)| *other == host);
                assert_eq!(directory.remove(host, hash), is_there);
                if is_there {
                    map.remove(&hash);
                }
                continue;
            }
            let row = row(hash, u64::from(random.below(50)), RowState::Running);
            directory.put(host, &row).unwrap();
            let is_older = map.get(&hash).is_some_and(|(other, old): &(_, Row)| {
                old.revision > row.revision || *other != host && old.revision == row.revision
            });
            if !is_older {
                map.insert(hash, (host, row));
            }
        }
        assert_eq!(directory.len(), map.len());
        for hash in &hashes {
            let located = directory
                .find(*hash)
                .map(|located| (located.host, located.revision));
            let expected = map.get(hash).map(|(host, row)| (*host, row.revision));
            assert_eq!(located, expected);
        }
        for host in (0..4).map(MemberId) {
            let rows = map.values().filter(|(other, _)| *other == host).count() as u64;
            assert_eq!(directory.rows_of(host), rows);
        }
        directory.remove_host(MemberId(1));
        assert_eq!(directory.rows(MemberId(1)).count(), 0);
        assert!(
            map.values()
                .all(|(host, row)| { *host == MemberId(1) || directory.find(row.hash).is_some() })
        );
    }
}

#[test]
fn a_row_of_a_moved_sandbox_is_not_replaced_by_its_former_host() {
    let mut random = Random::new(3);
    let (mut directory, hash) = (Directory::new(), hash(&mut random));
    directory.put(H1, &row(hash, 5, RowState::Stored)).unwrap();
    assert_eq!(directory.find(hash).unwrap().owner(), None);
    directory.put(H2, &row(hash, 6, RowState::Running)).unwrap();
    directory.put(H1, &row(hash, 5, RowState::Stored)).unwrap();
    assert!(!directory.remove(H1, hash));
    assert_eq!(directory.find(hash).unwrap().owner(), Some(H2));
    let out_of_range = row(hash, MAX_REVISION + 1, RowState::Running);
    assert!(directory.put(H1, &out_of_range).is_err());
}

/// Delivers a message and returns whether the coordinator requests more at once.
fn deliver(receiver: &mut RowReceiver, directory: &mut Directory, message: RowMessage) -> bool {
    receiver
        .receive(H1, &message, directory, &mut Vec::new())
        .unwrap()
}

/// Answers the coordinator's requests for pages until the list is complete.
fn list(
    sender: &mut RowSender,
    receiver: &mut RowReceiver,
    directory: &mut Directory,
    rows: &BTreeMap<SandboxHash, Row>,
) {
    while let RowRequest::Page { list, after } = receiver.request() {
        sender.start_page(list, after);
        let mut page: Vec<_> = rows
            .values()
            .copied()
            .filter(|r| Some(r.hash) > after)
            .collect();
        let is_last = page.len() <= 10;
        page.truncate(10);
        let message = sender.page(list, after, page, is_last).unwrap();
        assert!(deliver(receiver, directory, message));
    }
}

#[test]
fn a_gap_in_a_stream_causes_a_full_list() {
    let mut random = Random::new(4);
    let (mut sender, mut receiver) = (RowSender::default(), RowReceiver::new(1));
    let mut directory = Directory::new();
    let mut rows = BTreeMap::new();
    for _ in 0..35 {
        let row = row(hash(&mut random), 1, RowState::Running);
        rows.insert(row.hash, row);
    }
    list(&mut sender, &mut receiver, &mut directory, &rows);
    assert!(receiver.is_complete());
    assert_eq!(directory.len(), 35);
    // A change is lost. The next one reveals the gap.
    let removed = *rows.keys().next().unwrap();
    rows.remove(&removed);
    sender.record(RowChange::Removed(removed));
    let added = row(hash(&mut random), 1, RowState::Paused);
    rows.insert(added.hash, added);
    let change = sender.record(RowChange::Put(added));
    assert!(deliver(&mut receiver, &mut directory, change));
    assert!(!receiver.is_complete());
    list(&mut sender, &mut receiver, &mut directory, &rows);
    assert_eq!(directory.len(), 35);
    assert!(directory.find(removed).is_none() && directory.find(added.hash).is_some());
}

#[test]
fn lost_changes_are_repeated_and_repeated_changes_are_ignored() {
    let mut random = Random::new(5);
    let (mut sender, mut receiver) = (RowSender::default(), RowReceiver::new(1));
    let mut directory = Directory::new();
    list(&mut sender, &mut receiver, &mut directory, &BTreeMap::new());
    let hashes: Vec<_> = (0..3).map(|_| hash(&mut random)).collect();
    for &hash in &hashes {
        sender.record(RowChange::Put(row(hash, 0, RowState::Running)));
    }
    // No change has arrived, so the coordinator requests all of them.
    assert_eq!(receiver.request(), RowRequest::Changes { from: 1 });
    let changes = sender.changes(1).unwrap();
    deliver(&mut receiver, &mut directory, changes.clone());
    // Change 4 arrives, and then the changes 1 to 3 again, which are ignored.
    sender.record(RowChange::Removed(hashes[0]));
    deliver(&mut receiver, &mut directory, sender.changes(4).unwrap());
    deliver(&mut receiver, &mut directory, changes);
    assert_eq!(receiver.request(), RowRequest::Changes { from: 5 });
    assert!(directory.find(hashes[0]).is_none() && directory.find(hashes[2]).is_some());
    assert_eq!(sender.changes(5), None);
    // The member is restarted during a list. The new process does not have the list of its
    // predecessor, so the coordinator requests list 8 instead of 7.
    let mut restarted = RowSender::default();
    let mut receiver = RowReceiver::new(7);
    sender.start_page(7, None);
    let row = row(hashes[1], 0, RowState::Running);
    let page = sender.page(7, None, vec![row], false).unwrap();
    assert!(deliver(&mut receiver, &mut directory, page));
    restarted.start_page(7, Some(row.hash));
    let page = restarted.page(7, Some(row.hash), Vec::new(), true).unwrap();
    assert!(deliver(&mut receiver, &mut directory, page));
    assert!(matches!(
        receiver.request(),
        RowRequest::Page {
            list: 8,
            after: None
        }
    ));
}
