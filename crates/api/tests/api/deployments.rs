//! Deployments of functions: disk space is reserved before data is written.

use crate::function_keys::{FunctionApi, granted, record};
use crate::support::TestCaller;
use axum::body::Body;
use axum::http::Request;
use jiffy_api::{Limits, NewKey, Scope};
use jiffy_function_manager::{SandboxKeyScope, owner};
use serde_json::{Value, json};

/// Size in bytes of the module that the key already has.
const MODULE_BYTES: usize = 512 << 10;
/// Disk budget of the key.
const BUDGET_MIB: u64 = 1;

/// Returns a form with one file, whose parts are separated by the boundary `x`.
fn form(part: &str, content: &[u8]) -> Body {
    let mut body =
        format!("--x\r\nContent-Disposition: form-data; name=\"{part}\"; filename=\"m\"\r\n\r\n")
            .into_bytes();
    body.extend(content);
    body.extend(b"\r\n--x--\r\n");
    Body::from(body)
}

/// Returns a deployment. With `length`, the request has a `Content-Length`.
fn request(caller: &TestCaller, name: &str, body: Body, length: Option<usize>) -> Request<Body> {
    let TestCaller::Key(secret) = caller else {
        unreachable!("a key deploys")
    };
    let mut request = Request::post(format!("/functions/{name}"))
        .header("x-api-key", secret)
        .header("content-type", "multipart/form-data; boundary=x");
    if let Some(length) = length {
        request = request.header("content-length", length);
    }
    request.body(body).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_is_neither_received_nor_copied_beyond_the_quota() {
    let mut created = None;
    let content = vec![7; MODULE_BYTES];
    let digest = blake3::hash(&content).to_hex().to_string();
    let api = FunctionApi::new(|keys| {
        let limits = Limits {
            max_disk_mib: Some(BUDGET_MIB),
            ..Limits::default()
        };
        let key: NewKey = keys.create("a", Scope::Create, limits).unwrap();
        let granted = granted(&key, SandboxKeyScope::Create);
        let mut record = record(Some(&key.key.id), "agent", &granted);
        record.versions[0].module.clone_from(&digest);
        record.versions[0].bytes = MODULE_BYTES as u64;
        created = Some(key);
        vec![record]
    });
    let key = created.unwrap();
    let own = api
        .directory()
        .join(owner::directory_name(Some(&key.key.id)));
    std::fs::create_dir_all(own.join("modules")).unwrap();
    std::fs::write(own.join("modules").join(format!("{digest}.wasm")), &content).unwrap();
    let caller = TestCaller::Key(key.secret.clone());

    // The budget has half a MiB left, which is insufficient for a copy with its machine code.
    let settings = json!({ "digest": format!("blake3:{digest}") }).to_string();
    let by_digest = || form("settings", settings.as_bytes());
    for _ in 0..3 {
        let request = request(&caller, "other", by_digest(), None);
        let refused = api.api.send(request).await.expect(507);
        assert_eq!(refused.text("error_code"), "max_disk", "{}", refused.body);
    }
    // The space is also insufficient for a module, with or without a `Content-Length`.
    for length in [None, Some(MODULE_BYTES + 100)] {
        let request = request(&caller, "other", form("module", &content), length);
        api.api.send(request).await.expect(507);
    }
    let uploads = std::fs::read_dir(api.directory().join(".uploads"));
    let remaining: Vec<_> = uploads.into_iter().flatten().flatten().collect();
    assert!(remaining.is_empty(), "{remaining:?}");
    let (status, body): (u16, Value) = {
        let request = request(&caller, "other", form("module", b"no module"), None);
        let answer = api.api.send(request).await;
        (answer.status, answer.body)
    };
    assert_eq!(status, 422, "a small module is compiled: {body}");
}
