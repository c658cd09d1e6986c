//! Operations on one sandbox, whose lock the caller holds.

use super::api::Reply;
use super::guest::{PORT, number};
use super::model::{KillCount, Numbers, Sandbox, SandboxModel, Snapshot, SoakModel, State, locked};
use super::random::TestRandom;
use crate::support::alive;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// Time after which a VMM that was killed must be told as broken.
const NOTICE_LIMIT: Duration = Duration::from_secs(20);
/// Time that a process has to be gone after its sandbox's end was told.
const EXIT_LIMIT: Duration = Duration::from_secs(2);

/// A sandbox, its locked life, and the world around it.
pub struct LockedSandbox<'a> {
    pub soak: &'a SoakModel,
    pub sandbox: &'a Sandbox,
    pub model: &'a mut SandboxModel,
}

impl LockedSandbox<'_> {
    pub fn note(&mut self, what: &str, reply: &Reply) {
        let line = format!("{what} -> {}", reply.short());
        self.model.note(self.soak, &line);
    }

    pub fn settle(&mut self, permitted: &[State]) -> Result<(), String> {
        self.soak.settle(self.sandbox, self.model, permitted)
    }

    /// Finds out what became of a sandbox of which a call was not done, and whether there was a
    /// reason.
    pub fn judge(
        &mut self,
        before: KillCount,
        what: &str,
        reply: &Reply,
        permitted: &[State],
    ) -> Result<(), String> {
        let killed = self.soak.killed_since(before);
        let was = self.model.state;
        if killed {
            self.settle(permitted)?
        } else {
            self.settle(&[was])?
        }
        if killed || reply.is_no_room() || self.model.state == State::Broken {
            return Ok(());
        }
        if self.soak.excuse(self.sandbox, self.model) {
            return self.notice();
        }
        Err(format!("{what}: {}", reply.short()))
    }

    /// Waits until the end of a VMM that was killed is told.
    fn notice(&mut self) -> Result<(), String> {
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
            self.settle(&[was])?;
        }
        self.model.mended = self.sandbox.hits.load(SeqCst);
        Ok(())
    }

    pub fn verify(&mut self) -> Result<(), String> {
        let before = self.soak.kill_count();
        let id = &self.sandbox.id;
        let reply = self.soak.api.guest(id, PORT, "GET", "/verify");
        self.soak.count("verify", reply.is_done());
        if !reply.is_done() {
            self.note("verify", &reply);
            return self.judge(before, "verify", &reply, &[State::Running]);
        }
        let found = number(reply.body(), id)?;
        self.model.note(self.soak, &format!("verify -> {found}"));
        if !self.model.numbers.contains(&found) {
            return Err(format!(
                "it holds {found}, and may hold {:?}",
                self.model.numbers
            ));
        }
        if Some(&found) == self.model.numbers.last() {
            self.model.numbers = Numbers::from([found]);
        }
        Ok(())
    }

    /// True if its guest reaches the internet.
    pub fn reach(&mut self) -> Result<(), String> {
        let before = self.soak.kill_count();
        let reply = self.soak.api.guest(&self.sandbox.id, PORT, "GET", "/reach");
        self.soak.count("reach", reply.is_done());
        self.note("reach", &reply);
        match &reply {
            Reply::Answered(200, body) => {
                let heard = body["heard"].as_str().unwrap_or_default();
                let public = heard.starts_with("internet ");
                public.then_some(()).ok_or(format!("it heard {heard:?}"))
            }
            _ => self.judge(before, "reach", &reply, &[State::Running]),
        }
    }

    /// Starts a write; the caller tells with [`Self::wrote`] what came of it.
    pub fn write_of(&self, number: u64) -> Reply {
        let path = format!("/write/{number}");
        self.soak.api.guest(&self.sandbox.id, PORT, "POST", &path)
    }

    pub fn wrote(&mut self, number: u64, reply: &Reply) {
        self.soak.count("write", reply.is_done());
        self.note(&format!("write {number}"), reply);
        if reply.is_done() {
            self.model.numbers = Numbers::from([number])
        } else {
            drop(self.model.numbers.insert(number))
        }
    }

    pub fn write(&mut self) -> Result<(), String> {
        let (before, number) = (self.soak.kill_count(), self.soak.number());
        let reply = self.write_of(number);
        self.wrote(number, &reply);
        if reply.is_done() {
            Ok(())
        } else {
            self.judge(before, "write", &reply, &[State::Running])
        }
    }

    /// A write to one that sleeps must not be acknowledged.
    pub fn write_asleep(&mut self) -> Result<(), String> {
        let reply = self.write_of(self.soak.number());
        self.soak.count("write asleep", !reply.is_done());
        self.note("write asleep", &reply);
        let refused = !reply.is_done();
        refused.then_some(()).ok_or("a sleeping guest wrote".into())
    }

    /// Takes a snapshot that is acknowledged when it is `ack`: captured or stored.
    pub fn snapshot(&mut self, ack: &str) -> Result<(), String> {
        let before = self.soak.kill_count();
        let hits = self.sandbox.hits.load(SeqCst);
        let name = format!("s-{}", self.soak.number());
        let body = json!({ "name": name, "ack": ack });
        let reply = self.soak.post(self.sandbox, "snapshots", &body);
        let numbers = self.model.numbers.clone();
        if !self.soak.is_stored(&name)? && reply.is_done() {
            self.note("captured and lost", &reply);
            // With the process that held its memory: the VMM, or one of a killed daemon.
            let is_hit = self.sandbox.hits.load(SeqCst) > hits;
            let killed = is_hit || self.soak.killed_since(before);
            return killed
                .then_some(())
                .ok_or("an acknowledged snapshot is lost".into());
        }
        self.took(&name, &reply, numbers)?;
        let was = self.model.state;
        if reply.is_done() {
            Ok(())
        } else {
            self.judge(before, "snapshot", &reply, &[was])
        }
    }

    /// Takes a snapshot into the model, if there is one.
    pub fn took(&mut self, name: &str, reply: &Reply, numbers: Numbers) -> Result<(), String> {
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

    /// A snapshot that it may be put back to.
    pub fn relative(&self, random: &mut TestRandom) -> Option<Arc<Snapshot>> {
        let mut all = locked(&self.soak.snapshots).clone();
        all.retain(|s| s.family == self.sandbox.family);
        (!all.is_empty()).then(|| all.swap_remove(random.below(all.len())))
    }

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
            self.model.mended = hits;
            self.model.state = State::Running;
            self.model.numbers.clone_from(&snapshot.numbers);
            return Ok(());
        }
        if matches!(reply, Reply::Answered(404, _)) && snapshot.removed.load(SeqCst) {
            return self.settle(&[was]);
        }
        self.judge(
            before,
            "rollback",
            &reply,
            &[was, State::Running, State::Paused, State::Broken],
        )?;
        self.half_rolled_back(was, snapshot);
        Ok(())
    }

    /// Takes in what may be in one whose rollback was cut off. One that ran and sleeps now was on
    /// its way back in its place, and sleeps in the snapshot.
    pub fn half_rolled_back(&mut self, was: State, snapshot: &Snapshot) {
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
            self.judge(before, "pause", &reply, &[State::Running, State::Paused])
        }
    }

    /// Wakes it by `call`: `resume` or `connect`.
    pub fn wake(&mut self, call: &str) -> Result<(), String> {
        let (before, began) = (self.soak.kill_count(), Instant::now());
        let hits = self.sandbox.hits.load(SeqCst);
        let reply = self.soak.wake(self.sandbox, call);
        self.soak.count("wake", reply.is_done());
        self.note(call, &reply);
        self.model.spawned = (began, Instant::now());
        if reply.is_done() {
            self.model.state = State::Running;
            self.model.mended = hits;
            Ok(())
        } else {
            self.judge(before, call, &reply, &[State::Running, State::Paused])
        }
    }

    /// Its time ends now, and a client connects: it runs for the time that was asked for.
    pub fn expire(&mut self) -> Result<(), String> {
        let before = self.soak.kill_count();
        let expired = self
            .soak
            .post(self.sandbox, "timeout", &json!({ "timeout": 0 }));
        self.note("timeout 0", &expired);
        if !expired.is_done() {
            self.judge(
                before,
                "timeout",
                &expired,
                &[State::Running, State::Paused],
            )?;
            return self.give_time();
        }
        let (hits, began) = (self.sandbox.hits.load(SeqCst), Instant::now());
        let reply = self.soak.wake(self.sandbox, "connect");
        self.soak.count("expire", reply.is_done());
        self.note("connect", &reply);
        self.model.spawned = (began, Instant::now());
        if !reply.is_done() {
            // It may sleep by now; the time that it had is over.
            let killed = self.soak.killed_since(before);
            self.settle(&[State::Running, State::Paused])?;
            let known = killed
                || reply.is_no_room()
                || self.model.state == State::Broken
                || self.soak.excuse(self.sandbox, self.model);
            return if known {
                self.give_time()
            } else {
                Err(format!("connect: {}", reply.short()))
            };
        }
        if self.model.state == State::Paused {
            self.model.mended = hits;
        }
        self.model.state = State::Running;
        self.verify()
    }

    /// Sees to it that one that runs does not fall asleep by itself, as its time may be over.
    fn give_time(&mut self) -> Result<(), String> {
        match self.model.state {
            State::Running => self.wake("connect"),
            _ => Ok(()),
        }
    }

    /// Ends it: what is told as ended is no process any more.
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
        self.judge(before, "remove", &reply, &[was, State::Gone])
    }
}

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
