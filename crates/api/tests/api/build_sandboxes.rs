//! Sandboxes of builds: they terminate with their build, and a build waits for free memory of the
//! host. The fake engine (`world`) can hold the start of a sandbox at its step `restore`.

use crate::names::put;
use crate::support::fake::until;
use crate::support::{Answer, Api};
use jiffy_image::Home;
use jiffy_sandbox_manager::{HostFigures, HostOptions, HostReader, Sandbox, SandboxState};
use jiffy_template_builder::{Builder, BuilderSettings};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Starts a build of one command. Returns the path of its calls.
async fn start(api: &Api) -> String {
    put(api, "base", None);
    let body = json!({ "name": "mine", "cpuCount": 1, "memoryMB": 512 });
    let requested = api.post("/v3/templates", body).await.expect(202);
    let (template, build) = (requested.text("templateID"), requested.text("buildID"));
    let path = format!("/templates/{template}/builds/{build}");
    let steps = json!({ "fromTemplate": "base", "steps": [{ "type": "RUN", "args": ["x"] }] });
    api.post(&format!("/v2{path}"), steps).await.expect(202);
    path
}

/// Returns the sandboxes created by builds.
fn of_builds(api: &Api) -> Vec<Sandbox> {
    let of_build = |r: &Sandbox| r.settings().metadata.contains_key("jiffy.build");
    api.host.index().all(of_build)
}

#[tokio::test]
async fn cancelling_a_build_removes_a_sandbox_that_is_starting() {
    let api = Api::with_builder().await;
    let world = api.bench.world.clone();
    world.hold("restore");
    let path = start(&api).await;
    until("the restore", || world.is_stuck("restore")).await;
    let [starting] = &of_builds(&api)[..] else {
        panic!("{:?}", of_builds(&api));
    };
    let cancel = format!("{path}/cancel");
    let release = async {
        // The creation continues only after the request was processed as far as possible.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        world.release("restore");
    };
    let (cancelled, ()) = tokio::join!(api.post(&cancel, Value::Null), release);
    cancelled.expect(204);
    let removed = || {
        let found = api.host.find(starting.id());
        found.is_none_or(|record| *record.state() == SandboxState::Killed)
    };
    until("the end of the sandbox", removed).await;
    assert_eq!(world.running(), [""; 0]);
}

/// A host whose memory is exhausted until the flag is true.
#[derive(Debug, Default)]
struct Short(AtomicBool);

impl HostReader for Short {
    fn read(&self) -> HostFigures {
        if self.0.load(Ordering::Relaxed) {
            HostFigures::default()
        } else {
            HostFigures {
                memory_total_mib: Some(8192),
                memory_available_mib: Some(100),
                ..HostFigures::default()
            }
        }
    }
}

#[tokio::test]
async fn a_build_waits_for_memory_of_the_host_and_logs_the_wait() {
    let host = Arc::new(Short::default());
    let options = HostOptions {
        reader: Some(host.clone()),
        ..HostOptions::default()
    };
    let api = Api::with_options(options, |app| app);
    let home = Home::at(api.bench.dir.path().join("home")).unwrap();
    let builder = Builder::open(&home, api.host.clone(), BuilderSettings::default());
    let api = api.with_reopened_builder(builder.await.unwrap());
    let world = api.bench.world.clone();
    world.hold("restore");
    let path = start(&api).await;
    let logs = async || -> Answer { api.get(&format!("{path}/logs")).await.expect(200) };
    let says = |logs: &Answer| logs.body.to_string().contains("waiting for the host");
    while !says(&logs().await) {
        tokio::task::yield_now().await;
    }
    let status = format!("{path}/status");
    let now = api.get(&status).await.expect(200);
    assert_eq!(now.text("status"), "building", "{}", now.body);
    assert_eq!(of_builds(&api).len(), 0);
    host.0.store(true, Ordering::Relaxed);
    until("the sandbox", || world.is_stuck("restore")).await;
    assert_eq!(of_builds(&api).len(), 1);
    world.release("restore");
    let cancel = format!("{path}/cancel");
    api.post(&cancel, Value::Null).await.expect(204);
    until("the end", || world.running().is_empty()).await;
}
