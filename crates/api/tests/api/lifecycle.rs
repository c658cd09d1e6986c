//! Pause, resume, timeouts and removal.

use crate::support;

use jiffy_sandbox_manager::{OnTimeout, SandboxState};
use serde_json::{Value, json};
use support::{Api, TestCaller, fake::until};

fn path(id: &str, call: &str) -> String {
    format!("/sandboxes/{id}/{call}")
}

#[tokio::test]
async fn a_killed_sandbox_does_not_exist() {
    let api = Api::new();
    let id = api.sandbox().await;
    api.delete(&format!("/sandboxes/{id}")).await.expect(204);
    let again = api.delete(&format!("/sandboxes/{id}")).await;
    assert_eq!(again.expect_error(404), "sandbox_not_found");
    api.get(&format!("/sandboxes/{id}")).await.expect(404);
    for call in [
        "pause",
        "resume",
        "connect",
        "fork",
        "promote",
        "snapshots",
        "refreshes",
    ] {
        api.post(&path(&id, call), json!({})).await.expect(404);
    }
    // The host's owner can read the record until it is forgotten.
    assert_eq!(*api.host.get(&id).unwrap().state(), SandboxState::Killed);
    let forget = format!("/sandboxes/{id}?forget=true");
    api.call_as(&TestCaller::Owner, "DELETE", &forget, Value::Null)
        .await
        .expect(204);
    assert!(api.host.get(&id).is_err());
    api.delete("/sandboxes/x?forget=maybe").await.expect(400);
}

#[tokio::test]
async fn a_sandbox_pauses_and_resumes_under_the_same_id() {
    let api = Api::new();
    let id = api.sandbox().await;
    api.bench.world.write(&id, "kept");
    api.post(&path(&id, "pause"), Value::Null).await.expect(204);
    let detail = api.get(&format!("/sandboxes/{id}")).await.expect(200);
    assert_eq!(
        (detail.text("state"), detail.text("pauseMode")),
        ("paused".into(), "full".into())
    );
    let again = api.post(&path(&id, "pause"), json!({})).await;
    assert_eq!(again.expect_error(409), "already_paused");
    let woken = api
        .post(&format!("/v2/sandboxes/{id}/connect"), json!({}))
        .await
        .expect(201);
    assert_eq!(woken.id(), id);
    assert_eq!(api.bench.world.read(&id), "kept");
    api.post(&path(&id, "connect"), json!({ "timeout": 5 }))
        .await
        .expect(200);
    // Older clients use `resume`, which fails for a running sandbox, instead of `connect`.
    assert_eq!(
        api.post(&path(&id, "resume"), json!({}))
            .await
            .expect_error(409),
        "already_running"
    );
    api.post(&path(&id, "pause"), json!({ "memory": true }))
        .await
        .expect(204);
    let body = json!({ "timeout": 77, "autoPause": true });
    api.post(&path(&id, "resume"), body).await.expect(201);
    let settings = api.host.get(&id).unwrap().settings().clone();
    assert_eq!(
        (settings.timeout_s, settings.on_timeout),
        (Some(77), OnTimeout::Pause)
    );
}

#[tokio::test]
async fn a_pause_without_memory_is_rejected_if_the_engine_cannot_omit_it() {
    let api = Api::new();
    let id = api.sandbox().await;
    for call in ["pause", "connect", "resume", "snapshots"] {
        let refused = api.post(&path(&id, call), json!({ "memory": false })).await;
        assert_eq!(refused.expect_error(400), "unsupported_option", "{call}");
    }
    assert_eq!(*api.host.get(&id).unwrap().state(), SandboxState::Running);
}

#[tokio::test]
async fn an_unhealthy_guest_is_not_paused_where_health_is_required() {
    let api = Api::new();
    // The agent of the guest does not answer.
    let id = api.sandbox().await;
    api.bench.world.fail("answer");
    let body = json!({ "requireHealthyGuest": true });
    let refused = api.post(&path(&id, "pause"), body.clone()).await;
    assert_eq!(
        refused.expect_error(503),
        "sandbox_snapshot_guest_agent_unresponsive"
    );
    assert_eq!(*api.host.get(&id).unwrap().state(), SandboxState::Running);
    api.bench.world.clear_failures();
    api.post(&path(&id, "pause"), body).await.expect(204);
}

#[tokio::test]
async fn a_failed_pause_is_503_and_the_sandbox_continues_to_run() {
    let api = Api::new();
    let id = api.sandbox().await;
    api.bench.world.fail("snapshot");
    assert_eq!(
        api.post(&path(&id, "pause"), Value::Null)
            .await
            .expect_error(503),
        "pause_failed"
    );
    assert_eq!(*api.host.get(&id).unwrap().state(), SandboxState::Running);
}

#[tokio::test]
async fn a_timeout_counts_from_now_and_a_connect_never_shortens_it() {
    let api = Api::new();
    let id = api.sandbox().await;
    let deadline = || api.host.get(&id).unwrap().deadline_ms();
    let first = deadline().unwrap();
    api.post(&path(&id, "timeout"), json!({ "timeout": 3600 }))
        .await
        .expect(204);
    let long = deadline().unwrap();
    assert!(long > first + 3_000_000);
    for body in [json!({ "timeout": 1 }), json!({}), Value::Null] {
        api.post(&path(&id, "connect"), body).await.expect(200);
        assert!(deadline().unwrap() >= long);
    }
    api.post(&path(&id, "refreshes"), json!({ "duration": 1 }))
        .await
        .expect(204);
    assert!(deadline().unwrap() >= long);
    api.post(&path(&id, "timeout"), json!({ "timeout": 60 }))
        .await
        .expect(204);
    let short = deadline().unwrap();
    assert!(short < long);
    api.post(&path(&id, "refreshes"), json!({ "duration": 600 }))
        .await
        .expect(204);
    assert!(deadline().unwrap() > short);
    api.post(&path(&id, "connect"), json!({ "timeout": -1 }))
        .await
        .expect(200);
    assert_eq!(deadline(), None);
    // An unlimited timeout is retained.
    api.post(&path(&id, "connect"), json!({ "timeout": 9 }))
        .await
        .expect(200);
    assert_eq!(deadline(), None);
    for bad in [
        json!({}),
        json!({ "timeout": -2 }),
        json!({ "timeout": 1.5 }),
        json!({ "timeout": u64::MAX }),
    ] {
        api.post(&path(&id, "timeout"), bad).await.expect(400);
    }
    api.post(&path(&id, "refreshes"), json!({ "duration": 3601 }))
        .await
        .expect(400);
}

#[tokio::test]
async fn a_sandbox_past_its_timeout_does_not_exist() {
    let api = Api::new();
    let id = api.sandbox().await;
    api.post(&path(&id, "timeout"), json!({ "timeout": 0 }))
        .await
        .expect(204);
    support::fake::until("its end", || {
        api.host
            .get(&id)
            .is_ok_and(|r| *r.state() == SandboxState::Killed)
    })
    .await;
    api.get(&format!("/sandboxes/{id}")).await.expect(404);
}

#[tokio::test]
async fn a_broken_sandbox_is_hidden_until_it_is_repaired() {
    let api = Api::new();
    let id = api.sandbox().await;
    let taken = api
        .post(&path(&id, "snapshots"), Value::Null)
        .await
        .expect(201);
    api.bench.world.panic_guest(&id);
    support::fake::until("its end", || {
        matches!(
            api.host.get(&id).unwrap().state(),
            SandboxState::Broken { .. }
        )
    })
    .await;
    assert_eq!(
        api.get(&format!("/sandboxes/{id}")).await.expect_error(404),
        "sandbox_broken"
    );
    assert!(api.get("/v2/sandboxes").await.ids().is_empty());
    let broken = api.get("/v2/sandboxes?state=broken").await.expect(200);
    assert_eq!(
        (broken.ids(), &broken.body[0]["state"]),
        (vec![id.clone()], &json!("broken"))
    );
    let body = json!({ "snapshotID": taken.text("snapshotID") });
    api.post(&path(&id, "rollback"), body).await.expect(200);
    api.get(&format!("/sandboxes/{id}")).await.expect(200);
    // A broken sandbox can also be removed without a repair.
    api.bench.world.panic_guest(&id);
    support::fake::until("its end", || {
        matches!(
            api.host.get(&id).unwrap().state(),
            SandboxState::Broken { .. }
        )
    })
    .await;
    api.delete(&format!("/sandboxes/{id}")).await.expect(204);
}

#[tokio::test]
async fn a_sandbox_broken_by_missing_memory_is_resumed_by_its_key() {
    let api = Api::new();
    let id = api.sandbox().await;
    api.post(&path(&id, "snapshots"), Value::Null)
        .await
        .expect(201);
    for (call, status) in [("resume", 201), ("connect", 200)] {
        api.bench.world.starve_guest(&id);
        support::fake::until("its end", || {
            let state = api.host.get(&id).unwrap().state().clone();
            state.is_broken_and_resumable()
        })
        .await;
        let hidden = api.get(&format!("/sandboxes/{id}")).await;
        assert!(hidden.text("message").contains("resume it"));
        assert_eq!(hidden.expect_error(404), "sandbox_broken");
        api.post(&path(&id, call), Value::Null).await.expect(status);
        api.get(&format!("/sandboxes/{id}")).await.expect(200);
    }
}

#[tokio::test]
async fn a_fork_answers_an_entry_for_each_child() {
    let api = Api::new();
    let parent = api.sandbox().await;
    api.bench.world.write(&parent, "inherited");
    let forked = api
        .post(&path(&parent, "fork"), json!({ "count": 3 }))
        .await
        .expect(201);
    let children: Vec<&Value> = forked.items().iter().map(|e| &e["sandbox"]).collect();
    assert_eq!(children.len(), 3);
    let tokens: std::collections::BTreeSet<&str> = children
        .iter()
        .map(|c| c["envdAccessToken"].as_str().unwrap())
        .collect();
    assert_eq!(tokens.len(), 3, "tokens of their own");
    for child in &children {
        assert_eq!(
            (&child["forkedFrom"], &child["bootMode"]),
            (&json!(parent), &json!("fork"))
        );
        assert_eq!(
            api.bench.world.read(child["sandboxID"].as_str().unwrap()),
            "inherited"
        );
    }
    assert_eq!(forked.body[0]["snapshotID"], forked.body[2]["snapshotID"]);
    // The default is one child, and children may have a different timeout.
    let one = api
        .post(&path(&parent, "fork"), json!({ "timeout": -1 }))
        .await
        .expect(201);
    let id = one.body[0]["sandbox"]["sandboxID"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(
        (one.items().len(), api.host.get(&id).unwrap().deadline_ms()),
        (1, None)
    );
    api.bench.world.fail("restore");
    let failed = api
        .post(&path(&parent, "fork"), json!({ "count": 2 }))
        .await
        .expect(201);
    let errors = failed.items().iter().filter(|e| e["error"]["code"] == 500);
    assert_eq!(errors.count(), 2);
    for bad in [0, 101] {
        api.post(&path(&parent, "fork"), json!({ "count": bad }))
            .await
            .expect(400);
    }
}

#[tokio::test]
async fn promoting_a_child_removes_its_siblings() {
    let api = Api::new();
    let parent = api.sandbox().await;
    let forked = api
        .post(&path(&parent, "fork"), json!({ "count": 3 }))
        .await
        .expect(201);
    let ids: Vec<String> = forked
        .items()
        .iter()
        .map(|e| e["sandbox"]["sandboxID"].as_str().unwrap().to_owned())
        .collect();
    let promoted = api
        .post(&path(&ids[1], "promote"), Value::Null)
        .await
        .expect(200);
    assert_eq!(promoted.body["removed"].as_array().unwrap().len(), 2);
    let mut remaining = api.get("/v2/sandboxes").await.ids();
    remaining.sort();
    let mut expected = vec![parent, ids[1].clone()];
    expected.sort();
    assert_eq!(remaining, expected);
}

#[tokio::test]
async fn connect_and_resume_restore_a_sandbox_past_its_timeout() {
    let api = Api::new();
    let body = json!({ "templateID": "base", "timeout": 3600, "autoPause": true });
    let id = api.post("/sandboxes", body).await.expect(201).id();
    let state = || api.host.get(&id).unwrap().state().clone();
    for body in [json!({ "timeout": 300 }), json!({}), Value::Null] {
        for call in ["connect", "resume"] {
            api.post(&path(&id, "timeout"), json!({ "timeout": 0 }))
                .await
                .expect(204);
            until("its sleep", || state() == SandboxState::Paused).await;
            let (call, status) = match call {
                "connect" => (format!("/v2/sandboxes/{id}/connect"), 201),
                _ => (path(&id, call), 201),
            };
            api.post(&call, body.clone()).await.expect(status);
            // Let the other tasks run. If the old deadline were still in force, it would have
            // expired, and its task would pause the sandbox in these turns without waiting for the
            // clock.
            for _ in 0..400 {
                tokio::task::yield_now().await;
            }
            assert_eq!(state(), SandboxState::Running, "{call} {body}");
        }
    }
    // A sandbox with a timeout of zero gets the default timeout.
    let body = json!({ "templateID": "base", "timeout": 0, "autoPause": true });
    let id = api.post("/sandboxes", body).await.expect(201).id();
    let state = || api.host.get(&id).unwrap().state().clone();
    until("its sleep", || state() == SandboxState::Paused).await;
    // CubeSandbox's clients accept only 200 here.
    api.post(&path(&id, "connect"), json!({})).await.expect(200);
    for _ in 0..400 {
        tokio::task::yield_now().await;
    }
    assert_eq!(state(), SandboxState::Running);
}

#[tokio::test]
async fn a_child_without_a_timeout_outlives_its_parents_timeout() {
    let api = Api::new();
    let body = json!({ "templateID": "base", "timeout": 3600, "autoPause": true });
    let id = api.post("/sandboxes", body).await.expect(201).id();
    let change =
        |settings: &mut jiffy_sandbox_manager::SandboxSettings| settings.timeout_s = Some(0);
    api.host.change_settings(&id, change).await.unwrap();
    for _ in 0..10 {
        let forked = api.post(&path(&id, "fork"), json!({ "timeout": -1 })).await;
        let child = forked.expect(201).body[0]["sandbox"]["sandboxID"].clone();
        let child = api.host.get(child.as_str().unwrap()).unwrap();
        assert_eq!(
            (child.deadline_ms(), child.state()),
            (None, &SandboxState::Running)
        );
    }
}

#[tokio::test]
async fn an_operation_on_a_concurrently_deleted_sandbox_reports_not_found() {
    let api = Api::new();
    for call in ["pause", "snapshots", "fork"] {
        let id = api.sandbox().await;
        let world = &api.bench.world;
        world.hold("snapshot");
        let path = format!("/sandboxes/{id}/{call}");
        let losing = api.post(&path, Value::Null);
        let deleting = async {
            while !world.is_stuck("snapshot") {
                tokio::task::yield_now().await;
            }
            let whole = format!("/sandboxes/{id}");
            let deleted = api.delete(&whole);
            let failing = async {
                while world.running().contains(&id) {
                    tokio::task::yield_now().await;
                }
                // The error of an engine whose guest has exited: "control socket was closed".
                world.fail("snapshot");
                world.release("snapshot");
            };
            tokio::join!(deleted, failing).0
        };
        let (lost, deleted) = tokio::join!(losing, deleting);
        assert_eq!(lost.expect_error(404), "sandbox_not_found", "{call}");
        deleted.expect(204);
        world.clear_failures();
        world.forget_stuck();
    }
}
