//! `jiffy inspect`: all that is known about a sandbox or a snapshot.

use super::table::{self, age, mebibytes};
use crate::cli::InspectArgs;
use jiffy_api_types::{OnTimeout, OperationSteps, SandboxInfo, SandboxState, SnapshotInfo};
use jiffy_client::{Client, is_refusal};
use jiffy_sandbox_manager::Bytes;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;

/// Width of the column of names.
const NAME_COLUMN_WIDTH: usize = 12;

/// Something that is known.
enum Inspected {
    Sandbox(Box<SandboxInfo>),
    Snapshot(Box<SnapshotInfo>),
}

/// Shows each; one that is not found does not spare the others.
pub async fn run(args: &InspectArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let mut code = ExitCode::SUCCESS;
    let mut all = Vec::new();
    for id in &args.ids {
        match find(&client, id).await {
            Ok(found) => all.push(found),
            Err(e) => {
                errln!("jiffy: {e:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    let values = all.iter().map(|found| match found {
        Inspected::Sandbox(record) => serde_json::to_value(record),
        Inspected::Snapshot(record) => serde_json::to_value(record),
    });
    let values: Vec<Value> = values.collect::<Result<_, _>>()?;
    let texts: Vec<String> = all.iter().map(text).collect();
    table::show(args.json, &values, |_| texts.join("\n"))?;
    Ok(code)
}

async fn find(client: &Client, id: &str) -> anyhow::Result<Inspected> {
    match client.sandbox(id).await {
        Ok(found) => {
            let record = table::without_tokens(found.record);
            Ok(Inspected::Sandbox(Box::new(record)))
        }
        // No sandbox: then it is a snapshot, or nothing.
        Err(e) if is_refusal(&e, "sandbox_not_found") => match client.snapshot(id).await {
            Ok(record) => Ok(Inspected::Snapshot(Box::new(record))),
            Err(other) if is_refusal(&other, "snapshot_not_found") => Err(e),
            Err(other) => Err(other),
        },
        Err(e) => Err(e),
    }
}

/// Lines of a name and a value.
#[derive(Default)]
struct DetailLines(String);

impl DetailLines {
    fn add(&mut self, name: &str, value: impl std::fmt::Display) {
        let value = value.to_string();
        if !value.is_empty() {
            // Writing to a String does not fail.
            let _ = writeln!(self.0, "{name:<NAME_COLUMN_WIDTH$} {value}");
        }
    }

    fn pairs(&mut self, name: &str, pairs: &BTreeMap<String, String>) {
        let mut name = name;
        for (key, value) in pairs {
            self.add(name, format!("{key}={value}"));
            name = "";
        }
    }
}

fn text(found: &Inspected) -> String {
    let mut lines = DetailLines::default();
    match found {
        Inspected::Sandbox(record) => sandbox(&mut lines, record),
        Inspected::Snapshot(record) => snapshot(&mut lines, record),
    }
    lines.0
}

fn size(size: &jiffy_engine_api::SandboxSize) -> String {
    let cpus = if size.vcpus == 1 { "CPU" } else { "CPUs" };
    format!(
        "{} {cpus}, {} memory, {} disk",
        size.vcpus,
        mebibytes(size.memory_mib.into()),
        mebibytes(size.disk_mib)
    )
}

fn sandbox(lines: &mut DetailLines, s: &SandboxInfo) {
    lines.add("sandbox", &s.id);
    lines.add("name", s.name.as_deref().unwrap_or_default());
    let state = match &s.state {
        SandboxState::Broken { cause, .. } => format!("broken: {cause}"),
        state => format!("{}, since {}", state.name(), age(s.changed_ms)),
    };
    lines.add("state", state);
    lines.add("template", &s.template);
    lines.add("engine", s.engine.as_deref().unwrap_or_default());
    lines.add("size", size(&s.size));
    lines.add("created", format!("{} ago", age(s.created_ms)));
    if let (Some(mode), Some(ms)) = (s.boot_mode, s.boot_ms) {
        let mode = serde_json::to_value(mode).unwrap_or_default();
        let mode = mode.as_str().unwrap_or_default().to_owned();
        lines.add("came up", format!("{mode}, in {ms:.1} ms"));
    }
    let steps = s.steps.clone().unwrap_or_default();
    operation(lines, "create", steps.create.as_ref());
    // The last operation may be the create.
    operation(
        lines,
        "last",
        steps
            .last
            .filter(|last| Some(last) != steps.create.as_ref())
            .as_ref(),
    );
    lines.add("time limit", time_limit(s));
    let network = match s.settings.network.allow_internet_access {
        Some(false) => "no way to the internet",
        _ => "reaches the internet",
    };
    lines.add("network", network);
    lines.add("allowed", s.settings.network.allow_out.join(", "));
    lines.add("denied", s.settings.network.deny_out.join(", "));
    lines.add("forked from", s.forked_from.as_deref().unwrap_or_default());
    lines.add("snapshot", s.snapshot.as_deref().unwrap_or_default());
    lines.add("key", s.settings.owner.as_deref().unwrap_or_default());
    lines.pairs("labels", &s.settings.metadata);
    lines.pairs("environment", &s.env);
}

/// Adds an operation with its steps, one in a line.
fn operation(lines: &mut DetailLines, name: &str, times: Option<&OperationSteps>) {
    let Some(times) = times else { return };
    lines.add(name, format!("{}, in {:.1} ms", times.operation, times.ms));
    for step in &times.steps {
        lines.add("", format!("  {:>9.3} ms  {}", step.ms, step.step));
    }
}

fn time_limit(s: &SandboxInfo) -> String {
    let Some(seconds) = s.settings.timeout_s else {
        return "none".to_owned();
    };
    let then = match s.settings.on_timeout {
        OnTimeout::Kill => "then it is killed",
        OnTimeout::Pause => "then it is paused",
    };
    match (&s.state, s.deadline_ms) {
        (SandboxState::Running, Some(at)) => {
            format!("{seconds} s, over {}; {then}", table::time_left(at))
        }
        _ => format!("{seconds} s once it runs; {then}"),
    }
}

fn snapshot(lines: &mut DetailLines, s: &SnapshotInfo) {
    lines.add("snapshot", &s.id);
    lines.add("name", s.name.as_deref().unwrap_or_default());
    lines.add("taken", table::reason(s));
    lines.add("sandbox", &s.sandbox);
    lines.add("template", &s.template);
    lines.add("engine", &s.engine);
    lines.add("parent", s.parent.as_deref().unwrap_or_default());
    lines.add("size", size(&s.size));
    lines.add("on disk", format!("{} of its own", Bytes(s.bytes)));
    lines.add("age", age(s.created_ms));
    let took = format!(
        "{:.1} ms, the guest stood still for {:.1} ms",
        s.total_ms, s.stopped_ms
    );
    lines.add("took", took);
    lines.add("key", s.owner.as_deref().unwrap_or_default());
    lines.pairs("environment", &s.env);
}
