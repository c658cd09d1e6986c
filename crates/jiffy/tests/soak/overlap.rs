//! Two operations on one sandbox at the same time: some order of them, or one and a refusal.

use super::api::Reply;
use super::model::{KillCount, Numbers, State};
use super::operations::LockedSandbox;
use super::random::TestRandom;
use serde_json::{Value, json};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

/// Both, at once.
fn both(one: impl FnOnce() -> Reply, other: impl FnOnce() -> Reply + Send) -> (Reply, Reply) {
    std::thread::scope(|scope| {
        let other = scope.spawn(other);
        (one(), other.join().unwrap())
    })
}

impl LockedSandbox<'_> {
    pub fn overlap(&mut self, random: &mut TestRandom) -> Result<(), String> {
        match random.below(6) {
            0 => self.write_and_snapshot(),
            1 => self.write_and_fork(),
            2 => self.write_and_pause(),
            3 => self.write_and_rollback(random),
            4 => self.pause_and_connect(),
            _ => self.snapshot_and_pause(),
        }
    }

    /// Refusals are fine where another operation was first; failures need a reason.
    fn weigh(&mut self, before: KillCount, what: &str, replies: &[&Reply]) -> Result<(), String> {
        let states = [State::Running, State::Paused];
        let killed = self.soak.killed_since(before);
        self.settle(&states)?;
        for reply in replies {
            let known = reply.is_done() || reply.is_refused() || reply.is_no_room();
            if !known && !killed && self.model.state != State::Broken {
                self.judge(before, what, reply, &states)?;
            }
        }
        Ok(())
    }

    fn during(&self, number: u64) -> Numbers {
        let mut numbers = self.model.numbers.clone();
        numbers.insert(number);
        numbers
    }

    fn write_and_snapshot(&mut self) -> Result<(), String> {
        let (before, number) = (self.soak.kill_count(), self.soak.number());
        let name = format!("s-{}", self.soak.number());
        let during = self.during(number);
        let (soak, sandbox) = (self.soak, self.sandbox);
        let (wrote, took) = both(
            || self.write_of(number),
            || soak.post(sandbox, "snapshots", &json!({ "name": name })),
        );
        self.took(&name, &took, during)?;
        self.wrote(number, &wrote);
        self.weigh(before, "write beside a snapshot", &[&wrote, &took])
    }

    fn write_and_fork(&mut self) -> Result<(), String> {
        let (before, number) = (self.soak.kill_count(), self.soak.number());
        let (during, began) = (self.during(number), Instant::now());
        let (soak, sandbox) = (self.soak, self.sandbox);
        let (wrote, forked) = both(
            || self.write_of(number),
            || soak.post(sandbox, "fork", &json!({ "timeout": 3600 })),
        );
        self.forked(began, &forked, &during, self.soak.killed_since(before))?;
        self.wrote(number, &wrote);
        self.weigh(before, "write beside a fork", &[&wrote, &forked])
    }

    fn write_and_pause(&mut self) -> Result<(), String> {
        let (before, number) = (self.soak.kill_count(), self.soak.number());
        let (soak, sandbox) = (self.soak, self.sandbox);
        let (wrote, paused) = both(
            || self.write_of(number),
            || soak.post(sandbox, "pause", &Value::Null),
        );
        self.soak.count("pause", paused.is_done());
        self.note("pause", &paused);
        self.wrote(number, &wrote);
        // A request that comes too late for a guest is answered by the gateway, with any status.
        self.weigh(before, "pause beside a write", &[&paused])
    }

    fn write_and_rollback(&mut self, random: &mut TestRandom) -> Result<(), String> {
        let Some(snapshot) = self.relative(random) else {
            return Ok(());
        };
        let (before, number) = (self.soak.kill_count(), self.soak.number());
        let (began, hits) = (Instant::now(), self.sandbox.hits.load(SeqCst));
        let (soak, sandbox, to) = (self.soak, self.sandbox, &snapshot);
        let (wrote, put_back) = both(
            || self.write_of(number),
            || soak.post(sandbox, "rollback", &json!({ "snapshotID": to.id })),
        );
        self.soak.count("rollback", put_back.is_done());
        self.wrote(number, &wrote);
        self.note(&format!("rollback {}", snapshot.id), &put_back);
        self.model.spawned = (began, Instant::now());
        if put_back.is_done() {
            self.model.mended = hits;
            self.model.numbers.clone_from(&snapshot.numbers);
            self.model.numbers.insert(number);
        } else {
            self.model.numbers.extend(&snapshot.numbers)
        }
        if self.soak.killed_since(before) {
            let was = self.model.state;
            self.settle(&[State::Running, State::Paused, State::Broken])?;
            if !put_back.is_done() {
                self.half_rolled_back(was, &snapshot);
            }
            return Ok(());
        }
        self.weigh(before, "rollback beside a write", &[&put_back])
    }

    fn pause_and_connect(&mut self) -> Result<(), String> {
        let (before, began) = (self.soak.kill_count(), Instant::now());
        let (soak, sandbox) = (self.soak, self.sandbox);
        let (paused, connected) = both(
            || soak.post(sandbox, "pause", &Value::Null),
            || soak.wake(sandbox, "connect"),
        );
        self.note("pause", &paused);
        self.note("connect", &connected);
        self.model.spawned = (began, Instant::now());
        self.weigh(before, "pause beside connect", &[&paused, &connected])
    }

    fn snapshot_and_pause(&mut self) -> Result<(), String> {
        let before = self.soak.kill_count();
        let name = format!("s-{}", self.soak.number());
        let (soak, sandbox) = (self.soak, self.sandbox);
        let (took, paused) = both(
            || soak.post(sandbox, "snapshots", &json!({ "name": name })),
            || soak.post(sandbox, "pause", &Value::Null),
        );
        let numbers = self.model.numbers.clone();
        self.took(&name, &took, numbers)?;
        self.note("pause", &paused);
        self.weigh(before, "snapshot beside a pause", &[&took, &paused])
    }
}
