//! Clients that perform random operations.

use super::api::Reply;
use super::model::{Sandbox, Snapshot, SoakModel, State, locked};
use super::operations::LockedSandbox;
use super::random::TestRandom;
use super::spawn::{from_snapshot, from_template};
use crate::support::test_home::TestHome;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

/// Number of sandboxes below which new ones are created.
const TARGET_SANDBOXES: usize = 9;
/// Maximum number of running sandboxes before a create or resume. Each client may add two.
const MAX_RUNNING: usize = 5;
/// Number of snapshots above which one is removed.
const MAX_SNAPSHOTS: usize = 16;

/// Performs operations until the test is over. A detected error ends the test.
pub fn client(soak: &SoakModel, test_home: &TestHome, mut random: TestRandom) {
    while !soak.over.load(SeqCst) {
        let done = step(soak, test_home, &mut random);
        if let Err(found) = done {
            soak.over.store(true, SeqCst);
            locked(&soak.found).push(found);
        }
        // While no daemon runs, all calls fail.
        if soak.daemon_kills.load(SeqCst) % 2 == 1 {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Removes a snapshot, creates a sandbox, or operates on a sandbox.
fn step(soak: &SoakModel, test_home: &TestHome, random: &mut TestRandom) -> Result<(), String> {
    let all = locked(&soak.sandboxes).clone();
    let snapshots = locked(&soak.snapshots).clone();
    if snapshots.len() > MAX_SNAPSHOTS && random.below(3) == 0 {
        // The first snapshot remains, because most sandboxes are created from snapshots.
        return remove_snapshot(soak, &snapshots[1 + random.below(snapshots.len() - 1)]);
    }
    let room = soak.running() < MAX_RUNNING;
    if all.len() < TARGET_SANDBOXES && room && random.below(3) == 0 {
        let made = match random.below(6) {
            0 => from_template(soak, test_home)?,
            _ => from_snapshot(soak, &snapshots[random.below(snapshots.len())])?,
        };
        return match made {
            Some(made) => with(soak, &made, |held| held.sync_and_verify()),
            None => Ok(()),
        };
    }
    if all.is_empty() {
        return Ok(());
    }
    let sandbox = all[random.below(all.len())].clone();
    with(soak, &sandbox, |held| operate(held, random, room))
}

/// Operates on a sandbox, unless another client does. An error contains the sandbox's history.
fn with(
    soak: &SoakModel,
    sandbox: &Arc<Sandbox>,
    work: impl FnOnce(&mut LockedSandbox) -> Result<(), String>,
) -> Result<(), String> {
    let Some(mut model) = sandbox.try_lock() else {
        return Ok(());
    };
    if model.state == State::Gone {
        return Ok(());
    }
    let mut held = LockedSandbox {
        soak,
        sandbox,
        model: &mut model,
    };
    let done = work(&mut held);
    if model.state == State::Gone {
        soak.forget(sandbox);
    }
    done.map_err(|found| format!("{found}\n{}", model.describe(&sandbox.id)))
}

/// Operation on one sandbox. The methods of [`LockedSandbox`] describe the operations.
#[derive(Debug, Clone, Copy)]
enum Operation {
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

/// Performs a random operation that the state permits. `room` is true if another sandbox may run.
fn operate(held: &mut LockedSandbox, random: &mut TestRandom, room: bool) -> Result<(), String> {
    let room = usize::from(room);
    // The number before an operation is its weight in the random selection.
    let act = match held.model.state {
        State::Running => random.pick(&[
            (20, Operation::Verify),
            (3, Operation::Reach),
            (20, Operation::Write),
            (9, Operation::Snapshot),
            (9, Operation::Rollback),
            (6 * room, Operation::Fork),
            (9, Operation::Pause),
            (4, Operation::Expire),
            (14, Operation::Overlap),
            (6, Operation::Remove),
        ]),
        State::Paused => random.pick(&[
            (20 * room, Operation::Resume),
            (20 * room, Operation::Connect),
            (8 * room, Operation::Fork),
            (8 * room, Operation::Rollback),
            (8, Operation::Snapshot),
            (4, Operation::WriteAsleep),
            (6, Operation::Remove),
        ]),
        State::Broken | State::Gone => {
            random.pick(&[(3, Operation::Rollback), (1, Operation::Remove)])
        }
    };
    match act {
        Operation::Verify => held.verify(),
        Operation::Reach => held.reach(),
        Operation::Write => held.write(),
        Operation::WriteAsleep => held.write_paused(),
        Operation::Snapshot => held.snapshot(random.pick(&[(1, "captured"), (1, "stored")])),
        Operation::Rollback => match held.relative(random) {
            Some(snapshot) => {
                held.rollback(&snapshot)?;
                held.verify_if_running()
            }
            // Without a snapshot, the sandbox cannot be repaired.
            None => held.remove(),
        },
        Operation::Fork => held.fork(random),
        Operation::Pause => held.pause(),
        Operation::Resume => held
            .resume("resume")
            .and_then(|()| held.verify_if_running()),
        Operation::Connect => held
            .resume("connect")
            .and_then(|()| held.verify_if_running()),
        Operation::Expire => held.expire(),
        Operation::Overlap => held.overlap(random),
        Operation::Remove => held.remove(),
    }
}

impl LockedSandbox<'_> {
    /// Verifies the guest, unless the sandbox is not running any longer.
    pub fn verify_if_running(&mut self) -> Result<(), String> {
        match self.model.state {
            State::Running => self.verify(),
            _ => Ok(()),
        }
    }

    /// For a new sandbox: its state is unknown if the answer was incomplete.
    fn sync_and_verify(&mut self) -> Result<(), String> {
        self.sync_state(&[State::Running])?;
        self.verify_if_running()
    }
}

/// Removes a snapshot, unless it is still being stored.
pub fn remove_snapshot(soak: &SoakModel, snapshot: &Arc<Snapshot>) -> Result<(), String> {
    if snapshot.removed.swap(true, SeqCst) {
        return Ok(());
    }
    {
        let mut all = locked(&soak.snapshots);
        locked(&soak.removed_snapshots).insert(snapshot.id.clone());
        all.retain(|s| s.id != snapshot.id);
    }
    let path = format!("/templates/{}", snapshot.id);
    let before = soak.kill_count();
    let reply = soak.api.call("DELETE", &path, &Value::Null);
    soak.count("remove snapshot", reply.is_done());
    if matches!(&reply, Reply::Answered(409, body) if body["error_code"] == "in_use") {
        let mut all = locked(&soak.snapshots);
        locked(&soak.removed_snapshots).remove(&snapshot.id);
        snapshot.removed.store(false, SeqCst);
        all.push(snapshot.clone());
        return Ok(());
    }
    if reply.is_done() || soak.killed_since(before) {
        Ok(())
    } else {
        Err(format!(
            "removal of snapshot {}: {}",
            snapshot.id,
            reply.short()
        ))
    }
}
