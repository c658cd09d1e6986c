//! The model: each sandbox and snapshot with the numbers that may be in it.

use super::api::{Api, Reply};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Numbers that may be in a guest: one after an acknowledged write, more where a write was cut off.
pub type Numbers = BTreeSet<u64>;

/// Lines kept of a sandbox's history.
const MAX_HISTORY: usize = 80;
/// Time in which a state must settle, and a daemon that was killed must have a successor.
const KILL_SETTLE_TIMEOUT: Duration = Duration::from_secs(120);
/// A VMM that was killed without an owner may be handed out this long before its end is noticed.
const KILL_NOTICE_DELAY: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Running,
    Paused,
    Broken,
    Gone,
}

/// State under a sandbox's lock.
pub struct SandboxModel {
    pub state: State,
    pub numbers: Numbers,
    /// Kills of its VMM that were told already.
    pub mended: u32,
    /// When an operation that makes a VMM for it began and ended last.
    pub spawned: (Instant, Instant),
    history: Vec<String>,
}

pub struct Sandbox {
    pub id: String,
    /// Relatives have the same: they may be put back to each other's snapshots.
    pub family: u64,
    /// Times that its VMM was killed.
    pub hits: AtomicU32,
    model: Mutex<SandboxModel>,
}

pub struct Snapshot {
    pub id: String,
    pub family: u64,
    pub numbers: Numbers,
    /// Set before its removal is asked for.
    pub removed: AtomicBool,
}

/// Deaths and births of daemons, and kills of VMMs without an owner, so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KillCount {
    daemon: u32,
    strays: u32,
}

pub struct SoakModel {
    pub api: Api,
    pub began: Instant,
    pub memory_mib: u32,
    /// Set when time is up, or something was found.
    pub over: AtomicBool,
    /// Deaths and births of daemons: odd while there is none.
    pub daemon_kills: AtomicU32,
    pub vmm_kills: AtomicU32,
    /// Names of control groups that its VMMs were seen in.
    pub groups: Mutex<BTreeSet<String>>,
    /// Kills of VMMs that no sandbox owned yet.
    pub strays: Mutex<Vec<Instant>>,
    pub sandboxes: Mutex<Vec<Arc<Sandbox>>>,
    pub snapshots: Mutex<Vec<Arc<Snapshot>>>,
    /// Ids of snapshots whose removal was requested. Locked after `snapshots`.
    pub removed_snapshots: Mutex<BTreeSet<String>>,
    pub tally: Mutex<BTreeMap<&'static str, [u32; 2]>>,
    pub found: Mutex<Vec<String>>,
    numbers: AtomicU64,
}

/// A lock whose holder may have found something and given up.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sandbox {
    pub fn new(id: &str, family: u64, numbers: Numbers, began: Instant) -> Arc<Self> {
        Arc::new(Self {
            id: id.to_owned(),
            family,
            hits: AtomicU32::new(0),
            model: Mutex::new(SandboxModel {
                state: State::Running,
                numbers,
                mended: 0,
                spawned: (began, Instant::now()),
                history: Vec::new(),
            }),
        })
    }

    pub fn try_lock(&self) -> Option<MutexGuard<'_, SandboxModel>> {
        self.model.try_lock().ok()
    }

    pub fn lock(&self) -> MutexGuard<'_, SandboxModel> {
        locked(&self.model)
    }
}

impl SandboxModel {
    pub fn note(&mut self, soak: &SoakModel, line: &str) {
        if self.history.len() == MAX_HISTORY {
            self.history.remove(0);
        }
        self.history
            .push(format!("{:8.3} {line}", soak.began.elapsed().as_secs_f64()));
    }

    pub fn told(&self, id: &str) -> String {
        let mut text = format!(
            "sandbox {id}, {:?}, may hold {:?}:",
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
            strays: Mutex::default(),
            sandboxes: Mutex::default(),
            snapshots: Mutex::default(),
            removed_snapshots: Mutex::default(),
            tally: Mutex::default(),
            found: Mutex::default(),
            numbers: AtomicU64::new(1),
        }
    }

    /// A number that is newer than all before.
    pub fn number(&self) -> u64 {
        self.numbers.fetch_add(1, SeqCst)
    }

    pub fn kill_count(&self) -> KillCount {
        KillCount {
            daemon: self.daemon_kills.load(SeqCst),
            strays: u32::try_from(locked(&self.strays).len()).unwrap(),
        }
    }

    pub fn count(&self, what: &'static str, done: bool) {
        locked(&self.tally).entry(what).or_default()[usize::from(!done)] += 1;
    }

    pub fn running(&self) -> usize {
        let all = locked(&self.sandboxes).clone();
        let awake = |s: &&Arc<Sandbox>| s.try_lock().is_none_or(|l| l.state == State::Running);
        all.iter().filter(awake).count()
    }

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

    pub fn forget(&self, sandbox: &Sandbox) {
        locked(&self.sandboxes).retain(|s| s.id != sandbox.id);
    }

    /// True if a daemon, or a process without an owner, was killed since or just before.
    pub fn killed_since(&self, before: KillCount) -> bool {
        let last = locked(&self.strays).last().copied();
        let just_before = last.is_some_and(|stray| stray.elapsed() < KILL_NOTICE_DELAY);
        before.daemon % 2 == 1 || just_before || self.kill_count() != before
    }

    /// All records of sandboxes that the daemon has, once one answers.
    pub fn records(&self) -> Result<Vec<Value>, String> {
        let path = "/v2/sandboxes?state=creating,running,paused,broken&limit=100";
        let reply = self.settled("the list of sandboxes", || {
            let reply = self.api.call("GET", path, &Value::Null);
            reply.is_done().then_some(reply)
        })?;
        let all = reply.body().as_array().cloned().unwrap_or_default();
        Ok(all.into_iter().map(|s| s["jiffy"].clone()).collect())
    }

    /// All records of snapshots that were asked for.
    pub fn snapshot_records(&self) -> Result<Vec<Value>, String> {
        let reply = self.settled("the list of snapshots", || {
            let reply = self.api.call("GET", "/snapshots?limit=100", &Value::Null);
            reply.is_done().then_some(reply)
        })?;
        let all = reply.body().as_array().cloned().unwrap_or_default();
        Ok(all.into_iter().map(|s| s["jiffy"].clone()).collect())
    }

    /// True if there is a snapshot of that name, once it is no longer being stored.
    pub fn is_stored(&self, name: &str) -> Result<bool, String> {
        self.settled("a captured snapshot to be stored", || {
            let path = format!("/snapshots?name={name}");
            let reply = self.api.call("GET", &path, &Value::Null);
            let all = reply
                .is_done()
                .then(|| reply.body().as_array().cloned())??;
            let is_storing = |s: &Value| s["status"] == "storing";
            (!all.iter().any(is_storing)).then_some(!all.is_empty())
        })
    }

    pub fn settled<T>(
        &self,
        what: &str,
        mut ready: impl FnMut() -> Option<T>,
    ) -> Result<T, String> {
        let limit = Instant::now() + KILL_SETTLE_TIMEOUT;
        loop {
            if let Some(value) = ready() {
                return Ok(value);
            }
            if Instant::now() > limit {
                return Err(format!("waited in vain for {what}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Makes the model's state what the daemon says, which must be one of `permitted`, or broken
    /// for a reason that the model knows.
    pub fn settle(
        &self,
        sandbox: &Sandbox,
        model: &mut SandboxModel,
        permitted: &[State],
    ) -> Result<(), String> {
        let record = self.settled("a sandbox to be in one state", || {
            let all = self.records();
            let found = all.map(|all| all.into_iter().find(|r| r["id"] == sandbox.id.as_str()));
            match &found {
                Ok(Some(record)) if record["state"] == "creating" => None,
                _ => Some(found),
            }
        })??;
        let Some(record) = record else {
            model.state = State::Gone;
            model.note(self, "is gone");
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
        if model.state == State::Broken && self.excuse(sandbox, model) {
            model.mended = sandbox.hits.load(SeqCst);
            return Ok(());
        }
        self.permit(model.state, permitted, cause)
    }

    fn permit(&self, state: State, permitted: &[State], cause: &str) -> Result<(), String> {
        if permitted.contains(&state) {
            Ok(())
        } else {
            Err(format!(
                "it is {state:?} ({cause}), and may be {permitted:?} only"
            ))
        }
    }

    /// True if its VMM was killed.
    pub fn excuse(&self, sandbox: &Sandbox, model: &SandboxModel) -> bool {
        let (began, ended) = model.spawned;
        // One may have found its owner, and that a next operation, before its end is noticed.
        let near = |t: &Instant| *t + KILL_NOTICE_DELAY > began && *t < ended + KILL_NOTICE_DELAY;
        sandbox.hits.load(SeqCst) > model.mended || locked(&self.strays).iter().any(near)
    }

    /// A call whose body says with which limit of time a sandbox wakes.
    pub fn wake(&self, sandbox: &Sandbox, call: &str) -> Reply {
        let path = format!("/sandboxes/{}/{call}", sandbox.id);
        self.api.call("POST", &path, &json!({ "timeout": 3600 }))
    }

    pub fn post(&self, sandbox: &Sandbox, call: &str, body: &Value) -> Reply {
        let path = format!("/sandboxes/{}/{call}", sandbox.id);
        self.api.call("POST", &path, body)
    }
}
