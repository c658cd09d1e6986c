//! `POST /prune`: removed data, its owners, and retained data.

use crate::support;

use jiffy_api::{Limits, Scope};
use serde_json::{Value, json};
use support::{Answer, Api, TestCaller};

async fn prune(api: &Api, who: &TestCaller, dry_run: bool) -> Answer {
    let body = json!({ "dryRun": dry_run, "unusedSeconds": 0 });
    api.call_as(who, "POST", "/prune", body).await.expect(200)
}

fn of_kind(answer: &Answer, kind: &str) -> Vec<String> {
    let items = answer.body["items"].as_array().unwrap().iter();
    let wanted = items.filter(|item| item["kind"] == kind);
    wanted
        .map(|i| i["id"].as_str().unwrap().to_owned())
        .collect()
}

async fn ended(api: &Api, who: &TestCaller) -> String {
    let id = api.sandbox_of(who).await;
    let path = format!("/sandboxes/{id}");
    api.call_as(who, "DELETE", &path, Value::Null)
        .await
        .expect(204);
    id
}

#[tokio::test]
async fn a_dry_run_lists_exactly_what_a_prune_removes() {
    let api = Api::new();
    let gone = ended(&api, &TestCaller::Owner).await;
    let kept = api.sandbox_of(&TestCaller::Owner).await;
    // A snapshot is in use as long as a sandbox restored from it exists.
    let told = prune(&api, &TestCaller::Owner, true).await;
    assert_eq!(of_kind(&told, "sandbox"), std::slice::from_ref(&gone));
    assert_eq!(of_kind(&told, "snapshot"), [""; 0]);
    assert!(api.host.find(&gone).is_some(), "a dry run removes nothing");
    let done = prune(&api, &TestCaller::Owner, false).await;
    assert_eq!(done.body["items"], told.body["items"]);
    assert!(api.host.find(&gone).is_none());
    assert!(api.host.find(&kept).is_some());

    let path = format!("/sandboxes/{kept}/snapshots");
    api.post(&path, json!({ "name": "mine" })).await.expect(201);
    let path = format!("/sandboxes/{kept}?forget=true");
    api.delete(&path).await.expect(204);
    // The only remaining snapshot was requested by the user; it descends from the template's
    // snapshot.
    assert_eq!(
        prune(&api, &TestCaller::Owner, false).await.body["items"],
        json!([])
    );
    let mine = api.get("/snapshots").await.expect(200).body[0]["snapshotID"].clone();
    api.delete("/templates/mine").await.expect(204);
    assert_ne!(mine, Value::Null);
    let told = prune(&api, &TestCaller::Owner, true).await;
    let [booted] = of_kind(&told, "snapshot").try_into().unwrap();
    assert!(told.body["bytes"].as_u64().unwrap() > 0, "{}", told.body);
    let used = json!({ "dryRun": true, "unusedSeconds": 3600 });
    let recent = api
        .call_as(&TestCaller::Owner, "POST", "/prune", used)
        .await;
    assert_eq!(recent.expect(200).body["items"], json!([]));
    prune(&api, &TestCaller::Owner, false).await;
    let left = api.host.snapshots().list(None).unwrap();
    assert!(left.iter().all(|s| s.id() != booted));
}

#[tokio::test]
async fn a_key_prunes_its_own_data_and_a_read_key_nothing() {
    let api = Api::building().await;
    let (alice, _) = api.key(Scope::Create, Limits::default());
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let hers = ended(&api, &alice).await;
    let told = prune(&api, &mallory, false).await;
    assert_eq!(told.body["items"], json!([]));
    let body = json!({ "dryRun": true });
    let refused = api.call_as(&reader, "POST", "/prune", body).await;
    assert_eq!(refused.refused(403), "forbidden");
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
