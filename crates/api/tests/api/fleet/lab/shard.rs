//! First record of a fleet.

use super::{fleet_id, member_config};
use jiffy_fleet::{RecordKey, SealedRecords};
use jiffy_fleet_core::record::{MemberRow, MemberState, ShardRecord};
use jiffy_fleet_core::{Epoch, ShardId};

/// Writes the record of a fleet with the first member.
pub async fn create_shard(records: &SealedRecords) {
    let config = member_config(1);
    let row = MemberRow {
        id: config.id,
        epoch: Epoch(1),
        instance: config.instance,
        address: config.address,
        state: MemberState::Up,
        version: config.version,
        capacity: config.capacity,
        dead_since_ms: None,
        unknown: Default::default(),
    };
    let record = ShardRecord::new(fleet_id(), ShardId(0), row);
    let key: RecordKey = "fleet/shards/0".parse().unwrap();
    let write = records.create(&key, record.encode().unwrap()).unwrap();
    records.send(&write).await.unwrap();
}
