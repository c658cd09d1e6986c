//! Snapshots that are acknowledged when they are captured. While `storing_waits` of the fake engine
//! is true, captured snapshots are not stored.

use crate::support;

use jiffy_api::{Limits, Scope};
use jiffy_api_types::SnapshotAck;
use serde_json::json;
use support::Api;

#[tokio::test]
async fn a_snapshot_that_is_acknowledged_when_captured_is_storing_until_it_is_ready() {
    let api = Api::new();
    let id = api.sandbox().await;
    api.bench.world.write(&id, "captured");
    api.bench.world.storing_waits.send_replace(true);
    let take_at = format!("/sandboxes/{id}/snapshots");
    let take = |body| api.post(&take_at, body);
    let taken = take(json!({ "ack": "captured", "name": "early" })).await;
    let taken = taken.expect(201);
    assert_eq!(taken.text("status"), "storing");
    // The fake engine reports this time.
    assert_eq!(taken.body["stoppedMs"], json!(7.0));
    let snapshot = taken.text("snapshotID");
    let one = format!("/snapshots/{snapshot}");
    assert_eq!(api.get(&one).await.expect(200).text("status"), "storing");
    let in_use = api.delete(&format!("/templates/{snapshot}")).await;
    assert!(in_use.expect(409).text("message").contains("storing"));
    api.bench.world.storing_waits.send_replace(false);
    let body = json!({ "templateID": "early" });
    let created = api.post("/v2/sandboxes", body).await.expect(201);
    assert_eq!(api.bench.world.read(&created.id()), "captured");
    assert_eq!(api.get(&one).await.expect(200).text("status"), "ready");

    take(json!({ "ack": "maybe" })).await.expect(400);
    let both = json!({ "ack": "captured", "durable": true });
    take(both).await.expect(400);
    let stored = take(json!({ "ack": "stored" })).await.expect(201);
    assert_eq!(stored.text("status"), "ready");
}

#[tokio::test]
async fn a_captured_snapshot_that_could_not_be_stored_is_not_found_with_the_reason() {
    let api = Api::new();
    let id = api.sandbox().await;
    api.bench.world.storing_waits.send_replace(true);
    let body = json!({ "ack": "captured" });
    let taken = api
        .post(&format!("/sandboxes/{id}/snapshots"), body)
        .await
        .expect(201);
    api.bench.world.fail("store");
    api.bench.world.storing_waits.send_replace(false);
    let snapshot = taken.text("snapshotID");
    let body = json!({ "templateID": snapshot });
    let refused = api.post("/v2/sandboxes", body.clone()).await.expect(404);
    assert!(refused.text("message").contains("made to fail"));
    let one = api.get(&format!("/snapshots/{snapshot}")).await.expect(404);
    assert!(one.text("message").contains("made to fail"));
    let refused = api.post("/v2/sandboxes", body).await.expect(404);
    assert!(refused.text("message").contains("made to fail"));
}

#[tokio::test]
async fn a_snapshot_is_acknowledged_as_the_request_the_key_or_the_daemon_says() {
    // (daemon, key, request, status of the answer)
    let (captured, stored) = (SnapshotAck::Captured, SnapshotAck::Stored);
    let cases = [
        (captured, None, None, "storing"),
        (captured, Some(stored), None, "ready"),
        (captured, None, Some("stored"), "ready"),
        (stored, Some(captured), None, "storing"),
        (stored, Some(captured), Some("stored"), "ready"),
        (stored, Some(stored), Some("captured"), "storing"),
        (stored, None, None, "ready"),
    ];
    for (daemon, snapshot_ack, ack, status) in cases {
        let api = Api::new().with_snapshot_ack(daemon);
        let limits = Limits {
            snapshot_ack,
            ..Limits::default()
        };
        let (caller, _) = api.key(Scope::Create, limits);
        let id = api.sandbox_of(&caller).await;
        // A snapshot that is acknowledged when it is captured cannot become ready meanwhile.
        api.bench
            .world
            .storing_waits
            .send_replace(status == "storing");
        let path = format!("/sandboxes/{id}/snapshots");
        let body = ack.map_or_else(|| json!({}), |ack| json!({ "ack": ack }));
        let taken = api.call_as(&caller, "POST", &path, body).await.expect(201);
        assert_eq!(
            taken.text("status"),
            status,
            "{daemon:?} {snapshot_ack:?} {ack:?}"
        );
        api.bench.world.storing_waits.send_replace(false);
    }
}
