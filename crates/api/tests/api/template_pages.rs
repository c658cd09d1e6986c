//! Pagination of the list of templates.

use crate::support::{FakeTemplates, TestCaller};
use axum::body::Body;
use axum::http::{Request, StatusCode};
use jiffy_api::{App, Caller, Config, TemplateInfo, router};
use jiffy_engine_api::SandboxSize;
use jiffy_image::Visibility;
use serde_json::Value;
use std::sync::Arc;
use tower::ServiceExt;

/// Templates of the host.
const NUMBER: usize = 3000;

/// Returns a template with this owner, name, tag and visibility.
fn template(owner: Option<&str>, name: &str, tag: &str, visibility: Visibility) -> TemplateInfo {
    TemplateInfo {
        name: name.to_owned(),
        owner: owner.map(str::to_owned),
        visibility,
        tag: tag.to_owned(),
        version: Some("ab".repeat(32)),
        size: SandboxSize::default(),
        idle_timeout_s: None,
        network: Default::default(),
        created: 1_700_000_000,
    }
}

/// A control plane with many templates.
struct Many {
    templates: Arc<FakeTemplates>,
    router: axum::Router,
    _api: crate::support::Api,
}

impl Many {
    /// Creates an API whose host has these templates.
    fn of(all: Vec<TemplateInfo>) -> Self {
        let api = crate::support::Api::new();
        let templates = Arc::new(FakeTemplates::of(all));
        let (host, keys) = (api.host.clone(), api.keys.clone());
        let app = App::new(host, keys, templates.clone(), Config::default());
        Self {
            templates,
            router: router(app),
            _api: api,
        }
    }

    /// Returns the first names, the token of the next page, and the number of templates read.
    async fn page(&self, query: &str) -> (Vec<String>, Option<String>, usize) {
        let before = *self.templates.read_count.lock().unwrap();
        let mut request = Request::get(format!("/templates{query}"));
        let extensions = request.extensions_mut().unwrap();
        extensions.insert(Caller::Owner);
        let request = request.body(Body::empty()).unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let next = response.headers().get("x-next-token").cloned();
        let next = next.map(|next| next.to_str().unwrap().to_owned());
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await;
        let body: Vec<Value> = serde_json::from_slice(&body.unwrap()).unwrap();
        let names = body
            .iter()
            .map(|t| t["names"][0].as_str().unwrap().to_owned());
        let read_count = *self.templates.read_count.lock().unwrap() - before;
        (names.collect(), next, read_count)
    }
}

#[tokio::test]
async fn a_page_reads_only_its_templates_and_all_pages_form_the_list() {
    let all = (0..NUMBER).map(|at| {
        let name = format!("t{at:05}");
        template(None, &name, "default", Visibility::Private)
    });
    let many = Many::of(all.collect());
    let (first, next, read_count) = many.page("?limit=10").await;
    assert_eq!(
        (first.len(), &*first[0], &*first[9]),
        (10, "t00000", "t00009")
    );
    // The ten templates of the page, an eleventh that shows that a next page exists, and the first
    // tag of the twelfth, which ends the tags of the eleventh.
    assert!(read_count <= 12, "{read_count}");
    let (second, _, read_count) = many
        .page(&format!("?limit=10&nextToken={}", next.unwrap()))
        .await;
    assert_eq!((second.len(), &*second[0]), (10, "t00010"));
    // Also the last template of the previous page, at which the walk starts.
    assert!(read_count <= 13, "{read_count}");
    // Clients without support for pages get a bounded list with a token for the next page.
    let (mut visible, mut next, read_count) = many.page("").await;
    assert_eq!(visible.len(), 1000);
    assert!(read_count <= 1002, "{read_count}");
    while let Some(token) = next {
        let part;
        (part, next, _) = many.page(&format!("?nextToken={token}")).await;
        visible.extend(part);
    }
    let expected: Vec<String> = (0..NUMBER).map(|at| format!("t{at:05}")).collect();
    assert_eq!(visible, expected);
}

#[tokio::test]
async fn tags_of_a_template_are_on_one_page_and_internal_templates_are_hidden() {
    use Visibility::{Internal, Private};
    let key = "aaaaaaaaaaaaaaaaaaaa";
    let many = Many::of(vec![
        template(None, "a", "default", Private),
        template(None, "a", "old", Private),
        template(None, "b", "x", Private),
        template(None, "c", "default", Internal),
        template(None, "d", "default", Private),
        template(Some(key), "a", "default", Private),
    ]);
    let (mut visible, mut next, _) = many.page("?limit=1").await;
    while let Some(token) = next {
        let part;
        (part, next, _) = many.page(&format!("?limit=1&nextToken={token}")).await;
        assert!(part.len() == 1, "{part:?}");
        visible.extend(part);
    }
    assert_eq!(visible, ["a", "b:x", "d", &format!("{key}/a")]);
}

#[tokio::test]
async fn page_parameters_of_templates_out_of_bounds_are_refused() {
    let api = crate::support::Api::new();
    for bad in ["limit=0", "limit=101", "limit=x", "nextToken=%2B"] {
        let path = format!("/templates?{bad}");
        let answer = api.call_as(&TestCaller::Owner, "GET", &path, Value::Null);
        answer.await.expect(400);
    }
}
