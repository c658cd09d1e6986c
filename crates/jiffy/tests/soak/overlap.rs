//! Concurrent operations on one sandbox: the result must match some order, or one is rejected.

use super::api::Reply;
use super::model::{KillCount, Numbers, State};
use super::operations::LockedSandbox;
use super::random::TestRandom;
use serde_json::{Value, json};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

/// Runs both operations concurrently.
fn run_both(one: impl FnOnce() -> Reply, other: impl FnOnce() -> Reply + Send) -> (Reply, Reply) {
    std::thread::scope(|scope| {
        let other = scope.spawn(other);
        (one(), other.join().unwrap())
    })
}

impl LockedSandbox<'_> {
    /// Performs a random pair of operations concurrently.
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

    /// Accepts rejections, because another operation was first. Failures require a known reason.
    fn check_replies(
        &mut self,
        before: KillCount,
        what: &str,
        replies: &[&Reply],
    ) -> Result<(), String> {
        let states = [State::Running, State::Paused];
        let killed = self.soak.killed_since(before);
        self.sync_state(&states)?;
        for reply in replies {
            let known = reply.is_done() || reply.is_refused() || reply.is_capacity_exceeded();
            if !known && !killed && self.model.state != State::Broken {
                self.check_failure(before, what, reply, &states)?;
            }
        }
        Ok(())
    }

    /// Returns the possible numbers while a write of `number` is in progress.
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
        let (wrote, took) = run_both(
            || self.send_write(number),
            || soak.post(sandbox, "snapshots", &json!({ "name": name })),
        );
        self.add_snapshot(&name, &took, during)?;
        self.record_write(number, &wrote);
        self.check_replies(before, "write and snapshot", &[&wrote, &took])
    }

    fn write_and_fork(&mut self) -> Result<(), String> {
        let (before, number) = (self.soak.kill_count(), self.soak.number());
        let (during, began) = (self.during(number), Instant::now());
        let (soak, sandbox) = (self.soak, self.sandbox);
        let (wrote, forked) = run_both(
            || self.send_write(number),
            || soak.post(sandbox, "fork", &json!({ "timeout": 3600 })),
        );
        self.forked(began, &forked, &during, self.soak.killed_since(before))?;
        self.record_write(number, &wrote);
        self.check_replies(before, "write and fork", &[&wrote, &forked])
    }

    fn write_and_pause(&mut self) -> Result<(), String> {
        let (before, number) = (self.soak.kill_count(), self.soak.number());
        let (soak, sandbox) = (self.soak, self.sandbox);
        let (wrote, paused) = run_both(
            || self.send_write(number),
            || soak.post(sandbox, "pause", &Value::Null),
        );
        self.soak.count("pause", paused.is_done());
        self.note("pause", &paused);
        self.record_write(number, &wrote);
        // The gateway answers a request that arrives too late for a guest, with any status.
        self.check_replies(before, "pause and write", &[&paused])
    }

    fn write_and_rollback(&mut self, random: &mut TestRandom) -> Result<(), String> {
        let Some(snapshot) = self.relative(random) else {
            return Ok(());
        };
        let (before, number) = (self.soak.kill_count(), self.soak.number());
        let (began, hits) = (Instant::now(), self.sandbox.hits.load(SeqCst));
        let (soak, sandbox, to) = (self.soak, self.sandbox, &snapshot);
        let (wrote, rolled_back) = run_both(
            || self.send_write(number),
            || soak.post(sandbox, "rollback", &json!({ "snapshotID": to.id })),
        );
        self.soak.count("rollback", rolled_back.is_done());
        self.record_write(number, &wrote);
        self.note(&format!("rollback {}", snapshot.id), &rolled_back);
        self.model.spawned = (began, Instant::now());
        if rolled_back.is_done() {
            self.model.handled_kills = hits;
            self.model.numbers.clone_from(&snapshot.numbers);
            self.model.numbers.insert(number);
        } else {
            self.model.numbers.extend(&snapshot.numbers)
        }
        if self.soak.killed_since(before) {
            let was = self.model.state;
            self.sync_state(&[State::Running, State::Paused, State::Broken])?;
            if !rolled_back.is_done() {
                self.apply_interrupted_rollback(was, &snapshot);
            }
            return Ok(());
        }
        self.check_replies(before, "rollback and write", &[&rolled_back])
    }

    fn pause_and_connect(&mut self) -> Result<(), String> {
        let (before, began) = (self.soak.kill_count(), Instant::now());
        let (soak, sandbox) = (self.soak, self.sandbox);
        let (paused, connected) = run_both(
            || soak.post(sandbox, "pause", &Value::Null),
            || soak.resume(sandbox, "connect"),
        );
        self.note("pause", &paused);
        self.note("connect", &connected);
        self.model.spawned = (began, Instant::now());
        self.check_replies(before, "pause and connect", &[&paused, &connected])
    }

    fn snapshot_and_pause(&mut self) -> Result<(), String> {
        let before = self.soak.kill_count();
        let name = format!("s-{}", self.soak.number());
        let (soak, sandbox) = (self.soak, self.sandbox);
        let (took, paused) = run_both(
            || soak.post(sandbox, "snapshots", &json!({ "name": name })),
            || soak.post(sandbox, "pause", &Value::Null),
        );
        let numbers = self.model.numbers.clone();
        self.add_snapshot(&name, &took, numbers)?;
        self.note("pause", &paused);
        self.check_replies(before, "snapshot and pause", &[&took, &paused])
    }
}
