//! Interface to the quotas of owners (API keys) for operations on sandboxes and templates. The
//! crate that manages keys implements it.
//!
//! An operation reserves the maximum that it may need before it starts. It holds the permit, which
//! is the reservation, until its result counts as usage ([`crate::OwnerUsage`], and the records of
//! the template builder). Thus an owner never exceeds the quota, however many operations are in
//! flight. After a crash nothing is counted twice, since reservations are lost and only existing
//! resources count.

use std::fmt::Debug;
use std::future::Future;
use std::ops::{Add, Sub};
use std::pin::Pin;

/// Amounts of the resources that an owner's quota limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuotaAmount {
    /// Running sandboxes.
    pub sandboxes: u64,
    /// Virtual CPUs of the running sandboxes.
    pub vcpus: u64,
    /// Memory of the running sandboxes, in MiB.
    pub memory_mib: u64,
    /// Sandboxes that are paused, or will be paused at their timeout.
    pub paused: u64,
    /// Snapshots requested by clients.
    pub snapshots: u64,
    /// Tags of templates.
    pub templates: u64,
    /// Builds that are queued or running.
    pub builds: u64,
    /// Bytes on disk.
    pub disk_bytes: u64,
}

impl QuotaAmount {
    /// Combines each amount with the same amount of `other`.
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
        // A sum that wrapped would be taken for a small amount.
        self.with(other, u64::saturating_add)
    }
}

impl Sub for QuotaAmount {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.with(other, u64::saturating_sub)
    }
}

/// Number of bytes with a human-readable format.
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

/// Request for part of an owner's quota.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuotaRequest {
    /// Maximum amount that the operation may need.
    pub amount: QuotaAmount,
    /// Minimum of disk space, in bytes. If the free quota is less than `amount.disk_bytes` but not
    /// below this value, all of it is reserved. `None` if the operation needs all of
    /// `amount.disk_bytes`.
    pub disk_floor: Option<u64>,
}

/// Reason why an owner's quota does not allow a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct QuotaRefusal {
    /// Error code: the name of the limit.
    pub code: &'static str,
    /// True if the limit concerns disk space.
    pub of_disk: bool,
    /// Usage and remedy.
    pub message: String,
}

/// Limit that determined the amount of disk space in a reservation. An error about insufficient
/// space names this limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskLimit {
    /// The limit of the owner's key.
    Key,
    /// The free space of the host's disk minus the reservations of guests.
    Host,
}

/// Reserved part of a quota. Dropping it releases the reservation.
pub trait QuotaHold: Debug + Send + Sync {
    /// Returns the reserved bytes on disk.
    fn disk_bytes(&self) -> u64;

    /// Returns the limit that determined [`Self::disk_bytes`].
    fn disk_limit(&self) -> DiskLimit;

    /// Reserves `bytes` more without waiting.
    fn grow(&mut self, bytes: u64) -> Result<(), QuotaRefusal>;
}

/// Reserved part of an owner's quota. Contains `None` if the owner has no limits.
#[derive(Debug, Default)]
pub struct QuotaPermit(Option<Box<dyn QuotaHold>>);

impl QuotaPermit {
    /// Creates a permit for a reservation in the owner's quota.
    pub fn held(hold: impl QuotaHold + 'static) -> Self {
        Self(Some(Box::new(hold)))
    }

    /// Creates a permit without limits.
    pub fn unlimited() -> Self {
        Self(None)
    }

    /// Returns the reserved bytes on disk. `None` if they are not limited.
    pub fn disk_bytes(&self) -> Option<u64> {
        self.0.as_ref().map(|hold| hold.disk_bytes())
    }

    /// Returns the limit that determined the reserved amount of disk space.
    pub fn disk_limit(&self) -> DiskLimit {
        self.0
            .as_ref()
            // Without a quota of the owner, only the free space of the host's disk limits the
            // operation.
            .map_or(DiskLimit::Host, |hold| hold.disk_limit())
    }

    /// Reserves `bytes` more if the quota allows it.
    pub fn grow(&mut self, bytes: u64) -> Result<(), QuotaRefusal> {
        match &mut self.0 {
            Some(hold) => hold.grow(bytes),
            None => Ok(()),
        }
    }
}

/// Future of a reservation, which may wait for operations in flight.
pub type Reserving<'a> =
    Pin<Box<dyn Future<Output = Result<QuotaPermit, QuotaRefusal>> + Send + 'a>>;

/// Quotas of owners.
pub trait OwnerQuota: Send + Sync + 'static {
    /// Reserves part of the quota of `owner`. If only reservations of operations in flight exceed
    /// the quota, waits some time for these operations to end.
    fn reserve<'a>(&'a self, owner: &'a str, request: QuotaRequest) -> Reserving<'a>;

    /// Reserves part of the quota of `owner` without waiting.
    fn try_reserve(&self, owner: &str, request: QuotaRequest) -> Result<QuotaPermit, QuotaRefusal>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_added_and_subtracted_with_saturation() {
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
