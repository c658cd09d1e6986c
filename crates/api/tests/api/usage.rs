//! Usage of keys: who reads it, and its pages.

use crate::support;

use jiffy_api::{Limits, Scope};
use jiffy_sandbox_manager::{HostOptions, UsageAmounts, UsageClock, UsageLedger, UsageMoment};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use support::{Api, TestCaller};

/// Noon of 2026-11-29 in milliseconds since 1970.
const NOON_MS: u64 = 1_795_953_600_000;

/// Clock that stands still at noon.
struct Noon;

impl UsageClock for Noon {
    fn now(&self) -> UsageMoment {
        UsageMoment {
            wall_ms: NOON_MS,
            up_ms: 0,
        }
    }

    fn boot(&self) -> String {
        String::new()
    }
}

/// Control plane at noon. The directory has the file of the ledger.
fn api() -> (Api, UsageLedger, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("usage.db");
    let ledger = UsageLedger::open_with(&file, Arc::new(Noon)).unwrap();
    let options = HostOptions {
        usage: ledger.clone(),
        ..HostOptions::default()
    };
    (Api::with_options(options, |app| app), ledger, directory)
}

/// Adds an hour of a sandbox with 2 GiB until now.
fn add_hour(ledger: &UsageLedger, owner: Option<&str>) {
    let amounts = UsageAmounts {
        sandbox_ms: 3_600_000,
        cpu_us: 1_500_000,
        memory_mib_ms: 3_600_000 * 2048,
        stored_kib_s: 1 << 20,
        max_stored_bytes: 77,
        sent_bytes: 5,
        function_requests: 3,
    };
    ledger.add(owner, Duration::from_secs(3600), amounts);
}

fn keys(page: &Value) -> Vec<Option<String>> {
    let rows = page["usage"].as_array().unwrap().iter();
    rows.map(|row| row["keyID"].as_str().map(str::to_owned))
        .collect()
}

#[tokio::test]
async fn administrators_read_the_usage_of_all_keys_and_others_their_own() {
    let (api, ledger, _directory) = api();
    let (alice, a) = api.key(Scope::Create, Limits::default());
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let gone = api.keys.create("gone", Scope::Create, Limits::default());
    let gone = gone.unwrap();
    for owner in [None, Some(&*a.key.id), Some(&*gone.key.id)] {
        add_hour(&ledger, owner);
    }
    api.keys.revoke(&gone.key.id).unwrap();
    for admin in [&api.admin, &TestCaller::Owner] {
        let all = api.call_as(admin, "GET", "/usage", Value::Null).await;
        let all = all.expect(200).body;
        assert_eq!(keys(&all).len(), 3, "{all}");
        assert_eq!(keys(&all)[0], None);
        // The usage of a revoked key remains, and is found by its name.
        let one = api.call_as(admin, "GET", "/usage?key=gone", Value::Null);
        let one = one.await.expect(200).body;
        assert_eq!(keys(&one), [Some(gone.key.id.clone())]);
        assert_eq!(one["usage"][0]["keyName"], "gone");
        let owner = api.call_as(admin, "GET", "/usage?key=owner", Value::Null);
        assert_eq!(keys(&owner.await.expect(200).body), [None]);
        let unknown = api.call_as(admin, "GET", "/usage?key=unknown", Value::Null);
        assert_eq!(unknown.await.expect_error(404), "key_not_found");
    }
    let own = api.call_as(&alice, "GET", "/usage", Value::Null).await;
    let expected = json!({ "usage": [{
        "date": "2026-11-29", "keyID": a.key.id, "keyName": "test", "sandboxSeconds": 3600.0,
        "cpuSeconds": 1.5, "memoryGibSeconds": 7200.0, "storedGibSeconds": 1.0,
        "storedBytes": 77, "sentBytes": 5, "functionRequests": 3,
    }] });
    assert_eq!(own.expect(200).body, expected);
    let path = format!("/usage?key={}", a.key.id);
    let own = api.call_as(&alice, "GET", &path, Value::Null).await;
    assert_eq!(own.expect(200).body, expected);
    let none = api.call_as(&reader, "GET", "/usage", Value::Null).await;
    assert_eq!(none.expect(200).body, json!({ "usage": [] }));
    // Another key, an unknown key and the host's owner have the same answer.
    let mut answers = Vec::new();
    for key in [&*gone.key.id, "unknown", "owner"] {
        let path = format!("/usage?key={key}");
        let refused = api.call_as(&alice, "GET", &path, Value::Null).await;
        answers.push(refused.expect(403).body);
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]));
}

#[tokio::test]
async fn pages_select_days_and_invalid_selections_are_rejected() {
    let (api, ledger, _directory) = api();
    let owners = ["a1", "b2", "c3"];
    owners
        .iter()
        .for_each(|owner| add_hour(&ledger, Some(owner)));
    let mut after = String::new();
    let mut found = Vec::new();
    loop {
        let page = api.get(&format!("/usage?limit=2{after}")).await.expect(200);
        found.extend(keys(&page.body).into_iter().flatten());
        let Some(next) = page.body["next"].as_str() else {
            break;
        };
        after = format!("&after={next}");
    }
    assert_eq!(found, owners);
    // Days without usage.
    for empty in [
        "to=2026-11-28",
        "from=2026-11-30",
        "from=2026-11-29&to=2026-11-01",
    ] {
        let page = api.get(&format!("/usage?{empty}")).await.expect(200);
        assert_eq!(page.body, json!({ "usage": [] }), "{empty}");
    }
    let one_day = api.get("/usage?from=2026-11-29&to=2026-11-29").await;
    assert_eq!(keys(&one_day.expect(200).body).len(), 3);
    for bad in [
        "from=yesterday",
        "to=2026-02-30",
        "limit=0",
        "limit=1001",
        "after=2026-11-29",
        "after=2026-11-29.'",
    ] {
        let refused = api.get(&format!("/usage?{bad}")).await;
        assert_eq!(refused.expect_error(400), "invalid_request", "{bad}");
    }
    let long = "k".repeat(257);
    api.get(&format!("/usage?key={long}")).await.expect(400);
}
