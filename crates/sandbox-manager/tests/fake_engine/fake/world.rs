//! Guests of the engine, and the steps that fail or hang.

use jiffy_engine_api::{EngineError, ExitReason, SandboxIdentity};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// A generator that needs no crate and can be repeated (xorshift, Marsaglia 2003).
pub struct Dice(pub u64);

impl Dice {
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

/// Running guests, and failures to come.
#[derive(Default)]
pub struct World {
    pub(super) guests: Mutex<Vec<Arc<Body>>>,
    pub(super) failing: Mutex<BTreeSet<&'static str>>,
    pub(super) hanging: Mutex<BTreeSet<&'static str>>,
    stuck: Mutex<BTreeSet<&'static str>>,
    /// Steps that wait until they are released.
    held: watch::Sender<BTreeSet<&'static str>>,
    /// Seed of how often each step gives way to other tasks; zero: never.
    pub jitter: AtomicU64,
    pub boots: Mutex<usize>,
    pub restores: Mutex<usize>,
    pub version: Mutex<u32>,
    pub learned: Mutex<Vec<String>>,
    /// Rehearsals that began.
    pub rehearsed: Mutex<usize>,
    pub warmed: Mutex<Vec<String>>,
    pub sealed: Mutex<BTreeSet<String>>,
    /// Snapshots that need the files of no other.
    pub merged: Mutex<BTreeSet<String>>,
    /// Snapshots below those that were taken of a guest that had one.
    pub parents: Mutex<BTreeMap<String, String>>,
    /// Count of requests for that.
    pub asked: Mutex<usize>,
    /// Count of its looks for what was not finished.
    pub gc_runs: Mutex<usize>,
    /// Count of snapshots that gc saw on the disk.
    pub walked: Mutex<usize>,
    /// Snapshots that were taken with [`OTHER`].
    pub of_other: Mutex<BTreeSet<String>>,
    /// Guests can go back in their place.
    pub goes_back: AtomicBool,
    /// One has begun to.
    pub began: AtomicBool,
    /// Snapshots whose files it was told to remove.
    pub removed: Mutex<Vec<String>>,
    /// Files on which others lie cannot be removed.
    pub folds_snapshots: AtomicBool,
    /// Folds: the parent, and the snapshot that it was folded into.
    pub folds: Mutex<Vec<(String, String)>>,
    /// Folds that guests were told of, by the text of their sandboxes.
    pub told_folds: Mutex<Vec<String>>,
    /// Captured snapshots are not stored meanwhile.
    pub storing_waits: watch::Sender<bool>,
    /// Captured snapshots that were given up with their guest.
    pub discarded: Mutex<Vec<String>>,
    /// Names of the threads that asked for sizes of snapshots.
    pub measured_by: Mutex<Vec<String>>,
}

/// A guest's inside.
pub struct Body {
    pub sandbox_identity: Mutex<SandboxIdentity>,
    pub memory: Mutex<String>,
    pub(super) cpu_us: AtomicU64,
    pub(super) engine: &'static str,
    /// Latest snapshot it lies on, as it sees it.
    pub parent: Mutex<Option<String>>,
    /// Snapshot of it that is complete, or was to be, when its daemon died.
    pub(super) undecided: Mutex<Option<String>>,
    /// Captured snapshot that is not stored, and its text.
    pub captured: Mutex<Option<(String, String)>>,
    pub(super) kept: AtomicBool,
    pub(super) end: watch::Sender<Option<ExitReason>>,
}

impl World {
    pub fn fail(&self, step: &'static str) {
        self.failing.lock().unwrap().insert(step);
    }

    pub fn hang(&self, step: &'static str) {
        self.hanging.lock().unwrap().insert(step);
    }

    /// Holds a step up until [`Self::release`].
    pub fn hold(&self, step: &'static str) {
        self.held.send_modify(|held| _ = held.insert(step));
    }

    /// Lets a step that was held up go on.
    pub fn release(&self, step: &'static str) {
        self.held.send_modify(|held| _ = held.remove(step));
    }

    /// Returns true if the step hangs or is held up, and something waits for it.
    pub fn is_stuck(&self, step: &str) -> bool {
        self.stuck.lock().unwrap().contains(step)
    }

    /// Forgets which steps something waited for.
    pub fn forget_stuck(&self) {
        self.stuck.lock().unwrap().clear();
    }

    pub fn mend(&self) {
        self.failing.lock().unwrap().clear();
        self.hanging.lock().unwrap().clear();
    }

    /// Returns true if `step` is made to fail.
    pub(super) fn fails(&self, step: &str) -> bool {
        self.failing.lock().unwrap().contains(step)
    }

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

    /// Guests that run, by id; those that wait have none.
    pub fn running(&self) -> Vec<String> {
        let guests = self.guests.lock().unwrap();
        let live = guests.iter().filter(|b| b.end.borrow().is_none());
        live.map(|b| b.sandbox_identity.lock().unwrap().id.clone())
            .collect()
    }

    /// The one running guest of a sandbox.
    pub fn body(&self, id: &str) -> Arc<Body> {
        let guests = self.guests.lock().unwrap();
        let mut found = guests
            .iter()
            .filter(|b| b.end.borrow().is_none() && b.sandbox_identity.lock().unwrap().id == id);
        let body = found.next().unwrap_or_else(|| panic!("{id} does not run"));
        assert!(found.next().is_none(), "{id} runs twice");
        body.clone()
    }

    pub fn write(&self, id: &str, text: &str) {
        *self.body(id).memory.lock().unwrap() = text.to_owned();
    }

    pub fn read(&self, id: &str) -> String {
        self.body(id).memory.lock().unwrap().clone()
    }

    /// A guest that ends by itself.
    pub fn panic_guest(&self, id: &str) {
        let message = "gone".to_owned();
        let end = ExitReason::GuestPanic { message };
        self.body(id).end.send_replace(Some(end));
    }

    /// A guest that ends because its memory does not arrive.
    pub fn starve_guest(&self, id: &str) {
        let reason = "its store did not answer for 1 s".to_owned();
        let end = ExitReason::MissingMemory { reason };
        self.body(id).end.send_replace(Some(end));
    }

    pub(super) fn new_body(&self, engine: &'static str, memory: String) -> Arc<Body> {
        let body = Arc::new(Body {
            engine,
            sandbox_identity: Mutex::default(),
            memory: Mutex::new(memory),
            cpu_us: AtomicU64::default(),
            parent: Mutex::default(),
            undecided: Mutex::default(),
            captured: Mutex::default(),
            kept: AtomicBool::default(),
            end: watch::channel(None).0,
        });
        self.guests.lock().unwrap().push(body.clone());
        body
    }
}

impl Body {
    pub(super) fn lives(&self) -> bool {
        self.end.borrow().is_none()
    }

    pub fn stop(&self) {
        self.end.send_if_modified(|end| {
            let first = end.is_none();
            end.get_or_insert(ExitReason::Requested);
            first
        });
    }
}
