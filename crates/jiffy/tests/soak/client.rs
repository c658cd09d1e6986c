//! Clients: each does one random operation after the other.

use super::api::Reply;
use super::dice::Dice;
use super::lives::Turn;
use super::model::{Sandbox, Snapshot, State, World, locked};
use super::spawn::{from_snapshot, from_template};
use crate::support::place::Place;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

/// Sandboxes that are made anew as long as there are fewer.
const WANTED: usize = 9;
/// Most that run when another one is made or woken; each client may add two.
const MAX_RUNNING: usize = 5;
/// Snapshots beyond which one is removed.
const MAX_SNAPSHOTS: usize = 16;

/// Does operations until the world is over; what it finds wrong ends the world.
pub fn client(world: &World, place: &Place, mut dice: Dice) {
    while !world.over.load(SeqCst) {
        let done = step(world, place, &mut dice);
        if let Err(found) = done {
            world.over.store(true, SeqCst);
            locked(&world.found).push(found);
        }
        if world.daemon_kills.load(SeqCst) % 2 == 1 {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn step(world: &World, place: &Place, dice: &mut Dice) -> Result<(), String> {
    let all = locked(&world.sandboxes).clone();
    let snapshots = locked(&world.snapshots).clone();
    if snapshots.len() > MAX_SNAPSHOTS && dice.throw(3) == 0 {
        return remove_snapshot(world, &snapshots[1 + dice.throw(snapshots.len() - 1)]);
    }
    let room = world.running() < MAX_RUNNING;
    if all.len() < WANTED && room && dice.throw(3) == 0 {
        let made = match dice.throw(6) {
            0 => from_template(world, place)?,
            _ => from_snapshot(world, &snapshots[dice.throw(snapshots.len())])?,
        };
        return match made {
            Some(made) => with(world, &made, |turn| turn.settle_and_verify()),
            None => Ok(()),
        };
    }
    if all.is_empty() {
        return Ok(());
    }
    let sandbox = all[dice.throw(all.len())].clone();
    with(world, &sandbox, |turn| live(turn, dice, room))
}

/// Works on a sandbox, unless another client does. An error tells its history.
fn with(
    world: &World,
    sandbox: &Arc<Sandbox>,
    work: impl FnOnce(&mut Turn) -> Result<(), String>,
) -> Result<(), String> {
    let Some(mut life) = sandbox.try_lock() else {
        return Ok(());
    };
    if life.state == State::Gone {
        return Ok(());
    }
    let mut turn = Turn {
        world,
        sandbox,
        life: &mut life,
    };
    let done = work(&mut turn);
    if life.state == State::Gone {
        world.forget(sandbox);
    }
    done.map_err(|found| format!("{found}\n{}", life.told(&sandbox.id)))
}

#[derive(Debug, Clone, Copy)]
enum Act {
    Verify,
    Reach,
    Write,
    WriteAsleep,
    Snapshot,
    Rollback,
    Fork,
    Pause,
    Resume,
    Connect,
    Expire,
    Overlap,
    Remove,
}

fn live(turn: &mut Turn, dice: &mut Dice, room: bool) -> Result<(), String> {
    let room = usize::from(room);
    let act = match turn.life.state {
        State::Running => dice.pick(&[
            (20, Act::Verify),
            (3, Act::Reach),
            (20, Act::Write),
            (9, Act::Snapshot),
            (9, Act::Rollback),
            (6 * room, Act::Fork),
            (9, Act::Pause),
            (4, Act::Expire),
            (14, Act::Overlap),
            (6, Act::Remove),
        ]),
        State::Paused => dice.pick(&[
            (20 * room, Act::Resume),
            (20 * room, Act::Connect),
            (8 * room, Act::Fork),
            (8 * room, Act::Rollback),
            (8, Act::Snapshot),
            (4, Act::WriteAsleep),
            (6, Act::Remove),
        ]),
        State::Broken | State::Gone => dice.pick(&[(3, Act::Rollback), (1, Act::Remove)]),
    };
    match act {
        Act::Verify => turn.verify(),
        Act::Reach => turn.reach(),
        Act::Write => turn.write(),
        Act::WriteAsleep => turn.write_asleep(),
        Act::Snapshot => turn.snapshot(),
        Act::Rollback => match turn.relative(dice) {
            Some(snapshot) => {
                turn.rollback(&snapshot)?;
                turn.verify_if_running()
            }
            // Nothing that it can be mended from.
            None => turn.remove(),
        },
        Act::Fork => turn.fork(dice),
        Act::Pause => turn.pause(),
        Act::Resume => turn.wake("resume").and_then(|()| turn.verify_if_running()),
        Act::Connect => turn.wake("connect").and_then(|()| turn.verify_if_running()),
        Act::Expire => turn.expire(),
        Act::Overlap => turn.overlap(dice),
        Act::Remove => turn.remove(),
    }
}

impl Turn<'_> {
    pub fn verify_if_running(&mut self) -> Result<(), String> {
        match self.life.state {
            State::Running => self.verify(),
            _ => Ok(()),
        }
    }

    /// One that was just made: of what an answer that broke off told of, the state is not known.
    fn settle_and_verify(&mut self) -> Result<(), String> {
        self.settle(&[State::Running])?;
        self.verify_if_running()
    }
}

/// Removes a snapshot, unless something descends from it.
pub fn remove_snapshot(world: &World, snapshot: &Arc<Snapshot>) -> Result<(), String> {
    if snapshot.removed.swap(true, SeqCst) {
        return Ok(());
    }
    locked(&world.snapshots).retain(|s| s.id != snapshot.id);
    let path = format!("/templates/{}", snapshot.id);
    let before = world.weather();
    let reply = world.api.call("DELETE", &path, &Value::Null);
    world.count("remove snapshot", reply.is_done());
    if matches!(&reply, Reply::Answered(409, body) if body["error_code"] == "in_use") {
        snapshot.removed.store(false, SeqCst);
        locked(&world.snapshots).push(snapshot.clone());
        return Ok(());
    }
    match reply.is_done() || world.stormed_since(before) {
        true => Ok(()),
        false => Err(format!(
            "removal of snapshot {}: {}",
            snapshot.id,
            reply.short()
        )),
    }
}
