#![no_main]
//! Hostile messages of a member: the coordinator neither ends its term nor decides a verdict, and
//! acknowledges only the current epoch of the sender.
//!
//! A *shard* is a part of the fleet's sandboxes. Its *coordinator* is the member that registers
//! members and selects the hosts of new sandboxes. A *term* is the time during which one member has
//! this role. A *verdict* declares a member dead. An *epoch* lasts from the registration of a
//! member until its verdict.

use jiffy_fleet_core::record::{Capacity, MemberRow, MemberState, ShardRecord, UnknownFields};
use jiffy_fleet_core::{
    Body, Effect, Epoch, Event, FleetId, Instance, Member, MemberConfig, MemberId, Message, Millis,
    ReadOutcome, ShardId, Timing, Version, WriteOutcome,
};
use libfuzzer_sys::fuzz_target;

/// Member that sends the message.
const SENDER: MemberId = MemberId(2);

fn fleet() -> FleetId {
    FleetId::try_from("7kq2".to_owned()).unwrap()
}

/// Returns the entry of a member in the record of the shard.
fn row(id: u32) -> MemberRow {
    MemberRow {
        id: MemberId(id),
        epoch: Epoch(1),
        instance: Instance {
            boot: [id as u8; 16],
            started_ms: 1000,
        },
        address: "10.0.0.1:7946".to_owned(),
        state: MemberState::Up,
        version: "0.9.0".to_owned(),
        capacity: Capacity::default(),
        dead_since_ms: None,
        unknown: UnknownFields::new(),
    }
}

/// Returns the coordinator of a shard of two members, and the present time.
fn coordinator() -> (Member, Millis) {
    let mut record = ShardRecord::new(fleet(), ShardId(0), row(1));
    record.insert(row(2));
    let first = row(1);
    let config = MemberConfig {
        fleet: fleet(),
        id: first.id,
        instance: first.instance,
        address: first.address,
        version: first.version,
        capacity: first.capacity,
        timing: Timing::PRODUCTION,
    };
    let mut now = Millis(1_000_000);
    let mut member = Member::new(config, now);
    while !member.is_coordinator() {
        let mut events = vec![Event::Timer];
        while let Some(event) = events.pop() {
            let mut effects = Vec::new();
            member.handle(now, event, &mut effects);
            for effect in effects {
                let version = Version(Box::new([1]));
                match effect {
                    Effect::ReadShard => {
                        let outcome = ReadOutcome::Found(Box::new(record.clone()), version);
                        events.push(Event::ShardRead(outcome));
                    }
                    Effect::ReplaceShard { write, .. } => {
                        let outcome = WriteOutcome::Done(version);
                        events.push(Event::ShardWritten { write, outcome });
                    }
                    _ => {}
                }
            }
        }
        now = now.plus(1_000);
    }
    (member, now)
}

fuzz_target!(|data: &[u8]| {
    let Ok(message) = Message::decode(data) else {
        return;
    };
    let encoded = message.encode().unwrap();
    assert_eq!(Message::decode(&encoded).unwrap(), message);
    let (mut member, now) = coordinator();
    let epoch = message.epoch;
    let event = Event::Message {
        from: SENDER,
        message: Box::new(message),
    };
    let mut effects = Vec::new();
    member.handle(now, event, &mut effects);
    assert!(member.is_coordinator());
    for effect in effects {
        match effect {
            Effect::Verdict(_) | Effect::TermEnded { .. } | Effect::EpochEnded { .. } => {
                panic!("{effect:?}")
            }
            Effect::Send { to, message, .. } if matches!(message.body, Body::Acknowledged(_)) => {
                assert!(to == SENDER && epoch == Some(Epoch(1)));
            }
            _ => {}
        }
    }
});
