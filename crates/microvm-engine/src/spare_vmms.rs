//! Spare VMM processes: they are started in advance, are already jailed and in their control
//! groups, and wait for their first request.
//!
//! A process needs about 4 ms from its creation to its first request. Moving it to control groups
//! of version 1 takes up to 15 ms. A guest that uses a spare process saves this time. Spares are
//! started while no guest is starting, so that they do not compete with guests for processors.
//!
//! A *burst* is a series of guests that start at most 250 ms apart, for example several copies of
//! one sandbox that a client requests at once. If a burst needs more spares than exist, the number
//! of spares is raised for the next burst, to at most [`MAX_AFTER_BURST`]. Five minutes after the
//! last time when the additional spares were needed, the burst is forgotten and the additional
//! spares are terminated ([`BurstMemory`]).

use crate::boot_error::BootError;
use crate::vmm_launcher::{FreshVmm, VmmLauncher};
use crate::vmm_limits::VmmLimits;
use jiffy_engine_api::BurstMemory;
use jiffy_proto::channel::Channel;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::process::Child;
use tokio::runtime::Handle;

/// Time after the last start of a guest before spares are started.
const QUIET_TIME: Duration = Duration::from_millis(30);
/// Maximum time for which the start of spares is deferred.
const MAX_DEFERRAL: Duration = Duration::from_secs(1);

/// Maximum number of spares after a burst. A spare needs about 4 MiB.
const MAX_AFTER_BURST: usize = 20;

/// Spare VMM processes of one daemon.
#[derive(Debug)]
pub(crate) struct SpareVmms {
    launcher: VmmLauncher,
    state: Mutex<SpareState>,
}

/// Ready processes, and the state of the tasks that start and terminate them.
#[derive(Debug)]
struct SpareState {
    ready: Vec<(Channel, Child)>,
    bursts: BurstMemory,
    /// Memory of the guest that was started last, in MiB. The next guest probably has the same
    /// size.
    last_memory_mib: u32,
    /// True if a task is starting spares.
    refilling: bool,
    /// True if a task waits until a burst is forgotten.
    trimming: bool,
    /// True if no further spares are started.
    closed: bool,
}

impl SpareVmms {
    pub fn new(launcher: VmmLauncher, target: usize) -> Self {
        Self {
            launcher,
            state: Mutex::new(SpareState {
                ready: Vec::new(),
                bursts: BurstMemory::new(target, MAX_AFTER_BURST),
                last_memory_mib: 0,
                refilling: false,
                trimming: false,
                closed: false,
            }),
        }
    }

    /// Takes a running spare process for a guest with `memory` bytes of memory.
    fn take(&self, memory: u64) -> Option<(Channel, Child)> {
        let mut state = self.state.lock();
        // Conversion fails only for sizes above the maximum of a guest.
        state.last_memory_mib = u32::try_from(memory >> 20).unwrap_or(0);
        let mut spare = None;
        // Skip spares that have exited, for example because they were killed.
        while spare.is_none()
            && let Some((channel, mut child)) = state.ready.pop()
        {
            spare = matches!(child.try_wait(), Ok(None)).then_some((channel, child));
        }
        // `None` if no spare was available.
        let remaining = spare.is_some().then_some(state.ready.len());
        state.bursts.note_use(Instant::now(), remaining);
        spare
    }

    /// Terminates all spares. No further spares are started.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        for (_, mut child) in state.ready.drain(..) {
            // Ignore the error: the process has exited already. The runtime reaps it.
            let _ = child.start_kill();
        }
    }

    /// Returns whether the caller must start a spare, and reserves this task for the caller.
    fn begin(&self) -> bool {
        let mut state = self.state.lock();
        let target = state.bursts.target(Instant::now());
        let must_start = !state.closed && !state.refilling && state.ready.len() < target;
        state.refilling |= must_start;
        must_start
    }

    /// Stores the new spare; `None` means that the start failed. Returns whether another one is
    /// needed.
    fn store(&self, spare: Option<(Channel, Child)>) -> bool {
        let mut state = self.state.lock();
        let started = spare.is_some();
        match spare {
            // The daemon is shutting down. The spare was started before `close`.
            Some((_, mut child)) if state.closed => drop(child.start_kill()),
            Some(spare) => state.ready.push(spare),
            None => {}
        }
        let target = state.bursts.target(Instant::now());
        // After a failure, the next start of a guest tries again.
        state.refilling = started && !state.closed && state.ready.len() < target;
        state.refilling
    }

    /// Returns the time until the burst is forgotten if the caller must trim the spares then.
    fn begin_trim(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        if state.closed || state.trimming {
            return None;
        }
        let remaining = state.bursts.remembered_for(Instant::now());
        state.trimming = remaining.is_some();
        remaining
    }

    /// Terminates excess spares if the burst is forgotten. Otherwise returns the time until then.
    fn trim(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        let remaining = state.bursts.remembered_for(Instant::now());
        if remaining.is_some() && !state.closed {
            return remaining;
        }
        state.trimming = false;
        while state.ready.len() > state.bursts.usual()
            && let Some((_, mut child)) = state.ready.pop()
        {
            // Ignore the error: the process has exited already.
            let _ = child.start_kill();
        }
        None
    }

    /// Returns the probable memory of the next guest in MiB, or 0 if unknown.
    fn likely_memory_mib(&self) -> u32 {
        self.state.lock().last_memory_mib
    }

    /// Returns the time of the last start of a guest.
    fn last_start(&self) -> Option<Instant> {
        self.state.lock().bursts.last_use()
    }

    /// Returns the time until work requested at `requested_at` is due.
    fn deferral(&self, requested_at: Instant) -> Duration {
        // Wait for quiet time, but not forever on a busy host.
        let due = self.last_start().map_or(requested_at, |last| {
            (last + QUIET_TIME).min(requested_at + MAX_DEFERRAL)
        });
        due.saturating_duration_since(Instant::now())
    }

    /// Returns whether a guest that starts now is the only guest that is starting: no other guest
    /// was started for [`QUIET_TIME`]. Must be called before [`Self::take_or_spawn`], which records
    /// the start of the guest.
    pub fn starts_alone(&self) -> bool {
        let last = self.last_start();
        last.is_none_or(|last| last.elapsed() > QUIET_TIME)
    }

    /// Returns a spare process, or starts a process. Must be called inside a tokio runtime.
    pub fn take_or_spawn(self: &Arc<Self>, limits: VmmLimits) -> Result<FreshVmm, BootError> {
        let fresh = match self.take(limits.memory) {
            Some((channel, child)) => FreshVmm {
                limit_task: self.launcher.limit_spare(&child, limits),
                channel,
                child,
            },
            None => self.launcher.spawn(limits)?,
        };
        self.refill();
        Ok(fresh)
    }

    /// Terminates the spares of a burst when the burst is forgotten.
    fn trim_later(self: &Arc<Self>) {
        let Some(mut remaining) = self.begin_trim() else {
            return;
        };
        let spares = self.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(remaining).await;
                match spares.trim() {
                    Some(time) => remaining = time,
                    // The engine's garbage collection removes the control groups of the terminated
                    // spares.
                    None => return,
                }
            }
        });
    }

    /// Starts the missing spare processes when no guest is starting. Must be called inside a tokio
    /// runtime.
    pub fn refill(self: &Arc<Self>) {
        self.trim_later();
        if !self.begin() {
            return;
        }
        let spares = self.clone();
        tokio::spawn(async move {
            let mut requested_at = Instant::now();
            loop {
                let deferral = spares.deferral(requested_at);
                if !deferral.is_zero() {
                    tokio::time::sleep(deferral).await;
                    continue;
                }
                let memory_mib = spares.likely_memory_mib();
                let launcher = spares.launcher.clone();
                // Spawning blocks while the kernel moves the process to its control groups.
                let spare =
                    Handle::current().spawn_blocking(move || launcher.spawn_spare(memory_mib));
                let spare = match spare.await {
                    Ok(Ok(spare)) => Some(spare),
                    Ok(Err(e)) => {
                        tracing::debug!(error = %e, "cannot start a spare VMM");
                        None
                    }
                    // The task was cancelled or panicked.
                    Err(_) => None,
                };
                if !spares.store(spare) {
                    return;
                }
                requested_at = Instant::now();
            }
        });
    }
}
