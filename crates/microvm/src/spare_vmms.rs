//! VMM processes that are started before anybody needs them: jailed and in their control groups,
//! they wait for their first request.
//!
//! A process takes some 4 ms from fork to its first request, and moving it to control groups of
//! version 1 takes up to 15: neither is on the way of a guest that gets a spare. They are made in
//! pauses between starts of guests, whose processors they would take.
//!
//! Many starts at once, as of a fork's children, are likely to come again: after a burst there are
//! as many spares for some minutes as it would have taken.

use crate::jail::{LimitTask, Vmm};
use crate::vm::BootError;
use crate::vmm_limits::VmmLimits;
use jiffy_proto::channel::Channel;
use parking_lot::Mutex;
use std::time::{Duration, Instant};
use tokio::process::Child;
use tokio::runtime::Handle;

/// Time without a start of a guest after which spares are made.
const QUIET_TIME: Duration = Duration::from_millis(30);
/// Longest time that this is deferred.
const MAX_DEFERRAL: Duration = Duration::from_secs(1);

/// Starts that follow each other faster belong to one burst.
const BURST_GAP: Duration = Duration::from_millis(250);
/// Most spares after a burst: each takes some 4 MiB.
const MAX_AFTER_BURST: usize = 20;
/// Time for which a burst is remembered.
const BURST_MEMORY: Duration = Duration::from_mins(5);

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
    /// Number of them at all times.
    wanted: usize,
    state: Mutex<SpareState>,
}

#[derive(Debug, Default)]
struct SpareState {
    ready: Vec<(Channel, Child)>,
    last_start: Option<Instant>,
    /// Memory of the guest that was started last, in MiB: the next is likely to have as much.
    last_memory_mib: u32,
    /// A task makes spares.
    refilling: bool,
    /// A task waits for the end of a burst's memory.
    trimming: bool,
    closed: bool,
    /// Starts of the current burst that found no spare.
    missed: usize,
    /// Number of them while a burst is remembered, and when it was last of use.
    after_burst: Option<(usize, Instant)>,
}

impl SpareState {
    /// Notes a start for which there was a spare or none. `wanted` are there at all times.
    fn note_start(&mut self, now: Instant, wanted: usize, found: bool) {
        let goes_on = self.last_start.is_some_and(|last| now < last + BURST_GAP);
        self.last_start = Some(now);
        if !goes_on {
            self.missed = 0;
        }
        if found {
            // Without the burst before there would have been none.
            if let Some((many, last)) = &mut self.after_burst
                && self.ready.len() + wanted < *many
            {
                *last = now;
            }
            return;
        }
        self.missed += 1;
        let many = (wanted + self.missed).min(MAX_AFTER_BURST);
        let known = self.after_burst.map_or(0, |(known, _)| known);
        self.after_burst = Some((many.max(known), now));
    }

    /// Number of spares that there should be now.
    fn target(&self, now: Instant, wanted: usize) -> usize {
        match self.after_burst {
            Some((many, last)) if now < last + BURST_MEMORY => many.max(wanted),
            _ => wanted,
        }
    }
}

impl SpareVmms {
    pub fn new(wanted: usize) -> Self {
        Self {
            wanted,
            state: Mutex::default(),
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
        if self.wanted > 0 {
            state.note_start(Instant::now(), self.wanted, found.is_some());
        }
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
        let target = state.target(Instant::now(), self.wanted);
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
        let target = state.target(Instant::now(), self.wanted);
        state.refilling = able && !state.closed && state.ready.len() < target;
        state.refilling
    }

    /// Time until a burst is forgotten, if the caller is to end what is too much then.
    fn begin_trim(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        let (_, last) = state
            .after_burst
            .filter(|_| !state.closed && !state.trimming)?;
        state.trimming = true;
        Some((last + BURST_MEMORY).saturating_duration_since(Instant::now()))
    }

    /// Ends spares of a burst that is forgotten. Returns the time until then, if there is more.
    fn trim(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        let now = Instant::now();
        if let Some((_, last)) = state.after_burst
            && now < last + BURST_MEMORY
            && !state.closed
        {
            return Some(last + BURST_MEMORY - now);
        }
        state.after_burst = None;
        state.trimming = false;
        while state.ready.len() > self.wanted
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

    /// Time until work that was asked for at `asked` is due.
    fn deferral(&self, asked: Instant) -> Duration {
        let last = self.state.lock().last_start;
        let due = last.map_or(asked, |last| (last + QUIET_TIME).min(asked + MAX_DEFERRAL));
        due.saturating_duration_since(Instant::now())
    }
}

impl Vmm {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes starts that find no spare, `gap` apart from each other, and returns the last moment.
    fn starts(state: &mut SpareState, from: Instant, count: u32, gap: Duration) -> Instant {
        for n in 0..count {
            state.note_start(from + gap * n, 2, false);
        }
        from + gap * (count - 1)
    }

    #[test]
    fn after_a_burst_there_are_as_many_spares_as_it_would_have_taken() {
        let mut state = SpareState::default();
        let begin = Instant::now();
        assert_eq!(state.target(begin, 2), 2);
        let last = starts(&mut state, begin, 8, Duration::from_millis(5));
        assert_eq!(state.target(last, 2), 10);
        assert_eq!(state.target(last + BURST_MEMORY, 2), 2);
        let last = starts(&mut state, last, 1000, Duration::from_millis(5));
        assert_eq!(state.target(last, 2), MAX_AFTER_BURST);
    }

    #[test]
    fn starts_one_after_the_other_are_no_burst() {
        let mut state = SpareState::default();
        let last = starts(&mut state, Instant::now(), 100, BURST_GAP);
        assert_eq!(state.target(last, 2), 3);
    }

    #[test]
    fn a_burst_is_remembered_while_its_spares_are_of_use() {
        let mut state = SpareState::default();
        let first = starts(&mut state, Instant::now(), 8, Duration::from_millis(5));
        let second = first + BURST_MEMORY / 2;
        // None of ten is left after this start.
        state.note_start(second, 2, true);
        assert_eq!(state.target(first + BURST_MEMORY, 2), 10);
        assert_eq!(state.target(second + BURST_MEMORY, 2), 2);
    }
}
