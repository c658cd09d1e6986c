//! New sandboxes: from the template, from snapshots, as children of others.

use super::api::Reply;
use super::dice::Dice;
use super::guest::SERVER;
use super::lives::Turn;
use super::model::{Numbers, Sandbox, Snapshot, State, World, locked};
use crate::support::place::Place;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

/// A sandbox of the template, whose program holds a number of its own.
pub fn from_template(world: &World, place: &Place) -> Result<Option<Arc<Sandbox>>, String> {
    let before = world.weather();
    let number = world.number();
    let tag = format!("c-{number}");
    let body = json!({
        "templateID": "base", "timeout": 3600, "autoPause": true, "metadata": { "op": tag },
        "cpuCount": 1, "memoryMB": world.memory_mib,
    });
    let began = Instant::now();
    let reply = world.api.call("POST", "/v2/sandboxes", &body);
    world.count("create", reply.is_done());
    if !reply.is_done() {
        let stormed = world.stormed_since(before);
        if let Some(id) = adopted(world, &reply, &tag)? {
            let path = format!("/sandboxes/{id}?forget=true");
            world.api.call("DELETE", &path, &Value::Null);
        }
        return refusal(&reply, stormed).map(|()| None);
    }
    let id = reply.body()["sandboxID"].as_str().unwrap_or_default();
    let numbers = Numbers::from([number]);
    let sandbox = Sandbox::new(id, number, numbers, began);
    let mut life = sandbox.lock();
    life.note(world, "create base -> 201");
    // Killers may hit it from here on.
    locked(&world.sandboxes).push(sandbox.clone());
    let started = place.call(&[
        "exec",
        id,
        "--",
        "python3",
        "-c",
        SERVER,
        &number.to_string(),
    ]);
    life.note(world, &format!("start -> {:?}", started.code));
    if started.code == Some(0) {
        drop(life);
        return Ok(Some(sandbox));
    }
    let reply = Reply::Lost(started.stderr);
    let mut turn = Turn {
        world,
        sandbox: &sandbox,
        life: &mut life,
    };
    turn.judge(before, "start of the program", &reply, &[State::Running])?;
    // Nothing answers in it.
    turn.remove()?;
    world.forget(&sandbox);
    Ok(None)
}

/// A sandbox of a snapshot.
pub fn from_snapshot(world: &World, snapshot: &Snapshot) -> Result<Option<Arc<Sandbox>>, String> {
    let before = world.weather();
    let tag = format!("c-{}", world.number());
    let body = json!({
        "templateID": snapshot.id, "timeout": 3600, "autoPause": true, "metadata": { "op": tag },
    });
    let began = Instant::now();
    let reply = world.api.call("POST", "/v2/sandboxes", &body);
    world.count("create", reply.is_done());
    let stormed = world.stormed_since(before);
    let removed = snapshot.removed.load(SeqCst) && matches!(reply, Reply::Answered(404, _));
    let Some(id) = adopted(world, &reply, &tag)? else {
        return match removed {
            true => Ok(None),
            false => refusal(&reply, stormed).map(|()| None),
        };
    };
    let sandbox = Sandbox::new(&id, snapshot.family, snapshot.numbers.clone(), began);
    let line = format!("create {} -> {}", snapshot.id, reply.short());
    sandbox.lock().note(world, &line);
    locked(&world.sandboxes).push(sandbox.clone());
    Ok(Some(sandbox))
}

/// The sandbox that an answer tells of, or that came though no answer did.
fn adopted(world: &World, reply: &Reply, tag: &str) -> Result<Option<String>, String> {
    let id = match reply {
        Reply::Answered(201, body) => body["sandboxID"].clone(),
        Reply::Answered(..) => Value::Null,
        Reply::Lost(_) => {
            let all = world.records()?;
            let found = all.iter().find(|r| r["terms"]["metadata"]["op"] == tag);
            found.map_or(Value::Null, |r| r["id"].clone())
        }
    };
    Ok(id.as_str().map(str::to_owned))
}

fn refusal(reply: &Reply, stormed: bool) -> Result<(), String> {
    match stormed || reply.is_no_room() {
        true => Ok(()),
        false => Err(format!("create: {}", reply.short())),
    }
}

impl Turn<'_> {
    pub fn fork(&mut self, dice: &mut Dice) -> Result<(), String> {
        let (before, began) = (self.world.weather(), Instant::now());
        let count = 1 + dice.throw(2);
        let body = json!({ "count": count, "timeout": 3600 });
        let reply = self.world.post(self.sandbox, "fork", &body);
        let numbers = self.life.numbers.clone();
        self.forked(began, &reply, &numbers, self.world.stormed_since(before))?;
        let was = self.life.state;
        match reply.is_done() {
            true => Ok(()),
            false => self.judge(before, "fork", &reply, &[was]),
        }
    }

    /// Takes children into the model.
    pub fn forked(
        &mut self,
        began: Instant,
        reply: &Reply,
        numbers: &Numbers,
        stormed: bool,
    ) -> Result<(), String> {
        self.world.count("fork", reply.is_done());
        self.note("fork", reply);
        let mut ids = Vec::new();
        if let Reply::Lost(_) = reply {
            let known: Vec<String> = locked(&self.world.sandboxes)
                .iter()
                .map(|s| s.id.clone())
                .collect();
            let all = self.world.records()?;
            let of_it = all
                .iter()
                .filter(|r| r["forked_from"] == self.sandbox.id.as_str());
            let new = of_it.filter_map(|r| r["id"].as_str());
            ids.extend(
                new.filter(|id| !known.iter().any(|k| k == id))
                    .map(str::to_owned),
            );
        }
        for child in reply.body().as_array().into_iter().flatten() {
            match child["sandbox"]["sandboxID"].as_str() {
                Some(id) => ids.push(id.to_owned()),
                None if stormed || child["error"]["error_code"] == "host_busy" => {}
                None if self.world.excuse(self.sandbox, self.life) => {}
                None => return Err(format!("a child did not come up: {}", child["error"])),
            }
        }
        for id in ids {
            let child = Sandbox::new(&id, self.sandbox.family, numbers.clone(), began);
            let line = format!("forked from {}", self.sandbox.id);
            child.lock().note(self.world, &line);
            self.life.note(self.world, &format!("child {id}"));
            locked(&self.world.sandboxes).push(child);
        }
        Ok(())
    }
}
