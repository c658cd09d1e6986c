//! Records of a fleet that are damaged, too long, of a newer format, or of another fleet, shard or
//! sandbox.
//!
//! A *shard* is a part of the fleet's sandboxes. Its record lists the members and names the
//! coordinator.
//!
//! The *root* is the record of the settings of the fleet. It divides the 1,024 slots (first two
//! characters of sandbox ids) among the shards.
#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

use crate::samples::{fleet, head, root, row, sandbox, shard};
use jiffy_fleet_core::record::{
    Head, HeadState, KilledAt, MAX_HEAD_BYTES, MAX_INLINE_RECORD_BYTES, MAX_SHARD_BYTES,
    RecordError, Root, SandboxRecord, ShardRecord,
};
use jiffy_fleet_core::{Epoch, MAX_REVISION, MemberId, Owner, Revision, SandboxId, ShardId};

type Decode = fn(&[u8]) -> Result<(), RecordError>;

/// Returns a record of each kind, encoded, and the function that decodes it.
fn kinds() -> Vec<(&'static str, Vec<u8>, Decode)> {
    vec![
        ("head", head().encode().unwrap(), |bytes| {
            Head::decode(bytes, sandbox()).map(drop)
        }),
        ("root", root().encode().unwrap(), |bytes| {
            Root::decode(bytes, Some(&fleet())).map(drop)
        }),
        ("shard", shard(3).encode().unwrap(), |bytes| {
            ShardRecord::decode(bytes, &fleet(), ShardId(0)).map(drop)
        }),
    ]
}

/// Returns the text of a record with a replacement.
fn edit(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    assert!(text.contains(from), "{from} in {text}");
    text.replacen(from, to, 1).into_bytes()
}

#[test]
fn records_are_equal_after_encoding_and_decoding() {
    let killed = KilledAt {
        at_ms: 1,
        home: Some(MemberId(3)),
    };
    let running = HeadState::Running(Owner {
        member: MemberId(2),
        epoch: Epoch(7),
    });
    for state in [HeadState::Paused, running, HeadState::Killed(killed)] {
        let head = head().successor(MemberId(2), state).unwrap();
        assert_eq!(head.state(), state);
        assert_eq!(Head::decode(&head.encode().unwrap(), sandbox()), Ok(head));
    }
    let bytes = root().encode().unwrap();
    assert_eq!(Root::decode(&bytes, None), Ok(root()));
    let bytes = shard(5).encode().unwrap();
    let decoded = ShardRecord::decode(&bytes, &fleet(), ShardId(0));
    assert_eq!(decoded, Ok(shard(5)));
}

#[test]
fn truncated_and_repeated_records_are_damaged() {
    for (kind, bytes, decode) in kinds() {
        for length in 0..bytes.len() {
            let error = decode(&bytes[..length]).unwrap_err();
            assert!(
                matches!(error, RecordError::Damaged { .. }),
                "{kind} {length}"
            );
        }
        let twice = [&bytes[..], &bytes[..]].concat();
        assert!(decode(&twice).is_err(), "{kind}");
    }
}

/// A flipped bit in a number or text can produce another valid record. Only the encryption of
/// stored records (in the crate `jiffy-fleet`) detects this. It must not produce a record that
/// violates a rule.
#[test]
fn bit_flipped_records_violate_no_rule() {
    for (kind, bytes, decode) in kinds() {
        let mut rejected = 0;
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            rejected += usize::from(decode(&flipped).is_err());
            if let Ok(head) = Head::decode(&flipped, sandbox()) {
                assert!(head.encode().is_ok(), "{kind} {bit}");
            }
        }
        // At least a quarter of the flips (eight per byte) is detected even without encryption.
        assert!(rejected > bytes.len() * 2, "{kind}: {rejected}");
    }
}

#[test]
fn too_long_records_are_rejected_before_they_are_parsed() {
    for (kind, bytes, decode) in kinds() {
        let mut long = bytes;
        long.resize(MAX_SHARD_BYTES + 1, b' ');
        let error = decode(&long).unwrap_err();
        assert!(
            matches!(error, RecordError::TooLarge { .. }),
            "{kind}: {error}"
        );
    }
    let mut large = head();
    large.record = Some(SandboxRecord::Inline("a".repeat(MAX_INLINE_RECORD_BYTES)));
    assert!(large.encode().unwrap().len() <= MAX_HEAD_BYTES);
    large.record = Some(SandboxRecord::Inline(
        "a".repeat(MAX_INLINE_RECORD_BYTES + 1),
    ));
    assert!(matches!(large.encode(), Err(RecordError::Damaged { .. })));
    // JSON escapes this character with six bytes.
    large.record = Some(SandboxRecord::Inline(
        "\u{1}".repeat(MAX_INLINE_RECORD_BYTES),
    ));
    assert!(matches!(large.encode(), Err(RecordError::TooLarge { .. })));
}

#[test]
fn newer_formats_are_reported_and_unknown_fields_are_preserved() {
    for (kind, bytes, decode) in kinds() {
        let newer = edit(&bytes, "\"version\":1", "\"version\":2");
        let error = decode(&newer).unwrap_err();
        assert!(
            matches!(error, RecordError::NewerFormat { format: 2, .. }),
            "{kind}: {error}"
        );
        for version in ["0", "-1", "1.5", "\"1\"", "null"] {
            let invalid = edit(&bytes, "\"version\":1", &format!("\"version\":{version}"));
            assert!(
                matches!(decode(&invalid), Err(RecordError::Damaged { .. })),
                "{kind}"
            );
        }
        // Fractional numbers could not be preserved exactly.
        assert!(
            decode(&edit(&bytes, "{", "{\"later\":0.5,")).is_err(),
            "{kind}"
        );
    }
    let later = edit(
        &head().encode().unwrap(),
        "{",
        "{\"later\":{\"a\":[1,\"b\"]},",
    );
    let later = edit(
        &later,
        "\"taken_ms\"",
        "\"size\":18446744073709551615,\"taken_ms\"",
    );
    let decoded = Head::decode(&later, sandbox()).unwrap();
    let successor = decoded.successor(MemberId(2), HeadState::Paused).unwrap();
    let text = String::from_utf8(successor.encode().unwrap()).unwrap();
    assert!(text.contains(r#""later":{"a":[1,"b"]}"#), "{text}");
    assert!(text.contains(r#""size":18446744073709551615"#), "{text}");
}

#[test]
fn records_of_another_key_are_rejected() {
    let other = SandboxId::try_from("bbbbbbbbbbbbbbbbbbbb").unwrap();
    let error = Head::decode(&head().encode().unwrap(), other).unwrap_err();
    assert!(matches!(error, RecordError::ForeignKey { .. }), "{error}");
    let bytes = shard(3).encode().unwrap();
    let error = ShardRecord::decode(&bytes, &fleet(), ShardId(1)).unwrap_err();
    assert!(matches!(error, RecordError::ForeignKey { .. }), "{error}");
    let foreign = "zzzz".to_owned().try_into().unwrap();
    assert!(ShardRecord::decode(&bytes, &foreign, ShardId(0)).is_err());
    assert!(Root::decode(&root().encode().unwrap(), Some(&foreign)).is_err());
}

#[test]
fn numbers_out_of_range_are_rejected() {
    for revision in [0, MAX_REVISION + 1, u64::MAX] {
        let bytes = head().encode().unwrap();
        let to = format!("\"revision\":{revision}");
        assert!(Head::decode(&edit(&bytes, "\"revision\":1", &to), sandbox()).is_err());
    }
    let mut last = head();
    last.revision = Revision(MAX_REVISION);
    assert!(last.encode().is_ok());
    assert_eq!(last.successor(MemberId(2), HeadState::Paused), None);
    for (from, field) in [
        ("\"term\":1", "term"),
        ("\"seq\":1", "seq"),
        ("\"epoch\":1", "epoch"),
    ] {
        for number in [0, u64::MAX] {
            let bytes = edit(
                &shard(3).encode().unwrap(),
                from,
                &format!("\"{field}\":{number}"),
            );
            let decoded = ShardRecord::decode(&bytes, &fleet(), ShardId(0));
            assert!(decoded.is_err(), "{field} {number}");
        }
    }
}

#[test]
fn contradicting_fields_are_rejected() {
    let bytes = head().encode().unwrap();
    for state in ["running", "killed", "lost"] {
        let to = format!("\"state\":\"{state}\"");
        assert!(Head::decode(&edit(&bytes, "\"state\":\"paused\"", &to), sandbox()).is_err());
    }
    let mut unsorted = shard(3);
    unsorted.members.swap(0, 1);
    assert!(unsorted.encode().is_err());
    let mut repeated = shard(3);
    repeated.members[1] = repeated.members[0].clone();
    assert!(repeated.encode().is_err());
    let mut foreign = shard(3);
    foreign.coordinator = MemberId(9);
    assert!(foreign.encode().is_err());
    // The only shard must have exactly the slots 0 to 1,023.
    for (first, last) in [(1, 1023), (0, 1022), (0, 1024)] {
        let mut root = root();
        (root.slots[0].first, root.slots[0].last) = (first, last);
        assert!(root.encode().is_err(), "{first} to {last}");
    }
}

#[test]
fn a_shard_of_a_thousand_hosts_fits_a_record() {
    let bytes = shard(1000).encode().unwrap();
    println!("shard record of 1,000 hosts: {} bytes", bytes.len());
    assert!(bytes.len() < MAX_SHARD_BYTES / 2, "{}", bytes.len());
    let mut long = shard(1);
    for id in 2..=2_000 {
        let mut row = row(id);
        row.address = "a".repeat(255);
        row.capacity.labels = (0..16)
            .map(|_| crate::samples::label(&"n".repeat(63), &"v".repeat(63)))
            .collect();
        long.insert(row);
    }
    assert!(matches!(long.encode(), Err(RecordError::TooLarge { .. })));
}
