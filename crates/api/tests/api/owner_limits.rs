//! Operations on a sandbox count for its owner, not for the caller.

use crate::support::{Api, TestCaller};
use jiffy_api::{Limits, Scope};
use serde_json::{Value, json};

fn at_most(sandboxes: u32) -> Limits {
    Limits {
        max_sandboxes: Some(sandboxes),
        ..Limits::default()
    }
}

#[tokio::test]
async fn a_call_of_another_key_counts_for_the_owner_of_the_sandbox() {
    let api = Api::new();
    let (owner, _) = api.key(Scope::Create, at_most(1));
    // A key without any quota of its own.
    let (admin, _) = api.key(Scope::Admin, at_most(0));
    let create = async || {
        let body = json!({ "templateID": "base" });
        let made = api.call_as(&owner, "POST", "/sandboxes", body).await;
        made.expect(201).id()
    };
    let first = create().await;
    let path = |id: &str, call: &str| format!("/sandboxes/{id}{call}");
    let taken = api
        .call_as(&owner, "POST", &path(&first, "/snapshots"), json!({}))
        .await;
    let snapshot = taken.expect(201).text("snapshotID");
    api.call_as(&owner, "POST", &path(&first, "/pause"), json!({}))
        .await
        .expect(204);
    let second = create().await;
    let rollback = json!({ "snapshotID": snapshot });
    for caller in [&admin, &TestCaller::Owner, &owner] {
        for (id, call, body) in [
            (&first, "/resume", json!({})),
            (&first, "/connect", json!({ "timeout": 60 })),
            (&first, "/rollback", rollback.clone()),
            (&second, "/fork", json!({})),
        ] {
            let denied = api.call_as(caller, "POST", &path(id, call), body).await;
            assert_eq!(denied.expect_error(429), "max_sandboxes", "{call}");
        }
    }
    api.call_as(&owner, "DELETE", &path(&second, ""), Value::Null)
        .await
        .expect(204);
    // The caller's own limit does not apply.
    api.call_as(&admin, "POST", &path(&first, "/resume"), json!({}))
        .await
        .expect(201);
}
