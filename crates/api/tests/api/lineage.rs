//! Lineages: `GET /lineage`.
//!
//! The *lineage* of a sandbox or snapshot consists of the snapshots and sandboxes that are
//! connected with it: ancestors, descendants, and sandboxes created from them.

use crate::support;

use jiffy_api::{Limits, Scope};
use serde_json::{Value, json};
use support::{Answer, Api, TestCaller};

/// Sends `call` for a sandbox, and returns the response.
async fn operate(api: &Api, caller: &TestCaller, id: &str, call: &str, body: Value) -> Answer {
    let path = format!("/sandboxes/{id}/{call}");
    api.call_as(caller, "POST", &path, body).await
}

/// Takes a snapshot with this name, and returns its id.
async fn snapshot(api: &Api, caller: &TestCaller, id: &str, name: &str) -> String {
    let taken = operate(api, caller, id, "snapshots", json!({ "name": name })).await;
    taken.expect(201).text("snapshotID")
}

/// Creates a child. Returns the ids of the snapshot of the fork and of the child.
async fn fork(api: &Api, caller: &TestCaller, id: &str) -> (String, String) {
    let forked = operate(api, caller, id, "fork", json!({ "count": 1 })).await;
    let forked = forked.expect(201);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let child = &forked.body[0];
    (
        text(&child["snapshotID"]),
        text(&child["sandbox"]["sandboxID"]),
    )
}

async fn lineage(api: &Api, caller: &TestCaller, query: &str) -> Value {
    let path = format!("/lineage?{query}");
    let answer = api.call_as(caller, "GET", &path, Value::Null).await;
    answer.expect(200).body
}

fn ids(lineage: &Value) -> Vec<&str> {
    let nodes = lineage["nodes"].as_array().unwrap().iter();
    nodes.map(|node| node["id"].as_str().unwrap()).collect()
}

fn node<'a>(lineage: &'a Value, id: &str) -> &'a Value {
    let mut nodes = lineage["nodes"].as_array().unwrap().iter();
    nodes
        .find(|node| node["id"] == id)
        .unwrap_or_else(|| panic!("no {id} in {lineage}"))
}

/// Returns whether the lineage has an edge.
fn has_edge(lineage: &Value, from: &str, relation: &str, to: &str) -> bool {
    let mut edges = lineage["edges"].as_array().unwrap().iter();
    edges.any(|e| e["from"] == from && e["to"] == to && e["relation"] == relation)
}

#[tokio::test]
async fn a_lineage_has_ancestors_forks_snapshots_and_rollbacks_of_each_member() {
    let api = Api::new();
    let (alice, _) = api.key(Scope::Create, Limits::default());
    let agent = api.sandbox_of(&alice).await;
    let first = snapshot(&api, &alice, &agent, "first").await;
    let second = snapshot(&api, &alice, &agent, "second").await;
    let target = json!({ "snapshotID": first });
    operate(&api, &alice, &agent, "rollback", target)
        .await
        .expect(200);
    let (forked, child) = fork(&api, &alice, &agent).await;
    let body = json!({ "templateID": second });
    let created = api.call_as(&alice, "POST", "/v2/sandboxes", body).await;
    let created = created.expect(201).id();
    // A sandbox of the same key that is not connected.
    api.sandbox_of(&alice).await;
    let mut all = vec![&*agent, &first, &second, &forked, &child, &created];
    all.sort_unstable();
    for query in [
        format!("sandboxID={agent}"),
        format!("sandboxID={child}"),
        format!("sandbox_id={created}"),
        format!("snapshotID={second}"),
        "snapshotID=first".to_owned(),
    ] {
        let found = lineage(&api, &alice, &query).await;
        let mut found_ids = ids(&found);
        found_ids.sort_unstable();
        assert_eq!(found_ids, all, "{query}");
        assert_eq!(found["truncated"], false);
        for (from, relation, to) in [
            (&first, "snapshot_of", &agent),
            (&second, "snapshot_of", &agent),
            (&forked, "snapshot_of", &agent),
            (&agent, "rolled_back_to", &first),
            (&child, "started_from", &forked),
            (&created, "started_from", &second),
        ] {
            assert!(has_edge(&found, from, relation, to), "{relation} {found}");
        }
        assert_eq!(found["edges"].as_array().unwrap().len(), 6);
        let agent = node(&found, &agent);
        assert_eq!(
            (&agent["kind"], &agent["state"]),
            (&json!("sandbox"), &json!("running"))
        );
        let second = node(&found, &second);
        assert_eq!(
            (&second["kind"], &second["state"]),
            (&json!("snapshot"), &json!("ready"))
        );
        assert_eq!(second["parentSnapshotID"], json!(first));
        assert_eq!(second["name"], "second");
        // The rollback has changed the parent of the fork.
        assert_eq!(node(&found, &forked)["parentSnapshotID"], json!(first));
        assert_eq!(node(&found, &forked)["purpose"], "fork");
    }
}

#[tokio::test]
async fn rollbacks_and_origins_survive_a_restart_of_the_daemon() {
    let api = Api::new();
    let agent = api.sandbox().await;
    let first = snapshot(&api, &api.admin, &agent, "first").await;
    let target = json!({ "snapshotID": first });
    operate(&api, &api.admin, &agent, "rollback", target)
        .await
        .expect(200);
    let (forked, child) = fork(&api, &api.admin, &agent).await;
    // After this snapshot of the child, the parent of the child's state is the new snapshot. The
    // snapshot from which the child was created must therefore be recorded separately.
    snapshot(&api, &api.admin, &child, "own").await;
    let before = lineage(&api, &api.admin, &format!("sandboxID={agent}")).await;
    assert!(has_edge(&before, &child, "started_from", &forked));
    let host = api.bench.open().await;
    let start = jiffy_sandbox_manager::LineageObject::Sandbox(agent.clone());
    let after = host.lineage(start, &jiffy_sandbox_manager::UnfoldedSeries::None, |_| {
        true
    });
    assert_eq!(after.nodes.len(), before["nodes"].as_array().unwrap().len());
    assert_eq!(after.edges.len(), before["edges"].as_array().unwrap().len());
}

#[tokio::test]
async fn objects_of_another_key_neither_appear_nor_connect_others() {
    let api = Api::new();
    let (alice, _) = api.key(Scope::Create, Limits::default());
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let agent = api.sandbox_of(&alice).await;
    let taken = snapshot(&api, &alice, &agent, "taken").await;
    // The administrator uses the snapshot of the key.
    let body = json!({ "templateID": taken });
    let foreign = api.post("/v2/sandboxes", body).await.expect(201).id();
    snapshot(&api, &api.admin, &foreign, "foreign").await;
    let query = format!("sandboxID={agent}");
    let own = lineage(&api, &alice, &query).await;
    assert_eq!(ids(&own).len(), 2, "{own}");
    assert!(!own.to_string().contains(&foreign));
    let all = lineage(&api, &api.admin, &query).await;
    assert_eq!(ids(&all).len(), 4, "{all}");
    for query in [query, format!("snapshotID={taken}")] {
        let path = format!("/lineage?{query}");
        let refused = api.call_as(&mallory, "GET", &path, Value::Null).await;
        refused.expect(404);
    }
    // A read-only caller receives only prefixes of the ids of sandboxes.
    let shown = lineage(&api, &reader, &format!("snapshotID={taken}")).await;
    assert_eq!(ids(&shown).len(), 4, "{shown}");
    for id in [&agent, &foreign] {
        assert!(!shown.to_string().contains(id.as_str()), "{shown}");
        assert!(ids(&shown).contains(&&id[..10]), "{shown}");
    }
    assert!(has_edge(&shown, &taken, "snapshot_of", &agent[..10]));
    for query in ["", "sandboxID=a&snapshotID=b"] {
        api.get(&format!("/lineage?{query}")).await.expect(400);
    }
}

#[tokio::test]
async fn pruned_ancestors_remain_as_one_removed_node() {
    let api = Api::new();
    let agent = api.sandbox().await;
    let admin = &api.admin;
    let first = snapshot(&api, admin, &agent, "first").await;
    let second = snapshot(&api, admin, &agent, "second").await;
    let third = snapshot(&api, admin, &agent, "third").await;
    let last = snapshot(&api, admin, &agent, "last").await;
    // The fake engine has merged the files of their ancestors into `third` and `last`, so the files
    // of `second` and `third` can be removed.
    let independent = [&third, &last].map(Clone::clone);
    api.bench.world.merged.lock().unwrap().extend(independent);
    for removed in [&second, &third] {
        api.delete(&format!("/templates/{removed}"))
            .await
            .expect(204);
    }
    let found = lineage(&api, admin, &format!("sandboxID={agent}")).await;
    // The sandbox, `first`, `last`, and one node for both removed snapshots, with the id of
    // `third`.
    assert_eq!(ids(&found).len(), 4, "{found}");
    let removed = node(&found, &third);
    assert_eq!(removed["state"], "removed");
    assert_eq!(removed["count"], 2, "{found}");
    assert_eq!(removed["parentSnapshotID"], json!(first));
    assert_eq!(node(&found, &last)["parentSnapshotID"], json!(third));
    assert!(has_edge(&found, &third, "snapshot_of", &agent));
    // The sandbox is removed, and its snapshots remain connected with it.
    api.delete(&format!("/sandboxes/{agent}?forget=true"))
        .await
        .expect(204);
    for query in [format!("sandboxID={agent}"), format!("snapshotID={first}")] {
        let found = lineage(&api, admin, &query).await;
        assert_eq!(ids(&found).len(), 4, "{found}");
        assert_eq!(node(&found, &agent)["state"], "removed");
    }
}

#[tokio::test]
async fn a_long_series_of_pauses_is_one_node_with_their_number() {
    let api = Api::new();
    let agent = api.sandbox().await;
    let admin = &api.admin;
    snapshot(&api, admin, &agent, "before").await;
    // Like the engine, the fake engine keeps the files of a snapshot on which others depend.
    let folds = &api.bench.world.folds_snapshots;
    folds.store(true, std::sync::atomic::Ordering::Relaxed);
    for _ in 0..6 {
        operate(&api, admin, &agent, "pause", Value::Null)
            .await
            .expect(204);
        operate(&api, admin, &agent, "resume", Value::Null)
            .await
            .expect(201);
    }
    snapshot(&api, admin, &agent, "after").await;
    let found = lineage(&api, admin, &format!("sandboxID={agent}")).await;
    let nodes = found["nodes"].as_array().unwrap();
    let counts: Vec<_> = nodes.iter().map(|n| n["count"].as_u64().unwrap()).collect();
    // The sandbox, two snapshots and six pauses. The pauses are one node.
    assert_eq!(counts.iter().sum::<u64>(), 9, "{found}");
    assert_eq!(nodes.len(), 4, "{found}");
    // The series is unfolded by any of its snapshots, and by no other one.
    let all = lineage(&api, admin, &format!("sandboxID={agent}&unfold=all")).await;
    assert_eq!(ids(&all).len(), 9, "{all}");
    assert!(
        all["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .all(|n| n["count"] == 1)
    );
    let pauses = all["nodes"].as_array().unwrap().iter();
    let pauses: Vec<_> = pauses.filter(|n| n["purpose"] == "pause").collect();
    let oldest = pauses[0]["id"].as_str().unwrap();
    let before = ids(&all)[1];
    for (unfolded, count) in [(oldest.to_owned(), 9), (format!("{before},x"), 4)] {
        let query = format!("sandboxID={agent}&unfold={unfolded}");
        assert_eq!(
            ids(&lineage(&api, admin, &query).await).len(),
            count,
            "{query}"
        );
    }
    let many: Vec<_> = (0..101).map(|n| format!("s{n}")).collect();
    let many = many.join(",");
    api.get(&format!("/lineage?sandboxID={agent}&unfold={many}"))
        .await
        .expect(400);
}

#[tokio::test]
async fn comparisons_of_different_templates_and_by_read_only_keys_are_rejected() {
    let api = Api::new();
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let small = api.sandbox().await;
    let body = json!({ "templateID": "large" });
    let large = api.post("/v2/sandboxes", body).await.expect(201).id();
    let path = format!("/compare?a={small}&b={large}");
    let refused = api.get(&path).await.expect(400);
    let message = refused.text("message");
    assert!(
        message.contains("`base`") && message.contains("`large`"),
        "{message}"
    );
    let refused = api.call_as(&reader, "GET", &path, Value::Null).await;
    assert_eq!(refused.expect_error(403), "forbidden");
    for (query, status) in [
        (format!("a={small}"), 400),
        (format!("a={small}&b=nothing"), 404),
        (format!("a={small}&b={small}&limit=0"), 400),
        (format!("a={small}&b={small}&path=relative"), 400),
        (format!("a={small}&b={small}&nextToken=x"), 400),
        // The fake guests answer every request with 204, so their files cannot be compared.
        (format!("a={small}&b={small}"), 409),
    ] {
        api.get(&format!("/compare?{query}")).await.expect(status);
    }
    // No comparison occupies a slot for longer than its request.
    for _ in 0..8 {
        api.get(&path).await.expect(400);
    }
}
