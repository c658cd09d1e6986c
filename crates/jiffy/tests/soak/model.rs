//! Model: each sandbox and snapshot with its possible numbers.
//!
//! A *number* is the value that the program in a guest stores in memory and on disk (`guest.rs`). A
//! VMM *without an owner* belongs to no sandbox, usually because it waits in the warm pool.

use super::api::{Api, Reply};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Possible numbers in a guest: one after an acknowledged write, several after an interrupted
/// write.
pub type Numbers = BTreeSet<u64>;

/// Maximum number of lines in a sandbox's history.
const MAX_HISTORY: usize = 80;
/// Timeout for a stable state, and for the replacement of a killed daemon.
const KILL_SETTLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time in which a killed VMM without an owner may be assigned, before its exit is
/// detected.
const KILL_NOTICE_DELAY: Duration = Duration::from_secs(3);

/// State of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Running,
    Paused,
    Broken,
    Gone,
}

/// State protected by a sandbox's lock.
pub struct SandboxModel {
    pub state: State,
    pub numbers: Numbers,
    /// Number of its VMM's kills that were already handled, by a report or a repair.
    pub handled_kills: u32,
    /// Start and end of the last operation that creates a VMM for the sandbox.
    pub spawned: (Instant, Instant),
    history: Vec<String>,
}

/// Sandbox of the model.
pub struct Sandbox {
    pub id: String,
    /// Related sandboxes have the same value: they can be rolled back to each other's snapshots.
    pub family: u64,
    /// Number of times that its VMM was killed.
    pub hits: AtomicU32,
    model: Mutex<SandboxModel>,
}

/// Snapshot of the model.
pub struct Snapshot {
    pub id: String,
    pub family: u64,
    pub numbers: Numbers,
    /// Set before the removal is requested.
    pub removed: AtomicBool,
}

/// Number of stops and starts of daemons, and of kills of VMMs without an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KillCount {
    daemon: u32,
    orphan_kills: u32,
}

/// State that all clients share.
pub struct SoakModel {
    pub api: Api,
    pub began: Instant,
    pub memory_mib: u32,
    /// Set when the time is up or an error was found.
    pub over: AtomicBool,
    /// Number of stops and starts of daemons: odd while no daemon is running.
    pub daemon_kills: AtomicU32,
    pub vmm_kills: AtomicU32,
    /// Names of control groups of its VMMs.
    pub groups: Mutex<BTreeSet<String>>,
    /// Times of kills of VMMs without a sandbox.
    pub orphan_kills: Mutex<Vec<Instant>>,
    pub sandboxes: Mutex<Vec<Arc<Sandbox>>>,
    pub snapshots: Mutex<Vec<Arc<Snapshot>>>,
    /// Ids of snapshots whose removal was requested. Locked after `snapshots`.
    pub removed_snapshots: Mutex<BTreeSet<String>>,
    /// Numbers of successful and of failed operations, by kind.
    pub tally: Mutex<BTreeMap<&'static str, [u32; 2]>>,
    pub found: Mutex<Vec<String>>,
    numbers: AtomicU64,
}

/// Locks a mutex, even if its holder has panicked after finding an error.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sandbox {
    /// Creates the model of a running sandbox. The operation that creates its VMM started at
    /// `began`.
    pub fn new(id: &str, family: u64, numbers: Numbers, began: Instant) -> Arc<Self> {
        Arc::new(Self {
            id: id.to_owned(),
            family,
            hits: AtomicU32::new(0),
            model: Mutex::new(SandboxModel {
                state: State::Running,
                numbers,
                handled_kills: 0,
                spawned: (began, Instant::now()),
                history: Vec::new(),
            }),
        })
    }

    /// Locks the sandbox. `None` if another client operates on it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, SandboxModel>> {
        self.model.try_lock().ok()
    }

    pub fn lock(&self) -> MutexGuard<'_, SandboxModel> {
        locked(&self.model)
    }
}

impl SandboxModel {
    /// Appends a line to the history, and removes the oldest line of a full history.
    pub fn note(&mut self, soak: &SoakModel, line: &str) {
        if self.history.len() == MAX_HISTORY {
            self.history.remove(0);
        }
        self.history
            .push(format!("{:8.3} {line}", soak.began.elapsed().as_secs_f64()));
    }

    /// Returns the state and the history for error messages.
    pub fn describe(&self, id: &str) -> String {
        let mut text = format!(
            "sandbox {id}, {:?}, possible numbers {:?}:",
            self.state, self.numbers
        );
        for line in &self.history {
            let _ = write!(text, "\n    {line}");
        }
        text
    }
}

impl SoakModel {
    pub fn new(api: Api, memory_mib: u32) -> Self {
        Self {
            api,
            began: Instant::now(),
            memory_mib,
            over: AtomicBool::new(false),
            daemon_kills: AtomicU32::new(0),
            vmm_kills: AtomicU32::new(0),
            groups: Mutex::default(),
            orphan_kills: Mutex::default(),
            sandboxes: Mutex::default(),
            snapshots: Mutex::default(),
            removed_snapshots: Mutex::default(),
            tally: Mutex::default(),
            found: Mutex::default(),
            numbers: AtomicU64::new(1),
        }
    }

    /// Returns a number larger than all earlier numbers.
    pub fn number(&self) -> u64 {
        self.numbers.fetch_add(1, SeqCst)
    }

    /// Returns the present counts, for a later call of [`Self::killed_since`].
    pub fn kill_count(&self) -> KillCount {
        KillCount {
            daemon: self.daemon_kills.load(SeqCst),
            orphan_kills: u32::try_from(locked(&self.orphan_kills).len()).unwrap(),
        }
    }

    /// Counts an operation of the kind `what` as done or as failed.
    pub fn count(&self, what: &'static str, done: bool) {
        locked(&self.tally).entry(what).or_default()[usize::from(!done)] += 1;
    }

    /// Returns the number of running sandboxes. A sandbox whose lock is held counts as running.
    pub fn running(&self) -> usize {
        let all = locked(&self.sandboxes).clone();
        let awake = |s: &&Arc<Sandbox>| s.try_lock().is_none_or(|l| l.state == State::Running);
        all.iter().filter(awake).count()
    }

    /// Adds a snapshot that restores one of `numbers`.
    pub fn add_snapshot(&self, id: &str, family: u64, numbers: Numbers) {
        let mut all = locked(&self.snapshots);
        // A snapshot of a paused sandbox is the one in which it is paused: its id may be listed, or
        // its removal may have been requested.
        if all.iter().any(|s| s.id == id) || locked(&self.removed_snapshots).contains(id) {
            return;
        }
        all.push(Arc::new(Snapshot {
            id: id.to_owned(),
            family,
            numbers,
            removed: AtomicBool::new(false),
        }));
    }

    /// Removes a sandbox from the model.
    pub fn forget(&self, sandbox: &Sandbox) {
        locked(&self.sandboxes).retain(|s| s.id != sandbox.id);
    }

    /// Returns whether a daemon or a process without an owner was killed since `before` or shortly
    /// before.
    pub fn killed_since(&self, before: KillCount) -> bool {
        let last = locked(&self.orphan_kills).last().copied();
        let just_before = last.is_some_and(|stray| stray.elapsed() < KILL_NOTICE_DELAY);
        before.daemon % 2 == 1 || just_before || self.kill_count() != before
    }

    /// Returns all records of sandboxes, after waiting for a daemon that answers.
    pub fn records(&self) -> Result<Vec<Value>, String> {
        let path = "/v2/sandboxes?state=creating,running,paused,broken&limit=100";
        let reply = self.poll("the list of sandboxes", || {
            let reply = self.api.call("GET", path, &Value::Null);
            reply.is_done().then_some(reply)
        })?;
        let all = reply.body().as_array().cloned().unwrap_or_default();
        Ok(all.into_iter().map(|s| s["jiffy"].clone()).collect())
    }

    /// Returns all records of requested snapshots.
    pub fn snapshot_records(&self) -> Result<Vec<Value>, String> {
        let reply = self.poll("the list of snapshots", || {
            let reply = self.api.call("GET", "/snapshots?limit=100", &Value::Null);
            reply.is_done().then_some(reply)
        })?;
        let all = reply.body().as_array().cloned().unwrap_or_default();
        Ok(all.into_iter().map(|s| s["jiffy"].clone()).collect())
    }

    /// Returns whether a snapshot with this name exists, after it is no longer being stored.
    pub fn is_stored(&self, name: &str) -> Result<bool, String> {
        self.poll("a captured snapshot to be stored", || {
            let path = format!("/snapshots?name={name}");
            let reply = self.api.call("GET", &path, &Value::Null);
            let all = reply
                .is_done()
                .then(|| reply.body().as_array().cloned())??;
            let is_storing = |s: &Value| s["status"] == "storing";
            (!all.iter().any(is_storing)).then_some(!all.is_empty())
        })
    }

    /// Waits until `ready` returns a value. Returns an error after the timeout.
    pub fn poll<T>(&self, what: &str, mut ready: impl FnMut() -> Option<T>) -> Result<T, String> {
        let limit = Instant::now() + KILL_SETTLE_TIMEOUT;
        loop {
            if let Some(value) = ready() {
                return Ok(value);
            }
            if Instant::now() > limit {
                return Err(format!("timed out waiting for {what}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sets the model's state to the state reported by the daemon. It must be one of `permitted`,
    /// or broken for a known reason.
    pub fn sync_state(
        &self,
        sandbox: &Sandbox,
        model: &mut SandboxModel,
        permitted: &[State],
    ) -> Result<(), String> {
        let record = self.poll("a stable state of a sandbox", || {
            let all = self.records();
            let found = all.map(|all| all.into_iter().find(|r| r["id"] == sandbox.id.as_str()));
            match &found {
                Ok(Some(record)) if record["state"] == "creating" => None,
                _ => Some(found),
            }
        })??;
        let Some(record) = record else {
            model.state = State::Gone;
            model.note(self, "was removed");
            return self.permit(model.state, permitted, "");
        };
        let cause = record["cause"].as_str().unwrap_or_default();
        model.note(self, &format!("is {} {cause}", record["state"]));
        model.state = match record["state"].as_str() {
            Some("running") => State::Running,
            Some("paused") => State::Paused,
            Some("broken") => State::Broken,
            _ => return Err(format!("unknown state in {record}")),
        };
        if model.state == State::Broken && self.has_known_kill(sandbox, model) {
            model.handled_kills = sandbox.hits.load(SeqCst);
            return Ok(());
        }
        self.permit(model.state, permitted, cause)
    }

    /// Returns an error unless `state` is one of `permitted`.
    fn permit(&self, state: State, permitted: &[State], cause: &str) -> Result<(), String> {
        if permitted.contains(&state) {
            Ok(())
        } else {
            Err(format!(
                "the sandbox is {state:?} ({cause}), but only {permitted:?} are permitted"
            ))
        }
    }

    /// Returns whether its VMM was killed.
    pub fn has_known_kill(&self, sandbox: &Sandbox, model: &SandboxModel) -> bool {
        let (began, ended) = model.spawned;
        // A killed VMM may have been assigned, and used by the next operation, before its exit is
        // detected.
        let near = |t: &Instant| *t + KILL_NOTICE_DELAY > began && *t < ended + KILL_NOTICE_DELAY;
        sandbox.hits.load(SeqCst) > model.handled_kills
            || locked(&self.orphan_kills).iter().any(near)
    }

    /// Sends a call that resumes a sandbox with the timeout in its body.
    pub fn resume(&self, sandbox: &Sandbox, call: &str) -> Reply {
        let path = format!("/sandboxes/{}/{call}", sandbox.id);
        self.api.call("POST", &path, &json!({ "timeout": 3600 }))
    }

    pub fn post(&self, sandbox: &Sandbox, call: &str, body: &Value) -> Reply {
        let path = format!("/sandboxes/{}/{call}", sandbox.id);
        self.api.call("POST", &path, body)
    }
}
