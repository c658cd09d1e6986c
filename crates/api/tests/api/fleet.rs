//! Fleet of several hosts: every *member* (the daemon of one host) answers all calls. A *verdict*
//! is the decision of the coordinator, one of the members, that a host is dead.

mod lab;
mod loss;
mod objects;
mod operations;
mod placement;
mod streams;
mod volumes;

use crate::support::TestCaller;
use jiffy_api::Scope;
use lab::Lab;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_used_through_every_member_by_id_and_by_name() {
    let lab = Lab::start(3).await;
    let admin = lab.admin();
    let (key, _) = lab.key(Scope::Create);
    for caller in [&admin, &key] {
        let body = json!({ "templateID": "base", "name": "web" });
        let made = lab.call(1, caller, "POST", "/v2/sandboxes", body).await;
        let id = made.expect(201).id();
        lab.located(&id).await;
        for host in 1..=3 {
            for target in [&*id, "web"] {
                let path = format!("/sandboxes/{target}");
                let shown = lab.call(host, caller, "GET", &path, Value::Null).await;
                assert_eq!(shown.expect(200).id(), id);
            }
            let path = format!("/sandboxes/{id}/timeout");
            let body = json!({ "timeout": 100 + host });
            lab.call(host, caller, "POST", &path, body)
                .await
                .expect(204);
        }
        // A pause through one member, and a resume through another.
        let path = format!("/sandboxes/{id}/pause");
        lab.call(2, caller, "POST", &path, Value::Null)
            .await
            .expect(204);
        let path = format!("/v2/sandboxes/{id}/connect");
        let body = json!({ "timeout": 60 });
        lab.call(3, caller, "POST", &path, body).await.expect(201);
        let path = format!("/sandboxes/{id}");
        lab.call(2, caller, "DELETE", &path, Value::Null)
            .await
            .expect(204);
        for host in 1..=3 {
            let shown = lab.call(host, caller, "GET", &path, Value::Null).await;
            assert_eq!(shown.expect_error(404), "sandbox_not_found");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_member_shows_routes_to_or_counts_anything_of_another_tenant() {
    let lab = Lab::start(3).await;
    let (one, _) = lab.key(Scope::Create);
    let (two, _) = lab.key(Scope::Create);
    let body = json!({ "templateID": "base", "name": "private" });
    let id = lab
        .call(2, &one, "POST", "/sandboxes", body)
        .await
        .expect(201)
        .id();
    lab.located(&id).await;
    let unknown = jiffy_engine_api::new_id().unwrap();
    for host in 1..=3 {
        for (method, suffix) in [
            ("GET", ""),
            ("GET", "/logs"),
            ("GET", "/metrics"),
            ("GET", "/wait?for=paused&timeout=1"),
            ("POST", "/pause"),
            ("POST", "/resume"),
            ("POST", "/connect"),
            ("POST", "/timeout"),
            ("POST", "/fork"),
            ("POST", "/snapshots"),
            ("DELETE", ""),
        ] {
            let body = match (method, suffix) {
                ("POST", "/connect" | "/timeout") => json!({ "timeout": 10 }),
                _ => Value::Null,
            };
            let call = async |target: &str| {
                let path = format!("/sandboxes/{target}{suffix}");
                lab.call(host, &two, method, &path, body.clone()).await
            };
            let foreign = call(&id).await;
            let absent = call(&unknown).await;
            assert_eq!(foreign.status, 404, "{method} {suffix}: {}", foreign.body);
            let text = |body: &Value| body.to_string().replace(&id, "ID").replace(&unknown, "ID");
            assert_eq!(text(&foreign.body), text(&absent.body));
            // Names of other owners are not found. The caller may use them as well.
            let path = format!("/sandboxes/private{suffix}");
            let named = lab.call(host, &two, method, &path, body.clone()).await;
            assert_eq!(named.status, 404, "{method} {suffix}: {}", named.body);
        }
        for path in ["/sandboxes", "/v2/sandboxes?limit=10"] {
            let listed = lab
                .call(host, &two, "GET", path, Value::Null)
                .await
                .expect(200);
            assert!(listed.items().is_empty());
            assert!(listed.header("x-next-token").is_none());
        }
        let path = format!("/sandboxes/metrics?sandbox_ids={id}");
        let usage = lab
            .call(host, &two, "GET", &path, Value::Null)
            .await
            .expect(200);
        assert_eq!(usage.body["sandboxes"], json!({}));
    }
    let body = json!({ "templateID": "base", "name": "private" });
    lab.call(3, &two, "POST", "/sandboxes", body)
        .await
        .expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_all_members_are_merged_and_missing_members_are_named() {
    let lab = Lab::start(3).await;
    let (key, _) = lab.key(Scope::Create);
    let mut ids = Vec::new();
    for n in 0..9 {
        let body = json!({ "templateID": "base" });
        let made = lab.call(n % 3 + 1, &key, "POST", "/sandboxes", body).await;
        ids.push(made.expect(201).id());
    }
    for (order, host) in [("desc", 1), ("asc", 2), ("desc", 3)] {
        let mut expected = ids.clone();
        if order == "desc" {
            expected.reverse();
        }
        let (mut listed, mut token) = (Vec::new(), String::new());
        loop {
            let path = format!("/v2/sandboxes?limit=2&order={order}&nextToken={token}");
            let page = lab
                .call(host, &key, "GET", &path, Value::Null)
                .await
                .expect(200);
            assert!(page.items().len() <= 2);
            assert_eq!(page.header("jiffy-incomplete"), None);
            listed.extend(page.ids());
            match page.header("x-next-token") {
                Some(next) => token = next.to_owned(),
                None => break,
            }
        }
        // Creates within one millisecond are listed in the order of their ids, so the exact order
        // is unknown: compare the sorted ids.
        let sorted = |mut ids: Vec<String>| {
            ids.sort();
            ids
        };
        assert_eq!(sorted(listed.clone()), sorted(expected.clone()));
        assert_eq!(listed.len(), 9);
    }
    let all = lab
        .call(1, &key, "GET", "/sandboxes", Value::Null)
        .await
        .expect(200);
    assert_eq!(all.items().len(), 9);
    // Each item names the host that has the sandbox, and so does the sandbox itself.
    for item in all.items() {
        let host = item["host"].as_str().unwrap();
        let path = format!("/v2/sandboxes?host={host}");
        let own = lab.call(1, &key, "GET", &path, Value::Null).await;
        let id = item["sandboxID"].as_str().unwrap();
        assert!(own.expect(200).ids().iter().any(|own| own == id), "{item}");
        let path = format!("/sandboxes/{id}");
        let shown = lab.call(2, &key, "GET", &path, Value::Null).await;
        assert_eq!(shown.expect(200).body["host"], host);
    }
    // A member that does not answer within 1 s is named, and its sandboxes are missing. The limit
    // below leaves a margin.
    lab.freeze(3);
    let start = Instant::now();
    let list = lab
        .call(1, &key, "GET", "/v2/sandboxes", Value::Null)
        .await
        .expect(200);
    assert!(
        start.elapsed() < Duration::from_secs(3),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(list.header("jiffy-incomplete"), Some("h3"));
    assert_eq!(list.items().len(), 6);
    let path = "/v2/sandboxes?complete=true";
    let refused = lab.call(1, &key, "GET", path, Value::Null).await;
    assert_eq!(refused.header("retry-after"), Some("2"));
    assert_eq!(refused.expect_error(503), "fleet_unavailable");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_sandboxes_of_a_private_network_are_on_one_host() {
    let lab = Lab::start(3).await;
    let (key, _) = lab.key(Scope::Create);
    let body = json!({ "templateID": "base", "network": { "join": "lab" } });
    // Concurrent creates through all members. Only one host can create the network; a create on
    // another host is repeated there, or rejected.
    let calls = (0..9).map(|n| lab.call(n % 3 + 1, &key, "POST", "/sandboxes", body.clone()));
    let answers = futures_util::future::join_all(calls).await;
    let mut created = Vec::new();
    for answer in answers {
        match answer.status {
            201 => created.push(answer.id()),
            _ => assert_eq!(answer.expect_error(503), "host_busy"),
        }
    }
    assert!(!created.is_empty());
    // Later creates find the network, also through hosts that do not have it.
    for id in &created {
        lab.located(id).await;
    }
    for host in 1..=3 {
        let answer = lab
            .call(host, &key, "POST", "/sandboxes", body.clone())
            .await;
        created.push(answer.expect(201).id());
    }
    let all = lab.call(1, &key, "GET", "/sandboxes", Value::Null).await;
    let all = all.expect(200);
    let items = all.items();
    assert_eq!(items.len(), created.len());
    let network_host = items[0]["host"].clone();
    assert!(
        items.iter().all(|item| item["host"] == network_host),
        "{items:?}"
    );
    // Each sandbox has an address of its own.
    let mut addresses = std::collections::BTreeSet::new();
    for id in &created {
        let path = format!("/sandboxes/{id}");
        let shown = lab
            .call(2, &key, "GET", &path, Value::Null)
            .await
            .expect(200);
        addresses.insert(
            shown.body["network"]["address"]
                .as_str()
                .unwrap()
                .to_owned(),
        );
    }
    assert_eq!(addresses.len(), created.len());
    // Without its sandboxes, the network may be created on any host again.
    for id in &created {
        let path = format!("/sandboxes/{id}");
        lab.call(1, &key, "DELETE", &path, Value::Null)
            .await
            .expect(204);
    }
    let answer = lab.call(2, &key, "POST", "/sandboxes", body).await;
    answer.expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_unique_in_the_fleet_and_idempotency_keys_hold_on_all_members() {
    let mut lab = Lab::start(3).await;
    let (key, _) = lab.key(Scope::Create);
    let named = json!({ "templateID": "base", "name": "web" });
    let calls = (1..=3).map(|host| lab.call(host, &key, "POST", "/sandboxes", named.clone()));
    let answers = futures_util::future::join_all(calls).await;
    let created = answers.iter().filter(|answer| answer.status == 201).count();
    let statuses: Vec<_> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(created, 1, "{statuses:?}");
    for answer in answers.into_iter().filter(|answer| answer.status != 201) {
        assert_eq!(answer.expect_error(409), "name_taken");
    }
    // A rename is checked as well.
    let body = json!({ "templateID": "base" });
    let other = lab
        .call(1, &key, "POST", "/sandboxes", body)
        .await
        .expect(201)
        .id();
    lab.located(&other).await;
    for host in 1..=3 {
        let path = format!("/sandboxes/{other}");
        let renamed = lab
            .call(host, &key, "PATCH", &path, json!({ "name": "web" }))
            .await;
        assert_eq!(renamed.expect_error(409), "name_taken");
    }
    // Twenty concurrent creates with one key through all members create one sandbox.
    let body = json!({ "templateID": "base", "metadata": { "n": "1" } });
    let calls = (0..20).map(|n| lab.create_with("k-1", n % 3 + 1, &key, body.clone()));
    let answers = futures_util::future::join_all(calls).await;
    let ids: Vec<_> = answers
        .into_iter()
        .map(|answer| answer.expect(201).id())
        .collect();
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    // The key still returns the sandbox after a restart of all daemons.
    for host in 1..=3 {
        lab.restart(host).await;
    }
    for host in 1..=3 {
        let answer = lab.create_with("k-1", host, &key, body.clone()).await;
        assert_eq!(answer.expect(201).id(), ids[0]);
        let different = json!({ "templateID": "base" });
        let answer = lab.create_with("k-1", host, &key, different).await;
        assert_eq!(answer.expect_error(422), "idempotency_key_reused");
    }
    // An equal idempotency key of another owner creates another sandbox.
    let (two, _) = lab.key(Scope::Create);
    let answer = lab.create_with("k-1", 2, &two, body).await;
    assert_ne!(answer.expect(201).id(), ids[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_owner_ends_its_requests_and_slows_no_other_sandbox() {
    let lab = Lab::start(3).await;
    let (key, _) = lab.key(Scope::Create);
    let mut ids = Vec::new();
    for host in 1..=3 {
        let body = json!({ "templateID": "base" });
        let id = lab
            .call(host, &key, "POST", "/sandboxes", body)
            .await
            .expect(201)
            .id();
        lab.located(&id).await;
        ids.push(id);
    }
    // The usage of a key is the sum of all members.
    let path = format!("/sandboxes/{}", ids[0]);
    let killed = lab.call(1, &key, "DELETE", &path, Value::Null).await;
    killed.expect(204);
    let usage = lab.call(2, &key, "GET", "/usage", Value::Null).await;
    let usage = usage.expect(200).body;
    let seconds = usage["usage"][0]["sandboxSeconds"].as_f64().unwrap();
    assert!(
        seconds > 0.0 && usage.get("missingHosts").is_none(),
        "{usage}"
    );
    lab.freeze(3);
    // A member without an answer is named.
    let usage = lab.call(1, &key, "GET", "/usage", Value::Null).await;
    assert_eq!(usage.header("jiffy-incomplete"), Some("h3"));
    assert_eq!(usage.expect(200).body["missingHosts"], json!(["h3"]));
    let path = format!("/sandboxes/{}", ids[2]);
    let frozen = lab.call(1, &key, "GET", &path, Value::Null);
    let start = Instant::now();
    let others = async {
        for _ in 0..20 {
            let path = format!("/sandboxes/{}", ids[1]);
            lab.call(1, &key, "GET", &path, Value::Null)
                .await
                .expect(200);
        }
        start.elapsed()
    };
    let (frozen, others) = tokio::join!(frozen, others);
    // The calls on the other sandbox do not wait for the frozen host. The limit leaves a margin.
    assert!(others < Duration::from_secs(2), "{others:?}");
    assert!(
        frozen.text("message").contains("host h3"),
        "{}",
        frozen.body
    );
    assert_eq!(frozen.expect_error(503), "host_lost");
    // The first call has waited for the verdict. After the verdict, the answer is immediate.
    let start = Instant::now();
    let lost = lab.call(2, &key, "GET", &path, Value::Null).await;
    assert!(
        start.elapsed() < Duration::from_secs(2),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(lost.expect_error(503), "host_lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_sandbox_of_a_lost_host_is_resumed_through_any_member() {
    let lab = Lab::with_store(3).await;
    let (key, _) = lab.key(Scope::Create);
    // Stop a host that is not the coordinator, so that no takeover delays the test.
    let lost = (1..=3).find(|&host| !lab.is_coordinator(host)).unwrap();
    let resumer = (1..=3).find(|&host| host != lost).unwrap();
    let body = json!({ "templateID": "base", "name": "mine" });
    let id = lab
        .call(lost, &key, "POST", "/sandboxes", body)
        .await
        .expect(201)
        .id();
    lab.pause_durably(lost, &id).await;
    let path = format!("/sandboxes/{id}/connect");
    lab.stop(lost).await;
    let body = json!({ "timeout": 60 });
    let resumed = lab.call(resumer, &key, "POST", &path, body.clone()).await;
    assert_eq!(resumed.expect(200).id(), id);
    lab.located(&id).await;
    for host in (1..=3).filter(|&host| host != lost) {
        let path = format!("/sandboxes/{id}");
        lab.call(host, &key, "GET", &path, Value::Null)
            .await
            .expect(200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forwarded_call_is_not_forwarded_again_and_clients_cannot_mark_calls() {
    let lab = Lab::start(2).await;
    let (key, _) = lab.key(Scope::Create);
    let body = json!({ "templateID": "base" });
    let id = lab
        .call(1, &key, "POST", "/sandboxes", body)
        .await
        .expect(201)
        .id();
    lab.located(&id).await;
    let path = format!("/sandboxes/{id}");
    // A member rejects a forwarded call on a sandbox that it does not have.
    let moved = lab.forwarded(2, &key, &path).await;
    assert_eq!(moved.expect_error(421), "sandbox_moved");
    // Headers of members have no effect in calls of clients.
    let nobody = TestCaller::Nobody;
    let marked = lab
        .call_with(2, &nobody, &path, "jiffy-forwarded-owner")
        .await;
    assert_eq!(marked.expect_error(401), "unauthenticated");
    let (two, _) = lab.key(Scope::Create);
    let marked = lab.call_with(2, &two, &path, "jiffy-forwarded-owner").await;
    assert_eq!(marked.expect_error(404), "sandbox_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_state_of_the_fleet_is_shown_to_administrators_only() {
    let lab = Lab::start(2).await;
    for host in 1..=2 {
        let shown = lab
            .call(host, &lab.admin(), "GET", "/fleet", Value::Null)
            .await
            .expect(200);
        assert_eq!(shown.text("host"), format!("h{host}"));
        assert_eq!(shown.body["isReady"], true);
        assert_eq!(shown.body["hasAuthority"], true);
        assert_eq!(shown.body["nodes"].as_array().unwrap().len(), 2);
        let nodes = lab
            .call(host, &lab.admin(), "GET", "/fleet/nodes", Value::Null)
            .await;
        let nodes = nodes.expect(200);
        assert_eq!(nodes.body["nodes"][1]["id"], "h2");
        assert_eq!(nodes.body["nodes"][1]["state"], "up");
        for scope in [Scope::Create, Scope::Read] {
            for path in ["/fleet", "/fleet/nodes"] {
                let denied = lab
                    .call(host, &lab.key(scope).0, "GET", path, Value::Null)
                    .await;
                assert_eq!(denied.expect_error(403), "forbidden");
            }
        }
    }
    let alone = crate::support::Api::new();
    assert_eq!(alone.get("/fleet").await.expect_error(404), "not_found");
}
