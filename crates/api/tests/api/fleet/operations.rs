//! Operators' commands, through every member. A *front* is a machine without sandboxes that passes
//! requests of clients to the hosts.
//!
//! The *lineage* of a sandbox or snapshot consists of the snapshots and sandboxes that are
//! connected with it.

use super::lab::Lab;
use crate::support::TestCaller;
use jiffy_api::Scope;
use serde_json::{Value, json};
use std::time::Duration;

/// Returns the answer to a command on a host.
async fn operate(lab: &Lab, through: u32, host: &str, action: &str) -> crate::support::Answer {
    let path = format!("/fleet/nodes/{host}/{action}");
    lab.call(through, &lab.admin(), "POST", &path, Value::Null)
        .await
}

/// Takes a snapshot through a member, and returns its id.
async fn snapshot(lab: &Lab, through: u32, key: &TestCaller, id: &str) -> String {
    let path = format!("/sandboxes/{id}/snapshots");
    let taken = lab.call(through, key, "POST", &path, json!({})).await;
    taken.expect(201).text("snapshotID")
}

/// Waits until the first member shows a host in a state.
async fn until_state(lab: &Lab, host: u32, state: &str) {
    let shown = async {
        loop {
            let path = "/fleet/nodes";
            let nodes = lab.call(1, &lab.admin(), "GET", path, Value::Null).await;
            let nodes = nodes.expect(200).body["nodes"].clone();
            let id = format!("h{host}");
            let mut nodes = nodes.as_array().unwrap().iter();
            if nodes.any(|node| node["id"] == id && node["state"] == state) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let shown = tokio::time::timeout(Duration::from_secs(10), shown).await;
    shown.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_on_hosts_work_through_every_member_and_reject_wrong_states() {
    let lab = Lab::start(3).await;
    for through in [1, 3] {
        let drained = operate(&lab, through, "h2", "drain").await.expect(200);
        assert_eq!(drained.text("state"), "draining");
        until_state(&lab, 2, "draining").await;
        // A repeated command is rejected.
        let twice = operate(&lab, through, "h2", "drain").await;
        assert!(
            twice.text("message").contains("undrain h2"),
            "{}",
            twice.body
        );
        assert_eq!(twice.expect_error(409), "refused");
        operate(&lab, through, "h2", "undrain").await.expect(200);
        let twice = operate(&lab, through, "h2", "undrain").await;
        assert!(
            twice.text("message").contains("not draining"),
            "{}",
            twice.body
        );
        assert_eq!(twice.expect_error(409), "refused");
    }
    // A host cannot drain itself, and the last host that accepts sandboxes cannot be drained.
    let own = operate(&lab, 2, "h2", "drain").await;
    assert!(
        own.text("message").contains("on another host"),
        "{}",
        own.body
    );
    assert_eq!(own.expect_error(409), "refused");
    operate(&lab, 1, "h2", "drain").await.expect(200);
    operate(&lab, 1, "h3", "drain").await.expect(200);
    let last = operate(&lab, 2, "h1", "drain").await;
    assert!(last.text("message").contains("last host"), "{}", last.body);
    assert_eq!(last.expect_error(409), "refused");
    until_state(&lab, 1, "up").await;
    // A front (`f` and digits) is removed by an entry in the record of removed fronts, because the
    // fleet has no list of fronts. So any number can be removed, once.
    let removed = operate(&lab, 2, "f7", "remove").await.expect(200);
    assert_eq!(removed.text("state"), "left");
    let twice = operate(&lab, 3, "f7", "remove").await;
    let message = twice.text("message").to_owned();
    assert!(message.contains("f7 was removed"), "{message}");
    assert_eq!(twice.expect_error(409), "refused");
    // Hosts that send heartbeats cannot be removed.
    for action in ["remove", "confirm-dead"] {
        let living = operate(&lab, 1, "h2", action).await;
        let message = living.text("message").to_owned();
        assert!(message.contains("h2 sent a heartbeat"), "{message}");
        assert_eq!(living.expect_error(409), "refused");
    }
    until_state(&lab, 2, "draining").await;
    for (host, status, code) in [
        ("h9", 404, "not_found"),
        ("x", 400, "invalid_request"),
        ("h0", 404, "not_found"),
        ("h99999999999", 400, "invalid_request"),
    ] {
        for action in ["drain", "undrain", "remove", "confirm-dead"] {
            let answer = operate(&lab, 1, host, action).await;
            assert_eq!(answer.expect_error(status), code, "{host} {action}");
        }
    }
    // The records are not older than the hosts have read before, so there is nothing to accept.
    let path = "/fleet/accept-restore";
    let accepted = lab.call(3, &lab.admin(), "POST", path, Value::Null).await;
    assert_eq!(accepted.expect_error(409), "refused");
    // Only administrators may send commands.
    for scope in [Scope::Create, Scope::Read] {
        let (key, _) = lab.key(scope);
        for path in [
            "/fleet/accept-restore",
            "/fleet/nodes/h2/drain",
            "/fleet/nodes/h9/remove",
        ] {
            let denied = lab.call(1, &key, "POST", path, json!({})).await;
            assert_eq!(denied.expect_error(403), "forbidden");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_host_is_removed_with_the_time_of_its_loss() {
    let lab = Lab::start(3).await;
    let lost = (1..=3)
        .rev()
        .find(|&host| !lab.is_coordinator(host))
        .unwrap();
    let through = (1..=3).find(|&host| host != lost).unwrap();
    lab.stop(lost).await;
    let host = format!("h{lost}");
    for action in ["drain", "undrain", "confirm-dead"] {
        let answer = operate(&lab, through, &host, action).await;
        assert!(
            answer.text("message").contains("is dead"),
            "{}",
            answer.body
        );
        assert_eq!(answer.expect_error(409), "refused");
    }
    let removed = operate(&lab, through, &host, "remove").await.expect(200);
    assert_eq!(removed.text("state"), "left");
    for action in ["remove", "drain", "confirm-dead"] {
        let answer = operate(&lab, through, &host, action).await;
        let message = answer.text("message").to_owned();
        assert!(message.contains("was removed"), "{message}");
        assert_eq!(answer.expect_error(409), "refused");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_host_gives_up_its_sandboxes_which_resume_on_other_hosts() {
    let lab = Lab::with_store(3).await;
    let (key, _) = lab.key(Scope::Create);
    let drained = (1..=3).find(|&host| !lab.is_coordinator(host)).unwrap();
    let others: Vec<u32> = (1..=3).filter(|&host| host != drained).collect();
    let (mut ids, mut snapshots) = (Vec::new(), Vec::new());
    // The first two sandboxes are paused, the other two keep running. The first one also has a
    // snapshot.
    for n in 0..4 {
        let body = json!({ "templateID": "base", "name": format!("s{n}") });
        let made = lab.call(drained, &key, "POST", "/sandboxes", body).await;
        ids.push(made.expect(201).id());
        lab.located(&ids[n]).await;
        if n == 0 {
            snapshots.push(snapshot(&lab, drained, &key, &ids[n]).await);
        }
        if n < 2 {
            lab.pause_durably(drained, &ids[n]).await;
        }
    }
    let path = format!("/fleet/nodes/h{drained}/drain");
    let drain = async |body: Value| {
        let answer = lab.call(others[0], &lab.admin(), "POST", &path, body).await;
        answer.expect(200)
    };
    let first = drain(Value::Null).await;
    assert_eq!(first.text("state"), "draining", "{}", first.body);
    assert_eq!(first.body["running"], 2, "{}", first.body);
    // Running sandboxes run to their end without `force`.
    let running = format!("/sandboxes/{}", ids[2]);
    for &host in &others {
        let shown = lab.call(host, &key, "GET", &running, Value::Null).await;
        assert_eq!(shown.expect(200).text("state"), "running");
    }
    let start = std::time::Instant::now();
    let forced = drain(json!({ "force": true })).await;
    assert_eq!(forced.body["running"], 0, "{}", forced.body);
    assert_eq!(forced.body["unstored"], 0, "{}", forced.body);
    // A drain with `force` pauses the running sandboxes, and does not wait for their end.
    assert!(start.elapsed().as_secs() < 30);
    for host in 1..=3 {
        for id in &ids {
            let path = format!("/sandboxes/{id}");
            let shown = lab.call(host, &key, "GET", &path, Value::Null).await;
            assert_eq!(shown.expect(200).text("state"), "paused");
        }
    }
    // Resumes through each host, also through the drained one. No sandbox is resumed on the drained
    // host.
    for (n, host) in [others[0], others[1], drained, drained]
        .into_iter()
        .enumerate()
    {
        let path = format!("/sandboxes/{}/connect", ids[n]);
        let resumed = lab
            .call(host, &key, "POST", &path, json!({ "timeout": 60 }))
            .await;
        resumed.expect(200);
        let path = format!("/sandboxes/{}", ids[n]);
        let moved = lab.forwarded(drained, &key, &path).await;
        assert_eq!(moved.expect_error(421), "sandbox_moved");
        let shown = lab.call(others[1], &key, "GET", &path, Value::Null).await;
        assert_eq!(shown.expect(200).text("state"), "running");
    }
    let all = lab
        .call(others[0], &key, "GET", "/v2/sandboxes", Value::Null)
        .await;
    assert_eq!(all.expect(200).ids().len(), 4);
    // The lineage of a sandbox that has moved contains snapshots of both hosts.
    snapshots.push(snapshot(&lab, others[0], &key, &ids[0]).await);
    let (other, _) = lab.key(Scope::Create);
    let path = format!("/lineage?sandboxID={}", ids[0]);
    for host in 1..=3 {
        let lineage = lab.call(host, &key, "GET", &path, Value::Null).await;
        let lineage = lineage.expect(200).body;
        let nodes = lineage["nodes"].as_array().unwrap();
        let states_of = |id: &String| {
            let of_id = nodes.iter().filter(|node| node["id"] == **id);
            of_id.map(|node| node["state"].clone()).collect::<Vec<_>>()
        };
        assert_eq!(states_of(&ids[0]), ["running"], "{lineage}");
        for id in &snapshots {
            assert_eq!(states_of(id), ["ready"], "{host}: {lineage}");
        }
        let hidden = lab.call(host, &other, "GET", &path, Value::Null).await;
        assert_eq!(hidden.expect_error(404), "sandbox_not_found");
    }
}
