//! Fleet whose messages and records arrive at once.
//!
//! A *shard* is a part of the fleet's sandboxes. Its record lists the members and names the
//! coordinator. An *epoch* of a member lasts from its registration with the coordinator until the
//! coordinator declares it dead.
#![allow(
    clippy::unwrap_used,
    clippy::match_bool,
    reason = "a panic is a failed test"
)]

use crate::samples;
use jiffy_fleet_core::record::{MemberState, ShardRecord};
use jiffy_fleet_core::{
    Effect, Event, HostStatus, Instance, Member, MemberConfig, MemberId, Millis, Owner,
    ReadOutcome, RejectionReason, Timing, Version, WriteOutcome,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Members whose messages and records arrive at once.
pub struct Fleet {
    pub now: u64,
    pub members: BTreeMap<MemberId, Member>,
    /// Members that neither send nor receive.
    pub silent: BTreeSet<MemberId>,
    /// False while no member can reach the store.
    pub has_store: bool,
    /// Record of the shard in the store.
    pub record: ShardRecord,
    version: u64,
    /// Effects that are reported to operators, with their time.
    pub reported: Vec<(u64, MemberId, Effect)>,
}

impl Fleet {
    /// Returns a fleet whose members have not started.
    pub fn empty(members: u32) -> Self {
        Self {
            now: 1_000_000,
            members: BTreeMap::new(),
            silent: BTreeSet::new(),
            has_store: true,
            record: samples::shard(members),
            version: 1,
            reported: Vec::new(),
        }
    }

    /// Returns a fleet whose members are all registered. The boot of each host is the number of its
    /// member.
    pub fn new(members: u32) -> Self {
        let mut fleet = Self::empty(members);
        (1..=members).for_each(|id| fleet.start(MemberId(id), id as u8));
        // The first coordinator takes over like any other one.
        fleet.advance(30_000);
        assert!((1..=members).all(|id| fleet.authority(MemberId(id)).is_some()));
        fleet.reported.clear();
        fleet
    }

    /// Starts a process of a member. `boot` identifies the boot of its host: the same boot means a
    /// restart of the daemon, another one a reboot or another host.
    pub fn start(&mut self, id: MemberId, boot: u8) {
        let row = samples::row(id.0);
        let config = MemberConfig {
            fleet: samples::fleet(),
            id,
            instance: Instance {
                boot: [boot; 16],
                started_ms: self.now,
            },
            address: row.address,
            version: row.version,
            capacity: row.capacity,
            timing: Timing::PRODUCTION,
        };
        let mut member = Member::new(config, Millis(self.now));
        member.set_status(HostStatus::default());
        self.members.insert(id, member);
        self.silent.remove(&id);
    }

    pub fn authority(&self, id: MemberId) -> Option<Owner> {
        self.members[&id].authority(Millis(self.now))
    }

    /// Returns the coordinator. A silent member may still believe to be the coordinator.
    pub fn coordinator(&self) -> MemberId {
        let coordinators = self
            .members
            .values()
            .filter(|member| member.is_coordinator());
        let live = coordinators
            .map(Member::id)
            .filter(|id| !self.silent.contains(id));
        live.max().unwrap()
    }

    pub fn member(&mut self, id: MemberId) -> &mut Member {
        self.members.get_mut(&id).unwrap()
    }

    /// Returns the state and the epoch of a member in the record.
    pub fn state(&self, id: MemberId) -> (MemberState, u64) {
        let row = self.record.row(id).unwrap();
        (row.state, row.epoch.0)
    }

    /// Advances the time in steps of 100 ms, after each of which all members process their timers.
    pub fn advance(&mut self, ms: u64) {
        let end = self.now + ms;
        while self.now < end {
            self.now += 100;
            let ids: Vec<_> = self.members.keys().copied().collect();
            for id in ids {
                self.event(id, Event::Timer);
            }
        }
    }

    /// Advances until a condition holds. Returns the time in milliseconds.
    pub fn wait(&mut self, limit: u64, condition: impl Fn(&Self) -> bool) -> u64 {
        let start = self.now;
        while !condition(self) {
            assert!(self.now - start < limit, "not within {limit} ms");
            self.advance(100);
        }
        self.now - start
    }

    /// Passes an event to a member, and executes all effects until none is left.
    pub fn event(&mut self, id: MemberId, event: Event) {
        let mut events = VecDeque::from([(id, event)]);
        while let Some((id, event)) = events.pop_front() {
            if self.silent.contains(&id) {
                continue;
            }
            let mut effects = Vec::new();
            let member = self.members.get_mut(&id).unwrap();
            member.handle(Millis(self.now), event, &mut effects);
            for effect in effects {
                self.perform(id, effect, &mut events);
            }
        }
    }

    /// Executes an effect of a member, and queues the events that result from it. Effects without a
    /// result are recorded in `reported`.
    fn perform(&mut self, id: MemberId, effect: Effect, events: &mut VecDeque<(MemberId, Event)>) {
        let version = |number: u64| Version(number.to_be_bytes().into());
        match effect {
            Effect::Send { to, message, .. } => {
                if self.members.contains_key(&to) {
                    events.push_back((to, Event::Message { from: id, message }));
                }
            }
            Effect::ReadShard => {
                let outcome = match self.has_store {
                    true => {
                        let record = Box::new(self.record.clone());
                        ReadOutcome::Found(record, version(self.version))
                    }
                    false => ReadOutcome::Failed,
                };
                events.push_back((id, Event::ShardRead(outcome)));
            }
            Effect::ReplaceShard {
                write,
                record,
                expected,
            } => {
                let outcome = if !self.has_store {
                    WriteOutcome::Unknown
                } else if expected == version(self.version) {
                    self.record = *record;
                    self.version += 1;
                    WriteOutcome::Done(version(self.version))
                } else {
                    let current = (self.record.clone(), version(self.version));
                    WriteOutcome::Lost(Some(Box::new(current)))
                };
                events.push_back((id, Event::ShardWritten { write, outcome }));
            }
            Effect::ListRows { list, after, .. } => events.push_back((
                id,
                Event::RowsListed {
                    list,
                    after,
                    rows: Vec::new(),
                    is_last: true,
                },
            )),
            effect => self.reported.push((self.now, id, effect)),
        }
    }

    /// Returns the reasons for which the coordinator has rejected messages of a member.
    pub fn rejections(&self, id: MemberId) -> BTreeSet<RejectionReason> {
        let rejections = self
            .reported
            .iter()
            .filter_map(|(_, member, effect)| match effect {
                Effect::Rejected(reason) if *member == id => Some(*reason),
                _ => None,
            });
        rejections.collect()
    }
}
