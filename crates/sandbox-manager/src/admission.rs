//! Admission control: decides whether the host has enough resources for another guest.
//!
//! Every guest has a [`Reservation`] from its admission until it exits. Two checks decide about an
//! admission. The first compares the sum of all reservations with limits; concurrent requests
//! cannot exceed them, since the check and the reservation happen under one lock. The second
//! compares the free resources that the kernel reports with the needs of a starting guest. Guests
//! that are still starting have not used their share yet, so it is subtracted from the free
//! resources.
//!
//! The *warm pool* has guests that were started in advance and wait for a create.

mod figures;
mod limits;
mod shortage;

pub use figures::{HostFigures, HostReader, KernelReader, Pressure};
pub use limits::HostLimits;
pub use shortage::Shortage;

use crate::operation_error::OperationError;
use jiffy_engine_api::SandboxSize;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Memory that a guest uses until its agent has answered, in MiB. A booting guest touches 44 MiB, a
/// restored guest far less.
const BOOT_MIB: u64 = 48;
/// Tasks that one sandbox uses.
const TASKS_PER_GUEST: u64 = 12;
/// File descriptors of the daemon that one sandbox uses.
const DESCRIPTORS_PER_GUEST: u64 = 15;
/// Number of tasks of the host, and of file descriptors of the daemon, that must remain free for
/// other purposes.
const SPARE_PER_HOST: u64 = 256;
/// Memory pressure rejects guests only if less than this fraction (1/n) of the host's memory is
/// available. The kernel counts time spent on reclaiming page cache as pressure, even if all of
/// that cache can be reclaimed.
const SCARCE_MEMORY_PART: u64 = 4;

/// Reason why a guest is not admitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub short_of: Shortage,
    /// Text of the client's error: the shortage and, for exceeded limits, a remedy.
    what: String,
}

impl From<Refusal> for OperationError {
    fn from(refusal: Refusal) -> Self {
        let what = refusal.what;
        match refusal.short_of.retry_after() {
            Some(retry_after) => Self::Busy { what, retry_after },
            None => Self::TooLarge { what },
        }
    }
}

/// Purpose of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occupant {
    /// A sandbox.
    Sandbox,
    /// A guest of the warm pool.
    WarmPool,
}

/// Resources reserved for guests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReservedResources {
    /// Sandboxes that have a guest or are starting one.
    pub sandboxes: usize,
    /// Guests in the warm pool, ready or starting.
    pub warm_pool: usize,
    /// Guests that are starting.
    pub starting: usize,
    /// Sum of the guests' memory sizes, in MiB.
    pub memory_mib: u64,
    /// Sum of the guests' disk sizes, in MiB.
    pub disk_mib: u64,
    /// Number of rejections, by the resource that was short.
    pub rejections: BTreeMap<Shortage, u64>,
}

/// Resources that are free for further sandboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FreeResources {
    /// Sum of the memory sizes of further sandboxes in MiB. `None` if the host's memory is unknown.
    pub memory_mib: Option<u64>,
    /// Sum of the disk sizes of further sandboxes in MiB. `None` if the free space is unknown.
    pub disk_mib: Option<u64>,
    /// Part of the time in percent in which no task waited for a processor.
    pub cpu_percent: u8,
    /// Sandboxes that are starting.
    pub starting: usize,
}

/// Admission control of a host.
#[derive(Debug)]
pub(crate) struct Admission {
    limits: HostLimits,
    host: Arc<dyn HostReader>,
    reservations: Arc<Mutex<ReservedResources>>,
}

/// Resources reserved for a guest, from its admission until it exits. Dropping the reservation
/// releases them.
#[derive(Debug)]
pub(crate) struct Reservation {
    reservations: Arc<Mutex<ReservedResources>>,
    occupant: Occupant,
    memory_mib: u64,
    disk_mib: u64,
    /// True until the guest has started.
    starting: bool,
}

impl Admission {
    pub fn new(limits: HostLimits, host: Arc<dyn HostReader>) -> Self {
        Self {
            limits,
            host,
            reservations: Arc::default(),
        }
    }

    /// Returns the present reservations.
    pub fn reservations(&self) -> ReservedResources {
        self.reservations.lock().clone()
    }

    /// Reads the free resources of the host.
    pub fn figures(&self) -> HostFigures {
        self.host.read()
    }

    /// Returns the limit of the sum of memory sizes, in MiB. `None` if the host's memory size is
    /// unknown.
    pub fn memory_limit_mib(&self, figures: &HostFigures) -> Option<u64> {
        let total = figures.memory_total_mib?;
        Some((total as f64 * self.limits.memory_overcommit) as u64)
    }

    /// Returns the resources that [`Self::admit`] would grant to further sandboxes at present. Zero
    /// if it rejects every sandbox.
    pub fn free(&self) -> FreeResources {
        let figures = self.host.read();
        let reservations = self.reservations.lock();
        let starting = reservations.starting;
        let is_full = self
            .limits
            .sandboxes
            .is_some_and(|limit| reservations.sandboxes >= limit);
        if is_full || self.check_free_resources(&figures, starting).is_err() {
            return FreeResources {
                memory_mib: Some(0),
                disk_mib: Some(0),
                cpu_percent: 0,
                starting,
            };
        }
        let rest = |limit: Option<u64>, used: u64| limit.map(|limit| limit.saturating_sub(used));
        let waiting = figures.pressure.map_or(0.0, |pressure| pressure.cpu_some);
        FreeResources {
            memory_mib: rest(self.memory_limit_mib(&figures), reservations.memory_mib),
            disk_mib: rest(self.disk_limit_mib(&figures), reservations.disk_mib),
            cpu_percent: (100.0 - waiting).clamp(0.0, 100.0) as u8,
            starting,
        }
    }

    /// Reserves resources for one more guest of `size`.
    pub fn admit(&self, occupant: Occupant, size: SandboxSize) -> Result<Reservation, Refusal> {
        let figures = self.host.read();
        let mut reservations = self.reservations.lock();
        let decision = self
            // The limits first: their errors name a remedy that is in the client's hands.
            .check_limits(&figures, &reservations, occupant, size)
            .and_then(|()| self.check_free_resources(&figures, reservations.starting));
        if let Err(refusal) = decision {
            // Refusals for the warm pool are not counted: no client was rejected.
            if occupant == Occupant::Sandbox {
                *reservations.rejections.entry(refusal.short_of).or_insert(0) += 1;
            }
            return Err(refusal);
        }
        // Reserve under the same lock as the checks, so that concurrent admissions cannot exceed
        // the limits.
        Ok(self.reserve(&mut reservations, occupant, size, true))
    }

    /// Checks that the host has resources for the short overlap in which a new guest replaces a
    /// running one.
    pub fn check_replacement(&self) -> Result<(), Refusal> {
        let figures = self.host.read();
        let mut reservations = self.reservations.lock();
        let decision = self.check_free_resources(&figures, reservations.starting);
        if let Err(refusal) = &decision {
            *reservations.rejections.entry(refusal.short_of).or_insert(0) += 1;
        }
        decision
    }

    /// Reserves resources for a guest that already exists, without a check.
    pub fn reserve_existing(&self, size: SandboxSize) -> Reservation {
        let mut reservations = self.reservations.lock();
        // `starting` is false: the figures of the host already include the guest.
        self.reserve(&mut reservations, Occupant::Sandbox, size, false)
    }

    /// Adds a reservation. `starting` means that the figures of the host do not include the guest
    /// yet.
    fn reserve(
        &self,
        reservations: &mut ReservedResources,
        occupant: Occupant,
        size: SandboxSize,
        starting: bool,
    ) -> Reservation {
        let reservation = Reservation {
            reservations: self.reservations.clone(),
            occupant,
            memory_mib: size.memory_mib.into(),
            disk_mib: size.disk_mib,
            starting,
        };
        // The sums cannot overflow: `SandboxSize::check` limits each guest to 64 GiB of memory and
        // 1 TiB of disk.
        *reservation.counter(reservations) += 1;
        reservations.memory_mib += reservation.memory_mib;
        reservations.disk_mib += reservation.disk_mib;
        reservations.starting += usize::from(starting);
        reservation
    }

    /// Checks that the reservations and limits allow another guest.
    fn check_limits(
        &self,
        figures: &HostFigures,
        reservations: &ReservedResources,
        occupant: Occupant,
        size: SandboxSize,
    ) -> Result<(), Refusal> {
        let refuse = |short_of, what| Err(Refusal { short_of, what });
        let memory_mib = u64::from(size.memory_mib);
        if let Some(total) = figures.memory_total_mib {
            let limit = total.saturating_sub(self.memory_reserve_mib(figures));
            // Waiting cannot help, so this error differs from a lack of free memory.
            if memory_mib > limit {
                return refuse(
                    Shortage::Size,
                    format!(
                        "a sandbox with {memory_mib} MiB of memory exceeds the {limit} MiB that this host can provide: request less memory"
                    ),
                );
            }
        }
        if let Some(limit) = self.limits.sandboxes
            // Warm-pool guests do not count: an admitted sandbox can take one of them.
            && occupant == Occupant::Sandbox
            && reservations.sandboxes >= limit
        {
            return refuse(
                Shortage::Sandboxes,
                format!(
                    "{limit} sandboxes are running on this host, which is its limit: pause or kill a sandbox"
                ),
            );
        }
        if let Some(limit) = self.memory_limit_mib(figures)
            // The only guest of a host may exceed the limit: otherwise a large size could never
            // run.
            && reservations.memory_mib.saturating_add(memory_mib) > limit.max(memory_mib)
        {
            let before = reservations.memory_mib;
            return refuse(
                Shortage::ReservedMemory,
                format!(
                    "the sandboxes of this host have {before} MiB of memory, and {memory_mib} MiB more would exceed the limit of {limit} MiB: pause or kill a sandbox"
                ),
            );
        }
        // With overcommit, the only guest of a host may have a disk larger than the limit.
        let has_overcommit = self.limits.disk_overcommit > 1.0;
        let min_limit = if has_overcommit { size.disk_mib } else { 0 };
        if let Some(limit) = self.disk_limit_mib(figures)
            && reservations.disk_mib.saturating_add(size.disk_mib) > limit.max(min_limit)
        {
            let (before, disk_mib) = (reservations.disk_mib, size.disk_mib);
            return refuse(
                Shortage::ReservedDisk,
                format!(
                    "the disks of this host's sandboxes have {before} MiB, and {disk_mib} MiB more would exceed the limit of {limit} MiB: free disk space, or pause or kill a sandbox"
                ),
            );
        }
        Ok(())
    }

    /// Returns the limit of the sum of disk sizes, in MiB. `None` if the free space is unknown.
    /// Space that guests have written counts twice: it is a part of their reservations and is no
    /// longer free. The limit is therefore lower than necessary, which is safe.
    fn disk_limit_mib(&self, figures: &HostFigures) -> Option<u64> {
        let free_mib = figures.disk_free_mib?;
        let free_mib = free_mib.saturating_sub(self.disk_reserve_mib(figures));
        Some((free_mib as f64 * self.limits.disk_overcommit) as u64)
    }

    /// Returns the disk space that may be written in addition to the reservations of guests, in
    /// MiB. `None` if the free space is unknown.
    pub fn writable_disk_mib(&self) -> Option<u64> {
        let figures = self.host.read();
        let free_mib = figures.disk_free_mib?;
        let free_mib = free_mib.saturating_sub(self.disk_reserve_mib(&figures));
        // With overcommit, guests are expected to write only a part of their disks.
        let reserved_mib = self.reservations.lock().disk_mib as f64 / self.limits.disk_overcommit;
        Some(free_mib.saturating_sub(reserved_mib as u64))
    }

    /// Returns the disk space that must stay free, in MiB ([`HostLimits::reserve_disk_mib`]).
    fn disk_reserve_mib(&self, figures: &HostFigures) -> u64 {
        let reserve = self.limits.reserve_disk_mib;
        reserve.unwrap_or_else(|| (figures.disk_total_mib.unwrap_or(0) / 100).max(1024))
    }

    /// Returns the memory that must stay available, in MiB ([`HostLimits::reserve_memory_mib`]).
    fn memory_reserve_mib(&self, figures: &HostFigures) -> u64 {
        let total = figures.memory_total_mib.unwrap_or(0);
        let reserve = self.limits.reserve_memory_mib;
        reserve.unwrap_or_else(|| (total / 20).max(512))
    }

    /// Checks that the host has enough free resources in addition to the needs of `starting`
    /// guests.
    fn check_free_resources(&self, figures: &HostFigures, starting: usize) -> Result<(), Refusal> {
        // The guest to admit, and the guests that the host's figures do not include yet.
        let guests = u64::try_from(starting)
            .unwrap_or(u64::MAX)
            .saturating_add(1);
        let checks = [
            (
                Shortage::Memory,
                figures.memory_available_mib,
                self.memory_reserve_mib(figures)
                    .saturating_add(guests.saturating_mul(BOOT_MIB)),
                "MiB of memory available",
            ),
            (
                Shortage::Disk,
                figures.disk_free_mib,
                self.disk_reserve_mib(figures),
                "MiB of disk space free",
            ),
            (
                Shortage::Tasks,
                figures.tasks_free,
                guests
                    .saturating_mul(TASKS_PER_GUEST)
                    .saturating_add(SPARE_PER_HOST),
                "processes and threads available",
            ),
            (
                Shortage::Descriptors,
                figures.descriptors_free,
                guests
                    .saturating_mul(DESCRIPTORS_PER_GUEST)
                    .saturating_add(SPARE_PER_HOST),
                "file descriptors available",
            ),
        ];
        for (short_of, free, needed, unit) in checks {
            // A figure that the kernel does not report rejects no guest.
            if let Some(free) = free.filter(|free| *free < needed) {
                let what =
                    format!("this host has {free} {unit} and needs {needed} to start a guest");
                return Err(Refusal { short_of, what });
            }
        }
        // The pressure is checked last: a specific shortage explains more than the pressure that it
        // causes.
        self.check_pressure(figures)
    }

    /// Checks that tasks on the host do not wait too long for its resources.
    fn check_pressure(&self, figures: &HostFigures) -> Result<(), Refusal> {
        let (Some(now), limits) = (figures.pressure, self.limits.pressure) else {
            return Ok(());
        };
        let rejection = |who: &str, what: &str, (now, limit): (f64, f64), more: &str| Refusal {
            short_of: Shortage::Pressure,
            what: format!(
                "this host is under pressure: {who} waited for {what} for {now:.0} % of the last 10 s, and the limit is {limit:.0} %{more}"
            ),
        };
        // Full pressure comes first, since it is the more severe reason.
        if let Some(scarcity) = memory_scarcity(figures) {
            let checks = [
                ("all tasks", now.memory_full, limits.memory_full),
                ("some tasks", now.memory_some, limits.memory_some),
            ];
            for (who, now, limit) in checks {
                if now > limit {
                    return Err(rejection(who, "memory", (now, limit), &scarcity));
                }
            }
        }
        let checks = [
            ("all tasks", "disks", now.io_full, limits.io_full),
            ("some tasks", "processors", now.cpu_some, limits.cpu_some),
        ];
        match checks.into_iter().find(|(_, _, now, limit)| now > limit) {
            Some((who, what, now, limit)) => Err(rejection(who, what, (now, limit), "")),
            None => Ok(()),
        }
    }
}

/// Returns the available memory in words if memory is scarce, or an empty text if the available or
/// total memory is unknown. Returns `None` if memory is ample: pressure then only means that page
/// cache is reclaimed.
fn memory_scarcity(figures: &HostFigures) -> Option<String> {
    let (Some(available), Some(total)) = (figures.memory_available_mib, figures.memory_total_mib)
    else {
        return Some(String::new());
    };
    let enough = total / SCARCE_MEMORY_PART;
    (available < enough).then(|| {
        format!(
            " while less than {enough} MiB of memory are available; {available} of {total} MiB are available"
        )
    })
}

impl Reservation {
    fn counter<'a>(&self, reservations: &'a mut ReservedResources) -> &'a mut usize {
        match self.occupant {
            Occupant::Sandbox => &mut reservations.sandboxes,
            Occupant::WarmPool => &mut reservations.warm_pool,
        }
    }

    /// Returns the reserved memory in MiB.
    pub fn memory_mib(&self) -> u64 {
        self.memory_mib
    }

    /// Marks the guest as started: from now on the host's figures include its memory.
    pub fn mark_started(&mut self) {
        // A second call has no effect.
        if std::mem::take(&mut self.starting) {
            self.reservations.lock().starting -= 1;
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // A guest that never started must not be subtracted from the free resources any longer.
        self.mark_started();
        let reservations = self.reservations.clone();
        let mut reservations = reservations.lock();
        *self.counter(&mut reservations) -= 1;
        reservations.memory_mib -= self.memory_mib;
        reservations.disk_mib -= self.disk_mib;
    }
}

#[cfg(test)]
mod tests;
