//! Lists, filters, and the form of error responses.

use crate::support;

use axum::body::Body;
use axum::http::Request;
use bytes::Bytes;
use jiffy_api::PreviewLinks;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use support::{Api, TestCaller};

/// Returns a request of the administrator with the content type `kind`.
fn request(api: &Api, method: &str, path: &str, kind: Option<&str>, body: Body) -> Request<Body> {
    let TestCaller::Key(key) = &api.admin else {
        panic!()
    };
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header("x-api-key", key);
    if let Some(kind) = kind {
        request = request.header("content-type", kind);
    }
    request.body(body).unwrap()
}

#[tokio::test]
async fn all_error_responses_have_one_form() {
    let api = Api::new();
    assert_eq!(api.get("/nope").await.expect_error(404), "no_such_call");
    assert_eq!(
        api.get("/sandboxes/").await.expect_error(404),
        "no_such_call"
    );
    let other = api.put("/v2/sandboxes", json!({})).await;
    let allowed = other.header("allow").unwrap().to_owned();
    assert!(
        allowed.contains("POST") && allowed.contains("GET"),
        "{allowed}"
    );
    assert_eq!(other.expect_error(405), "method_not_allowed");
    // Paths and queries that are not UTF-8.
    for bad in [
        "/sandboxes/%ff",
        "/v2/sandboxes?metadata=%ff",
        "/v2/sandboxes?metadata=%25ff",
        "/v2/sandboxes?%ff=x",
    ] {
        assert_eq!(
            api.get(bad).await.expect_error(400),
            "invalid_request",
            "{bad}"
        );
    }
    let send = |kind: Option<&'static str>, body: &str| {
        let body = Body::from(body.to_owned());
        api.send(request(&api, "POST", "/v2/sandboxes", kind, body))
    };
    let good = r#"{"templateID":"base"}"#;
    // Bodies that are not one JSON object.
    for bad in [
        "",
        "{",
        "[]",
        "null",
        "\"x\"",
        "{\"templateID\":\"base\"} x",
        "\u{0}",
    ] {
        send(Some("application/json"), bad).await.expect(400);
    }
    // The media type must be JSON, if the request names one.
    for kind in ["text/plain", "application/x-www-form-urlencoded", "json"] {
        assert_eq!(
            send(Some(kind), good).await.expect_error(415),
            "unsupported_media_type"
        );
    }
    for kind in [
        Some("application/json; charset=utf-8"),
        Some("Application/JSON"),
        None,
    ] {
        send(kind, good).await.expect(201);
    }
}

#[tokio::test]
async fn unknown_calls_are_rejected_in_one_form_with_merged_routes() {
    let mut api = Api::new();
    let figures = axum::Router::new().route("/metrics", axum::routing::get(async || "figures"));
    api.router = api.router.merge(figures);
    assert_eq!(api.get("/nope").await.expect_error(404), "no_such_call");
    let other = api.put("/v2/sandboxes", json!({})).await;
    assert_eq!(other.expect_error(405), "method_not_allowed");
}

#[tokio::test]
async fn a_body_is_a_mebibyte_at_most_also_in_pieces() {
    let api = Api::new();
    let piece = Bytes::from(vec![b' '; 64 << 10]);
    let stream = |pieces: usize| {
        let tail = Bytes::from_static(br#"{"templateID":"base"}"#);
        let all = std::iter::repeat_n(piece.clone(), pieces).chain([tail]);
        let all: Vec<Result<Bytes, Infallible>> = all.map(Ok).collect();
        Body::from_stream(Pieces(all.into_iter()))
    };
    let send = |body| {
        api.send(request(
            &api,
            "POST",
            "/v2/sandboxes",
            Some("application/json"),
            body,
        ))
    };
    // With the text after them, 15 pieces of 64 KiB are less than 1 MiB, and 16 pieces are more.
    send(stream(15)).await.expect(201);
    assert_eq!(send(stream(16)).await.expect_error(413), "body_too_large");
}

/// Request body of several frames.
struct Pieces(std::vec::IntoIter<Result<Bytes, Infallible>>);

impl futures_core::Stream for Pieces {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        std::task::Poll::Ready(self.0.next())
    }
}

#[tokio::test]
async fn a_list_is_filtered_by_metadata_state_template_and_age() {
    let api = Api::new();
    let make = |template: &str, metadata: Value| {
        api.post(
            "/v2/sandboxes",
            json!({ "templateID": template, "metadata": metadata }),
        )
    };
    let a = make("base", json!({ "user": "x y&z", "app": "1" }))
        .await
        .expect(201)
        .id();
    let b = make("base", json!({ "user": "other", "app": "1" }))
        .await
        .expect(201)
        .id();
    let c = make("large", json!({})).await.expect(201).id();
    api.post(&format!("/sandboxes/{b}/pause"), Value::Null)
        .await
        .expect(204);
    let list = |query: &str| {
        let path = format!("/v2/sandboxes?{query}");
        let api = &api;
        async move {
            let mut ids = api.get(&path).await.expect(200).ids();
            ids.sort();
            ids
        }
    };
    let sorted = |ids: &[&String]| {
        let mut ids: Vec<String> = ids.iter().map(|id| (*id).clone()).collect();
        ids.sort();
        ids
    };
    assert_eq!(list("").await, sorted(&[&a, &b, &c]));
    // `user=x%20y%26z&app=1`, quoted once more.
    assert_eq!(
        list("metadata=user%3Dx%2520y%2526z%26app%3D1").await,
        sorted(&[&a])
    );
    assert_eq!(list("metadata=app%3D1").await, sorted(&[&a, &b]));
    assert_eq!(list("state=running").await, sorted(&[&a, &c]));
    assert_eq!(list("state=paused,running").await, sorted(&[&a, &b, &c]));
    assert_eq!(
        list("state=paused&state=running").await,
        sorted(&[&a, &b, &c])
    );
    assert_eq!(list("template=large").await, sorted(&[&c]));
    assert!(list("startedAfter=2999-01-01T00:00:00Z").await.is_empty());
    // The filter is inclusive: a sandbox's own start time finds the sandbox.
    for id in [&a, &b, &c] {
        let detail = api.get(&format!("/sandboxes/{id}")).await.expect(200);
        let started = detail.text("startedAt");
        let found = list(&format!("startedAfter={started}")).await;
        assert!(found.contains(id), "{started}: {found:?}");
    }
    assert_eq!(
        list("startedAfter=2000-01-01T00:00:00%2B02:00").await.len(),
        3
    );
    assert_eq!(
        api.get("/sandboxes").await.ids().len(),
        2,
        "the first version lists running sandboxes"
    );
    for bad in [
        "state=sleeping",
        "state=",
        "startedAfter=yesterday",
        "limit=0",
        "limit=101",
        "order=x",
        "nextToken=!",
    ] {
        api.get(&format!("/v2/sandboxes?{bad}")).await.expect(400);
    }
}

#[tokio::test]
async fn pages_of_sandboxes_form_the_complete_list() {
    let api = Api::new();
    let mut created = Vec::new();
    for _ in 0..7 {
        created.push(api.sandbox().await);
    }
    for order in ["asc", "desc"] {
        let all = api.get(&format!("/v2/sandboxes?order={order}")).await;
        assert_eq!(all.header("x-next-token"), None);
        let (mut visible, mut next) = (Vec::new(), Some(String::new()));
        while let Some(token) = next {
            let path = format!("/v2/sandboxes?order={order}&limit=3&nextToken={token}");
            let page = api.get(&path).await.expect(200);
            visible.extend(page.ids());
            next = page.header("x-next-token").map(str::to_owned);
        }
        assert_eq!(visible, all.ids());
        assert_eq!(visible.len(), created.len());
    }
}

#[tokio::test]
async fn network_rules_are_replaced_as_a_whole_or_not_at_all() {
    let api = Api::new();
    let body = json!({ "templateID": "base", "network": { "allowOut": ["a.example"], "allowPublicTraffic": false } });
    let id = api.post("/v2/sandboxes", body).await.expect(201).id();
    let path = format!("/sandboxes/{id}/network");
    let update = json!({ "denyOut": ["10.0.0.0/8"], "allow_internet_access": false });
    api.put(&path, update).await.expect(204);
    let shown = api.get(&format!("/sandboxes/{id}")).await.expect(200);
    // Rules that the update lacks are removed. Public traffic is no rule, and stays denied.
    let network = &shown.body["network"];
    assert_eq!(
        (&network["allowOut"], &network["denyOut"]),
        (&json!([]), &json!(["10.0.0.0/8"]))
    );
    assert_eq!(
        (
            &network["allowPublicTraffic"],
            &shown.body["allowInternetAccess"]
        ),
        (&json!(false), &json!(false))
    );
    // Rejected updates change nothing: rules must not set the header `Host`.
    let inject =
        json!({ "rules": { "a.example": [{ "transform": { "headers": { "Host": "b" } } }] } });
    let refused = api.put(&path, inject).await;
    assert!(refused.text("message").contains("`rules`"));
    assert_eq!(refused.expect_error(400), "invalid_request");
    for bad in [
        json!({ "denyOut": ["a.example"] }),
        json!({ "allowOut": "x" }),
        json!({ "rules": [{}] }),
    ] {
        api.put(&path, bad).await.expect(400);
    }
    let still = api.get(&format!("/sandboxes/{id}")).await;
    assert_eq!(still.body["network"]["denyOut"], json!(["10.0.0.0/8"]));
    api.put(&path, json!({})).await.expect(204);
    let cleared = api.get(&format!("/sandboxes/{id}")).await;
    assert_eq!(cleared.body["network"]["denyOut"], json!([]));
    api.put(&path, Value::Null).await.expect(400);
}

#[tokio::test]
async fn metrics_are_the_hosts_samples_of_the_requested_period() {
    let api = Api::with_sampling();
    let id = api.sandbox().await;
    let samples = || api.host.observe().history(&id, None, None).unwrap();
    support::fake::until("samples", || samples().len() > 3).await;
    // A paused sandbox is not sampled.
    api.post(&format!("/sandboxes/{id}/pause"), Value::Null)
        .await
        .expect(204);
    let registered = samples();
    let all = api
        .get(&format!("/sandboxes/{id}/metrics"))
        .await
        .expect(200);
    assert_eq!(all.items().len(), registered.len());
    let (first, last) = (
        registered[0].at_ms / 1000,
        registered[registered.len() - 1].at_ms / 1000,
    );
    assert_eq!(all.body[0]["timestampUnix"], json!(first));
    assert_eq!(all.body[0]["memTotal"], json!(512 << 20));
    let within = |query: String| {
        let path = format!("/sandboxes/{id}/metrics?{query}");
        let api = &api;
        async move { api.get(&path).await.expect(200).items().len() }
    };
    assert_eq!(
        within(format!("start={first}&end={last}")).await,
        registered.len()
    );
    assert_eq!(within(format!("start={}", last + 1)).await, 0);
    assert_eq!(within(format!("end={}", first - 1)).await, 0);
    api.get(&format!("/sandboxes/{id}/metrics?start=-1"))
        .await
        .expect(400);
    let both = api
        .get(&format!("/sandboxes/metrics?sandbox_ids={id},nope"))
        .await
        .expect(200);
    assert_eq!(both.body["sandboxes"].as_object().unwrap().len(), 1);
    assert_eq!(both.body["sandboxes"][&id]["timestampUnix"], json!(last));
    let many = vec!["a"; 101].join(",");
    api.get(&format!("/sandboxes/metrics?sandbox_ids={many}"))
        .await
        .expect(400);
}

#[tokio::test]
async fn connections_are_listed_newest_last_across_a_pause() {
    let api = Api::new();
    let id = api.sandbox().await;
    let path = format!("/sandboxes/{id}/connections");
    let now = api.get(&path).await.expect(200);
    let line = &now.body["connections"][0];
    // Each guest of the fake engine has this connection.
    assert_eq!(line["timestamp"], "1970-01-01T00:00:01Z");
    assert_eq!(
        (&line["protocol"], &line["address"], &line["port"]),
        (&json!("tcp"), &json!("192.0.2.1"), &json!(443))
    );
    assert_eq!(
        (&line["host"], &line["bytesOut"], &line["verdict"]),
        (&json!("a.example"), &json!(10), &json!("allowed"))
    );
    let count = async |query: &str| {
        let answer = api.get(&format!("{path}{query}")).await.expect(200);
        answer.body["connections"].as_array().unwrap().len()
    };
    assert_eq!(count("?limit=0").await, 0);
    // Each guest has one connection: the guest of the create, and the guest of the resume.
    for call in ["pause", "resume", "pause"] {
        let call = format!("/sandboxes/{id}/{call}");
        assert!(api.post(&call, Value::Null).await.status < 300);
    }
    assert_eq!(count("").await, 2);
    assert_eq!(count("?limit=1").await, 1);
    api.get(&format!("{path}?limit=1001")).await.expect(400);
    api.get("/sandboxes/none/connections").await.expect(404);
}

#[tokio::test]
async fn logs_are_the_consoles_last_lines() {
    let api = Api::new();
    let id = api.sandbox().await;
    let first = api
        .get(&format!("/sandboxes/{id}/logs?limit=10"))
        .await
        .expect(200);
    let line = first.body["logs"][0]["line"].as_str().unwrap();
    let line: Value = serde_json::from_str(line).unwrap();
    assert_eq!(
        line["level"], "info",
        "E2B's command line wants JSON: {line}"
    );
    assert_eq!(
        (&line["logger"], &line["message"]),
        (&json!("console"), &json!("guest is up"))
    );
    let at: jiff::Timestamp = first.body["logs"][0]["timestamp"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    for (first_ms, count) in [(at.as_millisecond(), 1), (at.as_millisecond() + 1, 0)] {
        let path = format!("/sandboxes/{id}/logs?start={first_ms}");
        let some = api.get(&path).await.expect(200);
        assert_eq!(
            some.body["logs"].as_array().unwrap().len(),
            count,
            "{first_ms}"
        );
        let path = format!("/v2/sandboxes/{id}/logs?cursor={first_ms}");
        let some = api.get(&path).await.expect(200);
        assert_eq!(
            some.body["logs"].as_array().unwrap().len(),
            count,
            "{first_ms}"
        );
    }
    assert_eq!(first.body["logEntries"][0]["message"], "guest is up");
    let second = format!("/v2/sandboxes/{id}/logs");
    for (query, count) in [
        ("", 1),
        ("?limit=0", 0),
        ("?search=up&direction=backward", 1),
        ("?search=x", 0),
        ("?level=error", 0),
    ] {
        let some = api.get(&format!("{second}{query}")).await.expect(200);
        assert_eq!(
            some.body["logs"].as_array().unwrap().len(),
            count,
            "{query}"
        );
    }
    for bad in ["limit=1001", "direction=up", "level=loud", "cursor=x"] {
        api.get(&format!("{second}?{bad}")).await.expect(400);
    }
    // A paused sandbox has no console lines.
    api.post(&format!("/sandboxes/{id}/pause"), Value::Null)
        .await
        .expect(204);
    let none = api.get(&second).await.expect(200);
    assert_eq!(none.body["logs"], json!([]));
}

#[tokio::test]
async fn a_link_to_a_port_is_valid_for_the_requested_time() {
    let api = Api::new();
    let id = api.sandbox().await;
    assert_eq!(
        // This daemon offers no links to ports.
        api.get(&format!("/sandboxes/{id}/preview?port=80"))
            .await
            .expect_error(501),
        "unsupported"
    );
    let links: Arc<dyn PreviewLinks> = Arc::new(|id: &str, port: u16, expires: u64| {
        format!("http://{port}-{id}.x/?until={expires}")
    });
    let api = Api::with(|app| app.with_preview(links));
    let id = api.sandbox().await;
    let link = api
        .get(&format!("/sandboxes/{id}/preview?port=8080&ttl=60"))
        .await
        .expect(200);
    assert!(
        link.text("url")
            .starts_with(&format!("http://8080-{id}.x/?until="))
    );
    let at: jiff::Timestamp = link.text("expiresAt").parse().unwrap();
    let remaining = at.as_second() - jiff::Timestamp::now().as_second();
    assert!((50..=60).contains(&remaining), "{remaining}");
    for bad in [
        "",
        "?port=0",
        "?port=65536",
        "?port=80&ttl=0",
        "?port=80&ttl=604801",
    ] {
        api.get(&format!("/sandboxes/{id}/preview{bad}"))
            .await
            .expect(400);
    }
}
