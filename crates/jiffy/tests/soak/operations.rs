//! Operations on one sandbox. The caller holds its lock.

use super::api::Reply;
use super::guest::{PORT, number};
use super::model::{KillCount, Numbers, Sandbox, SandboxModel, Snapshot, SoakModel, State, locked};
use super::random::TestRandom;
use crate::support::alive;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// Maximum time until a sandbox with a killed VMM is reported as broken.
const NOTICE_LIMIT: Duration = Duration::from_secs(20);
/// Maximum time until a process exits after the removal of its sandbox was acknowledged.
const EXIT_LIMIT: Duration = Duration::from_secs(2);

/// Sandbox with its locked state.
pub struct LockedSandbox<'a> {
    pub soak: &'a SoakModel,
    pub sandbox: &'a Sandbox,
    pub model: &'a mut SandboxModel,
}

impl LockedSandbox<'_> {
    /// Adds a call and its reply to the history of the sandbox.
    pub fn note(&mut self, what: &str, reply: &Reply) {
        let line = format!("{what} -> {}", reply.short());
        self.model.note(self.soak, &line);
    }

    pub fn sync_state(&mut self, permitted: &[State]) -> Result<(), String> {
        self.soak.sync_state(self.sandbox, self.model, permitted)
    }

    /// Determines the state of a sandbox after a failed call, and checks that the failure has a
    /// known reason: a killed process, or a lack of capacity.
    pub fn check_failure(
        &mut self,
        before: KillCount,
        what: &str,
        reply: &Reply,
        permitted: &[State],
    ) -> Result<(), String> {
        let killed = self.soak.killed_since(before);
        let was = self.model.state;
        if killed {
            self.sync_state(permitted)?
        } else {
            self.sync_state(&[was])?
        }
        if killed || reply.is_capacity_exceeded() || self.model.state == State::Broken {
            return Ok(());
        }
        if self.soak.has_known_kill(self.sandbox, self.model) {
            return self.wait_for_exit_report();
        }
        Err(format!("{what}: {}", reply.short()))
    }

    /// Waits until the exit of a killed VMM is reported, or until the guest answers again.
    /// Afterwards the kills so far explain no other failure.
    fn wait_for_exit_report(&mut self) -> Result<(), String> {
        let limit = Instant::now() + NOTICE_LIMIT;
        let was = self.model.state;
        while self.model.state != State::Broken && Instant::now() < limit {
            let asked = self
                .soak
                .api
                .guest(&self.sandbox.id, PORT, "GET", "/verify");
            if asked.is_done() {
                break;
            }
            self.sync_state(&[was])?;
        }
        self.model.handled_kills = self.sandbox.hits.load(SeqCst);
        Ok(())
    }

    /// Checks that the guest contains a possible number. If it is the newest, the others become
    /// impossible, because the guest ignores older numbers that arrive late.
    pub fn verify(&mut self) -> Result<(), String> {
        let before = self.soak.kill_count();
        let id = &self.sandbox.id;
        let reply = self.soak.api.guest(id, PORT, "GET", "/verify");
        self.soak.count("verify", reply.is_done());
        if !reply.is_done() {
            self.note("verify", &reply);
            return self.check_failure(before, "verify", &reply, &[State::Running]);
        }
        let found = number(reply.body(), id)?;
        self.model.note(self.soak, &format!("verify -> {found}"));
        if !self.model.numbers.contains(&found) {
            return Err(format!(
                "the guest contains {found}, but only {:?} are possible",
                self.model.numbers
            ));
        }
        if Some(&found) == self.model.numbers.last() {
            self.model.numbers = Numbers::from([found]);
        }
        Ok(())
    }

    /// Checks that the guest reaches the internet.
    pub fn reach(&mut self) -> Result<(), String> {
        let before = self.soak.kill_count();
        let reply = self.soak.api.guest(&self.sandbox.id, PORT, "GET", "/reach");
        self.soak.count("reach", reply.is_done());
        self.note("reach", &reply);
        match &reply {
            Reply::Answered(200, body) => {
                let heard = body["heard"].as_str().unwrap_or_default();
                let public = heard.starts_with("internet ");
                public
                    .then_some(())
                    .ok_or(format!("the guest received {heard:?}"))
            }
            _ => self.check_failure(before, "reach", &reply, &[State::Running]),
        }
    }

    /// Sends a write. The caller must pass the reply to [`Self::record_write`].
    pub fn send_write(&self, number: u64) -> Reply {
        let path = format!("/write/{number}");
        self.soak.api.guest(&self.sandbox.id, PORT, "POST", &path)
    }

    /// Records a write: after a failure, the guest may have the old or the new number.
    pub fn record_write(&mut self, number: u64, reply: &Reply) {
        self.soak.count("write", reply.is_done());
        self.note(&format!("write {number}"), reply);
        if reply.is_done() {
            self.model.numbers = Numbers::from([number]);
        } else {
            self.model.numbers.insert(number);
        }
    }

    pub fn write(&mut self) -> Result<(), String> {
        let (before, number) = (self.soak.kill_count(), self.soak.number());
        let reply = self.send_write(number);
        self.record_write(number, &reply);
        if reply.is_done() {
            Ok(())
        } else {
            self.check_failure(before, "write", &reply, &[State::Running])
        }
    }

    /// Checks that a write to a paused sandbox is not acknowledged.
    pub fn write_paused(&mut self) -> Result<(), String> {
        let reply = self.send_write(self.soak.number());
        self.soak
            .count("write to a paused sandbox", !reply.is_done());
        self.note("write to a paused sandbox", &reply);
        let refused = !reply.is_done();
        refused.then_some(()).ok_or("a paused guest wrote".into())
    }

    /// Takes a snapshot that is acknowledged at the stage `ack`: `captured` when the guest's state
    /// is captured but not yet written, or `stored`.
    pub fn snapshot(&mut self, ack: &str) -> Result<(), String> {
        let before = self.soak.kill_count();
        let hits = self.sandbox.hits.load(SeqCst);
        let name = format!("s-{}", self.soak.number());
        let body = json!({ "name": name, "ack": ack });
        let reply = self.soak.post(self.sandbox, "snapshots", &body);
        let numbers = self.model.numbers.clone();
        if !self.soak.is_stored(&name)? && reply.is_done() {
            self.note("captured and lost", &reply);
            // The process that held the memory may have been killed: the VMM, or a process of the
            // daemon.
            let is_hit = self.sandbox.hits.load(SeqCst) > hits;
            let killed = is_hit || self.soak.killed_since(before);
            return killed
                .then_some(())
                .ok_or("an acknowledged snapshot is lost".into());
        }
        self.add_snapshot(&name, &reply, numbers)?;
        let was = self.model.state;
        if reply.is_done() {
            Ok(())
        } else {
            self.check_failure(before, "snapshot", &reply, &[was])
        }
    }

    /// Adds a new snapshot to the model, if it exists.
    pub fn add_snapshot(
        &mut self,
        name: &str,
        reply: &Reply,
        numbers: Numbers,
    ) -> Result<(), String> {
        self.soak.count("snapshot", reply.is_done());
        self.note(&format!("snapshot {name}"), reply);
        let id = match reply {
            Reply::Answered(201, body) => body["snapshotID"].as_str().map(str::to_owned),
            Reply::Answered(..) => None,
            Reply::Lost(_) => {
                let all = self.soak.snapshot_records()?;
                let found = all.into_iter().find(|s| s["name"] == name);
                found.and_then(|s| Some(s["id"].as_str()?.to_owned()))
            }
        };
        if let Some(id) = id {
            self.soak.add_snapshot(&id, self.sandbox.family, numbers);
        }
        Ok(())
    }

    /// Returns a snapshot to which the sandbox can be rolled back.
    pub fn relative(&self, random: &mut TestRandom) -> Option<Arc<Snapshot>> {
        let mut all = locked(&self.soak.snapshots).clone();
        all.retain(|s| s.family == self.sandbox.family);
        (!all.is_empty()).then(|| all.swap_remove(random.below(all.len())))
    }

    /// Sends a rollback to a snapshot.
    pub fn rollback_of(&self, snapshot: &Snapshot) -> Reply {
        let body = json!({ "snapshotID": snapshot.id });
        self.soak.post(self.sandbox, "rollback", &body)
    }

    pub fn rollback(&mut self, snapshot: &Snapshot) -> Result<(), String> {
        let (before, began) = (self.soak.kill_count(), Instant::now());
        let hits = self.sandbox.hits.load(SeqCst);
        let reply = self.rollback_of(snapshot);
        self.soak.count("rollback", reply.is_done());
        self.note(&format!("rollback {}", snapshot.id), &reply);
        let was = self.model.state;
        self.model.spawned = (began, Instant::now());
        if reply.is_done() {
            self.model.handled_kills = hits;
            self.model.state = State::Running;
            self.model.numbers.clone_from(&snapshot.numbers);
            return Ok(());
        }
        if matches!(reply, Reply::Answered(404, _)) && snapshot.removed.load(SeqCst) {
            return self.sync_state(&[was]);
        }
        self.check_failure(
            before,
            "rollback",
            &reply,
            &[was, State::Running, State::Paused, State::Broken],
        )?;
        self.apply_interrupted_rollback(was, snapshot);
        Ok(())
    }

    /// Adds the numbers that are possible after an interrupted rollback. A sandbox that was running
    /// and is now paused is paused in the snapshot.
    pub fn apply_interrupted_rollback(&mut self, was: State, snapshot: &Snapshot) {
        match (was, self.model.state) {
            (State::Running, State::Paused) => self.model.numbers.clone_from(&snapshot.numbers),
            _ => self.model.numbers.extend(&snapshot.numbers),
        }
    }

    pub fn pause(&mut self) -> Result<(), String> {
        let before = self.soak.kill_count();
        let reply = self.soak.post(self.sandbox, "pause", &Value::Null);
        self.soak.count("pause", reply.is_done());
        self.note("pause", &reply);
        if reply.is_done() {
            self.model.state = State::Paused;
            Ok(())
        } else {
            self.check_failure(before, "pause", &reply, &[State::Running, State::Paused])
        }
    }

    /// Resumes the sandbox by `call`: `resume` or `connect`.
    pub fn resume(&mut self, call: &str) -> Result<(), String> {
        let (before, began) = (self.soak.kill_count(), Instant::now());
        let hits = self.sandbox.hits.load(SeqCst);
        let reply = self.soak.resume(self.sandbox, call);
        self.soak.count("resume", reply.is_done());
        self.note(call, &reply);
        self.model.spawned = (began, Instant::now());
        if reply.is_done() {
            self.model.state = State::Running;
            self.model.handled_kills = hits;
            Ok(())
        } else {
            self.check_failure(before, call, &reply, &[State::Running, State::Paused])
        }
    }

    /// Lets the sandbox time out while a client connects: it must run for the requested time.
    pub fn expire(&mut self) -> Result<(), String> {
        let before = self.soak.kill_count();
        let expired = self
            .soak
            .post(self.sandbox, "timeout", &json!({ "timeout": 0 }));
        self.note("timeout 0", &expired);
        if !expired.is_done() {
            self.check_failure(
                before,
                "timeout",
                &expired,
                &[State::Running, State::Paused],
            )?;
            return self.give_time();
        }
        let (hits, began) = (self.sandbox.hits.load(SeqCst), Instant::now());
        let reply = self.soak.resume(self.sandbox, "connect");
        self.soak.count("expire", reply.is_done());
        self.note("connect", &reply);
        self.model.spawned = (began, Instant::now());
        if !reply.is_done() {
            // The sandbox may be paused by now, because its time is over.
            let killed = self.soak.killed_since(before);
            self.sync_state(&[State::Running, State::Paused])?;
            let known = killed
                || reply.is_capacity_exceeded()
                || self.model.state == State::Broken
                || self.soak.has_known_kill(self.sandbox, self.model);
            return if known {
                self.give_time()
            } else {
                Err(format!("connect: {}", reply.short()))
            };
        }
        if self.model.state == State::Paused {
            self.model.handled_kills = hits;
        }
        self.model.state = State::Running;
        self.verify()
    }

    /// Extends the timeout of a running sandbox, so that it is not paused by itself.
    fn give_time(&mut self) -> Result<(), String> {
        match self.model.state {
            State::Running => self.resume("connect"),
            _ => Ok(()),
        }
    }

    /// Removes the sandbox, and checks that its process has exited.
    pub fn remove(&mut self) -> Result<(), String> {
        let before = self.soak.kill_count();
        let of = format!("/sandboxes/{}/process", self.sandbox.id);
        let process = self.soak.api.call("GET", &of, &Value::Null);
        let path = format!("/sandboxes/{}?forget=true", self.sandbox.id);
        let reply = self.soak.api.call("DELETE", &path, &Value::Null);
        self.soak.count("remove", reply.is_done());
        self.note("remove", &reply);
        let was = self.model.state;
        if reply.is_done() {
            self.model.state = State::Gone;
            let pid = process.body()["pid"]
                .as_u64()
                .and_then(|p| p.try_into().ok());
            return pid.map_or(Ok(()), exited);
        }
        self.check_failure(before, "remove", &reply, &[was, State::Gone])
    }
}

/// Waits until a process has exited.
fn exited(pid: u32) -> Result<(), String> {
    let limit = Instant::now() + EXIT_LIMIT;
    while alive(pid) {
        if Instant::now() > limit {
            return Err(format!("process {pid} of a sandbox that was removed lives"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
