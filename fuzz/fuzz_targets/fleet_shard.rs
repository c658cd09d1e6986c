#![no_main]
//! Decrypted but hostile shard records: a decoded record has a coordinator, finds each of its
//! members, and is equal after encoding.
//!
//! A *shard* is a part of the fleet's sandboxes. Its record lists the members (the hosts of the
//! fleet) and names the *coordinator*, the member that makes decisions for the shard.

use jiffy_fleet_core::record::{MAX_MEMBERS, ShardRecord};
use jiffy_fleet_core::{FleetId, ShardId};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let fleet = FleetId::try_from("7kq2".to_owned()).unwrap();
    let Ok(record) = ShardRecord::decode(data, &fleet, ShardId(0)) else {
        return;
    };
    assert!(record.members.len() <= MAX_MEMBERS);
    assert!(record.row(record.coordinator).is_some());
    for row in &record.members {
        assert_eq!(record.row(row.id), Some(row));
    }
    let decoded = ShardRecord::decode(&record.encode().unwrap(), &fleet, ShardId(0));
    assert_eq!(decoded, Ok(record));
});
