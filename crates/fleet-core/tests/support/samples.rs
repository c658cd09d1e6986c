//! Valid records for tests.
//!
//! A *shard* is a part of the fleet's sandboxes. Its record lists the members and names the
//! coordinator.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. The *root*
//! is the record of the settings of the fleet.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test program uses a part of the samples"
)]

use jiffy_fleet_core::record::{
    Capacity, Head, HeadState, HostLabel, MemberRow, MemberState, ObjectRecords, Root,
    SandboxRecord, ShardRecord, Snapshot, UnknownFields,
};
use jiffy_fleet_core::{Digest, Epoch, FleetId, Instance, MemberId, SandboxId, ShardId};

pub fn fleet() -> FleetId {
    "7kq2".to_owned().try_into().unwrap()
}

pub fn sandbox() -> SandboxId {
    SandboxId::try_from("aaaaaaaaaaaaaaaaaaab").unwrap()
}

pub fn label(name: &str, value: &str) -> HostLabel {
    HostLabel {
        name: name.to_owned(),
        value: value.to_owned(),
    }
}

/// Returns the capacity of a host with 64 processors and 256 GiB of memory.
pub fn capacity() -> Capacity {
    Capacity {
        cpu_milli: 64_000,
        memory_mib: 262_144,
        disk_mib: 4_000_000,
        microvm: true,
        gvisor: true,
        cpu_level: 3,
        cpu_features: 0,
        labels: vec![label("zone", "eu-1")],
        unknown: UnknownFields::new(),
    }
}

/// Returns the row of a live member in the record of the shard.
pub fn row(id: u32) -> MemberRow {
    MemberRow {
        id: MemberId(id),
        epoch: Epoch(1),
        instance: Instance {
            boot: [id as u8; 16],
            started_ms: 1000,
        },
        address: format!("10.0.{}.{}:7946", id / 256, id % 256),
        state: MemberState::Up,
        version: "0.9.0".to_owned(),
        capacity: capacity(),
        dead_since_ms: None,
        unknown: UnknownFields::new(),
    }
}

/// Returns a shard of the members 1 to `members`.
pub fn shard(members: u32) -> ShardRecord {
    let mut record = ShardRecord::new(fleet(), ShardId(0), row(1));
    (2..=members).for_each(|id| record.insert(row(id)));
    record
}

/// Returns a snapshot whose root (digest in the store) consists of these bytes.
pub fn snapshot(root: u8) -> Snapshot {
    Snapshot {
        id: "bbbbbbbbbbbbbbbbbbbb".to_owned(),
        root: Digest([root; 32]),
        taken_ms: 1_795_880_000_000,
        unknown: UnknownFields::new(),
    }
}

/// Returns the first head of a paused sandbox.
pub fn head() -> Head {
    let record = SandboxRecord::Inline("{\"name\":\"a\"}".to_owned());
    Head::new(
        sandbox(),
        HeadState::Paused,
        Some(snapshot(1)),
        Some(record),
    )
}

pub fn root() -> Root {
    Root::new(
        fleet(),
        "-----BEGIN CERTIFICATE-----".to_owned(),
        3,
        ObjectRecords::Store,
        "c2VjcmV0".to_owned(),
    )
}
