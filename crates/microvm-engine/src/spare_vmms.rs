//! VMM processes that are started in advance: jailed and in their control groups, they wait for
//! their first request.
//!
//! A process takes some 4 ms from fork to its first request, and moving it to control groups of
//! version 1 takes up to 15: neither is on the way of a guest that gets a spare. They are made in
//! pauses between starts of guests, whose processors they would take.

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

/// Time without a start of a guest after which spares are made.
const QUIET_TIME: Duration = Duration::from_millis(30);
/// Longest time that this is deferred.
const MAX_DEFERRAL: Duration = Duration::from_secs(1);

/// Most spares after a burst: each takes some 4 MiB.
const MAX_AFTER_BURST: usize = 20;

/// Spare processes of one daemon.
#[derive(Debug)]
pub(crate) struct SpareVmms {
    launcher: VmmLauncher,
    state: Mutex<SpareState>,
}

#[derive(Debug)]
struct SpareState {
    ready: Vec<(Channel, Child)>,
    bursts: BurstMemory,
    /// Memory of the guest that was started last, in MiB: the next is likely to have as much.
    last_memory_mib: u32,
    /// A task makes spares.
    refilling: bool,
    /// A task waits for the end of a burst's memory.
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

    /// Takes one that lives, for a guest with `memory` bytes of memory.
    fn take(&self, memory: u64) -> Option<(Channel, Child)> {
        let mut state = self.state.lock();
        state.last_memory_mib = u32::try_from(memory >> 20).unwrap_or(0);
        let mut found = None;
        while found.is_none()
            && let Some((channel, mut child)) = state.ready.pop()
        {
            found = matches!(child.try_wait(), Ok(None)).then_some((channel, child));
        }
        let left = found.is_some().then_some(state.ready.len());
        state.bursts.note_use(Instant::now(), left);
        found
    }

    /// Ends all, and has no more made.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        for (_, mut child) in state.ready.drain(..) {
            let _ = child.start_kill();
        }
    }

    /// True if one is to be made, and the caller is to make it.
    fn begin(&self) -> bool {
        let mut state = self.state.lock();
        let target = state.bursts.target(Instant::now());
        let begins = !state.closed && !state.refilling && state.ready.len() < target;
        state.refilling |= begins;
        begins
    }

    /// Keeps a spare; none could be made. Returns true if another one is to be made.
    fn keep(&self, spare: Option<(Channel, Child)>) -> bool {
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

    /// Time until a burst is forgotten, if the caller is to end what is too much then.
    fn begin_trim(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        if state.closed || state.trimming {
            return None;
        }
        let rest = state.bursts.remembered_for(Instant::now());
        state.trimming = rest.is_some();
        rest
    }

    /// Ends spares of a burst that is forgotten. Returns the time until then, if there is more.
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

    /// Memory that the guest of the next spare is likely to have, in MiB; 0: not known.
    fn likely_memory_mib(&self) -> u32 {
        self.state.lock().last_memory_mib
    }

    /// Moment of the last start of a guest.
    fn last_start(&self) -> Option<Instant> {
        self.state.lock().bursts.last_use()
    }

    /// Time until work that was asked for at `asked` is due.
    fn deferral(&self, asked: Instant) -> Duration {
        let due = self
            .last_start()
            .map_or(asked, |last| (last + QUIET_TIME).min(asked + MAX_DEFERRAL));
        due.saturating_duration_since(Instant::now())
    }

    /// Returns true if no guest has been started for a moment.
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

    /// Ends the spares of a burst when it is forgotten.
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
                    // Garbage collection of the engine removes their control groups.
                    None => return,
                }
            }
        });
    }

    /// Starts the missing spare processes in a pause between starts of guests. Must be called
    /// inside a tokio runtime.
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
                // Blocks while the kernel moves the process.
                let made =
                    Handle::current().spawn_blocking(move || launcher.spawn_spare(memory_mib));
                let made = match made.await {
                    Ok(Ok(made)) => Some(made),
                    Ok(Err(e)) => {
                        tracing::debug!("cannot start a spare VMM: {e}");
                        None
                    }
                    Err(_) => None,
                };
                if !spares.keep(made) {
                    return;
                }
                asked = Instant::now();
            }
        });
    }
}
