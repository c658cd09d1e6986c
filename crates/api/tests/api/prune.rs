//! `POST /prune`: removed data, its owners, and retained data.

use crate::support;

use jiffy_api::{Limits, Scope};
use serde_json::{Value, json};
use support::{Answer, Api, TestCaller};

/// Removes or lists all unused data of a caller, regardless of its age.
async fn prune(api: &Api, caller: &TestCaller, dry_run: bool) -> Answer {
    let body = json!({ "dryRun": dry_run, "unusedSeconds": 0 });
    api.call_as(caller, "POST", "/prune", body)
        .await
        .expect(200)
}

/// Returns the ids of the items of a kind in an answer.
fn of_kind(answer: &Answer, kind: &str) -> Vec<String> {
    let items = answer.body["items"].as_array().unwrap().iter();
    let expected = items.filter(|item| item["kind"] == kind);
    expected
        .map(|i| i["id"].as_str().unwrap().to_owned())
        .collect()
}

/// Creates and kills a sandbox, whose record remains. Returns its id.
async fn ended(api: &Api, caller: &TestCaller) -> String {
    let id = api.sandbox_of(caller).await;
    let path = format!("/sandboxes/{id}");
    api.call_as(caller, "DELETE", &path, Value::Null)
        .await
        .expect(204);
    id
}

#[tokio::test]
async fn a_dry_run_lists_exactly_what_a_prune_removes() {
    let api = Api::new();
    let removed = ended(&api, &TestCaller::Owner).await;
    let retained = api.sandbox_of(&TestCaller::Owner).await;
    // A snapshot is in use as long as a sandbox restored from it exists.
    let reported = prune(&api, &TestCaller::Owner, true).await;
    assert_eq!(
        of_kind(&reported, "sandbox"),
        std::slice::from_ref(&removed)
    );
    assert_eq!(of_kind(&reported, "snapshot"), [""; 0]);
    assert!(
        api.host.find(&removed).is_some(),
        "a dry run removes nothing"
    );
    let done = prune(&api, &TestCaller::Owner, false).await;
    assert_eq!(done.body["items"], reported.body["items"]);
    assert!(api.host.find(&removed).is_none());
    assert!(api.host.find(&retained).is_some());

    let path = format!("/sandboxes/{retained}/snapshots");
    api.post(&path, json!({ "name": "mine" })).await.expect(201);
    let path = format!("/sandboxes/{retained}?forget=true");
    api.delete(&path).await.expect(204);
    // The only remaining snapshot was requested by the user; it descends from the template's
    // snapshot.
    assert_eq!(
        prune(&api, &TestCaller::Owner, false).await.body["items"],
        json!([])
    );
    let own = api.get("/snapshots").await.expect(200).body[0]["snapshotID"].clone();
    api.delete("/templates/mine").await.expect(204);
    // Without this snapshot, the template's snapshot is unused, and is removed unless it is recent.
    assert_ne!(own, Value::Null);
    let reported = prune(&api, &TestCaller::Owner, true).await;
    let [booted] = of_kind(&reported, "snapshot").try_into().unwrap();
    assert!(
        reported.body["bytes"].as_u64().unwrap() > 0,
        "{}",
        reported.body
    );
    let used = json!({ "dryRun": true, "unusedSeconds": 3600 });
    let recent = api
        .call_as(&TestCaller::Owner, "POST", "/prune", used)
        .await;
    assert_eq!(recent.expect(200).body["items"], json!([]));
    prune(&api, &TestCaller::Owner, false).await;
    let remaining = api.host.snapshots().list(None).unwrap();
    assert!(remaining.iter().all(|s| s.id() != booted));
}

#[tokio::test]
async fn a_key_prunes_its_own_data_and_a_read_key_nothing() {
    let api = Api::with_builder().await;
    let (alice, _) = api.key(Scope::Create, Limits::default());
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let hers = ended(&api, &alice).await;
    let reported = prune(&api, &mallory, false).await;
    assert_eq!(reported.body["items"], json!([]));
    let body = json!({ "dryRun": true });
    let refused = api.call_as(&reader, "POST", "/prune", body).await;
    assert_eq!(refused.expect_error(403), "forbidden");
    assert_eq!(
        of_kind(&prune(&api, &alice, true).await, "snapshot"),
        [""; 0]
    );
    assert_eq!(
        of_kind(&prune(&api, &alice, false).await, "sandbox"),
        std::slice::from_ref(&hers)
    );
    assert!(api.host.find(&hers).is_none());
}
