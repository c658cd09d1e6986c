//! Lineages that were opened before a merge.

use super::{put_chunk, store};
use jiffy_snapshot::SnapshotError;
use std::io::ErrorKind;

#[test]
fn a_lineage_that_was_merged_since_it_was_opened_is_told_by_opening_it_again() {
    let (_dir, store) = store();
    put_chunk(&store, "root", None, (0, 1, 3));
    put_chunk(&store, "middle", Some("root"), (1, 2, 3));
    put_chunk(&store, "top", Some("middle"), (2, 3, 3));
    let before = store.lineage("top").unwrap();
    assert!(store.lineage("top").unwrap().is_same(&before));
    store.merge("top", 1).unwrap();
    store.remove("middle").unwrap();
    match before.memory() {
        Err(SnapshotError::Io { source, .. }) => assert_eq!(source.kind(), ErrorKind::NotFound),
        other => panic!("{other:?}"),
    }
    let after = store.lineage("top").unwrap();
    assert!(!after.is_same(&before));
    assert_eq!(after.memory().unwrap().len(), 2);
}
