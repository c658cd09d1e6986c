//! Lineages that were opened before a merge.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.

use super::{put_chunk, store};
use jiffy_snapshot::SnapshotError;
use std::io::ErrorKind;

#[test]
fn opening_a_lineage_again_detects_a_merge() {
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
