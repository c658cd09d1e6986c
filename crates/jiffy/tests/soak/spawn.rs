//! Creates sandboxes from the template, from snapshots, and as children of other sandboxes.

use super::api::Reply;
use super::guest::SERVER;
use super::model::{Numbers, Sandbox, Snapshot, SoakModel, State, locked};
use super::operations::LockedSandbox;
use super::random::TestRandom;
use crate::support::test_home::TestHome;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

/// Creates a sandbox of the template, whose program stores its own number.
pub fn from_template(
    soak: &SoakModel,
    test_home: &TestHome,
) -> Result<Option<Arc<Sandbox>>, String> {
    let before = soak.kill_count();
    let number = soak.number();
    let tag = format!("c-{number}");
    let body = json!({
        "templateID": "base", "timeout": 3600, "autoPause": true, "metadata": { "op": tag },
        "cpuCount": 1, "memoryMB": soak.memory_mib,
    });
    let began = Instant::now();
    let reply = soak.api.call("POST", "/v2/sandboxes", &body);
    soak.count("create", reply.is_done());
    if !reply.is_done() {
        let killed = soak.killed_since(before);
        if let Some(id) = adopted(soak, &reply, &tag)? {
            let path = format!("/sandboxes/{id}?forget=true");
            soak.api.call("DELETE", &path, &Value::Null);
        }
        return refusal(&reply, killed).map(|()| None);
    }
    let id = reply.body()["sandboxID"].as_str().unwrap_or_default();
    let numbers = Numbers::from([number]);
    let sandbox = Sandbox::new(id, number, numbers, began);
    let mut model = sandbox.lock();
    model.note(soak, "create base -> 201");
    // Killers may select it from here on.
    locked(&soak.sandboxes).push(sandbox.clone());
    let started = test_home.call(&[
        "exec",
        id,
        "--",
        "python3",
        "-c",
        SERVER,
        &number.to_string(),
    ]);
    model.note(soak, &format!("start -> {:?}", started.code));
    if started.code == Some(0) {
        drop(model);
        return Ok(Some(sandbox));
    }
    let reply = Reply::Lost(started.stderr);
    let mut held = LockedSandbox {
        soak,
        sandbox: &sandbox,
        model: &mut model,
    };
    held.check_failure(before, "start of the program", &reply, &[State::Running])?;
    // Without its program, the sandbox cannot be checked: remove it.
    held.remove()?;
    soak.forget(&sandbox);
    Ok(None)
}

/// Creates a sandbox from a snapshot.
pub fn from_snapshot(
    soak: &SoakModel,
    snapshot: &Snapshot,
) -> Result<Option<Arc<Sandbox>>, String> {
    let before = soak.kill_count();
    let tag = format!("c-{}", soak.number());
    let body = json!({
        "templateID": snapshot.id, "timeout": 3600, "autoPause": true, "metadata": { "op": tag },
    });
    let began = Instant::now();
    let reply = soak.api.call("POST", "/v2/sandboxes", &body);
    soak.count("create", reply.is_done());
    let killed = soak.killed_since(before);
    let removed = snapshot.removed.load(SeqCst) && matches!(reply, Reply::Answered(404, _));
    let Some(id) = adopted(soak, &reply, &tag)? else {
        return if removed {
            Ok(None)
        } else {
            refusal(&reply, killed).map(|()| None)
        };
    };
    let sandbox = Sandbox::new(&id, snapshot.family, snapshot.numbers.clone(), began);
    let line = format!("create {} -> {}", snapshot.id, reply.short());
    sandbox.lock().note(soak, &line);
    locked(&soak.sandboxes).push(sandbox.clone());
    Ok(Some(sandbox))
}

/// Returns the sandbox in an answer, or the sandbox that was created although the answer was lost.
/// Its metadata contains `tag`.
fn adopted(soak: &SoakModel, reply: &Reply, tag: &str) -> Result<Option<String>, String> {
    let id = match reply {
        Reply::Answered(201, body) => body["sandboxID"].clone(),
        Reply::Answered(..) => Value::Null,
        Reply::Lost(_) => {
            let all = soak.records()?;
            let found = all.iter().find(|r| r["terms"]["metadata"]["op"] == tag);
            found.map_or(Value::Null, |r| r["id"].clone())
        }
    };
    Ok(id.as_str().map(str::to_owned))
}

/// Accepts a rejected create if a process was killed or the host has insufficient capacity.
fn refusal(reply: &Reply, killed: bool) -> Result<(), String> {
    if killed || reply.is_capacity_exceeded() {
        Ok(())
    } else {
        Err(format!("create: {}", reply.short()))
    }
}

impl LockedSandbox<'_> {
    /// Creates one or two children.
    pub fn fork(&mut self, random: &mut TestRandom) -> Result<(), String> {
        let (before, began) = (self.soak.kill_count(), Instant::now());
        let count = 1 + random.below(2);
        let body = json!({ "count": count, "timeout": 3600 });
        let reply = self.soak.post(self.sandbox, "fork", &body);
        let numbers = self.model.numbers.clone();
        self.forked(began, &reply, &numbers, self.soak.killed_since(before))?;
        let was = self.model.state;
        if reply.is_done() {
            Ok(())
        } else {
            self.check_failure(before, "fork", &reply, &[was])
        }
    }

    /// Adds the children of a fork to the model.
    pub fn forked(
        &mut self,
        began: Instant,
        reply: &Reply,
        numbers: &Numbers,
        killed: bool,
    ) -> Result<(), String> {
        self.soak.count("fork", reply.is_done());
        self.note("fork", reply);
        let mut ids = Vec::new();
        if let Reply::Lost(_) = reply {
            let known: Vec<String> = locked(&self.soak.sandboxes)
                .iter()
                .map(|s| s.id.clone())
                .collect();
            let all = self.soak.records()?;
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
                None if killed || child["error"]["error_code"] == "host_busy" => {}
                None if self.soak.has_known_kill(self.sandbox, self.model) => {}
                None => return Err(format!("a child did not start: {}", child["error"])),
            }
        }
        for id in ids {
            let child = Sandbox::new(&id, self.sandbox.family, numbers.clone(), began);
            let line = format!("forked from {}", self.sandbox.id);
            child.lock().note(self.soak, &line);
            self.model.note(self.soak, &format!("child {id}"));
            locked(&self.soak.sandboxes).push(child);
        }
        Ok(())
    }
}
