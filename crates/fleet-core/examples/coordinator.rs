//! Processor time of a coordinator, and speed of its directory.
//!
//!     cargo run --release -p jiffy-fleet-core --example coordinator [MEMBERS [SECONDS [ROWS]]]
//!
//! Simulates the members of a shard (a part of a fleet's sandboxes) for some seconds. The first
//! member is the coordinator: it registers the others and selects the hosts of new sandboxes. Each
//! member sends a heartbeat every 2 s, with the templates on its host (50) and its shares (20). A
//! *share* is the part of an API key's limit that one member may use. Each member reports one
//! change of a sandbox per second. The coordinator makes 100 placements per second, and replaces
//! the shard's record every 3 s. Messages and records are encoded and decoded as on a network.
//!
//! Prints the processor time of the coordinator in percent of the simulated time, and the speed of
//! a directory of ROWS sandboxes.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a measurement that fails has no result"
)]

#[path = "../tests/support/random.rs"]
mod random;
#[path = "../tests/support/samples.rs"]
mod samples;

use jiffy_fleet_core::record::ShardRecord;
use jiffy_fleet_core::{
    Body, BudgetNeed, BudgetOwner, Directory, Effect, Event, HostStatus, Instance, Member,
    MemberConfig, MemberId, Message, Millis, ReadOutcome, Revision, Row, RowChange, RowState,
    SandboxHash, ShardId, Timing, Version, WriteOutcome,
};
use jiffy_scheduler::{PlacementRequest, Resources};
use random::Random;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// API keys whose limits are divided between the members.
const OWNERS: usize = 20;

/// Members of a shard. Only the time of the first one, the coordinator, is measured.
struct Fleet {
    now: u64,
    members: Vec<Member>,
    record: Vec<u8>,
    version: u64,
    random: Random,
    /// Processor time that the coordinator has used.
    spent: Duration,
    messages: u64,
    replaces: u64,
    changes: u64,
    placements: u64,
}

fn member(id: u32) -> Member {
    let row = samples::row(id);
    let config = MemberConfig {
        fleet: samples::fleet(),
        id: MemberId(id),
        instance: Instance {
            boot: [id as u8; 16],
            started_ms: 2_000,
        },
        address: row.address,
        version: row.version,
        capacity: row.capacity,
        timing: Timing::PRODUCTION,
    };
    let mut member = Member::new(config, Millis(1_000_000));
    member.set_status(HostStatus {
        free_cpu_milli: 32_000,
        free_memory_mib: 131_072,
        free_disk_mib: 2_000_000,
        is_store_reachable: true,
        templates: (0..50).collect(),
        ..HostStatus::default()
    });
    for owner in 0..OWNERS {
        member.set_limit(&owner_of(owner), Some(1_000_000));
    }
    member
}

fn owner_of(number: usize) -> BudgetOwner {
    BudgetOwner(format!("key{number:017}"))
}

fn hash(random: &mut Random) -> SandboxHash {
    let value = u128::from(random.next()) << 64 | u128::from(random.next());
    SandboxHash(value.to_be_bytes())
}

impl Fleet {
    fn new(members: u32) -> Self {
        Self {
            now: 1_000_000,
            members: (1..=members).map(member).collect(),
            record: samples::shard(members).encode().unwrap(),
            version: 1,
            random: Random::new(1),
            spent: Duration::ZERO,
            messages: 0,
            replaces: 0,
            changes: 0,
            placements: 0,
        }
    }

    /// Advances by 10 ms.
    fn advance(&mut self) {
        self.now += 10;
        for index in 0..self.members.len() {
            if self.members[index].wake_at().0 <= self.now {
                self.event(index, Event::Timer);
            }
        }
    }

    fn event(&mut self, index: usize, event: Event) {
        let mut effects = Vec::new();
        let start = Instant::now();
        self.members[index].handle(Millis(self.now), event, &mut effects);
        if index == 0 {
            self.spent += start.elapsed();
        }
        self.perform(index, effects);
    }

    fn perform(&mut self, index: usize, effects: Vec<Effect>) {
        let mut events = VecDeque::new();
        for effect in effects {
            match effect {
                Effect::Send { to, message, .. } => {
                    let message = self.transmit(index, to, &message);
                    let from = MemberId(index as u32 + 1);
                    let event = Event::Message {
                        from,
                        message: Box::new(message),
                    };
                    events.push_back((to.0 as usize - 1, event));
                }
                Effect::ReadShard => {
                    let start = Instant::now();
                    let record = self.decode();
                    if index == 0 {
                        self.spent += start.elapsed();
                    }
                    let version = Version(self.version.to_be_bytes().into());
                    let outcome = ReadOutcome::Found(Box::new(record), version);
                    events.push_back((index, Event::ShardRead(outcome)));
                }
                Effect::ReplaceShard { write, record, .. } => {
                    let start = Instant::now();
                    self.record = record.encode().unwrap();
                    self.spent += start.elapsed();
                    self.version += 1;
                    self.replaces += 1;
                    let outcome = WriteOutcome::Done(Version(self.version.to_be_bytes().into()));
                    events.push_back((index, Event::ShardWritten { write, outcome }));
                }
                Effect::ListRows { list, after, .. } => {
                    let event = Event::RowsListed {
                        list,
                        after,
                        rows: Vec::new(),
                        is_last: true,
                    };
                    events.push_back((index, event));
                }
                _ => {}
            }
        }
        for (index, event) in events {
            self.event(index, event);
        }
    }

    fn decode(&self) -> ShardRecord {
        ShardRecord::decode(&self.record, &samples::fleet(), ShardId(0)).unwrap()
    }

    /// Encodes and decodes a message. Only the time of the coordinator is measured: it encodes the
    /// messages that it sends, and decodes received messages.
    fn transmit(&mut self, from: usize, to: MemberId, message: &Message) -> Message {
        let start = Instant::now();
        let bytes = message.encode().unwrap();
        let encoded = Instant::now();
        let message = Message::decode(&bytes).unwrap();
        if from == 0 {
            self.spent += encoded - start;
        }
        if to == MemberId(1) {
            self.spent += encoded.elapsed();
        }
        if matches!(message.body, Body::Heartbeat(_) | Body::Rows(_)) {
            self.messages += 1;
        }
        message
    }

    /// Reports a new sandbox on a random member.
    fn change_row(&mut self) {
        let index = self.random.below(self.members.len() as u32) as usize;
        let row = Row {
            hash: hash(&mut self.random),
            revision: Revision(0),
            state: RowState::Running,
        };
        let mut effects = Vec::new();
        self.members[index].change_row(RowChange::Put(row), &mut effects);
        self.changes += 1;
        self.perform(index, effects);
    }

    /// Selects a host for a sandbox of a random owner, and counts the sandbox on this host.
    fn place(&mut self) {
        let request = PlacementRequest {
            needs: Resources {
                cpu_milli: 500,
                memory_mib: 512,
                disk_mib: 1_024,
            },
            ..PlacementRequest::default()
        };
        let owner = owner_of(self.random.below(OWNERS as u32) as usize);
        let start = Instant::now();
        let placement = self.members[0].place(
            Millis(self.now),
            &[BudgetNeed {
                owner: owner.clone(),
                amount: 1,
            }],
            &request,
        );
        self.spent += start.elapsed();
        if let Ok(placement) = placement {
            self.placements += 1;
            let index = placement.admission.host.member.0 as usize - 1;
            let host = &mut self.members[index];
            if host
                .accept_placement(Millis(self.now), &placement.admission)
                .is_ok()
            {
                host.shares().admit(Millis(self.now), &owner, 1);
            }
        }
    }
}

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .map(|text| text.parse::<u64>().unwrap());
    let members = arguments.next().unwrap_or(1_000);
    let seconds = arguments.next().unwrap_or(60);
    let rows = arguments.next().unwrap_or(5_000_000);
    let mut fleet = Fleet::new(members as u32);
    // Within 40 s, the first member becomes the coordinator and registers all others.
    for _ in 0..4_000 {
        fleet.advance();
    }
    let has_authority = |member: &Member| member.authority(Millis(fleet.now)).is_some();
    assert!(fleet.members[0].is_coordinator() && fleet.members.iter().all(has_authority));
    (fleet.spent, fleet.messages, fleet.replaces) = (Duration::ZERO, 0, 0);
    for tick in 0..seconds * 100 {
        fleet.advance();
        // A tick lasts 10 ms: each member changes one sandbox per second on average.
        (0..members / 100).for_each(|_| fleet.change_row());
        fleet.place();
        if tick % 100 == 0 {
            assert!(fleet.members[0].is_coordinator());
        }
    }
    println!(
        "{{\"members\":{members},\"simulated_s\":{seconds},\"coordinator_s\":{:.2},\
         \"percent_of_a_core\":{:.2},\"messages\":{},\"replaces\":{},\"changes\":{},\
         \"placements\":{},\"record_bytes\":{}}}",
        fleet.spent.as_secs_f64(),
        fleet.spent.as_secs_f64() * 100.0 / seconds as f64,
        fleet.messages,
        fleet.replaces,
        fleet.changes,
        fleet.placements,
        fleet.record.len(),
    );
    directory(rows);
}

/// Measures inserts and lookups of a directory, which maps sandboxes to their hosts.
fn directory(rows: u64) {
    let mut directory = Directory::new();
    let mut random = Random::new(1);
    let start = Instant::now();
    for _ in 0..rows {
        let row = Row {
            hash: hash(&mut random),
            revision: Revision(1),
            state: RowState::Stored,
        };
        let host = MemberId(random.below(1_000));
        directory.put(host, &row).unwrap();
    }
    let inserts = start.elapsed();
    let mut random = Random::new(1);
    let mut times: Vec<_> = (0..rows.min(1_000_000))
        .map(|_| {
            let hash = hash(&mut random);
            // The insertion has also drawn a host for each hash.
            let _ = random.below(1_000);
            let start = Instant::now();
            assert!(directory.find(hash).is_some());
            start.elapsed().as_nanos() as u64
        })
        .collect();
    times.sort_unstable();
    println!(
        "{{\"rows\":{rows},\"inserts_per_s\":{:.0},\"lookup_p50_ns\":{},\"lookup_p99_ns\":{},\
         \"mib\":{:.1},\"bytes_per_row\":{:.2}}}",
        rows as f64 / inserts.as_secs_f64(),
        times[times.len() / 2],
        times[times.len() * 99 / 100],
        directory.heap_bytes() as f64 / f64::from(1 << 20),
        directory.heap_bytes() as f64 / rows as f64,
    );
}
