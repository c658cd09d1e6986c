//! Concurrent operations on one sandbox, compared with a model: the answers and the final state
//! must equal the outcome of some sequential order of the operations.

use crate::fake;

use fake::{Bench, Dice, base, snapshot_id};
use jiffy_sandbox_manager::{
    CreateSpec, ErrorKind, OnTimeout, OperationError, ResumeOptions, ResumeTimeout,
    SandboxSettings, SandboxState, Sandboxes,
};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Duration that no test exceeds.
const LONG: Duration = Duration::from_secs(3600);
/// Longer duration than [`LONG`].
const LONGER: Duration = Duration::from_secs(7200);
/// Number of random histories.
const SEEDS: u64 = 150;
/// Number of rounds of concurrent operations in each history.
const ROUNDS: usize = 12;
/// Maximum number of concurrent operations. All of their orders are tried.
const MAX_AT_ONCE: usize = 4;

/// Operation requested by a client.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Call {
    SetTimeout(Option<Duration>),
    Extend(Duration),
    Connect(ResumeTimeout),
    Resume(ResumeOptions),
    Pause,
    Kill,
    Snapshot,
    Rollback,
}

/// Answer as a client sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Reply {
    Done,
    // The sandbox was paused before, and runs now.
    Resumed,
    Rejected,
}

/// Deadline of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Deadline {
    Never,
    Past,
    In(Duration),
}

impl Deadline {
    fn after(time: Option<Duration>) -> Self {
        match time {
            None => Self::Never,
            Some(Duration::ZERO) => Self::Past,
            Some(time) => Self::In(time),
        }
    }
}

/// State of a sandbox, without the states in which an operation is in flight.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Life {
    Running,
    Paused,
    Killed,
}

/// Sandbox as the documentation describes it.
#[derive(Debug, Clone, PartialEq)]
struct Model {
    life: Life,
    deadline: Deadline,
    /// Configured timeout.
    own: Option<Duration>,
    on_timeout: OnTimeout,
}

impl Model {
    /// Returns the state after the timeout if the deadline has passed.
    fn expired(&self) -> Option<Self> {
        let over = self.life == Life::Running && self.deadline == Deadline::Past;
        over.then(|| Self {
            life: match self.on_timeout {
                OnTimeout::Kill => Life::Killed,
                OnTimeout::Pause => Life::Paused,
            },
            ..self.clone()
        })
    }

    /// Sets the timeout, starting now.
    fn limit(&mut self, time: Option<Duration>) {
        self.deadline = Deadline::after(time);
        if time != Some(Duration::ZERO) {
            self.own = time;
        }
    }

    /// Moves the deadline to at least `time` from now.
    fn extend(&mut self, time: Duration) {
        let before = match (self.life, self.deadline) {
            (Life::Running, deadline) => deadline,
            (_, _) => Deadline::after(self.own),
        };
        match before {
            Deadline::Past => self.limit(Some(time)),
            Deadline::In(before) if before < time => self.limit(Some(time)),
            _ => {}
        }
    }

    /// Resumes the sandbox.
    fn resume(&mut self, options: ResumeOptions) {
        match options.time {
            ResumeTimeout::Own => {}
            ResumeTimeout::AtLeast(time) => self.own = Some(time),
            ResumeTimeout::Unlimited => self.own = None,
        }
        self.on_timeout = options.on_timeout.unwrap_or(self.on_timeout);
        self.deadline = Deadline::after(self.own);
        self.life = Life::Running;
    }

    /// Changes the model as the call must change the sandbox. Returns the expected reply.
    fn apply(&mut self, call: Call) -> Reply {
        let life = self.life;
        match (call, life) {
            (Call::Kill, _) => self.life = Life::Killed,
            (_, Life::Killed) => return Reply::Rejected,
            (Call::SetTimeout(time), _) => self.limit(time),
            (Call::Extend(time), _) => self.extend(time),
            (Call::Connect(time), Life::Paused) => {
                self.resume(ResumeOptions {
                    time,
                    on_timeout: None,
                    reboot: false,
                });
                return Reply::Resumed;
            }
            (Call::Connect(ResumeTimeout::AtLeast(time)), _) => self.extend(time),
            (Call::Connect(ResumeTimeout::Unlimited), _) => self.limit(None),
            (Call::Connect(ResumeTimeout::Own), _) => {
                if let Some(own) = self.own {
                    self.extend(own);
                }
            }
            (Call::Resume(options), Life::Paused) => self.resume(options),
            (Call::Resume(_), _) => return Reply::Rejected,
            (Call::Pause, Life::Running) => self.life = Life::Paused,
            (Call::Pause, _) => return Reply::Rejected,
            (Call::Snapshot, _) => {}
            (Call::Rollback, Life::Running) => {}
            (Call::Rollback, _) => self.resume(ResumeOptions::default()),
        }
        Reply::Done
    }

    /// Adds all possible states after `calls` were answered by `replies`, in any order.
    fn outcomes(&self, calls: &[(Call, Reply)], outcomes: &mut Vec<Self>) {
        if calls.is_empty() {
            // No operation is in flight, so a passed deadline has been handled.
            outcomes.push(self.expired().unwrap_or_else(|| self.clone()));
        }
        for (at, (call, reply)) in calls.iter().enumerate() {
            let mut rest = calls.to_vec();
            rest.remove(at);
            let mut next = self.clone();
            let expected = next.apply(*call);
            // A kill makes an operation on the same guest fail.
            let is_cut_off =
                *reply == Reply::Rejected && rest.iter().any(|(c, _)| *c == Call::Kill);
            if expected == *reply {
                next.outcomes(&rest, outcomes);
            } else if is_cut_off {
                self.outcomes(&rest, outcomes);
            }
        }
        // The timeout may also have been handled between two operations.
        if let Some(expired) = self.expired().filter(|_| !calls.is_empty()) {
            expired.outcomes(calls, outcomes);
        }
    }
}

/// Sends the call to the host.
async fn perform(host: &Sandboxes, id: &str, snapshot: &str, call: Call) -> Reply {
    let done = |result: Result<_, OperationError>| match result {
        Ok(_) => Reply::Done,
        Err(e) => {
            let is_rejection = matches!(e.kind(), ErrorKind::Conflict | ErrorKind::Failed);
            assert!(is_rejection, "{call:?}: {e}");
            Reply::Rejected
        }
    };
    match call {
        Call::SetTimeout(time) => done(host.timeouts().set(id, time).await.map(drop)),
        Call::Extend(time) => done(host.timeouts().extend(id, time).await.map(drop)),
        Call::Connect(time) => match host.ensure_running_for(id, time).await {
            Ok((_, true)) => Reply::Resumed,
            other => done(other.map(drop)),
        },
        Call::Resume(options) => done(host.resume_with(id, options).await.map(drop)),
        Call::Pause => done(host.pause(id).await.map(drop)),
        Call::Kill => done(host.kill(id).await.map(drop)),
        Call::Snapshot => done(host.snapshot(id, None).await.map(drop)),
        Call::Rollback => done(host.rollback(id, snapshot).await.map(drop)),
    }
}

fn some_time(dice: &mut Dice) -> Option<Duration> {
    *dice
        .pick(&[None, Some(Duration::ZERO), Some(LONG), Some(LONGER)])
        .unwrap()
}

fn some_resume_timeout(dice: &mut Dice) -> ResumeTimeout {
    let times = [
        ResumeTimeout::Own,
        ResumeTimeout::AtLeast(LONG),
        ResumeTimeout::AtLeast(LONGER),
        ResumeTimeout::Unlimited,
    ];
    *dice.pick(&times).unwrap()
}

/// Returns a random call.
fn some_call(dice: &mut Dice) -> Call {
    match dice.throw(16) {
        0..4 => Call::SetTimeout(some_time(dice)),
        4 => Call::Extend(LONGER),
        5..9 => Call::Connect(some_resume_timeout(dice)),
        9 => Call::Resume(ResumeOptions {
            time: some_resume_timeout(dice),
            on_timeout: Some(OnTimeout::Pause),
            reboot: false,
        }),
        10..13 => Call::Pause,
        13 => Call::Snapshot,
        14 => Call::Rollback,
        _ => match dice.throw(8) {
            0 => Call::Kill,
            _ => Call::SetTimeout(Some(Duration::ZERO)),
        },
    }
}

/// Runs all tasks until they wait. No task waits for a clock, so a limited number of yields is
/// sufficient.
async fn quiet(host: &Sandboxes, id: &str) {
    for _ in 0..400 {
        tokio::task::yield_now().await;
    }
    host.wait_decided(id).await;
}

/// Returns whether the record of the sandbox agrees with the model.
fn compare(bench: &Bench, host: &Sandboxes, id: &str, model: &Model) -> bool {
    let record = host.get(id).unwrap();
    let life = match record.state() {
        SandboxState::Running => Life::Running,
        SandboxState::Paused => Life::Paused,
        SandboxState::Killed => Life::Killed,
        other => panic!("{id} is {other:?}"),
    };
    let guests = bench.world.running().iter().filter(|r| *r == id).count();
    assert_eq!(guests, usize::from(life == Life::Running), "guests of {id}");
    let deadline_fits = match model.deadline {
        Deadline::Never => record.deadline_ms().is_none(),
        // The task that handles timeouts may not have run yet.
        Deadline::Past => true,
        Deadline::In(time) => {
            let set_at = record.deadline_ms().map(|d| d.saturating_sub(ms(time)));
            let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
            // Timeouts differ by at least `LONG`, so half of it distinguishes them.
            set_at.is_some_and(|b| b.abs_diff(ms(now)) < ms(LONG / 2))
        }
    };
    // Only a running sandbox has a deadline.
    let is_running = life == Life::Running;
    life == model.life
        && (!is_running || deadline_fits)
        && (life == Life::Killed || record.settings().timeout_s == model.own.map(|t| t.as_secs()))
        && record.settings().on_timeout == model.on_timeout
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap()
}

/// Creates a data directory in memory if possible: its journal is written thousands of times.
fn in_memory() -> Bench {
    match tempfile::tempdir_in("/dev/shm") {
        Ok(dir) => Bench::in_dir(dir),
        Err(_) => Bench::new(),
    }
}

/// Performs a random history of operations and compares each round with the model.
async fn one_history(seed: u64) {
    // The constant sets many bits: the first numbers of generators with small seeds would be
    // similar.
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ (seed + 1));
    let bench = in_memory();
    let host = bench.open().await;
    bench.world.jitter.store(dice.0, Ordering::Relaxed);
    let on_timeout = *dice
        .pick(&[OnTimeout::Pause, OnTimeout::Pause, OnTimeout::Kill])
        .unwrap();
    let spec = CreateSpec {
        settings: SandboxSettings {
            timeout_s: Some(LONG.as_secs()),
            on_timeout,
            ..SandboxSettings::default()
        },
        ..base()
    };
    let id = host.create(spec).await.unwrap().id().to_owned();
    let snapshot = snapshot_id(&host, &id).await;
    let mut model = Model {
        life: Life::Running,
        deadline: Deadline::In(LONG),
        own: Some(LONG),
        on_timeout,
    };
    for round in 0..ROUNDS {
        let count = 1 + dice.throw(MAX_AT_ONCE);
        let calls: Vec<_> = (0..count).map(|_| some_call(&mut dice)).collect();
        let tasks = calls.iter().map(|call| {
            let (host, id, snapshot) = (host.clone(), id.clone(), snapshot.clone());
            let (call, pause) = (*call, dice.throw(12));
            tokio::spawn(async move {
                for _ in 0..pause {
                    tokio::task::yield_now().await;
                }
                (call, perform(&host, &id, &snapshot, call).await)
            })
        });
        let tasks: Vec<_> = tasks.collect();
        let mut replies = Vec::new();
        for answer in tasks {
            replies.push(answer.await.unwrap());
        }
        quiet(&host, &id).await;
        let mut outcomes = Vec::new();
        model.outcomes(&replies, &mut outcomes);
        let outcome = outcomes.iter().find(|m| compare(&bench, &host, &id, m));
        let Some(now) = outcome else {
            panic!(
                "seed {seed}, round {round}: from {model:?}\n{replies:?}\nnow {:?}",
                host.get(&id).unwrap()
            );
        };
        model = now.clone();
        if model.life == Life::Killed {
            break;
        }
    }
}

#[tokio::test]
async fn concurrent_operations_are_equivalent_to_a_sequential_order() {
    for seed in 0..SEEDS {
        one_history(seed).await;
    }
}

#[tokio::test]
async fn a_resume_with_a_timeout_replaces_the_earlier_deadline() {
    let bench = Bench::new();
    let host = bench.open().await;
    let spec = CreateSpec {
        settings: SandboxSettings {
            timeout_s: Some(0),
            on_timeout: OnTimeout::Pause,
            ..SandboxSettings::default()
        },
        ..base()
    };
    let id = host.create(spec).await.unwrap().id().to_owned();
    for _ in 0..20 {
        quiet(&host, &id).await;
        assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Paused);
        let (_, was_resumed) = host
            .ensure_running_for(&id, ResumeTimeout::AtLeast(LONG))
            .await
            .unwrap();
        assert!(was_resumed);
        quiet(&host, &id).await;
        assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Running);
        let end = Some(Duration::ZERO);
        let ended = host.timeouts().set(&id, end).await.unwrap();
        // A timeout of zero does not replace the configured timeout.
        assert_eq!(ended.settings().timeout_s, Some(LONG.as_secs()));
    }
}

#[tokio::test]
async fn a_sandbox_that_is_killed_during_its_create_stays_killed() {
    let bench = Bench::new();
    let host = bench.open().await;
    bench.world.jitter.store(1, Ordering::Relaxed);
    let mut killed_early = 0;
    for _ in 0..40 {
        let creating = host.clone();
        let create = tokio::spawn(async move { creating.create(base()).await });
        let new = loop {
            let list = host.list();
            match list.iter().find(|r| *r.state() == SandboxState::Creating) {
                Some(record) => break Some(record.id().to_owned()),
                None if create.is_finished() => break None,
                None => tokio::task::yield_now().await,
            }
        };
        let Some(id) = new else { continue };
        host.kill(&id).await.unwrap();
        let result = create.await.unwrap();
        quiet(&host, &id).await;
        let state = host.get(&id).map(|r| r.state().clone());
        assert!(
            matches!(state, Ok(SandboxState::Killed) | Err(_)),
            "{state:?}"
        );
        assert!(
            !bench.world.running().contains(&id),
            "{id} still has a guest"
        );
        killed_early += usize::from(result.is_err());
    }
    // At least one kill must have happened before the guest existed.
    assert!(killed_early > 0);
}
