//! [`ShardRecord`]: the record with the coordinator and the members of a shard (a part of the
//! fleet's sandboxes). Only the coordinator replaces the record, or a member that takes over its
//! role. Members read it if their heartbeats are not acknowledged.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor. An
//! *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. A restart of the daemon continues the epoch, but a reboot of the host does
//! not. A *verdict* is the decision that an epoch is dead. A *front* is a machine without sandboxes
//! that passes requests of clients to the members.

use super::label::{HostLabel, MAX_LABELS};
use super::{Checked, Format, RecordError, UnknownFields, check_text, decode, encode, rule};
use crate::ids::{Epoch, FleetId, Instance, MemberId, ShardId, Term};
use jiffy_scheduler::{CpuLevel, EngineSet, HostSpec, Resources};
use serde::{Deserialize, Serialize};

/// Maximum size of an encoded shard record.
pub const MAX_SHARD_BYTES: usize = 1 << 20;
/// Maximum number of rows of a shard, including dead members and members that have left.
pub const MAX_MEMBERS: usize = 2_000;
/// Maximum number of removed fronts.
pub const MAX_REMOVED_FRONTS: usize = 1_000;
/// Maximum length of an address.
pub const MAX_ADDRESS_BYTES: usize = 255;
/// Maximum length of a software version.
const MAX_SOFTWARE_VERSION_BYTES: usize = 63;

/// State of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberState {
    /// The member runs sandboxes and accepts new ones.
    Up,
    /// The member accepts no new sandboxes.
    Draining,
    /// The coordinator decided that the epoch of the row is dead.
    Dead,
    /// The member was removed from the fleet, or left it.
    Left,
}

impl MemberState {
    /// Returns whether the member sends heartbeats.
    #[must_use]
    pub fn is_live(self) -> bool {
        matches!(self, Self::Up | Self::Draining)
    }

    /// Returns the name, as operators see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Draining => "draining",
            Self::Dead => "dead",
            Self::Left => "left",
        }
    }
}

/// Resources and properties of a host that do not change while it is registered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Processor time in thousandths of a processor.
    pub cpu_milli: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Disk space in MiB.
    pub disk_mib: u32,
    /// The host runs microVMs.
    #[serde(default)]
    pub microvm: bool,
    /// The host runs gVisor.
    #[serde(default)]
    pub gvisor: bool,
    /// Highest processor level (feature level of the x86-64 psABI) of guests.
    #[serde(default)]
    pub cpu_level: u8,
    /// Further processor features, as bits.
    #[serde(default)]
    pub cpu_features: u64,
    /// Labels.
    #[serde(default)]
    pub labels: Vec<HostLabel>,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl Capacity {
    /// Returns the properties for the scheduler.
    #[must_use]
    pub fn spec(&self) -> HostSpec {
        let engine = |has: bool, set: EngineSet| if has { set } else { EngineSet::default() };
        HostSpec {
            capacity: Resources {
                cpu_milli: self.cpu_milli,
                memory_mib: self.memory_mib,
                disk_mib: self.disk_mib,
            },
            engines: engine(self.microvm, EngineSet::MICROVM)
                .with(engine(self.gvisor, EngineSet::GVISOR)),
            cpu_level: CpuLevel(self.cpu_level),
            cpu_features: self.cpu_features,
            labels: self.labels.iter().map(Into::into).collect(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        rule(
            self.labels.len() <= MAX_LABELS,
            "a member has too many labels",
        )?;
        self.labels.iter().try_for_each(HostLabel::check)
    }
}

/// Row of a member in the record of its shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRow {
    /// Number of the member.
    pub id: MemberId,
    /// Number of its latest registration.
    pub epoch: Epoch,
    /// Process that registered.
    pub instance: Instance,
    /// Address for messages of other members, as `HOST:PORT`.
    pub address: String,
    /// State of the epoch.
    pub state: MemberState,
    /// Version of Jiffy on the host.
    pub version: String,
    /// Resources and properties of the host.
    pub capacity: Capacity,
    /// Wall clock of the coordinator at the verdict, in milliseconds since 1970. Only shown to
    /// operators and clients. `None` for a live member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead_since_ms: Option<u64>,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl MemberRow {
    /// Returns the size of the row in an encoded record, with a separator.
    pub(crate) fn encoded_bytes(&self) -> usize {
        serde_json::to_vec(self).map_or(MAX_SHARD_BYTES, |bytes| bytes.len() + 1)
    }
}

/// Record `fleet/shards/<n>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRecord {
    version: Format,
    /// Fleet of the shard.
    pub fleet: FleetId,
    /// Number of the shard.
    pub shard: ShardId,
    /// Term of the coordinator.
    pub term: Term,
    /// Member that is the coordinator. Its row has the address.
    pub coordinator: MemberId,
    /// Number of replacements of the record.
    pub seq: u64,
    /// Members, in the order of their ids.
    pub members: Vec<MemberRow>,
    /// Fronts whose certificates are no longer accepted, in the order of their numbers. They stay
    /// listed, because a certificate remains valid after the removal of its front.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed_fronts: Vec<MemberId>,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl ShardRecord {
    /// Returns the record of a new shard, whose first member is the coordinator of term 1.
    #[must_use]
    pub fn new(fleet: FleetId, shard: ShardId, first: MemberRow) -> Self {
        Self {
            version: Format::default(),
            fleet,
            shard,
            term: Term(1),
            coordinator: first.id,
            seq: 1,
            members: vec![first],
            removed_fronts: Vec::new(),
            unknown: UnknownFields::new(),
        }
    }

    /// Returns whether no coordinator has replaced the record since the creation of the fleet.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.term == Term(1) && self.seq == 1
    }

    /// Returns the row of a member.
    #[must_use]
    pub fn row(&self, id: MemberId) -> Option<&MemberRow> {
        let index = self.members.binary_search_by_key(&id, |row| row.id).ok()?;
        self.members.get(index)
    }

    /// Returns the row of a member for a change.
    pub fn row_mut(&mut self, id: MemberId) -> Option<&mut MemberRow> {
        let index = self.members.binary_search_by_key(&id, |row| row.id).ok()?;
        self.members.get_mut(index)
    }

    /// Adds a row, or replaces the row of the same member.
    pub fn insert(&mut self, row: MemberRow) {
        match self.members.binary_search_by_key(&row.id, |other| other.id) {
            Ok(index) => self.members[index] = row,
            Err(index) => self.members.insert(index, row),
        }
    }

    /// Returns the JSON of the record.
    ///
    /// # Errors
    /// [`RecordError::TooLarge`], or [`RecordError::Damaged`] if a rule is violated.
    pub fn encode(&self) -> Result<Vec<u8>, RecordError> {
        encode(self)
    }

    /// Returns the record with this JSON.
    ///
    /// # Errors
    /// [`RecordError`] if the record cannot be used.
    pub fn decode(bytes: &[u8], fleet: &FleetId, shard: ShardId) -> Result<Self, RecordError> {
        let record: Self = decode(bytes)?;
        if record.fleet != *fleet || record.shard != shard {
            return Err(RecordError::ForeignKey {
                record: Self::NAME,
                expected: format!("{shard} of fleet {fleet}"),
                actual: format!("{} of fleet {}", record.shard, record.fleet),
            });
        }
        Ok(record)
    }
}

impl Checked for ShardRecord {
    const NAME: &'static str = "shard record";
    const MAX_BYTES: usize = MAX_SHARD_BYTES;

    fn check(&self) -> Result<(), String> {
        rule(
            (1..u64::MAX).contains(&self.term.0) && (1..u64::MAX).contains(&self.seq),
            "`term` or `seq` is out of range",
        )?;
        rule(self.members.len() <= MAX_MEMBERS, "too many members")?;
        rule(
            self.members.windows(2).all(|pair| pair[0].id < pair[1].id),
            "the members are not in the order of their ids",
        )?;
        rule(
            self.removed_fronts.len() <= MAX_REMOVED_FRONTS
                && self.removed_fronts.iter().all(|id| id.is_front())
                && self.removed_fronts.windows(2).all(|pair| pair[0] < pair[1]),
            "`removed_fronts` is too long or not in order",
        )?;
        rule(
            self.row(self.coordinator).is_some(),
            "the coordinator is not a member",
        )?;
        self.members.iter().try_for_each(|row| {
            rule(!row.id.is_front(), "a front has a row")?;
            rule(
                (1..u64::MAX).contains(&row.epoch.0),
                "an epoch is out of range",
            )?;
            check_text("members.address", &row.address, MAX_ADDRESS_BYTES)?;
            check_text("members.version", &row.version, MAX_SOFTWARE_VERSION_BYTES)?;
            row.capacity.check()
        })
    }
}
