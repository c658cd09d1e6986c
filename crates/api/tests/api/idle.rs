//! Idle timeouts: defaults, validation, quotas, and resumes by requests.

use crate::support;

use jiffy_api::{AutoResume, Limits, Scope};
use jiffy_sandbox_manager::{SandboxSettings, SandboxState};
use serde_json::{Value, json};
use support::fake::until;
use support::{Api, TestCaller};

/// Returns limits of a key with this default of the idle timeout.
fn idle(limit: Option<u64>) -> Limits {
    Limits {
        idle_timeout_s: limit,
        ..Limits::default()
    }
}

/// Creates a sandbox with these fields in addition to the template, and returns its settings.
async fn settings_of(api: &Api, caller: &TestCaller, fields: Value) -> SandboxSettings {
    let mut body = json!({ "templateID": "base" });
    let more = fields.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    let created = api.call_as(caller, "POST", "/v2/sandboxes", body).await;
    let id = created.expect(201).id();
    api.host.get(&id).unwrap().settings().clone()
}

#[tokio::test]
async fn the_idle_timeout_of_a_create_precedes_the_defaults_of_template_and_key() {
    let api = Api::new();
    let (caller, _) = api.key(Scope::Create, idle(Some(600)));
    let (plain, _) = api.key(Scope::Create, idle(None));
    let (zero, _) = api.key(Scope::Create, idle(Some(0)));
    // A key of `jiffy key create` may have more than the maximum of the daemon.
    let (excessive, _) = api.key(Scope::Create, idle(Some(u64::MAX)));
    let month = 30 * 24 * 3600;
    for (caller, fields, expected) in [
        (&caller, json!({}), Some(600)),
        (&caller, json!({ "idleTimeout": null }), Some(600)),
        (&caller, json!({ "idleTimeout": 60 }), Some(60)),
        (&caller, json!({ "idle_timeout": 61 }), Some(61)),
        (&caller, json!({ "idleTimeout": 0 }), None),
        (&plain, json!({}), None),
        (&plain, json!({ "idleTimeout": 1 }), Some(1)),
        (&zero, json!({}), None),
        (&excessive, json!({}), Some(month)),
        (&TestCaller::Owner, json!({}), None),
        (
            &TestCaller::Owner,
            json!({ "idleTimeout": month }),
            Some(month),
        ),
        // The template `large` has a default of 900 s.
        (&caller, json!({ "templateID": "large" }), Some(900)),
        (&plain, json!({ "templateID": "large" }), Some(900)),
        (
            &plain,
            json!({ "templateID": "large", "idleTimeout": 0 }),
            None,
        ),
    ] {
        let settings = settings_of(&api, caller, fields.clone()).await;
        assert_eq!(settings.idle_timeout_s, expected, "{fields}");
        // A sandbox that is paused without a request is resumed by one.
        assert_eq!(settings.auto_resume, expected.is_some(), "{fields}");
    }
}

#[tokio::test]
async fn an_idle_timeout_is_shown_and_automatic_resumes_can_be_disabled() {
    let api = Api::new();
    let body = json!({
        "templateID": "base", "idleTimeout": 60, "autoResume": { "enabled": false },
    });
    let id = api.post("/v2/sandboxes", body).await.expect(201).id();
    let detail = api.get(&format!("/sandboxes/{id}")).await.expect(200);
    assert_eq!(detail.body["jiffy"]["terms"]["idle_timeout_s"], 60);
    assert_eq!(
        detail.body["lifecycle"],
        json!({ "onTimeout": "kill", "autoResume": false })
    );
    let plain = api.sandbox().await;
    let detail = api.get(&format!("/sandboxes/{plain}")).await.expect(200);
    let settings = &detail.body["jiffy"]["terms"];
    assert!(settings.get("idle_timeout_s").is_none(), "{settings}");
}

#[tokio::test]
async fn idle_timeouts_out_of_range_are_rejected() {
    let api = Api::new();
    // The maximum is 30 days, which are 2,592,000 s.
    for bad in [json!(-1), json!(2_592_001), json!(1.5), json!("60")] {
        let body = json!({ "templateID": "base", "idleTimeout": bad });
        api.post("/v2/sandboxes", body).await.expect(400);
        let body = json!({ "limits": { "idleTimeout": bad } });
        api.post("/keys", body).await.expect(400);
    }
    assert!(api.host.list().is_empty());
    let created = json!({ "name": "idle", "limits": { "idleTimeout": 600 } });
    let created = api.post("/keys", created).await.expect(201);
    assert_eq!(created.body["key"]["limits"]["idleTimeout"], 600);
    let caller = TestCaller::Key(created.text("secret"));
    let settings = settings_of(&api, &caller, json!({})).await;
    assert_eq!(settings.idle_timeout_s, Some(600));
}

#[tokio::test]
async fn a_sandbox_with_an_idle_timeout_counts_as_paused_from_the_beginning() {
    let api = Api::new();
    let limits = Limits {
        max_paused: Some(1),
        ..Limits::default()
    };
    let (caller, _) = api.key(Scope::Create, limits);
    let body = json!({ "templateID": "base", "idleTimeout": 3600 });
    let create = |body: Value| api.call_as(&caller, "POST", "/v2/sandboxes", body);
    let id = create(body.clone()).await.expect(201).id();
    assert_eq!(create(body).await.expect_error(429), "max_paused");
    let fork = format!("/sandboxes/{id}/fork");
    let fork = api.call_as(&caller, "POST", &fork, json!({})).await;
    assert_eq!(fork.expect_error(429), "max_paused");
    create(json!({ "templateID": "base" })).await.expect(201);
    // The pause needs no further quota.
    let pause = format!("/sandboxes/{id}/pause");
    api.call_as(&caller, "POST", &pause, Value::Null)
        .await
        .expect(204);
}

#[tokio::test]
async fn the_idle_timeout_of_a_running_sandbox_is_set_within_the_limits_of_its_key() {
    let api = Api::new();
    let limits = Limits {
        max_paused: Some(1),
        ..Limits::default()
    };
    let (caller, _) = api.key(Scope::Create, limits);
    let [first, second] = [api.sandbox_of(&caller).await, api.sandbox_of(&caller).await];
    let set = |id: &str, body: Value| {
        let path = format!("/sandboxes/{id}/timeout");
        let (api, caller) = (&api, &caller);
        async move { api.call_as(caller, "POST", &path, body).await }
    };
    let settings = |id: &str| api.host.get(id).unwrap().settings().clone();
    set(&first, json!({ "idleTimeout": 3600 }))
        .await
        .expect(204);
    assert_eq!(settings(&first).idle_timeout_s, Some(3600));
    assert!(settings(&first).auto_resume);
    // The default timeout.
    assert_eq!(settings(&first).timeout_s, Some(300));
    // The sandbox counts as paused. A change of its idle timeout needs no further quota.
    let refused = set(&second, json!({ "timeout": 60, "idleTimeout": 3600 })).await;
    assert_eq!(refused.expect_error(429), "max_paused");
    assert_eq!(settings(&second).timeout_s, Some(300));
    set(&first, json!({ "timeout": 60, "idle_timeout": 60 }))
        .await
        .expect(204);
    assert_eq!(settings(&first).idle_timeout_s, Some(60));
    assert_eq!(settings(&first).timeout_s, Some(60));
    set(&first, json!({ "idleTimeout": 0 })).await.expect(204);
    assert_eq!(settings(&first).idle_timeout_s, None);
    set(&second, json!({ "idleTimeout": 1800 }))
        .await
        .expect(204);
    for bad in [
        json!({}),
        json!({ "timeout": null }),
        json!({ "idleTimeout": -1 }),
        json!({ "idleTimeout": 2_592_001 }),
        json!({ "idleTimeout": "60" }),
    ] {
        set(&first, bad).await.expect(400);
    }
}

#[tokio::test]
async fn an_idle_sandbox_is_resumed_by_a_request_or_a_connect() {
    let mut auto_resume = None;
    let api = Api::with(|app| {
        auto_resume = Some(AutoResume::new(app.clone()));
        app
    });
    let (caller, _) = api.key(Scope::Create, idle(Some(1)));
    let id = api.sandbox_of(&caller).await;
    let state = || api.host.get(&id).unwrap().state().clone();
    until("the pause", || state() == SandboxState::Paused).await;
    let events = format!("/events?sandboxID={id}&types=sandbox.paused");
    let events = api.call_as(&caller, "GET", &events, Value::Null).await;
    assert_eq!(events.expect(200).body["events"][0]["cause"], "idle");
    // The gateway makes this call for a request to a port.
    auto_resume.unwrap().ensure_running(&id).await.unwrap();
    assert_eq!(state(), SandboxState::Running);
    until("the next pause", || state() == SandboxState::Paused).await;
    let connect = format!("/v2/sandboxes/{id}/connect");
    api.call_as(&caller, "POST", &connect, json!({}))
        .await
        .expect(201);
    assert_eq!(state(), SandboxState::Running);
}
