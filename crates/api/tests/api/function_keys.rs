//! Sandbox keys of functions: permissions of their holders, and their lifetime.
//!
//! A sandbox key has two secrets. With the first one, the function calls the API. With the second
//! one, the *callback secret*, a sandbox may only invoke the function.

use crate::support::{Answer, Api, TestCaller};
use axum::body::{Body, to_bytes};
use axum::http::Request;
use axum::response::IntoResponse;
use jiffy_api::{
    FunctionCall, FunctionHost, FunctionInvoker, Invoking, Limits, NewKey, Scope, Validity,
};
use jiffy_engine_api::now_ms;
use jiffy_function_manager::egress::EgressSettings;
use jiffy_function_manager::{
    Artifact, FunctionHostSettings, FunctionRecord, Functions, SandboxKey, SandboxKeyScope,
    VersionRecord, owner,
};
use jiffy_proto::function::{CompileLimits, LoadSettings, TenantLimits, World};
use jiffy_proto::internal::InternalOrigin;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use tower::ServiceExt;

/// Invoker that answers each request itself, instead of a function.
pub struct NoInvoker;

impl FunctionInvoker for NoInvoker {
    fn invoke(&self, _: FunctionCall) -> Invoking<'_> {
        Box::pin(async { "invoked".into_response() })
    }
}

/// Control plane with functions whose records are in a directory.
pub struct FunctionApi {
    pub api: Api,
    functions: Functions,
    directory: tempfile::TempDir,
}

/// Returns a function of the key `owner` with a key for sandboxes of `of`.
pub fn record(owner: Option<&str>, name: &str, granted: &SandboxKey) -> FunctionRecord {
    FunctionRecord {
        owner: owner.map(str::to_owned),
        name: name.to_owned(),
        enabled: true,
        public: false,
        settings: LoadSettings::default(),
        schedule: None,
        sandbox_key: Some(granted.clone()),
        answering: 1,
        versions: vec![VersionRecord {
            number: 1,
            module: "m".to_owned(),
            bytes: 1,
            world: World::Http,
            artifact: Artifact {
                engine: "e".to_owned(),
                digest: "d".to_owned(),
                bytes: 1,
            },
            created_ms: 0,
        }],
        next_version: 2,
        revision: 1,
        created_ms: 0,
        updated_ms: 0,
    }
}

/// Returns a sandbox key with which a function acts as `key`. `is_own` is false, because `key` was
/// not created for the function alone.
pub fn granted(key: &NewKey, scope: SandboxKeyScope) -> SandboxKey {
    let is_own = false;
    SandboxKey::new(key.key.id.clone(), is_own, scope).unwrap()
}

/// Opens functions whose records are in a directory.
pub fn open_functions(directory: &Path, records: Vec<FunctionRecord>) -> Functions {
    for record in records {
        let name = owner::directory_name(record.owner.as_deref());
        let records = directory.join(name).join("records");
        std::fs::create_dir_all(&records).unwrap();
        let text = serde_json::to_vec(&record).unwrap();
        std::fs::write(records.join(format!("{}.json", record.name)), text).unwrap();
    }
    Functions::open(FunctionHostSettings {
        directory: directory.to_owned(),
        program: Some("/nonexistent".into()),
        jailed: false,
        cgroups: None,
        limits: TenantLimits::default(),
        compile: CompileLimits::default(),
        idle: Duration::from_secs(60),
        grace: Duration::from_secs(1),
        egress: EgressSettings::default(),
    })
}

impl FunctionApi {
    /// Creates a control plane with the records that `make` returns for its keys.
    pub fn new(make: impl FnOnce(&jiffy_api::Keys) -> Vec<FunctionRecord>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let api = Api::new();
        let functions = open_functions(directory.path(), make(&api.keys));
        let api = api.with_functions(functions.clone(), NoInvoker);
        Self {
            api,
            functions,
            directory,
        }
    }

    /// Returns the directory of the functions.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Sends a call over an internal connection of `origin`.
    async fn call(
        &self,
        origin: &InternalOrigin,
        secret: &str,
        method: &str,
        path: &str,
        body: Value,
    ) -> Answer {
        let request = Request::builder().method(method).uri(path);
        let request = request
            .header("x-api-key", secret)
            .header("content-type", "application/json")
            .extension(origin.clone());
        let body = match body {
            Value::Null => Body::empty(),
            body => Body::from(body.to_string()),
        };
        self.api.send(request.body(body).unwrap()).await
    }
}

/// Returns the origin of connections from the function `agent` of `key`.
fn agent(key: &NewKey) -> InternalOrigin {
    InternalOrigin::Function {
        key: key.key.id.clone(),
        owner: Some(key.key.id.clone()),
        name: "agent".to_owned(),
        reaches_ports: true,
    }
}

fn base() -> Value {
    json!({ "templateID": "base" })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_calls_as_its_key_for_sandboxes_of_that_key_only() {
    let mut created = None;
    let api = FunctionApi::new(|keys| {
        let key = keys.create("a", Scope::Create, Limits::default()).unwrap();
        let granted = granted(&key, SandboxKeyScope::Create);
        let record = record(Some(&key.key.id), "agent", &granted);
        created = Some((key, granted));
        vec![record]
    });
    let (key, granted) = created.unwrap();
    let (own, secret) = (agent(&key), granted.secret.as_str());
    let (other, _) = api.api.key(Scope::Create, Limits::default());
    let foreign = api.api.sandbox_of(&other).await;

    let sandbox = api.call(&own, secret, "POST", "/sandboxes", base()).await;
    let sandbox = sandbox.expect(201).id();
    // The sandbox belongs to the key.
    let key_itself = TestCaller::Key(key.secret.clone());
    let path = format!("/sandboxes/{sandbox}");
    let visible = api.api.call_as(&key_itself, "GET", &path, Value::Null);
    visible.await.expect(200);
    let visible = api.api.call_as(&other, "GET", &path, Value::Null).await;
    visible.expect(404);
    let list = api.call(&own, secret, "GET", "/v2/sandboxes", Value::Null);
    assert_eq!(list.await.expect(200).ids(), [sandbox.as_str()]);
    for (method, call) in [
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/pause"),
        ("GET", "/logs"),
    ] {
        let path = format!("/sandboxes/{foreign}{call}");
        let answer = api.call(&own, secret, method, &path, Value::Null).await;
        assert_eq!(
            answer.expect_error(404),
            "sandbox_not_found",
            "{method} {path}"
        );
    }
    // Calls that outlive the function, or that affect the host, are rejected.
    for (method, path) in [
        ("GET", "/functions"),
        ("DELETE", "/functions/agent"),
        ("POST", "/functions/agent/disable"),
        ("POST", "/v3/templates"),
        ("POST", "/keys/x/revoke"),
        ("POST", "/host/stop"),
        ("GET", "/host"),
        ("GET", "/fleet"),
        ("GET", "/fleet/nodes"),
        ("GET", "/engines"),
        ("POST", "/prune"),
    ] {
        let answer = api.call(&own, secret, method, path, Value::Null).await;
        assert_eq!(answer.expect_error(403), "forbidden", "{method} {path}");
    }
    let ended = api.call(&own, secret, "DELETE", &path, Value::Null).await;
    ended.expect(204);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_functions_key_creates_nothing_and_sees_its_keys_resources_only() {
    let mut created = None;
    let api = FunctionApi::new(|keys| {
        let key = keys.create("a", Scope::Create, Limits::default()).unwrap();
        let granted = granted(&key, SandboxKeyScope::Read);
        let record = record(Some(&key.key.id), "agent", &granted);
        created = Some((key, granted));
        vec![record]
    });
    let (key, granted) = created.unwrap();
    let (origin, secret) = (agent(&key), granted.secret.as_str());
    let (other, _) = api.api.key(Scope::Create, Limits::default());
    let foreign = api.api.sandbox_of(&other).await;
    let own = TestCaller::Key(key.secret.clone());
    let own = api.api.sandbox_of(&own).await;
    let refused = api.call(&origin, secret, "POST", "/sandboxes", base());
    assert_eq!(refused.await.expect_error(403), "forbidden");
    let list = api.call(&origin, secret, "GET", "/v2/sandboxes", Value::Null);
    let visible = list.await.expect(200).ids();
    // A read-only caller receives a prefix of the id.
    assert!(
        visible.len() == 1 && own.starts_with(&visible[0]),
        "{visible:?}"
    );
    let path = format!("/sandboxes/{foreign}");
    let answer = api.call(&origin, secret, "GET", &path, Value::Null).await;
    answer.expect(404);
    for path in ["/engines", "/pools", "/host"] {
        let answer = api.call(&origin, secret, "GET", path, Value::Null).await;
        assert_eq!(answer.expect_error(403), "forbidden", "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_functions_key_is_valid_only_on_its_own_connections() {
    let mut created = None;
    let api = FunctionApi::new(|keys| {
        let [one, two] =
            ["a", "b"].map(|name| keys.create(name, Scope::Create, Limits::default()).unwrap());
        let [for_one, for_two] = [&one, &two].map(|key| granted(key, SandboxKeyScope::Create));
        let records = vec![
            record(Some(&one.key.id), "agent", &for_one),
            record(Some(&two.key.id), "agent", &for_two),
        ];
        created = Some((one, two, for_one, for_two));
        records
    });
    let (one, two, for_one, for_two) = created.unwrap();
    let list = "/v2/sandboxes";
    let unknown = |answer: Answer| assert_eq!(answer.expect_error(401), "unauthenticated");
    let api = &api;
    let at = |origin: InternalOrigin, secret: &str| {
        let secret = secret.to_owned();
        async move { api.call(&origin, &secret, "GET", list, Value::Null).await }
    };
    let from = |key: &NewKey| InternalOrigin::Sandbox {
        key: key.key.id.clone(),
    };
    at(agent(&one), &for_one.secret).await.expect(200);
    unknown(at(agent(&one), &for_two.secret).await);
    unknown(at(agent(&two), &for_one.secret).await);
    // On connections of functions and sandboxes, API keys are not accepted. Each secret of a
    // sandbox key is accepted only on connections of its holder.
    unknown(at(agent(&one), &one.secret).await);
    unknown(at(agent(&one), &for_one.callback).await);
    unknown(at(agent(&one), "").await);
    unknown(at(from(&one), &for_one.secret).await);
    unknown(at(from(&one), &one.secret).await);
    for secret in [&for_one.secret, &for_one.callback] {
        let outside = TestCaller::Key(secret.clone());
        unknown(api.api.call_as(&outside, "GET", list, Value::Null).await);
    }
    // A callback secret permits only invocations of its function, by path.
    let invoke = "/functions/agent/invoke/x";
    let invoked = |origin, secret: String| {
        let router = api.api.router.clone();
        async move {
            let request = Request::post(invoke).header("x-api-key", secret);
            let request = request.extension::<InternalOrigin>(origin);
            let request = request.body(Body::empty()).unwrap();
            let answer = tower::ServiceExt::oneshot(router, request).await.unwrap();
            answer.status().as_u16()
        }
    };
    assert_eq!(invoked(from(&one), for_one.callback.clone()).await, 200);
    assert_eq!(invoked(from(&two), for_one.callback.clone()).await, 401);
    assert_eq!(invoked(from(&one), for_one.secret.clone()).await, 401);
    // A function may not invoke functions with its own secret.
    assert_eq!(invoked(agent(&one), for_one.secret.clone()).await, 403);
    let origin = from(&one);
    let callback = for_one.callback.as_str();
    let path = "/functions/agent";
    let answer = api.call(&origin, callback, "GET", path, Value::Null);
    unknown(answer.await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_functions_key_ends_with_the_function_and_with_the_key_it_was_deployed_with() {
    let mut created = Vec::new();
    let api = FunctionApi::new(|keys| {
        let mut records = Vec::new();
        let validity = Validity {
            expires_ms: Some(now_ms() + 3_600_000),
            ..Validity::default()
        };
        for name in ["removed", "revoked"] {
            let key = keys.create_within(name, Scope::Create, Limits::default(), &validity);
            let key = key.unwrap();
            let granted = granted(&key, SandboxKeyScope::Create);
            records.push(record(Some(&key.key.id), "agent", &granted));
            created.push((key, granted));
        }
        records
    });
    let [(removed, for_removed), (revoked, for_revoked)] = &created[..] else {
        panic!("{created:?}");
    };
    let call = |key: &NewKey, granted: &SandboxKey| {
        let (origin, secret) = (agent(key), granted.secret.clone());
        let api = &api;
        async move {
            let list = api.call(&origin, &secret, "GET", "/v2/sandboxes", Value::Null);
            list.await.status
        }
    };
    assert_eq!(call(removed, for_removed).await, 200);
    assert_eq!(call(revoked, for_revoked).await, 200);
    // Responses state that the function has a key, but do not contain the secret.
    let owner = TestCaller::Key(removed.secret.clone());
    let info = api.api.call_as(&owner, "GET", "/functions", Value::Null);
    let info = info.await.expect(200).body;
    assert_eq!(info[0]["sandboxKey"], "create");
    for secret in [&for_removed.secret, &for_removed.callback] {
        assert!(!info.to_string().contains(secret.as_str()), "{info}");
    }
    let id = Some(removed.key.id.as_str());
    api.functions.remove(id, "agent").await.unwrap();
    assert_eq!(call(removed, for_removed).await, 401);
    api.api.keys.revoke(&revoked.key.id).unwrap();
    assert_eq!(call(revoked, for_revoked).await, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn private_and_unknown_functions_answer_callers_without_a_right_alike() {
    let mut created = None;
    let api = FunctionApi::new(|keys| {
        let [owner, other] =
            ["a", "b"].map(|name| keys.create(name, Scope::Create, Limits::default()).unwrap());
        let key = granted(&owner, SandboxKeyScope::Create);
        let open = FunctionRecord {
            public: true,
            ..record(Some(&owner.key.id), "open", &key)
        };
        let records = vec![record(Some(&owner.key.id), "hidden", &key), open];
        created = Some((owner, other));
        records
    });
    let (owner, other) = created.unwrap();
    let router = api.api.function_router(api.functions.clone(), NoInvoker);
    let ask = async |label: &str, key: Option<&str>| {
        let mut request = Request::get("/x").extension(FunctionHost(label.to_owned()));
        if let Some(key) = key {
            request = request.header("x-api-key", key);
        }
        let request = request.body(Body::empty()).unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        let (mut head, body) = response.into_parts();
        // The label is part of the body, so its length differs.
        head.headers.remove("content-length");
        let body = to_bytes(body, 1 << 16).await.unwrap();
        let text = String::from_utf8(body.to_vec())
            .unwrap()
            .replace(label, "LABEL");
        (
            head.status.as_u16(),
            format!("{:?}", head.headers).replace(label, "LABEL"),
            text,
        )
    };
    let label = |name: &str| owner::label(Some(&owner.key.id), name);
    // A label of another owner, of a missing function of the owner, and without an owner.
    let unknown = [
        "hidden--000000000000".to_owned(),
        label("gone"),
        "hidden".to_owned(),
    ];
    for (key, status) in [
        (None, 401),
        (Some("e2b_wrong"), 401),
        (Some(&*other.secret), 404),
    ] {
        let private = ask(&label("hidden"), key).await;
        assert_eq!(private.0, status, "{private:?}");
        for unknown in &unknown {
            assert_eq!(ask(unknown, key).await, private, "{unknown} {key:?}");
        }
        assert_eq!(ask(&label("open"), key).await.0, 200);
    }
    assert_eq!(ask(&label("hidden"), Some(&owner.secret)).await.0, 200);
    // Functions of a removed key are reported as unknown.
    let before = ask(&unknown[0], None).await;
    api.api.keys.revoke_and_end(&owner.key.id).unwrap();
    for name in ["hidden", "open"] {
        assert_eq!(ask(&label(name), None).await, before, "{name}");
    }
}
