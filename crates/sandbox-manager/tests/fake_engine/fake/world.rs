//! State that survives a daemon: the guests of the fake engine, injected failures, recorded calls.

use jiffy_engine_api::{EngineError, ExitReason, SandboxIdentity};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// Reproducible random number generator (xorshift, Marsaglia 2003).
pub struct Dice(pub u64);

impl Dice {
    /// Returns a number below `sides`.
    pub fn throw(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % sides as u64).unwrap()
    }

    pub fn pick<'a, T>(&mut self, among: &'a [T]) -> Option<&'a T> {
        (!among.is_empty()).then(|| &among[self.throw(among.len())])
    }
}

/// Guests, injected failures, and recorded calls.
#[derive(Default)]
pub struct World {
    /// All guests since the start of the test. Their handles are positions in this list.
    pub(super) guests: Mutex<Vec<Arc<Body>>>,
    /// Steps that fail.
    pub(super) failing: Mutex<BTreeSet<&'static str>>,
    /// Steps that hang forever.
    pub(super) hanging: Mutex<BTreeSet<&'static str>>,
    /// Steps in which a task has hung or was blocked.
    stuck: Mutex<BTreeSet<&'static str>>,
    /// Steps that wait until they are released.
    held: watch::Sender<BTreeSet<&'static str>>,
    /// Seed of the random number of yields in each step. Zero for no yields.
    pub jitter: AtomicU64,
    pub boots: Mutex<usize>,
    pub restores: Mutex<usize>,
    /// Version of all templates. A change invalidates their snapshots.
    pub version: Mutex<u32>,
    /// Snapshots whose working set (memory that a restored guest accesses first) was recorded.
    pub working_sets: Mutex<Vec<String>>,
    /// Number of started rehearsals. A rehearsal runs a few commands in a guest, so that their
    /// programs are in the page cache.
    pub rehearsed: Mutex<usize>,
    /// Snapshots that were prefetched, one entry per prefetch.
    pub prefetched: Mutex<Vec<String>>,
    /// Snapshots whose checksums were written.
    pub checksummed: Mutex<BTreeSet<String>>,
    /// Snapshots that do not depend on the files of another one.
    pub merged: Mutex<BTreeSet<String>>,
    /// Parents of snapshots.
    pub parents: Mutex<BTreeMap<String, String>>,
    /// Number of queries whether a snapshot is independent.
    pub independence_queries: Mutex<usize>,
    /// Number of garbage collections of unfinished files.
    pub gc_runs: Mutex<usize>,
    /// Number of snapshots that garbage collection walked over.
    pub walked: Mutex<usize>,
    /// Snapshots that were taken with [`OTHER`].
    pub of_other: Mutex<BTreeSet<String>>,
    /// True if guests support rollback in place.
    pub supports_rollback: AtomicBool,
    /// True once a rollback in place has started.
    pub rollback_started: AtomicBool,
    /// Snapshots whose files were removed.
    pub removed: Mutex<Vec<String>>,
    /// True if files that others depend on cannot be removed.
    pub folds_snapshots: AtomicBool,
    /// Folds: the parent, and the snapshot that it was folded into.
    pub folds: Mutex<Vec<(String, String)>>,
    /// Folds reported to guests, by the text of the guest.
    pub notified_folds: Mutex<Vec<String>>,
    /// While true, captured snapshots are not stored.
    pub storing_waits: watch::Sender<bool>,
    /// Captured snapshots that were discarded with their guest.
    pub discarded: Mutex<Vec<String>>,
    /// Names of the threads that requested sizes of snapshots.
    pub measured_by: Mutex<Vec<String>>,
}

/// State of a guest.
pub struct Body {
    pub sandbox_identity: Mutex<SandboxIdentity>,
    pub memory: Mutex<String>,
    pub(super) cpu_us: AtomicU64,
    /// True if the guest uses all its processors.
    pub is_busy: AtomicBool,
    /// Number of commands of clients, as reported by the agent.
    pub commands: AtomicU64,
    /// Number of requests to the agent.
    pub requests: AtomicU64,
    pub(super) engine: &'static str,
    /// Latest snapshot that the guest descends from, in its own view.
    pub parent: Mutex<Option<String>>,
    /// Snapshot that is being taken. If the daemon is killed meanwhile, the guest does not know
    /// whether the file of the snapshot is complete.
    pub(super) undecided: Mutex<Option<String>>,
    /// Captured snapshot that is not stored yet, and its text.
    pub captured: Mutex<Option<(String, String)>>,
    pub(super) detached: AtomicBool,
    pub(super) end: watch::Sender<Option<ExitReason>>,
}

impl World {
    /// Makes a step fail.
    pub fn fail(&self, step: &'static str) {
        self.failing.lock().unwrap().insert(step);
    }

    /// Makes a step hang until the runtime is shut down.
    pub fn hang(&self, step: &'static str) {
        self.hanging.lock().unwrap().insert(step);
    }

    /// Blocks a step until [`Self::release`].
    pub fn hold(&self, step: &'static str) {
        self.held.send_modify(|held| _ = held.insert(step));
    }

    /// Unblocks a step.
    pub fn release(&self, step: &'static str) {
        self.held.send_modify(|held| _ = held.remove(step));
    }

    /// Returns whether the step hangs or is blocked, and a task waits in it.
    pub fn is_stuck(&self, step: &str) -> bool {
        self.stuck.lock().unwrap().contains(step)
    }

    /// Clears the record of steps in which tasks waited.
    pub fn forget_stuck(&self) {
        self.stuck.lock().unwrap().clear();
    }

    pub fn clear_failures(&self) {
        self.failing.lock().unwrap().clear();
        self.hanging.lock().unwrap().clear();
    }

    /// Returns whether `step` is set to fail.
    pub(super) fn fails(&self, step: &str) -> bool {
        self.failing.lock().unwrap().contains(step)
    }

    /// Performs a step: yields, hangs, waits or fails as the test requests.
    pub(super) async fn step(&self, step: &'static str) -> Result<(), EngineError> {
        let mut dice = Dice(self.jitter.load(Ordering::Relaxed));
        if dice.0 != 0 {
            let times = dice.throw(6);
            self.jitter.store(dice.0, Ordering::Relaxed);
            for _ in 0..times {
                tokio::task::yield_now().await;
            }
        }
        if self.hanging.lock().unwrap().contains(step) {
            self.stuck.lock().unwrap().insert(step);
            std::future::pending::<()>().await;
        }
        if self.held.borrow().contains(step) {
            self.stuck.lock().unwrap().insert(step);
            let mut held = self.held.subscribe();
            held.wait_for(|held| !held.contains(step)).await.unwrap();
        }
        if self.failing.lock().unwrap().contains(step) {
            return Err(EngineError::failed(format!("{step} was made to fail")));
        }
        Ok(())
    }

    /// Returns the sandbox ids of the running guests. The id of a warm-pool guest is empty.
    pub fn running(&self) -> Vec<String> {
        let guests = self.guests.lock().unwrap();
        let live = guests.iter().filter(|b| b.end.borrow().is_none());
        live.map(|b| b.sandbox_identity.lock().unwrap().id.clone())
            .collect()
    }

    /// Returns the guest of a sandbox that must have exactly one running guest.
    pub fn body(&self, id: &str) -> Arc<Body> {
        let guests = self.guests.lock().unwrap();
        let mut bodies = guests
            .iter()
            .filter(|b| b.end.borrow().is_none() && b.sandbox_identity.lock().unwrap().id == id);
        let body = bodies.next().unwrap_or_else(|| panic!("{id} has no guest"));
        assert!(bodies.next().is_none(), "{id} has two guests");
        body.clone()
    }

    /// Sets the content of the memory of the guest of a sandbox.
    pub fn write(&self, id: &str, text: &str) {
        *self.body(id).memory.lock().unwrap() = text.to_owned();
    }

    /// Returns the content of the memory of the guest of a sandbox.
    pub fn read(&self, id: &str) -> String {
        self.body(id).memory.lock().unwrap().clone()
    }

    /// Makes a guest exit by itself.
    pub fn panic_guest(&self, id: &str) {
        let message = "panicked".to_owned();
        let end = ExitReason::GuestPanic { message };
        self.body(id).end.send_replace(Some(end));
    }

    /// Makes a guest exit because its memory does not arrive.
    pub fn starve_guest(&self, id: &str) {
        let reason = "its store did not answer for 1 s".to_owned();
        let end = ExitReason::MissingMemory { reason };
        self.body(id).end.send_replace(Some(end));
    }

    /// Adds a running guest with this content of its memory.
    pub(super) fn new_body(&self, engine: &'static str, memory: String) -> Arc<Body> {
        let body = Arc::new(Body {
            engine,
            sandbox_identity: Mutex::default(),
            memory: Mutex::new(memory),
            cpu_us: AtomicU64::default(),
            is_busy: AtomicBool::default(),
            commands: AtomicU64::default(),
            requests: AtomicU64::default(),
            parent: Mutex::default(),
            undecided: Mutex::default(),
            captured: Mutex::default(),
            detached: AtomicBool::default(),
            end: watch::channel(None).0,
        });
        self.guests.lock().unwrap().push(body.clone());
        body
    }
}

impl Body {
    /// Returns whether the guest has not exited.
    pub(super) fn lives(&self) -> bool {
        self.end.borrow().is_none()
    }

    /// Ends the guest as an engine does on request.
    pub fn stop(&self) {
        // The first exit reason remains.
        self.end.send_if_modified(|end| {
            let first = end.is_none();
            end.get_or_insert(ExitReason::Requested);
            first
        });
    }
}
