//! Rosters: the sandboxes of each host as records in the store, for the time after its loss.
//!
//! One more roster contains the *released* sandboxes: paused ones that drained hosts have given up,
//! so that any host may resume them. The *head* of a sandbox is the record in the store that
//! decides which host of a fleet may run the sandbox.
//!
//! A host writes its roster in the background, some seconds after its sandboxes have changed. If
//! the host is lost, the other hosts read the roster: they show its sandboxes, resume the stored
//! ones, and check the owner of a sandbox before they kill it. A sandbox that was created in the
//! last seconds before the loss is not in the roster. No decision about the right to run a sandbox
//! depends on rosters: heads decide.

use crate::records::{Outcome, Record, RecordError, RecordKey, SealedRecords};
use jiffy_fleet_core::MemberId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Maximum size of a decompressed roster.
const MAX_PLAIN_BYTES: usize = 64 << 20;
/// Maximum size of a compressed roster. The rest of a record is its encryption.
const MAX_COMPRESSED_BYTES: usize = crate::MAX_RECORD_BYTES - (4 << 10);
/// Maximum number of sandboxes.
const MAX_ENTRIES: usize = 100_000;
/// Maximum number of attempts at a change, if other hosts write the roster concurrently.
const ATTEMPTS: usize = 16;
/// Level of the compression with zstd.
const COMPRESSION_LEVEL: i32 = 3;
/// Version of the format.
const VERSION: u32 = 1;

/// State of a sandbox in a roster. If a roster is too large, sandboxes in the first states are
/// retained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RosterState {
    /// Runs, or is broken.
    Running,
    /// Paused, and its state is on the host only.
    Paused,
    /// Paused and stored.
    Stored,
}

/// Sandbox in a roster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterEntry {
    /// Id.
    pub id: String,
    /// State.
    pub state: RosterState,
    /// Record of the sandbox, which names its owner.
    pub record: String,
}

/// Sandboxes of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Roster {
    /// Sandboxes by id.
    pub entries: BTreeMap<String, RosterEntry>,
    /// Number of sandboxes that are missing because the roster was too large.
    pub omitted: usize,
}

/// Encoded roster.
#[derive(Serialize, Deserialize)]
struct Format {
    version: u32,
    /// Number of sandboxes for which the roster has no space.
    #[serde(default)]
    omitted: usize,
    entries: Vec<RosterEntry>,
}

impl Roster {
    /// Returns a roster with these sandboxes.
    pub fn new(entries: impl IntoIterator<Item = RosterEntry>) -> Self {
        let entries = entries.into_iter().map(|entry| (entry.id.clone(), entry));
        Self {
            entries: entries.collect(),
            omitted: 0,
        }
    }

    /// Returns the bytes of the roster. If it is too large, paused and stored sandboxes are omitted
    /// first.
    fn encode(&self) -> Result<Vec<u8>, String> {
        let mut entries: Vec<_> = self.entries.values().cloned().collect();
        entries.sort_by_key(|entry| entry.state);
        let mut kept = entries.len().min(MAX_ENTRIES);
        loop {
            let format = Format {
                version: VERSION,
                omitted: self.omitted + entries.len() - kept,
                entries: entries[..kept].to_vec(),
            };
            let plain = serde_json::to_vec(&format).map_err(|e| e.to_string())?;
            if plain.len() <= MAX_PLAIN_BYTES {
                let bytes =
                    zstd::bulk::compress(&plain, COMPRESSION_LEVEL).map_err(|e| e.to_string())?;
                if bytes.len() <= MAX_COMPRESSED_BYTES {
                    return Ok(bytes);
                }
            }
            if kept == 0 {
                return Err("it is too large".to_owned());
            }
            kept /= 2;
        }
    }

    /// Returns the roster with these bytes.
    ///
    /// # Errors
    /// A description of the defect.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let plain = zstd::bulk::decompress(bytes, MAX_PLAIN_BYTES).map_err(|e| e.to_string())?;
        let format: Format = serde_json::from_slice(&plain).map_err(|e| e.to_string())?;
        if format.version != VERSION {
            return Err(format!("its format is {}, not {VERSION}", format.version));
        }
        if format.entries.len() > MAX_ENTRIES {
            return Err("it has too many sandboxes".to_owned());
        }
        let omitted = format.omitted;
        Ok(Self {
            omitted,
            ..Self::new(format.entries)
        })
    }
}

/// Roster that was read, with the version of its record.
#[derive(Debug, Clone)]
pub struct ReadRoster {
    /// Roster.
    pub roster: Roster,
    record: Record,
}

impl ReadRoster {
    /// Returns whether two reads have returned the same version.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.record.version_id() == other.record.version_id()
    }
}

/// Rosters of all hosts in the store of the fleet.
#[derive(Debug, Clone)]
pub struct Rosters {
    records: Arc<SealedRecords>,
}

/// Owner of a roster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RosterOf {
    /// Host.
    Host(MemberId),
    /// No host: paused sandboxes that drained hosts have given up.
    Released,
}

impl RosterOf {
    fn key(self) -> Result<RecordKey, RecordError> {
        match self {
            Self::Host(member) => format!("fleet/rosters/{}", member.0).parse(),
            Self::Released => "fleet/rosters/released".parse(),
        }
    }
}

impl Rosters {
    /// Uses records of the fleet in the store.
    #[must_use]
    pub fn new(records: Arc<SealedRecords>) -> Self {
        Self { records }
    }

    /// Reads a roster. `None` if it was never written.
    ///
    /// # Errors
    /// [`RecordError`] if it cannot be read.
    pub async fn read(&self, of: RosterOf) -> Result<Option<ReadRoster>, RecordError> {
        let key = of.key()?;
        let record = match self.records.get(&key).await {
            // The store returned to an older state, for example after a restore from a backup.
            // Accept it, because no decision depends on rosters.
            Err(RecordError::Regressed { .. }) => {
                self.records.forget(&key);
                self.records.get(&key).await?
            }
            other => other?,
        };
        let Some(record) = record else {
            return Ok(None);
        };
        let roster = Roster::decode(&record.content).map_err(|reason| damaged(&key, reason))?;
        Ok(Some(ReadRoster { roster, record }))
    }

    /// Changes a roster by `change`, which may be called several times. Writes nothing if the
    /// roster is unchanged.
    ///
    /// # Errors
    /// [`RecordError`] if it cannot be read or written.
    pub async fn update(
        &self,
        of: RosterOf,
        change: impl Fn(&mut Roster) + Send,
    ) -> Result<(), RecordError> {
        let key = of.key()?;
        for _ in 0..ATTEMPTS {
            let current = match self.read(of).await {
                // Replace a damaged roster. A host writes all its sandboxes each time. The roster
                // of released sandboxes loses its former entries, but the heads of these sandboxes
                // remain.
                Err(RecordError::Damaged { .. }) => {
                    self.records.get(&key).await?.map(|record| ReadRoster {
                        roster: Roster::default(),
                        record,
                    })
                }
                other => other?,
            };
            let before = current.as_ref().map(|read| read.roster.clone());
            let mut roster = before.clone().unwrap_or_default();
            change(&mut roster);
            if before.unwrap_or_default() == roster {
                return Ok(());
            }
            let content = roster.encode().map_err(|reason| damaged(&key, reason))?;
            let write = match &current {
                None => self.records.create(&key, content)?,
                Some(read) => self.records.replace(&key, content, &read.record)?,
            };
            if let Outcome::Done(_) = self.records.send(&write).await? {
                return Ok(());
            }
        }
        Err(damaged(
            &key,
            "other hosts change it concurrently".to_owned(),
        ))
    }
}

fn damaged(key: &RecordKey, reason: String) -> RecordError {
    RecordError::Damaged {
        record: key.clone(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(n: usize, state: RosterState, record: String) -> RosterEntry {
        RosterEntry {
            id: format!("s{n}"),
            state,
            record,
        }
    }

    #[test]
    fn a_roster_is_read_back_and_a_damaged_one_rejected() {
        let roster = Roster::new((0..100).map(|n| entry(n, RosterState::Stored, "{}".to_owned())));
        let bytes = roster.encode().unwrap();
        assert_eq!(Roster::decode(&bytes).unwrap(), roster);
        for n in 0..bytes.len() {
            assert!(Roster::decode(&bytes[..n]).is_err());
        }
        assert!(Roster::decode(b"{}").is_err());
        let newer = zstd::bulk::compress(b"{\"version\":2,\"entries\":[]}", 1).unwrap();
        assert!(Roster::decode(&newer).unwrap_err().contains("format"));
    }

    #[test]
    fn a_roster_that_is_too_large_contains_the_running_sandboxes() {
        // Random bytes: zstd can only reverse the doubling of their size by hexadecimal digits.
        let mut bytes = vec![0; 3 << 20];
        getrandom::fill(&mut bytes).unwrap();
        let large = bytes.chunks(30_000).enumerate().map(|(n, part)| {
            let text: String = part.iter().map(|byte| format!("{byte:02x}")).collect();
            let is_running = n % 10 == 0;
            let state = if is_running {
                RosterState::Running
            } else {
                RosterState::Stored
            };
            entry(n, state, text)
        });
        let roster = Roster::new(large);
        let read = Roster::decode(&roster.encode().unwrap()).unwrap();
        assert!(read.omitted > 0);
        assert_eq!(read.entries.len() + read.omitted, roster.entries.len());
        let running = |roster: &Roster| {
            let entries = roster.entries.values();
            entries.filter(|e| e.state == RosterState::Running).count()
        };
        assert_eq!(running(&read), running(&roster));
    }
}
