//! Names and numbers of members, terms, records and sandboxes. The crate's documentation explains
//! the terms.
//!
//! A *front* is a machine without sandboxes that passes requests of clients to the members. A
//! *shard* is a part of the fleet's sandboxes, for which one member at a time is the coordinator.
//! The *head* of a sandbox is the record that decides which member may run the sandbox. An *epoch*
//! of a member lasts from its registration with the coordinator until the coordinator declares it
//! dead.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Characters of sandbox ids, in the order of their 5-bit values (`jiffy_engine_api::new_id`).
const ID_ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
/// Number of characters of a sandbox id.
const ID_LENGTH: usize = 20;
/// Number of slots: values of the first two characters of a sandbox id.
pub const SLOTS: u16 = 1024;
/// Maximum revision of a head. The directory stores 48 bits.
pub const MAX_REVISION: u64 = (1 << 48) - 1;
/// Maximum length of a fleet id in bytes.
const MAX_FLEET_ID_BYTES: usize = 32;

/// Defines a number that is written as `PREFIX` and digits.
macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

/// Bit that distinguishes the numbers of fronts from the numbers of hosts.
const FRONT: u32 = 1 << 31;

/// Number of a member of the fleet. Numbers are not reused. Hosts and fronts are numbered
/// independently. The record of the shard has a row for each host, but lists only those fronts that
/// were removed.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct MemberId(pub u32);

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = if self.is_front() { 'f' } else { 'h' };
        write!(f, "{prefix}{}", self.0 & !FRONT)
    }
}

number! {
    /// Number of a registration of a member. A member that returns after its death receives the
    /// next epoch.
    Epoch(u64), "epoch "
}
number! {
    /// Number of a coordinator of a shard. Each takeover increments it.
    Term(u64), "term "
}
number! {
    /// Number of a shard.
    ShardId(u16), "shard "
}
number! {
    /// Number of replacements of a head, from 1 to [`MAX_REVISION`].
    Revision(u64), "revision "
}
number! {
    /// Number of a write within one state machine. A write that is repeated because its outcome is
    /// unknown has the same number and must be sent with the same bytes.
    WriteId(u64), "write "
}

impl MemberId {
    /// Returns the number of a front.
    #[must_use]
    pub fn front(self) -> Self {
        Self(self.0 | FRONT)
    }

    /// Returns whether the member is a front, which has no sandboxes and makes no decisions.
    #[must_use]
    pub fn is_front(self) -> bool {
        self.0 & FRONT != 0
    }

    /// Returns the number of the host in the scheduler.
    #[must_use]
    pub fn host(self) -> jiffy_scheduler::HostId {
        jiffy_scheduler::HostId(self.0)
    }

    /// Returns the number of the member in the budgets of the scheduler.
    pub(crate) fn budget(self) -> jiffy_scheduler::MemberId {
        jiffy_scheduler::MemberId(self.0)
    }
}

impl FromStr for MemberId {
    type Err = IdError;

    /// Parses the text of [`fmt::Display`].
    fn from_str(text: &str) -> Result<Self, IdError> {
        let number = |digits: &str| {
            let is_number = digits.bytes().all(|digit| digit.is_ascii_digit());
            let number: Option<u32> = digits.parse().ok().filter(|_| is_number);
            number.filter(|number| number & FRONT == 0).map(Self)
        };
        let host = text.strip_prefix('h').and_then(number);
        let front = text.strip_prefix('f').and_then(number).map(Self::front);
        host.or(front)
            .ok_or_else(|| IdError::Member(text.chars().take(64).collect()))
    }
}

impl Revision {
    /// Returns the next revision. `None` after [`MAX_REVISION`].
    #[must_use]
    pub fn next(self) -> Option<Self> {
        (self.0 < MAX_REVISION).then_some(Self(self.0 + 1))
    }
}

/// Time in milliseconds since the boot of the local host (`CLOCK_BOOTTIME`). Times of different
/// hosts are never compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Millis(pub u64);

impl Millis {
    /// Returns the time `ms` later.
    #[must_use]
    pub fn plus(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }

    /// Returns the milliseconds since `earlier`. Zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Version of a stored record: opaque bytes of the store, which are only compared for equality.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version(pub Box<[u8]>);

/// Member and epoch that own a running sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Owner {
    /// Member.
    pub member: MemberId,
    /// Registration of the member.
    pub epoch: Epoch,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.member, self.epoch)
    }
}

/// Process of a member: boot of its host, and start time of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Instance {
    /// Boot id of the host.
    #[serde(with = "hex")]
    pub boot: [u8; 16],
    /// Start time of the process since the boot, in milliseconds.
    pub started_ms: u64,
}

impl Instance {
    /// Returns whether this process is a restart of `other` on the same boot of the same host.
    #[must_use]
    pub fn is_restart_of(&self, other: &Self) -> bool {
        self.boot == other.boot && self.started_ms > other.started_ms
    }
}

/// Error of an id that does not have the required form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The sandbox id is malformed.
    #[error("{0:?} is not a sandbox id: expected 20 letters and digits")]
    Sandbox(String),
    /// The fleet id is malformed.
    #[error("{0:?} is not a fleet id: expected 4 to 32 lower-case letters and digits")]
    Fleet(String),
    /// The number of a member is malformed.
    #[error("{0:?} is not a member: expected `h` and a number, as `jiffy fleet nodes` shows it")]
    Member(String),
}

/// Id of a fleet: 4 to 32 lower-case letters and digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FleetId(String);

impl TryFrom<String> for FleetId {
    type Error = IdError;

    fn try_from(id: String) -> Result<Self, IdError> {
        let is_valid = (4..=MAX_FLEET_ID_BYTES).contains(&id.len())
            && id
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if !is_valid {
            return Err(IdError::Fleet(id.chars().take(64).collect()));
        }
        Ok(Self(id))
    }
}

impl From<FleetId> for String {
    fn from(id: FleetId) -> Self {
        id.0
    }
}

impl fmt::Display for FleetId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Id of a sandbox: 20 characters of 5 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxId([u8; ID_LENGTH]);

impl SandboxId {
    /// Returns the slot, which selects the shard of the sandbox.
    #[must_use]
    pub fn slot(&self) -> Slot {
        let value = |c: u8| ID_ALPHABET.iter().position(|&a| a == c).unwrap_or(0) as u16;
        Slot(value(self.0[0]) * 32 + value(self.0[1]))
    }
}

impl TryFrom<&str> for SandboxId {
    type Error = IdError;

    fn try_from(id: &str) -> Result<Self, IdError> {
        <[u8; ID_LENGTH]>::try_from(id.as_bytes())
            .ok()
            .filter(|bytes| bytes.iter().all(|b| ID_ALPHABET.contains(b)))
            .map(Self)
            .ok_or_else(|| IdError::Sandbox(id.chars().take(64).collect()))
    }
}

impl TryFrom<String> for SandboxId {
    type Error = IdError;

    fn try_from(id: String) -> Result<Self, IdError> {
        Self::try_from(id.as_str())
    }
}

impl From<SandboxId> for String {
    fn from(id: SandboxId) -> Self {
        id.to_string()
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .try_for_each(|&b| write!(f, "{}", char::from(b)))
    }
}

/// First 10 bits of a sandbox id, below [`SLOTS`]. Each slot belongs to one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u16);

impl Slot {
    /// Returns the number of the slot.
    #[must_use]
    pub fn number(self) -> u16 {
        self.0
    }
}

/// Digest of 32 bytes: root of a snapshot, or content of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Digest(#[serde(with = "hex")] pub [u8; 32]);

/// Byte arrays as lower-case hexadecimal digits.
pub(crate) mod hex {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use std::fmt::Write;

    pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(bytes.len() * 2);
        for byte in bytes {
            let _ = write!(text, "{byte:02x}");
        }
        serializer.serialize_str(&text)
    }

    /// Reads an array of bytes from lower-case hexadecimal digits.
    pub fn deserialize<'de, const N: usize, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<[u8; N], D::Error> {
        let text = String::deserialize(deserializer)?;
        let digit = |c: u8| match c {
            b'0'..=b'9' => Some(c - b'0'),
            b'a'..=b'f' => Some(c - b'a' + 10),
            _ => None,
        };
        let mut bytes = [0; N];
        let is_valid = text.len() == 2 * N
            && text
                .as_bytes()
                .chunks(2)
                .zip(&mut bytes)
                .all(|(pair, byte)| match (digit(pair[0]), digit(pair[1])) {
                    (Some(high), Some(low)) => {
                        *byte = high << 4 | low;
                        true
                    }
                    _ => false,
                });
        if !is_valid {
            let reason = format!("expected {} hexadecimal digits", 2 * N);
            return Err(D::Error::custom(reason));
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_the_first_ten_bits_of_a_new_sandbox_id() {
        for (id, slot) in [
            ("aaaaaaaaaaaaaaaaaaaa", 0),
            ("ab222222222222222222", 1),
            ("baaaaaaaaaaaaaaaaaaa", 32),
            ("99999999999999999999", 1023),
        ] {
            assert_eq!(SandboxId::try_from(id).unwrap().slot().number(), slot);
        }
        for _ in 0..100 {
            let id = jiffy_engine_api::new_id().unwrap();
            let parsed = SandboxId::try_from(id.as_str()).unwrap();
            assert_eq!(parsed.to_string(), id);
            assert!(parsed.slot().number() < SLOTS);
        }
    }

    #[test]
    fn malformed_ids_are_rejected() {
        for id in [
            "",
            "aaaaaaaaaaaaaaaaaaa",
            "aaaaaaaaaaaaaaaaaaa1",
            "aaaaaaaaaaaaaaaaaaaaa",
        ] {
            assert!(SandboxId::try_from(id).is_err(), "{id}");
        }
        for id in ["", "abc", "ABCD", "ab-d", &"a".repeat(33)] {
            assert!(FleetId::try_from(id.to_owned()).is_err(), "{id}");
        }
        assert_eq!(MemberId(12).to_string().parse(), Ok(MemberId(12)));
        let front = MemberId(12).front();
        assert_eq!(front.to_string(), "f12");
        assert_eq!("f12".parse(), Ok(front));
        assert!(front.is_front() && !MemberId(12).is_front());
        for id in [
            "",
            "h",
            "12",
            "h-1",
            "h+1",
            "f-1",
            "h2147483648",
            "f2147483648",
            "hx",
            "H1",
            "h1/../2",
            "h4294967296",
        ] {
            assert!(id.parse::<MemberId>().is_err(), "{id}");
        }
    }

    #[test]
    fn revisions_end_at_the_maximum() {
        assert_eq!(Revision(1).next(), Some(Revision(2)));
        assert_eq!(Revision(MAX_REVISION).next(), None);
    }
}
