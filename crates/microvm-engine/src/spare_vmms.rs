//! VMM processes that are started in advance. They are already jailed and in their control groups,
//! and wait for the first request.
//!
//! A process needs about 4 ms from fork to its first request. Moving it to control groups of
//! version 1 takes up to 15 ms. A guest that uses a spare process saves this time. Spares are
//! started while no guest is starting, so that they do not compete with guests for processors.

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

/// Maximum number of spares after a burst. Each needs about 4 MiB.
const MAX_AFTER_BURST: usize = 20;

/// Spare VMM processes of one daemon.
#[derive(Debug)]
pub(crate) struct SpareVmms {
    launcher: VmmLauncher,
    state: Mutex<SpareState>,
}

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
    closed: bool,
}

impl SpareVmms {
    pub fn new(launcher: VmmLauncher, wanted: usize) -> Self {
        Self {
            launcher,
            state: Mutex::new(SpareState {
                ready: Vec::new(),
                bursts: BurstMemory::new(wanted, MAX_AFTER_BURST),
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
        state.last_memory_mib = u32::try_from(memory >> 20).unwrap_or(0);
        let mut spare = None;
        while spare.is_none()
            && let Some((channel, mut child)) = state.ready.pop()
        {
            spare = matches!(child.try_wait(), Ok(None)).then_some((channel, child));
        }
        let remaining = spare.is_some().then_some(state.ready.len());
        state.bursts.note_use(Instant::now(), remaining);
        spare
    }

    /// Terminates all spares. No further spares are started.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        for (_, mut child) in state.ready.drain(..) {
            let _ = child.start_kill();
        }
    }

    /// Returns whether the caller must start a spare, and reserves this task for the caller.
    fn begin(&self) -> bool {
        let mut state = self.state.lock();
        let target = state.bursts.target(Instant::now());
        let begins = !state.closed && !state.refilling && state.ready.len() < target;
        state.refilling |= begins;
        begins
    }

    /// Stores the new spare; `None` means that the start failed. Returns whether another one is
    /// needed.
    fn store(&self, spare: Option<(Channel, Child)>) -> bool {
        let mut state = self.state.lock();
        let able = spare.is_some();
        match spare {
            Some((_, mut child)) if state.closed => drop(child.start_kill()),
            Some(spare) => state.ready.push(spare),
            None => {}
        }
        let target = state.bursts.target(Instant::now());
        state.refilling = able && !state.closed && state.ready.len() < target;
        state.refilling
    }

    /// Returns the time until the burst is forgotten if the caller must trim the spares then.
    fn begin_trim(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        if state.closed || state.trimming {
            return None;
        }
        let rest = state.bursts.remembered_for(Instant::now());
        state.trimming = rest.is_some();
        rest
    }

    /// Terminates excess spares if the burst is forgotten. Otherwise returns the time until then.
    fn trim(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        let rest = state.bursts.remembered_for(Instant::now());
        if rest.is_some() && !state.closed {
            return rest;
        }
        state.trimming = false;
        while state.ready.len() > state.bursts.usual()
            && let Some((_, mut child)) = state.ready.pop()
        {
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

    /// Returns the time until work requested at `asked` is due.
    fn deferral(&self, asked: Instant) -> Duration {
        let due = self
            .last_start()
            .map_or(asked, |last| (last + QUIET_TIME).min(asked + MAX_DEFERRAL));
        due.saturating_duration_since(Instant::now())
    }

    /// Returns whether no guest was started for [`QUIET_TIME`].
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
        let Some(mut rest) = self.begin_trim() else {
            return;
        };
        let spares = self.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(rest).await;
                match spares.trim() {
                    Some(more) => rest = more,
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
            let mut asked = Instant::now();
            loop {
                let deferral = spares.deferral(asked);
                if !deferral.is_zero() {
                    tokio::time::sleep(deferral).await;
                    continue;
                }
                let memory_mib = spares.likely_memory_mib();
                let launcher = spares.launcher.clone();
                // Spawning blocks while the kernel moves the process to its control groups.
                let made =
                    Handle::current().spawn_blocking(move || launcher.spawn_spare(memory_mib));
                let made = match made.await {
                    Ok(Ok(made)) => Some(made),
                    Ok(Err(e)) => {
                        tracing::debug!(error = %e, "cannot start a spare VMM");
                        None
                    }
                    Err(_) => None,
                };
                if !spares.store(made) {
                    return;
                }
                asked = Instant::now();
            }
        });
    }
}
