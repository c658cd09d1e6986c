//! Placement of sandboxes on the hosts of a fleet, and limits for all hosts together. The
//! *coordinator* is the member that selects the hosts. The *tightest* host has the least free
//! memory that suffices.

use super::lab::{Lab, with_free};
use jiffy_api::{Limits, Scope};
use jiffy_fleet_core::HostStatus;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Returns the status of a host with this free memory that reports the template `base`.
fn with_template(lab: &Lab, free_memory_mib: u32) -> HostStatus {
    HostStatus {
        templates: vec![lab.template_hash("base")],
        ..with_free(free_memory_mib)
    }
}

/// Returns the host of a sandbox.
fn host_of(lab: &Lab, id: &str) -> u32 {
    let hosts: Vec<_> = (1..=3).filter(|&host| lab.has(host, id)).collect();
    assert_eq!(hosts.len(), 1, "{id} is on {hosts:?}");
    hosts[0]
}

/// Returns three hosts that report the template, of which h3 has the least free memory.
async fn lab() -> Lab {
    let lab = Lab::start(3).await;
    for (host, memory) in [(1, 64_000), (2, 32_000), (3, 16_000)] {
        lab.set_status(host, with_template(&lab, memory)).await;
    }
    lab
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_through_any_member_runs_on_the_tightest_host() {
    let lab = lab().await;
    let (key, _) = lab.key(Scope::Create);
    for (through, path) in [(1, "/sandboxes"), (2, "/v2/sandboxes"), (3, "/sandboxes")] {
        let body = json!({ "templateID": "base", "metadata": { "front": through.to_string() } });
        let made = lab
            .call(through, &key, "POST", path, body)
            .await
            .expect(201);
        assert_eq!(host_of(&lab, &made.id()), 3);
        // Members forward a create with this header. It must not reach the client.
        assert!(made.header("jiffy-forwarded-placement").is_none());
    }
    // A host that does not report the template is not selected.
    lab.set_status(3, with_free(16_000)).await;
    let body = json!({ "templateID": "base" });
    let made = lab.call(3, &key, "POST", "/sandboxes", body).await;
    assert_eq!(host_of(&lab, &made.expect(201).id()), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_runs_on_a_host_with_the_required_labels_only() {
    let lab = lab().await;
    let (key, _) = lab.key(Scope::Create);
    for (through, host) in [(1, 1), (3, 1), (1, 2)] {
        let labels = json!({ "number": host.to_string() });
        let body = json!({ "templateID": "base", "hostLabels": labels });
        let made = lab.call(through, &key, "POST", "/sandboxes", body).await;
        assert_eq!(host_of(&lab, &made.expect(201).id()), host);
    }
    // The only suitable host rejects the sandbox.
    lab.fill(2);
    let body = json!({ "templateID": "base", "hostLabels": { "number": "2" } });
    let full = lab.call(1, &key, "POST", "/sandboxes", body).await;
    assert!(full.text("message").contains("h2: "), "{}", full.body);
    assert_eq!(full.expect_error(503), "host_busy");
    // No host is suitable.
    let labels = json!({ "number": "1", "zone": "a" });
    let body = json!({ "templateID": "base", "hostLabels": labels });
    let missing = lab.call(2, &key, "POST", "/sandboxes", body).await;
    let message = missing.text("message").to_owned();
    assert!(message.contains("the label zone=a is missing"), "{message}");
    assert!(
        message.contains("the label number=1 is missing"),
        "{message}"
    );
    assert_eq!(missing.expect_error(503), "host_busy");
    for (name, value) in [
        ("", "a"),
        ("zone", ""),
        ("zo ne", "a"),
        ("zone", &"a".repeat(64)),
    ] {
        let body = json!({ "templateID": "base", "hostLabels": { name: value } });
        let invalid = lab.call(2, &key, "POST", "/sandboxes", body).await;
        assert_eq!(
            invalid.expect_error(400),
            "invalid_request",
            "{name}={value}"
        );
    }
    let many: serde_json::Map<_, _> = (0..17).map(|n| (format!("n{n}"), json!("a"))).collect();
    let body = json!({ "templateID": "base", "hostLabels": many });
    let invalid = lab.call(2, &key, "POST", "/sandboxes", body).await;
    assert_eq!(invalid.expect_error(400), "invalid_request");
    let nodes = lab
        .call(1, &lab.admin(), "GET", "/fleet/nodes", Value::Null)
        .await;
    assert_eq!(
        nodes.expect(200).body["nodes"][1]["labels"],
        json!({ "number": "2" })
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_runs_on_a_host_of_its_distribution_scope_only() {
    let lab = lab().await;
    let (key, _) = lab.key(Scope::Create);
    for (through, scope) in [(1, "h3"), (3, "h1"), (2, "h2")] {
        let body = json!({ "templateID": "base", "distributionScope": [scope, "h9"] });
        let made = lab.call(through, &key, "POST", "/sandboxes", body).await;
        assert_eq!(format!("h{}", host_of(&lab, &made.expect(201).id())), scope);
    }
    // The only host of the scope rejects the sandbox.
    lab.fill(2);
    let body = json!({ "templateID": "base", "distributionScope": ["h2"] });
    let full = lab.call(1, &key, "POST", "/sandboxes", body).await;
    assert_eq!(full.expect_error(503), "host_busy");
    // A private network has all of its sandboxes on one host.
    let joins = |scope: &str| {
        let network = json!({ "join": "lab" });
        json!({ "templateID": "base", "network": network, "distributionScope": [scope] })
    };
    let first = lab.call(1, &key, "POST", "/sandboxes", joins("h3")).await;
    assert_eq!(host_of(&lab, &first.expect(201).id()), 3);
    let elsewhere = lab.call(1, &key, "POST", "/sandboxes", joins("h1")).await;
    assert!(
        elsewhere.text("message").contains("is on h3 only"),
        "{}",
        elsewhere.body
    );
    assert_eq!(elsewhere.expect_error(503), "host_busy");
    for invalid in [
        json!(["h9"]),
        json!(["10.9.9.9"]),
        json!([""]),
        json!(vec!["h1"; 17]),
    ] {
        let body = json!({ "templateID": "base", "distributionScope": invalid });
        let invalid = lab.call(2, &key, "POST", "/sandboxes", body).await;
        assert_eq!(invalid.expect_error(400), "invalid_request");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_host_is_tried_after_a_rejection_and_all_reasons_are_reported() {
    let lab = lab().await;
    let (key, _) = lab.key(Scope::Create);
    lab.fill(3);
    let body = json!({ "templateID": "base", "name": "web" });
    let made = lab.call(1, &key, "POST", "/sandboxes", body).await;
    let id = made.expect(201).id();
    assert_eq!(host_of(&lab, &id), 2);
    let admin = lab.admin();
    // Two decisions: h3, which rejected the sandbox, and then h2.
    let why = lab.why(3, &admin, &id, 2).await;
    let text = why["text"].as_str().unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("h3 rejected it"), "{text}");
    assert!(lines[1].starts_with("placed on h2"), "{text}");
    assert!(lines[1].contains("h3: rejected by the host"), "{text}");
    assert_eq!(why["host"], "h2");
    lab.fill(1);
    lab.fill(2);
    let body = json!({ "templateID": "base", "name": "other" });
    let full = lab.call(1, &key, "POST", "/sandboxes", body).await;
    let message = full.text("message");
    for host in ["h1: ", "h2: ", "h3: "] {
        assert!(message.contains(host), "{message}");
    }
    assert_eq!(full.expect_error(503), "host_busy");
    // A create that fits on no host.
    let body = json!({ "templateID": "base", "memoryMB": 65_536 });
    let large = lab.call(2, &key, "POST", "/sandboxes", body).await;
    let message = large.text("message");
    assert_eq!(large.expect_error(503), "host_busy");
    let decision = message.split("jiffy fleet why ").nth(1).unwrap();
    let decision = decision.split('`').next().unwrap();
    let why = lab.why(1, &admin, decision, 1).await;
    assert!(
        why["text"].as_str().unwrap().contains("65536 required"),
        "{why}"
    );
    let path = format!("/fleet/why/{decision}");
    let denied = lab.call(1, &key, "GET", &path, Value::Null).await;
    assert_eq!(denied.expect_error(403), "forbidden");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_one_host_has_is_found_before_its_next_heartbeat() {
    let lab = lab().await;
    let (key, _) = lab.key(Scope::Create);
    let body = json!({ "templateID": "base" });
    let made = lab.call(1, &key, "POST", "/sandboxes", body).await;
    let (id, body) = (made.expect(201).id(), json!({ "name": "snap" }));
    let path = format!("/sandboxes/{id}/snapshots");
    lab.located(&id).await;
    let taken = lab.call(1, &key, "POST", &path, body).await.expect(201);
    let snapshot = taken.text("snapshotID");
    // Heartbeats do not contain the new snapshot. The member that receives the create queries the
    // hosts, and the host of the snapshot answers.
    for through in 1..=3 {
        let body = json!({ "templateID": snapshot });
        let made = lab.call(through, &key, "POST", "/sandboxes", body).await;
        assert_eq!(host_of(&lab, &made.expect(201).id()), 3);
    }
    let body = json!({ "templateID": "unknown" });
    let unknown = lab.call(2, &key, "POST", "/sandboxes", body).await;
    assert_eq!(unknown.expect_error(404), "template_not_found");
    // A template that another host builds.
    let mut building = with_template(&lab, 32_000);
    building.builds = vec![lab.template_hash("unknown")];
    lab.set_status(2, building).await;
    let body = json!({ "templateID": "unknown" });
    let waits = lab.call(1, &key, "POST", "/sandboxes", body).await;
    let message = waits.text("message");
    assert!(message.contains("h2 builds it"), "{message}");
    waits.expect_error(503);
    // Each host lists its templates in the background, to report them in its heartbeats.
    let start = Instant::now();
    while !lab.templates(1).contains(&lab.template_hash("base")) {
        assert!(start.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_and_idempotency_keys_hold_for_creates_on_other_hosts() {
    let lab = lab().await;
    let (key, _) = lab.key(Scope::Create);
    let body = || json!({ "templateID": "base", "name": "once" });
    let creates = (0..12).map(|n| lab.create_with("key-1", n % 3 + 1, &key, body()));
    let made = futures_util::future::join_all(creates).await;
    let ids: std::collections::BTreeSet<_> = made
        .into_iter()
        .map(|answer| answer.expect(201).id())
        .collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    let taken = lab.call(2, &key, "POST", "/sandboxes", body()).await;
    assert_eq!(taken.expect_error(409), "name_taken");
    // The name is free at once after the kill.
    for _ in 0..10 {
        let path = "/sandboxes/once";
        lab.call(1, &key, "DELETE", path, Value::Null)
            .await
            .expect(204);
        let made = lab.call(2, &key, "POST", "/sandboxes", body()).await;
        made.expect(201);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_limits_of_a_key_hold_for_creates_forks_and_resumes_on_all_hosts() {
    const MAX: u64 = 12;
    let lab = lab().await;
    let limits = Limits {
        max_sandboxes: Some(MAX as u32),
        ..Limits::default()
    };
    let (key, new) = lab.limited_key(Scope::Create, limits);
    // All hosts have the same free memory, so each can be selected.
    for host in 1..=3 {
        lab.set_status(host, with_template(&lab, 64_000)).await;
    }
    let body = || json!({ "templateID": "base", "memoryMB": 4096 });
    let creates = (0..30).map(|n| lab.call(n % 3 + 1, &key, "POST", "/sandboxes", body()));
    let made = futures_util::future::join_all(creates).await;
    let ids: Vec<_> = made
        .iter()
        .filter(|answer| answer.status == 201)
        .map(|answer| answer.body["sandboxID"].as_str().unwrap().to_owned())
        .collect();
    for answer in made.iter().filter(|answer| answer.status != 201) {
        assert_eq!(
            (answer.status, &*answer.text("error_code")),
            (429, "max_sandboxes")
        );
    }
    assert_eq!(ids.len() as u64, MAX);
    // A fork is rejected on the host of the sandbox.
    lab.located(&ids[0]).await;
    let path = format!("/sandboxes/{}/fork", ids[0]);
    let fork = lab.call(2, &key, "POST", &path, json!({})).await;
    assert_eq!(fork.expect_error(429), "max_sandboxes");
    // The usage is the sum of all hosts.
    let admin = lab.admin();
    let path = format!("/limits?key={}", new.key.id);
    for (caller, path) in [(&key, "/limits"), (&admin, &*path)] {
        let budget = lab
            .call(3, caller, "GET", path, Value::Null)
            .await
            .expect(200);
        assert_eq!(budget.body["used"]["sandboxes"], MAX);
        assert_eq!(budget.body["limits"]["sandboxes"], MAX);
    }
    // An admin key resumes within the limit of the owner of the sandbox.
    let path = format!("/sandboxes/{}/pause", ids[1]);
    lab.located(&ids[1]).await;
    lab.call(1, &admin, "POST", &path, Value::Null)
        .await
        .expect(204);
    let extra = lab.call(1, &key, "POST", "/sandboxes", body()).await;
    extra.expect(201);
    let path = format!("/sandboxes/{}/connect", ids[1]);
    let resumed = lab
        .call(3, &admin, "POST", &path, json!({ "timeout": 60 }))
        .await;
    assert_eq!(resumed.expect_error(429), "max_sandboxes");
    // A kill on one host permits a create on any other one.
    for (id, through) in ids[2..8].iter().zip([1, 2, 3, 1, 2, 3]) {
        lab.located(id).await;
        let path = format!("/sandboxes/{id}");
        lab.call(through, &key, "DELETE", &path, Value::Null)
            .await
            .expect(204);
        let made = lab.call(through, &key, "POST", "/sandboxes", body()).await;
        made.expect(201);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_without_a_coordinator_runs_on_the_host_that_receives_it() {
    let lab = lab().await;
    let (key, _) = lab.key(Scope::Create);
    let coordinator = (1..=3).find(|&host| lab.is_coordinator(host)).unwrap();
    let through = coordinator % 3 + 1;
    lab.freeze(coordinator);
    let body = json!({ "templateID": "base" });
    let made = lab.call(through, &key, "POST", "/sandboxes", body).await;
    assert_eq!(host_of(&lab, &made.expect(201).id()), through);
    // Only the coordinator can reserve a name.
    let body = json!({ "templateID": "base", "name": "named" });
    let named = lab.call(through, &key, "POST", "/sandboxes", body).await;
    assert_eq!(named.expect_error(503), "fleet_unavailable");
}

/// Prints the time that a create through another member takes longer than one on its own host.
#[tokio::test(flavor = "multi_thread")]
async fn creates_send_no_request_to_the_records_and_cost_little_through_another_member() {
    const CREATES: usize = 60;
    let lab = lab().await;
    for (host, memory) in [(2, 60_000), (3, 50_000)] {
        lab.set_status(host, with_template(&lab, memory)).await;
    }
    let (key, _) = lab.key(Scope::Create);
    let mut medians = Vec::new();
    for through in [3, 1, 2] {
        let mut times = Vec::new();
        for _ in 0..CREATES {
            let (before, start) = (lab.record_requests(), Instant::now());
            let body = json!({ "templateID": "base", "memoryMB": 128 });
            let made = lab.call(through, &key, "POST", "/sandboxes", body).await;
            times.push(start.elapsed());
            let requests = lab.record_requests() - before;
            let id = made.expect(201).id();
            let host = host_of(&lab, &id);
            assert_eq!(host, 3, "{}", lab.why(1, &lab.admin(), &id, 1).await);
            // A create sends no request. The coordinator replaces its record every 0.6 s in this
            // test, which may happen during the create.
            assert!(requests <= 2, "{requests} requests");
            lab.call(3, &key, "DELETE", &format!("/sandboxes/{id}"), Value::Null)
                .await
                .expect(204);
        }
        times.sort();
        medians.push(times[CREATES / 2]);
    }
    println!(
        "create: P50 {:?} on its host, {:?} and {:?} through other members",
        medians[0], medians[1], medians[2]
    );
}
