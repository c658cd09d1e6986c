//! A control plane with a scripted fake engine. Every response is validated against the OpenAPI
//! document.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

#[path = "../../../../sandbox-manager/tests/fake_engine/fake/mod.rs"]
pub mod fake;
pub mod schema;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Method, Request, StatusCode};
use fake::Bench;
use jiffy_api::{
    App, Caller, Config, FunctionInvoker, Keys, Limits, NewKey, Scope, TemplateInfo,
    TemplateRefusal, TemplateSource, openapi, router,
};
use jiffy_api_types::{Recipe, SnapshotAck};
use jiffy_engine_api::{SandboxSize, TemplateNetwork};
use jiffy_function_manager::Functions;
use jiffy_image::{Home, Progress, Templates, Visibility};
use jiffy_sandbox_manager::{HostOptions, Sandboxes};
use jiffy_secrets::Secrets;
use jiffy_store::host::{RemoteSettings, RemoteStore, STORE_TIMEOUT};
use jiffy_template_builder::{Builder, BuilderSettings};
use jiffy_volumes::{HostVolumes, ServerProgram, StoredVolumes};
use jiffy_webhooks::Webhooks;
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock, Mutex};
use tower::ServiceExt;

static DOCUMENT: LazyLock<Value> = LazyLock::new(openapi::document);

/// Templates of a test.
pub struct FakeTemplates {
    all: Mutex<Vec<TemplateInfo>>,
    /// Number of templates that lists have read.
    pub read_count: Mutex<usize>,
}

impl FakeTemplates {
    pub fn of(all: Vec<TemplateInfo>) -> Self {
        Self {
            all: Mutex::new(all),
            read_count: Mutex::default(),
        }
    }
}

impl TemplateSource for FakeTemplates {
    fn walk(
        &self,
        from: Option<&str>,
        each: &mut dyn FnMut(TemplateInfo) -> ControlFlow<()>,
    ) -> Result<(), TemplateRefusal> {
        let mut all = self.all.lock().unwrap().clone();
        all.sort_by_key(|t| (t.owner.clone(), t.name.clone(), t.tag.clone()));
        let position = |name: &str| match name.split_once('/') {
            Some((owner, name)) => (Some(owner.to_owned()), name.to_owned()),
            None => (None, name.to_owned()),
        };
        let from = from.map(position);
        let reached = |t: &TemplateInfo| Some((t.owner.clone(), t.name.clone())) >= from;
        for info in all.into_iter().filter(reached) {
            *self.read_count.lock().unwrap() += 1;
            if each(info).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Result<TemplateInfo, TemplateRefusal> {
        if name == "damaged" {
            return Err(TemplateRefusal::Failed("/secret/path is damaged".into()));
        }
        let all = self.all.lock().unwrap();
        let found = all.iter().find(|t| t.name == name);
        let unknown = || TemplateRefusal::Unknown(name.to_owned());
        found.cloned().ok_or_else(unknown)
    }

    fn set_public(&self, name: &str, _: bool) -> Result<(), TemplateRefusal> {
        Err(TemplateRefusal::Stock(name.to_owned()))
    }

    fn remove(&self, name: &str) -> Result<(), TemplateRefusal> {
        self.find(name)?;
        self.all.lock().unwrap().retain(|t| t.name != name);
        Ok(())
    }

    fn recipes(&self) -> Result<Vec<Recipe>, TemplateRefusal> {
        Ok(Vec::new())
    }

    fn has_recipe(&self, _: &str) -> bool {
        false
    }

    fn build_recipe(
        &self,
        name: &str,
        _: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), TemplateRefusal> {
        Err(TemplateRefusal::Unknown(name.to_owned()))
    }
}

/// Sender of a request.
#[derive(Clone)]
pub enum TestCaller {
    /// Owner of the host, who needs no key.
    Owner,
    /// Client with the secret of an API key.
    Key(String),
    /// Client without a key.
    Nobody,
}

/// Response to a request.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Value,
}

impl Answer {
    /// Returns a field of the body, which must be a text.
    pub fn text(&self, field: &str) -> String {
        let text = self.body[field].as_str();
        text.unwrap_or_else(|| panic!("no {field} in {}", self.body))
            .to_owned()
    }

    /// Returns the id of the sandbox in the body.
    pub fn id(&self) -> String {
        self.text("sandboxID")
    }

    /// Asserts that the response has this status.
    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{}", self.body);
        self
    }

    /// Asserts that the response has this error status. Returns the error code.
    #[track_caller]
    pub fn expect_error(self, status: u16) -> String {
        self.expect(status).text("error_code")
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|v| v.to_str().unwrap())
    }

    /// Returns the items of a list.
    pub fn items(&self) -> &Vec<Value> {
        self.body.as_array().unwrap()
    }

    /// Returns the ids of a list of sandboxes.
    pub fn ids(&self) -> Vec<String> {
        let id = |item: &Value| item["sandboxID"].as_str().unwrap().to_owned();
        self.items().iter().map(id).collect()
    }
}

/// Templates of every control plane.
pub fn base_templates() -> FakeTemplates {
    let template = |name: &str, disk_mib| TemplateInfo {
        name: name.into(),
        owner: None,
        visibility: Visibility::Public,
        tag: "default".into(),
        version: Some("ab".repeat(32)),
        size: SandboxSize {
            disk_mib,
            ..SandboxSize::default()
        },
        idle_timeout_s: (name == "large").then_some(900),
        network: (name == "large").then(|| {
            Arc::new(TemplateNetwork {
                allow_internet_access: Some(false),
                ..TemplateNetwork::default()
            })
        }),
        created: 1_700_000_000,
    };
    FakeTemplates::of(vec![template("base", 1024), template("large", 4096)])
}

/// Control plane on a fake engine, with the objects that tests inspect.
pub struct Api {
    pub bench: Bench,
    pub host: Sandboxes,
    pub keys: Arc<Keys>,
    pub router: Router,
    /// Caller with an admin key, which sends the requests of [`Api::get`], [`Api::post`], ...
    pub admin: TestCaller,
}

/// Adds volumes whose servers are threads, and a store for their snapshots.
fn add_volumes(app: App, home: &std::path::Path) -> App {
    let open = HostVolumes::open(home, &home.join("run"), ServerProgram::Thread);
    let volumes = Arc::new(open.unwrap());
    let settings = RemoteSettings {
        url: format!("file://{}/bucket", home.display()).parse().unwrap(),
        keyring: None,
        home: home.to_owned(),
        cache_bytes: 1 << 30,
        upload_bytes_per_second: None,
        timeout: STORE_TIMEOUT,
    };
    let remote = RemoteStore::open(&settings).unwrap();
    let stored = StoredVolumes::open(home, volumes.clone(), remote).unwrap();
    app.with_volumes(volumes).with_stored_volumes(Some(stored))
}

impl Api {
    /// Creates a control plane with default options.
    pub fn new() -> Self {
        Self::with(|app| app)
    }

    /// Creates a control plane whose state is modified by `change`.
    pub fn with(change: impl FnOnce(App) -> App) -> Self {
        Self::with_options(HostOptions::default(), change)
    }

    /// Creates a control plane that samples its sandboxes continuously.
    pub fn with_sampling() -> Self {
        let sample = std::time::Duration::from_millis(5);
        let options = HostOptions {
            sample,
            ..HostOptions::default()
        };
        Self::with_options(options, |app| app)
    }

    /// Creates a control plane with a template builder.
    pub async fn with_builder() -> Self {
        let api = Self::new();
        let home = api.home();
        let builder = Builder::open(&home, api.host.clone(), BuilderSettings::default());
        let builder = builder.await.unwrap();
        api.with_reopened_builder(builder)
    }

    /// Returns the control plane with another builder.
    pub fn with_reopened_builder(self, builder: Builder) -> Self {
        let (keys, host) = (self.keys.clone(), self.host.clone());
        let templates = Arc::new(Templates::new(&self.home()));
        let app = App::new(host, keys, templates, Config::default())
            .with_builder(builder)
            .with_secrets(Secrets::open(self.bench.dir.path()).unwrap())
            .with_webhooks(Webhooks::open(self.bench.dir.path()).unwrap());
        let app = add_volumes(app, self.bench.dir.path());
        Self {
            router: router(app),
            ..self
        }
    }

    /// Returns the control plane of a host that stores no secrets.
    pub fn without_secrets(self) -> Self {
        let (keys, host) = (self.keys.clone(), self.host.clone());
        let app = App::new(host, keys, Arc::new(base_templates()), Config::default());
        Self {
            router: router(app),
            ..self
        }
    }

    /// Returns the control plane of a daemon with this default for the answers of snapshots.
    pub fn with_snapshot_ack(self, snapshot_ack: SnapshotAck) -> Self {
        let (keys, host) = (self.keys.clone(), self.host.clone());
        let config = Config {
            snapshot_ack,
            ..Config::default()
        };
        let app = App::new(host, keys, Arc::new(base_templates()), config);
        Self {
            router: router(app),
            ..self
        }
    }

    /// Returns the control plane with functions.
    pub fn with_functions(self, functions: Functions, invoker: impl FunctionInvoker) -> Self {
        let (keys, host) = (self.keys.clone(), self.host.clone());
        let templates = Arc::new(base_templates());
        let app = App::new(host, keys, templates, Config::default());
        let app = app.with_functions(functions, Arc::new(invoker));
        Self {
            router: router(app),
            ..self
        }
    }

    /// Returns the router of requests to functions by host name.
    pub fn function_router(&self, functions: Functions, invoker: impl FunctionInvoker) -> Router {
        let (keys, host) = (self.keys.clone(), self.host.clone());
        let app = App::new(host, keys, Arc::new(base_templates()), Config::default());
        jiffy_api::function_router(app.with_functions(functions, Arc::new(invoker)))
    }

    /// Returns the data directory of a control plane with a builder.
    pub fn home(&self) -> Home {
        Home::at(self.bench.dir.path().join("home")).unwrap()
    }

    /// Opens a host with these options. `change` adds parts to the API, for example a builder.
    pub fn with_options(options: HostOptions, change: impl FnOnce(App) -> App) -> Self {
        let bench = Bench::new();
        let host = bench.open_first(options);
        let keys = Arc::new(Keys::open(bench.dir.path()).unwrap());
        let admin = keys
            .create("admin", Scope::Admin, Limits::default())
            .unwrap();
        let config = Config {
            domain: Some("sandboxes.example:3000".into()),
            ..Config::default()
        };
        let app = App::new(
            host.clone(),
            keys.clone(),
            Arc::new(base_templates()),
            config,
        );
        let app = app.with_secrets(Secrets::open(bench.dir.path()).unwrap());
        let app = add_volumes(app, bench.dir.path());
        let app = app.with_webhooks(Webhooks::open(bench.dir.path()).unwrap());
        Self {
            router: router(change(app)),
            admin: TestCaller::Key(admin.secret),
            bench,
            host,
            keys,
        }
    }

    /// Creates a key and its caller.
    pub fn key(&self, scope: Scope, limits: Limits) -> (TestCaller, NewKey) {
        let key = self.keys.create("test", scope, limits).unwrap();
        (TestCaller::Key(key.secret.clone()), key)
    }

    /// Sends a request unchanged.
    pub async fn send(&self, request: Request<Body>) -> Answer {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = to_bytes(body, 16 << 20).await.unwrap();
        let body = if bytes.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&bytes)
                .unwrap_or_else(|e| panic!("{method} {path} did not return JSON ({e}): {bytes:?}"))
        };
        let answer = Answer {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body,
        };
        check_response(&method, &path, &answer);
        answer
    }

    /// Sends a request of `caller`. A body of `null` is omitted.
    pub async fn call_as(
        &self,
        caller: &TestCaller,
        method: &str,
        path: &str,
        body: Value,
    ) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        match caller {
            TestCaller::Key(key) => request = request.header("x-api-key", key),
            TestCaller::Owner => request = request.extension(Caller::Owner),
            TestCaller::Nobody => {}
        }
        let body = match body {
            Value::Null => Body::empty(),
            body => {
                request = request.header("content-type", "application/json");
                Body::from(body.to_string())
            }
        };
        self.send(request.body(body).unwrap()).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call_as(&self.admin, "GET", path, Value::Null).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.call_as(&self.admin, "POST", path, body).await
    }

    pub async fn put(&self, path: &str, body: Value) -> Answer {
        self.call_as(&self.admin, "PUT", path, body).await
    }

    pub async fn patch(&self, path: &str, body: Value) -> Answer {
        self.call_as(&self.admin, "PATCH", path, body).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.call_as(&self.admin, "DELETE", path, Value::Null).await
    }

    /// Creates a sandbox of `base` and returns its id.
    pub async fn sandbox(&self) -> String {
        self.sandbox_of(&self.admin).await
    }

    /// Creates a sandbox of a caller. Returns its id.
    pub async fn sandbox_of(&self, caller: &TestCaller) -> String {
        let body = json!({ "templateID": "base" });
        let made = self.call_as(caller, "POST", "/v2/sandboxes", body).await;
        made.expect(201).id()
    }
}

/// Asserts that the document describes this response.
fn check_response(method: &Method, path: &str, answer: &Answer) {
    let status = answer.status;
    let Some((known, operation)) = find_operation(method, path) else {
        assert!(matches!(status, 404 | 405), "{method} {path}: {status}");
        assert_error_form(answer);
        return;
    };
    let shown = &operation["responses"][status.to_string()];
    assert!(
        shown.is_object(),
        "{method} {known} answers {status}, which its description lacks: {}",
        answer.body
    );
    if status >= 400 {
        assert_error_form(answer);
    }
    let schema = &shown["content"]["application/json"]["schema"];
    if schema.is_null() {
        assert_eq!(answer.body, Value::Null, "{method} {known} {status}");
        return;
    }
    let problems = schema::problems(schema, &DOCUMENT["components"]["schemas"], &answer.body);
    assert!(
        problems.is_empty(),
        "{method} {known} {status}: {problems:?} in {}",
        answer.body
    );
}

/// Asserts that an error response has the fields of all error responses.
fn assert_error_form(answer: &Answer) {
    assert_eq!(answer.body["code"], answer.status, "{}", answer.body);
    let message = answer.text("message");
    assert!(!message.is_empty());
    // Harbor and CubeSandbox's test suite match these words.
    let code = answer.body["error_code"].as_str().unwrap_or_default();
    let is_missing = answer.status == 404 && !["no_such_call", "sandbox_broken"].contains(&code);
    assert!(
        !is_missing || message.contains("does not exist"),
        "{message}"
    );
    let kind = answer.header("content-type").unwrap();
    assert!(kind.starts_with("application/json"), "{kind}");
    assert_ne!(StatusCode::OK, answer.status);
}

/// Returns the operation of a call. Literal paths take precedence over paths with parameters.
fn find_operation(method: &Method, path: &str) -> Option<(String, Value)> {
    let parts: Vec<&str> = path.split('/').collect();
    let fits = |pattern: &str| {
        let pattern: Vec<&str> = pattern.split('/').collect();
        let part = |(p, s): (&&str, &&str)| p == s || (p.starts_with('{') && !s.is_empty());
        pattern.len() == parts.len() && pattern.iter().zip(&parts).all(part)
    };
    let paths = DOCUMENT["paths"].as_object().unwrap();
    let mut found: Vec<_> = paths.iter().filter(|(p, _)| fits(p)).collect();
    found.sort_by_key(|(p, _)| p.matches('{').count());
    let (pattern, calls) = found.first()?;
    let call = calls.get(method.as_str().to_lowercase())?;
    Some(((*pattern).clone(), call.clone()))
}
