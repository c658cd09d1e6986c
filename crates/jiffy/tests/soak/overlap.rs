//! Two operations on one sandbox at the same time: some order of them, or one and a refusal.

use super::api::Reply;
use super::dice::Dice;
use super::lives::Turn;
use super::model::{Numbers, State, Weather};
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

impl Turn<'_> {
    pub fn overlap(&mut self, dice: &mut Dice) -> Result<(), String> {
        match dice.throw(6) {
            0 => self.write_and_snapshot(),
            1 => self.write_and_fork(),
            2 => self.write_and_pause(),
            3 => self.write_and_rollback(dice),
            4 => self.pause_and_connect(),
            _ => self.snapshot_and_pause(),
        }
    }

    /// Refusals are fine where another operation was first; failures need a reason.
    fn weigh(&mut self, before: Weather, what: &str, replies: &[&Reply]) -> Result<(), String> {
        let states = [State::Running, State::Paused];
        let stormed = self.world.stormed_since(before);
        self.settle(&states)?;
        for reply in replies {
            let known = reply.is_done() || reply.is_refused() || reply.is_no_room();
            if !known && !stormed && self.life.state != State::Broken {
                self.judge(before, what, reply, &states)?;
            }
        }
        Ok(())
    }

    fn during(&self, number: u64) -> Numbers {
        let mut numbers = self.life.numbers.clone();
        numbers.insert(number);
        numbers
    }

    fn write_and_snapshot(&mut self) -> Result<(), String> {
        let (before, number) = (self.world.weather(), self.world.number());
        let name = format!("s-{}", self.world.number());
        let during = self.during(number);
        let (world, sandbox) = (self.world, self.sandbox);
        let (wrote, took) = both(
            || self.write_of(number),
            || world.post(sandbox, "snapshots", &json!({ "name": name })),
        );
        self.took(&name, &took, during)?;
        self.wrote(number, &wrote);
        self.weigh(before, "write beside a snapshot", &[&wrote, &took])
    }

    fn write_and_fork(&mut self) -> Result<(), String> {
        let (before, number) = (self.world.weather(), self.world.number());
        let (during, began) = (self.during(number), Instant::now());
        let (world, sandbox) = (self.world, self.sandbox);
        let (wrote, forked) = both(
            || self.write_of(number),
            || world.post(sandbox, "fork", &json!({ "timeout": 3600 })),
        );
        self.forked(began, &forked, &during, self.world.stormed_since(before))?;
        self.wrote(number, &wrote);
        self.weigh(before, "write beside a fork", &[&wrote, &forked])
    }

    fn write_and_pause(&mut self) -> Result<(), String> {
        let (before, number) = (self.world.weather(), self.world.number());
        let (world, sandbox) = (self.world, self.sandbox);
        let (wrote, paused) = both(
            || self.write_of(number),
            || world.post(sandbox, "pause", &Value::Null),
        );
        self.world.count("pause", paused.is_done());
        self.note("pause", &paused);
        self.wrote(number, &wrote);
        // A request that comes too late for a guest is answered by the gateway, with any status.
        self.weigh(before, "pause beside a write", &[&paused])
    }

    fn write_and_rollback(&mut self, dice: &mut Dice) -> Result<(), String> {
        let Some(snapshot) = self.relative(dice) else {
            return Ok(());
        };
        let (before, number) = (self.world.weather(), self.world.number());
        let (began, hits) = (Instant::now(), self.sandbox.hits.load(SeqCst));
        let (world, sandbox, to) = (self.world, self.sandbox, &snapshot);
        let (wrote, put_back) = both(
            || self.write_of(number),
            || world.post(sandbox, "rollback", &json!({ "snapshotID": to.id })),
        );
        self.world.count("rollback", put_back.is_done());
        self.wrote(number, &wrote);
        self.note(&format!("rollback {}", snapshot.id), &put_back);
        self.life.spawned = (began, Instant::now());
        match put_back.is_done() {
            true => {
                self.life.mended = hits;
                self.life.numbers.clone_from(&snapshot.numbers);
                self.life.numbers.insert(number);
            }
            false => self.life.numbers.extend(&snapshot.numbers),
        }
        if self.world.stormed_since(before) {
            return self.settle(&[State::Running, State::Broken]);
        }
        self.weigh(before, "rollback beside a write", &[&put_back])
    }

    fn pause_and_connect(&mut self) -> Result<(), String> {
        let (before, began) = (self.world.weather(), Instant::now());
        let (world, sandbox) = (self.world, self.sandbox);
        let (paused, connected) = both(
            || world.post(sandbox, "pause", &Value::Null),
            || world.wake(sandbox, "connect"),
        );
        self.note("pause", &paused);
        self.note("connect", &connected);
        self.life.spawned = (began, Instant::now());
        self.weigh(before, "pause beside connect", &[&paused, &connected])
    }

    fn snapshot_and_pause(&mut self) -> Result<(), String> {
        let before = self.world.weather();
        let name = format!("s-{}", self.world.number());
        let (world, sandbox) = (self.world, self.sandbox);
        let (took, paused) = both(
            || world.post(sandbox, "snapshots", &json!({ "name": name })),
            || world.post(sandbox, "pause", &Value::Null),
        );
        let numbers = self.life.numbers.clone();
        self.took(&name, &took, numbers)?;
        self.note("pause", &paused);
        self.weigh(before, "snapshot beside a pause", &[&took, &paused])
    }
}
