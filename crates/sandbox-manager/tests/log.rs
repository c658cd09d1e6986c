//! Log lines of operations, and secrets that must not be logged. The program has only one test,
//! since a process has only one tracing subscriber.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "fake_engine/fake/mod.rs"]
mod fake;

use fake::{Bench, base};
use jiffy_sandbox_manager::{CreateSpec, SandboxSettings};
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tracing_subscriber::fmt::MakeWriter;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[test]
fn the_log_names_operation_sandbox_and_outcome_but_no_secrets() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(log.clone())
        .finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let bench = Bench::new();
    let ids = Arc::new(Mutex::new(Vec::new()));
    bench.run_and_kill(async {
        let host = bench.open().await;
        let spec = CreateSpec {
            env: [("API_KEY".to_owned(), "hunter2-in-env".to_owned())].into(),
            settings: SandboxSettings {
                secure: true,
                owner: Some("key-of-the-owner".into()),
                metadata: [("note".to_owned(), "private-note".to_owned())].into(),
                ..SandboxSettings::default()
            },
            ..base()
        };
        let sandbox = host.create(spec).await.unwrap();
        let create = host.observe().times(sandbox.id()).create.unwrap();
        // The steps of an operation, in the order of their ends. `keep` detaches the guest.
        let names: Vec<&str> = create.steps.iter().map(|step| step.name).collect();
        let expected = ["admission", "fingerprint", "template_snapshot"];
        assert_eq!(names, [&expected[..], &["keep", "journal"]].concat());
        let sum: Duration = create.steps.iter().map(|step| step.duration).sum();
        assert!(sum <= create.duration, "{create:?}");
        host.fork(sandbox.id(), 2, None).await.unwrap();
        host.pause(sandbox.id()).await.unwrap();
        let times = host.observe().times(sandbox.id());
        assert_eq!(times.create.unwrap(), create);
        assert_eq!(times.last.unwrap().operation, "pause");
        let metrics = host.figures().render();
        for (operation, step, count) in [
            ("create", "journal", 1),
            ("child", "admission", 2),
            ("pause", "snapshot", 1),
        ] {
            let labels = format!("operation=\"{operation}\",step=\"{step}\"");
            let line = format!("jiffy_operation_step_seconds_count{{{labels}}} {count}");
            assert!(metrics.lines().any(|l| l == line), "no {line} in {metrics}");
        }
        // A failed operation is logged with the same fields.
        bench.world.fail("assign");
        assert!(host.resume(sandbox.id()).await.is_err());
        bench.world.clear_failures();
        host.kill(sandbox.id()).await.unwrap();
        ids.lock().unwrap().push(sandbox);
    });
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let sandbox = ids.lock().unwrap().remove(0);
    let token = sandbox.agent_token().unwrap();
    for secret in ["hunter2-in-env", "key-of-the-owner", "private-note", token] {
        assert!(!text.contains(secret), "{secret} is in the log");
    }
    let lines: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let has_steps = |line: &serde_json::Value| {
        let steps = line["fields"]["steps"].as_str().unwrap_or_default();
        line["span"]["operation"] == "create" && steps.contains("journal=")
    };
    assert!(
        lines.iter().any(has_steps),
        "no steps of the create in {text}"
    );
    let is_logged = |name: &str, outcome: &str| {
        lines.iter().any(|l| {
            l["span"]["operation"] == name
                && l["span"]["sandbox"] == sandbox.id()
                && l["fields"]["outcome"] == outcome
                && l["fields"]["ms"].as_f64().is_some()
        })
    };
    for (name, outcome) in [
        ("create", "ok"),
        ("fork", "ok"),
        ("pause", "ok"),
        ("resume", "failed"),
        ("kill", "ok"),
    ] {
        assert!(
            is_logged(name, outcome),
            "{name} {outcome} is not in {text}"
        );
    }
}
