//! [`Root`]: the record of fleet-wide settings, which every host reads first. It contains the
//! certificate authority, the shards, and the encrypted secret of the fleet.
//!
//! A *shard* is a part of the fleet's sandboxes, for which one member at a time is the coordinator.
//! The *head* of a sandbox is the record that decides which member may run the sandbox.

use super::{Checked, Format, RecordError, UnknownFields, check_text, decode, encode, rule};
use crate::ids::{FleetId, MemberId, SLOTS, ShardId, Slot};
use serde::{Deserialize, Serialize};

/// Maximum size of an encoded root record.
pub const MAX_ROOT_BYTES: usize = 64 << 10;
/// Maximum length of a domain.
const MAX_DOMAIN_BYTES: usize = 253;
/// Maximum number of domains.
const MAX_DOMAINS: usize = 64;
/// Maximum length of the certificate and of the wrapped secret.
const MAX_CERTIFICATE_BYTES: usize = 16 << 10;

/// Location of records that grow with sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectRecords {
    /// The object store.
    Store,
    /// etcd.
    Etcd,
}

/// Range of slots that belong to a shard. The first two characters of a sandbox id are its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotRange {
    /// First slot.
    pub first: u16,
    /// Last slot.
    pub last: u16,
    /// Shard of the slots.
    pub shard: ShardId,
}

/// Content of the record `fleet/root`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    version: Format,
    /// Fleet.
    pub fleet: FleetId,
    /// Number that an operator raises after a restore of the records from a backup.
    pub incarnation: u64,
    /// Shards of all slots, in the order of the slots.
    pub slots: Vec<SlotRange>,
    /// Certificate of the fleet's authority (PEM).
    pub ca_certificate: String,
    /// Domains of sandboxes.
    #[serde(default)]
    pub domains: Vec<String>,
    /// Processor level (feature level of the x86-64 psABI) that all hosts have.
    pub cpu_level: u8,
    /// Location of heads, locks and key generations.
    pub object_records: ObjectRecords,
    /// Secret of the fleet, encrypted with the keys of the store.
    pub wrapped_secret: String,
    /// Private key of the authority, encrypted with the keys of the store.
    #[serde(default)]
    pub wrapped_authority_key: String,
    /// Number of the next member that joins. Numbers are not reused.
    #[serde(default = "second_member")]
    pub next_member: MemberId,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// Returns the number of the member that joins first.
fn second_member() -> MemberId {
    MemberId(2)
}

impl Root {
    /// Returns the root of a new fleet with one shard.
    #[must_use]
    pub fn new(
        fleet: FleetId,
        ca_certificate: String,
        cpu_level: u8,
        object_records: ObjectRecords,
        wrapped_secret: String,
    ) -> Self {
        Self {
            version: Format::default(),
            fleet,
            incarnation: 1,
            slots: vec![SlotRange {
                first: 0,
                last: SLOTS - 1,
                shard: ShardId(0),
            }],
            ca_certificate,
            domains: Vec::new(),
            cpu_level,
            object_records,
            wrapped_secret,
            wrapped_authority_key: String::new(),
            next_member: second_member(),
            unknown: UnknownFields::new(),
        }
    }

    /// Returns the shard of a slot.
    #[must_use]
    pub fn shard_of(&self, slot: Slot) -> Option<ShardId> {
        self.slots
            .iter()
            .find(|range| (range.first..=range.last).contains(&slot.number()))
            .map(|range| range.shard)
    }

    /// Returns the JSON of the record.
    ///
    /// # Errors
    /// [`RecordError::TooLarge`], or [`RecordError::Damaged`] if a rule is violated.
    pub fn encode(&self) -> Result<Vec<u8>, RecordError> {
        encode(self)
    }

    /// Returns the record with this JSON. `fleet` is `None` when a host joins and reads the root
    /// for the first time.
    ///
    /// # Errors
    /// [`RecordError`] if the record cannot be used.
    pub fn decode(bytes: &[u8], fleet: Option<&FleetId>) -> Result<Self, RecordError> {
        let root: Self = decode(bytes)?;
        match fleet {
            Some(fleet) if *fleet != root.fleet => Err(RecordError::ForeignKey {
                record: Self::NAME,
                expected: format!("fleet {fleet}"),
                actual: format!("fleet {}", root.fleet),
            }),
            _ => Ok(root),
        }
    }
}

impl Checked for Root {
    const NAME: &'static str = "root record";
    const MAX_BYTES: usize = MAX_ROOT_BYTES;

    fn check(&self) -> Result<(), String> {
        rule(
            (1..u64::MAX).contains(&self.incarnation),
            "`incarnation` is out of range",
        )?;
        let mut next = 0;
        for range in &self.slots {
            rule(
                range.first == next && range.first <= range.last && range.last < SLOTS,
                "`slots` has a gap or an overlap",
            )?;
            next = range.last + 1;
        }
        rule(next == SLOTS, "`slots` does not cover all slots")?;
        rule(self.domains.len() <= MAX_DOMAINS, "too many domains")?;
        self.domains
            .iter()
            .try_for_each(|domain| check_text("domains", domain, MAX_DOMAIN_BYTES))?;
        rule(
            self.next_member.0 >= 2 && !self.next_member.is_front(),
            "`next_member` is out of range",
        )?;
        rule(
            self.wrapped_authority_key.len() <= MAX_CERTIFICATE_BYTES,
            "`wrapped_authority_key` is too long",
        )?;
        rule(
            (1..=MAX_CERTIFICATE_BYTES).contains(&self.ca_certificate.len())
                && (1..=MAX_CERTIFICATE_BYTES).contains(&self.wrapped_secret.len()),
            "`ca_certificate` or `wrapped_secret` is empty or too long",
        )
    }
}
