//! Budgets of owners (API keys), as operations on sandboxes and templates ask for them.
//!
//! An operation reserves what it may come to need before it begins, and holds the permit until what
//! it made is counted where it is ([`crate::Sandboxes::usage_of`] and what the builder keeps). So
//! an owner never has more than they may, however many operations are under way, and nothing is
//! counted twice after a crash: only what is there counts.

use std::fmt::Debug;
use std::future::Future;
use std::ops::{Add, Sub};
use std::pin::Pin;

/// Amounts of what an owner's budget limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuotaAmount {
    /// Running sandboxes.
    pub sandboxes: u64,
    /// Their virtual CPUs.
    pub vcpus: u64,
    /// Their memory, in MiB.
    pub memory_mib: u64,
    /// Sandboxes that are paused, or will be at their timeout.
    pub paused: u64,
    /// Snapshots that were asked for.
    pub snapshots: u64,
    /// Tags of templates.
    pub templates: u64,
    /// Builds that wait or run.
    pub builds: u64,
    /// Bytes on disk.
    pub disk_bytes: u64,
}

impl QuotaAmount {
    fn with(self, other: Self, each: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            sandboxes: each(self.sandboxes, other.sandboxes),
            vcpus: each(self.vcpus, other.vcpus),
            memory_mib: each(self.memory_mib, other.memory_mib),
            paused: each(self.paused, other.paused),
            snapshots: each(self.snapshots, other.snapshots),
            templates: each(self.templates, other.templates),
            builds: each(self.builds, other.builds),
            disk_bytes: each(self.disk_bytes, other.disk_bytes),
        }
    }
}

impl Add for QuotaAmount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.with(other, u64::saturating_add)
    }
}

impl Sub for QuotaAmount {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.with(other, u64::saturating_sub)
    }
}

/// A number of bytes, for people.
#[derive(Debug, Clone, Copy)]
pub struct Bytes(pub u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
        match units.iter().find(|(shift, _)| self.0 >= 1 << shift) {
            Some((shift, unit)) => {
                write!(f, "{:.1} {unit}", self.0 as f64 / (1u64 << shift) as f64)
            }
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// A request for part of an owner's budget.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuotaRequest {
    /// Most that may be needed.
    pub amount: QuotaAmount,
    /// Bytes on disk that are enough to begin with: where fewer than `amount.disk_bytes` are left,
    /// the permit is for those.
    pub disk_floor: Option<u64>,
}

/// Why an owner's budget has no room.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct QuotaRefusal {
    /// One word for programs: the name of the limit.
    pub code: &'static str,
    /// True if it is a limit of disk space.
    pub of_disk: bool,
    /// Usage, and what would free some of it.
    pub message: String,
}

/// Limit from which the disk space of a reservation comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskLimit {
    /// The limit of the owner's key.
    Key,
    /// The rest of the host's disk beside what was promised to guests.
    Host,
}

/// Part of a budget, given back when this is dropped.
pub trait QuotaHold: Debug + Send + Sync {
    /// Bytes on disk it is for.
    fn disk_bytes(&self) -> u64;

    /// Limit that those bytes come from.
    fn disk_limit(&self) -> DiskLimit;

    /// Takes `bytes` more; waits for nothing.
    fn grow(&mut self, bytes: u64) -> Result<(), QuotaRefusal>;
}

/// A reserved part of an owner's budget; none: the owner has no limits.
#[derive(Debug, Default)]
pub struct QuotaPermit(Option<Box<dyn QuotaHold>>);

impl QuotaPermit {
    /// A permit that is held in the owner's budget.
    pub fn held(hold: impl QuotaHold + 'static) -> Self {
        Self(Some(Box::new(hold)))
    }

    /// A permit without limits.
    pub fn unlimited() -> Self {
        Self(None)
    }

    /// Bytes on disk it is for; none: any number.
    pub fn disk_bytes(&self) -> Option<u64> {
        self.0.as_ref().map(|hold| hold.disk_bytes())
    }

    /// Limit from which its disk space comes.
    pub fn disk_limit(&self) -> DiskLimit {
        self.0
            .as_ref()
            .map_or(DiskLimit::Host, |hold| hold.disk_limit())
    }

    /// Takes `bytes` more, if the budget has them.
    pub fn grow(&mut self, bytes: u64) -> Result<(), QuotaRefusal> {
        match &mut self.0 {
            Some(hold) => hold.grow(bytes),
            None => Ok(()),
        }
    }
}

/// A reservation that waits for requests under way.
pub type Reserving<'a> =
    Pin<Box<dyn Future<Output = Result<QuotaPermit, QuotaRefusal>> + Send + 'a>>;

/// Knows the budgets of owners.
pub trait OwnerQuota: Send + Sync + 'static {
    /// Reserves part of `owner`'s budget. Where only operations under way stand in the way, it
    /// waits a while for their end.
    fn reserve<'a>(&'a self, owner: &'a str, request: QuotaRequest) -> Reserving<'a>;

    /// Reserves at once or not at all.
    fn try_reserve(&self, owner: &str, request: QuotaRequest) -> Result<QuotaPermit, QuotaRefusal>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_added_and_taken_away_each_by_itself() {
        let one = QuotaAmount {
            sandboxes: 1,
            disk_bytes: 10,
            ..QuotaAmount::default()
        };
        let other = QuotaAmount {
            paused: 2,
            disk_bytes: u64::MAX,
            ..QuotaAmount::default()
        };
        let sum = one + other;
        assert_eq!((sum.sandboxes, sum.paused), (1, 2));
        assert_eq!(sum.disk_bytes, u64::MAX, "bytes do not overflow");
        assert_eq!((one - other).disk_bytes, 0);
        assert!(QuotaPermit::unlimited().grow(u64::MAX).is_ok());
    }
}
