//! Tests that sandboxes and snapshots of one key do not exist for another.

use super::two_keys::TwoKeys;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};

#[jiffy_test]
fn a_tenant_cannot_reach_sandboxes_or_snapshots_of_another() {
    let keys = TwoKeys::new(&["--warm-pool", "0"]);
    let id = keys.ok(&keys.alice, &["create"]);
    let path = format!("/sandboxes/{id}/snapshots");
    let (status, snapshot) = keys.http(&keys.alice, "POST", &path, &json!({}));
    assert_eq!(status, 201, "{snapshot}");
    let snapshot = snapshot["snapshotID"].as_str().unwrap();
    let unknown = [
        ("GET", format!("/sandboxes/{id}"), Value::Null),
        ("DELETE", format!("/sandboxes/{id}"), Value::Null),
        ("POST", path, json!({})),
        (
            "POST",
            "/sandboxes".to_owned(),
            json!({ "templateID": snapshot }),
        ),
        ("GET", format!("/snapshots/{snapshot}"), Value::Null),
        ("DELETE", format!("/templates/{snapshot}"), Value::Null),
    ];
    for (method, path, body) in unknown {
        let (status, answer) = keys.http(&keys.mallory, method, &path, &body);
        assert_eq!(status, 404, "{method} {path}: {answer}");
    }
    let (status, listed) = keys.http(&keys.mallory, "GET", "/snapshots", &Value::Null);
    assert_eq!((status, listed), (200, json!([])));
    assert_eq!(
        keys.ok(&keys.alice, &["exec", &id, "--", "echo", "ok"]),
        "ok"
    );
}
