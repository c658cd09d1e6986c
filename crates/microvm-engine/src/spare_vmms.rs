//! VMM processes that are started before anybody needs them: jailed and in their control groups,
//! they wait for their first request.
//!
//! A process takes some 4 ms from fork to its first request, and moving it to control groups of
//! version 1 takes up to 15: neither is on the way of a guest that gets a spare. They are made in
//! pauses between starts of guests, whose processors they would take.

use crate::jail::{LimitTask, Vmm};
use crate::vm::BootError;
use crate::vmm_limits::VmmLimits;
use jiffy_engine_api::BurstMemory;
use jiffy_proto::channel::Channel;
use parking_lot::Mutex;
use std::time::{Duration, Instant};
use tokio::process::Child;
use tokio::runtime::Handle;

/// Time without a start of a guest after which spares are made.
const QUIET_TIME: Duration = Duration::from_millis(30);
/// Longest time that this is deferred.
const MAX_DEFERRAL: Duration = Duration::from_secs(1);

/// Most spares after a burst: each takes some 4 MiB.
const MAX_AFTER_BURST: usize = 20;

/// VMM process that has had no request yet.
#[derive(Debug)]
pub(crate) struct FreshVmm {
    pub channel: Channel,
    pub child: Child,
    /// Task that limits it, where processes are limited.
    pub limit_task: Option<LimitTask>,
}

/// Spare processes of one daemon.
#[derive(Debug)]
pub(crate) struct SpareVmms {
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
    pub fn new(wanted: usize) -> Self {
        Self {
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
}

impl Vmm {
    /// True if no guest has been started for a moment.
    pub(crate) fn starts_alone(&self) -> bool {
        let last = self.spares().and_then(|spares| spares.last_start());
        last.is_none_or(|last| last.elapsed() > QUIET_TIME)
    }

    /// Returns a spare process, or starts one. Must be called inside a tokio runtime.
    pub(crate) fn fresh(&self, limits: VmmLimits) -> Result<FreshVmm, BootError> {
        let spare = self.spares().and_then(|spares| spares.take(limits.memory));
        let fresh = match spare {
            Some((channel, child)) => FreshVmm {
                limit_task: self.limit_spare(&child, limits),
                channel,
                child,
            },
            None => self.spawn(limits)?,
        };
        self.make_spares();
        Ok(fresh)
    }

    /// Ends the spares of a burst when it is forgotten.
    fn trim_spares_later(&self) {
        let Some(mut rest) = self.spares().and_then(|spares| spares.begin_trim()) else {
            return;
        };
        let vmm = self.clone();
        tokio::spawn(async move {
            let Some(spares) = vmm.spares() else { return };
            loop {
                tokio::time::sleep(rest).await;
                match spares.trim() {
                    Some(more) => rest = more,
                    // The engine's gc finds their control groups.
                    None => return,
                }
            }
        });
    }

    /// Has the missing spare processes made, in a pause between starts.
    pub fn make_spares(&self) {
        let Some(spares) = self.spares() else { return };
        self.trim_spares_later();
        if !spares.begin() {
            return;
        }
        let vmm = self.clone();
        tokio::spawn(async move {
            let Some(spares) = vmm.spares() else { return };
            let mut asked = Instant::now();
            loop {
                let deferral = spares.deferral(asked);
                if !deferral.is_zero() {
                    tokio::time::sleep(deferral).await;
                    continue;
                }
                let (maker, memory_mib) = (vmm.clone(), spares.likely_memory_mib());
                // It blocks while the kernel moves the process.
                let made = Handle::current().spawn_blocking(move || maker.spawn_spare(memory_mib));
                let made = match made.await {
                    Ok(Ok(made)) => Some(made),
                    Ok(Err(e)) => {
                        tracing::debug!("no spare VMM: {e}");
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
