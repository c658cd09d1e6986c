//! Builds of stock templates from their recipes.

use crate::support;

use jiffy_api::{
    App, Config, Limits, Scope, TemplateInfo, TemplateRefusal, TemplateSource, router,
};
use jiffy_api_types::{Recipe, RecipeState};
use jiffy_image::{Phase, Progress};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::{Answer, Api, FakeTemplates, TestCaller, base_templates};

/// Time limit of a build.
const LIMIT: Duration = Duration::from_secs(30);

/// Templates with the recipes `tools`, whose build waits for a message and then ends with its
/// result, and `base`.
struct Source {
    templates: FakeTemplates,
    ends: Mutex<Receiver<Result<(), &'static str>>>,
    is_built: AtomicBool,
}

impl TemplateSource for Source {
    fn walk(
        &self,
        from: Option<&str>,
        each: &mut dyn FnMut(TemplateInfo) -> ControlFlow<()>,
    ) -> Result<(), TemplateRefusal> {
        self.templates.walk(from, each)
    }

    fn find(&self, name: &str) -> Result<TemplateInfo, TemplateRefusal> {
        self.templates.find(name)
    }

    fn set_public(&self, name: &str, public: bool) -> Result<(), TemplateRefusal> {
        self.templates.set_public(name, public)
    }

    fn remove(&self, name: &str) -> Result<(), TemplateRefusal> {
        self.templates.remove(name)
    }

    fn recipes(&self) -> Result<Vec<Recipe>, TemplateRefusal> {
        let recipe = |name: &str, from: Option<&str>, is_built| Recipe {
            name: name.to_owned(),
            from: from.map(str::to_owned),
            state: if is_built {
                RecipeState::Ready
            } else {
                RecipeState::Missing
            },
        };
        let is_built = self.is_built.load(Ordering::Relaxed);
        Ok(vec![
            recipe("base", None, true),
            recipe("tools", Some("base"), is_built),
        ])
    }

    fn has_recipe(&self, name: &str) -> bool {
        matches!(name, "base" | "tools")
    }

    fn build_recipe(
        &self,
        name: &str,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), TemplateRefusal> {
        if name == "base" {
            return Ok(());
        }
        on_progress(Progress::Phase(Phase::Packages));
        on_progress(Progress::Percent(40));
        on_progress(Progress::Line("unpacking one"));
        let end = self.ends.lock().unwrap().recv().unwrap();
        self.is_built.store(end.is_ok(), Ordering::Relaxed);
        end.map_err(|e| TemplateRefusal::Failed(e.to_owned()))
    }
}

/// Returns a control plane, and the sender of the results of builds.
fn with_recipes() -> (Api, Sender<Result<(), &'static str>>) {
    let (sender, ends) = channel();
    let source = Source {
        templates: base_templates(),
        ends: Mutex::new(ends),
        is_built: AtomicBool::new(false),
    };
    let api = Api::new();
    let (host, keys) = (api.host.clone(), api.keys.clone());
    let app = App::new(host, keys, Arc::new(source), Config::default());
    let api = Api {
        router: router(app),
        ..api
    };
    (api, sender)
}

async fn start(api: &Api, recipe: &str) -> Answer {
    api.post(&format!("/recipes/{recipe}/build"), Value::Null)
        .await
}

/// Waits until the build of `tools` holds a condition, and returns it.
async fn until(api: &Api, holds: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let build = api.get("/recipes/tools/build").await.expect(200).body;
        if holds(&build) {
            return build;
        }
        assert!(began.elapsed() < LIMIT, "{build}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn state(api: &Api) -> Value {
    let recipes = api.get("/recipes").await.expect(200).body;
    assert_eq!(recipes[1]["name"], "tools");
    assert_eq!(recipes[1]["from"], "base");
    recipes[1]["state"].clone()
}

#[tokio::test]
async fn a_stock_template_is_built_with_a_log_one_at_a_time() {
    let (api, ends) = with_recipes();
    assert_eq!(state(&api).await, "missing");
    let none = api.get("/recipes/tools/build").await;
    assert_eq!(none.expect_error(404), "build_not_found");
    assert_eq!(
        start(&api, "tools").await.expect(202).text("status"),
        "building"
    );
    let running = until(&api, |build| build["logs"].as_array().unwrap().len() == 2).await;
    assert_eq!(running["progress"]["percent"], 40, "{running}");
    assert_eq!(state(&api).await, "building");
    for recipe in ["tools", "base"] {
        let refused = start(&api, recipe).await;
        assert_eq!(refused.expect_error(409), "build_started");
    }
    ends.send(Err("no network")).unwrap();
    let failed = until(&api, |build| build["status"] == "error").await;
    assert_eq!(failed["reason"]["message"], "no network");
    assert_eq!(state(&api).await, "missing");

    start(&api, "tools").await.expect(202);
    ends.send(Ok(())).unwrap();
    let built = until(&api, |build| build["status"] == "ready").await;
    let logs = json!([
        "installing Debian packages",
        "unpacking one",
        "the template is ready"
    ]);
    assert_eq!((&built["logs"], &built["progress"]), (&logs, &Value::Null));
    let page = api.get("/recipes/tools/build?logsOffset=1&limit=1").await;
    assert_eq!(page.expect(200).body["logs"], json!(["unpacking one"]));
    assert_eq!(state(&api).await, "ready");
}

#[tokio::test]
async fn only_administrators_build_stock_templates_and_others_see_their_states() {
    let (api, _ends) = with_recipes();
    for scope in [Scope::Create, Scope::Read] {
        let (caller, _) = api.key(scope, Limits::default());
        for (method, recipe) in [("POST", "base"), ("GET", "base"), ("POST", "nothing")] {
            let path = format!("/recipes/{recipe}/build");
            let refused = api.call_as(&caller, method, &path, Value::Null).await;
            assert_eq!(refused.expect_error(403), "forbidden", "{method} {recipe}");
        }
        let listed = api.call_as(&caller, "GET", "/recipes", Value::Null).await;
        assert_eq!(listed.expect(200).items().len(), 2);
    }
    for recipe in ["nothing", "..%2Fbase"] {
        let unknown = start(&api, recipe).await;
        assert_eq!(unknown.expect_error(404), "template_not_found");
    }
    let path = "/recipes/base/build";
    let built = api
        .call_as(&TestCaller::Owner, "POST", path, Value::Null)
        .await;
    built.expect(202);
}
