//! `jiffy inspect`: shows the details of sandboxes and snapshots.

use super::table::{self, age, mebibytes};
use crate::cli::InspectArgs;
use jiffy_api_types::{OnTimeout, OperationSteps, SandboxInfo, SandboxState, SnapshotInfo};
use jiffy_client::SandboxOrSnapshot;
use jiffy_sandbox_manager::Bytes;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;

/// Width of the name column.
const NAME_COLUMN_WIDTH: usize = 12;

/// Prints the records of all objects. Continues after failures.
pub async fn run(args: &InspectArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let mut code = ExitCode::SUCCESS;
    let mut all = Vec::new();
    for id in &args.ids {
        match client.sandbox_or_snapshot(id).await {
            Ok(SandboxOrSnapshot::Sandbox(record)) => {
                let record = table::without_tokens(*record);
                all.push(SandboxOrSnapshot::Sandbox(Box::new(record)));
            }
            Ok(snapshot) => all.push(snapshot),
            Err(e) => {
                errln!("jiffy: {e:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    let values = all.iter().map(|object| match object {
        SandboxOrSnapshot::Sandbox(record) => serde_json::to_value(record),
        SandboxOrSnapshot::Snapshot(record) => serde_json::to_value(record),
    });
    let values: Vec<Value> = values.collect::<Result<_, _>>()?;
    let texts: Vec<String> = all.iter().map(text).collect();
    table::show(args.json, &values, |_| texts.join("\n"))?;
    Ok(code)
}

/// Lines with a name and a value.
#[derive(Default)]
struct DetailLines(String);

impl DetailLines {
    /// Adds a line, unless the value is empty.
    fn add(&mut self, name: &str, value: impl std::fmt::Display) {
        let value = value.to_string();
        if !value.is_empty() {
            let _ = writeln!(self.0, "{name:<NAME_COLUMN_WIDTH$} {value}");
        }
    }

    /// Adds a line for each pair. Only the first line has the name.
    fn pairs(&mut self, name: &str, pairs: &BTreeMap<String, String>) {
        let mut name = name;
        for (key, value) in pairs {
            self.add(name, format!("{key}={value}"));
            name = "";
        }
    }
}

/// Returns the details of an object as lines.
pub fn text(object: &SandboxOrSnapshot) -> String {
    let mut lines = DetailLines::default();
    match object {
        SandboxOrSnapshot::Sandbox(record) => sandbox(&mut lines, record),
        SandboxOrSnapshot::Snapshot(record) => snapshot(&mut lines, record),
    }
    lines.0
}

/// Formats the size of a sandbox.
fn size(size: &jiffy_engine_api::SandboxSize) -> String {
    let cpus = if size.vcpus == 1 { "CPU" } else { "CPUs" };
    format!(
        "{} {cpus}, {} memory, {} disk",
        size.vcpus,
        mebibytes(size.memory_mib.into()),
        mebibytes(size.disk_mib)
    )
}

/// Adds the details of a sandbox.
fn sandbox(lines: &mut DetailLines, s: &SandboxInfo) {
    lines.add("sandbox", &s.id);
    lines.add("name", s.name.as_deref().unwrap_or_default());
    let state = match &s.state {
        SandboxState::Broken { cause, .. } => format!("broken: {cause}"),
        _ => format!("{}, since {}", table::state(s), age(s.changed_ms)),
    };
    lines.add("state", state);
    lines.add("template", &s.template);
    lines.add("engine", s.engine.as_deref().unwrap_or_default());
    lines.add("size", size(&s.size));
    lines.add("created", format!("{} ago", age(s.created_ms)));
    if let (Some(mode), Some(ms)) = (s.boot_mode, s.boot_ms) {
        let mode = serde_json::to_value(mode).unwrap_or_default();
        let mode = mode.as_str().unwrap_or_default().to_owned();
        lines.add("boot", format!("{mode}, in {ms:.1} ms"));
    }
    let steps = s.steps.clone().unwrap_or_default();
    operation(lines, "create", steps.create.as_ref());
    // The last operation is not repeated if it is the create.
    operation(
        lines,
        "last",
        steps
            .last
            .filter(|last| Some(last) != steps.create.as_ref())
            .as_ref(),
    );
    lines.add("timeout", timeout(s));
    if let Some(seconds) = s.settings.idle_timeout_s {
        lines.add("idle timeout", format!("{seconds} s, then {}", paused(s)));
    }
    let network = match s.settings.network.allow_internet_access {
        Some(false) => "no internet access",
        _ => "internet access",
    };
    lines.add("network", network);
    let own = &s.settings.network;
    if let (Some(name), Some(address)) = (&own.join, &own.address) {
        lines.add("joined", format!("{name}, as {address}"));
    }
    lines.add("allowed", s.settings.network.allow_out.join(", "));
    lines.add("denied", s.settings.network.deny_out.join(", "));
    let proxy = s.settings.network.egress_proxy.as_ref();
    lines.add("egress proxy", proxy.map_or("", |proxy| &proxy.address));
    for (number, mount) in s.settings.volumes.iter().enumerate() {
        let name = if number == 0 { "volumes" } else { "" };
        let rights = if mount.read_only { " (read-only)" } else { "" };
        lines.add(name, format!("{} at {}{rights}", mount.name, mount.path));
    }
    lines.add("forked from", s.forked_from.as_deref().unwrap_or_default());
    lines.add("snapshot", s.snapshot.as_deref().unwrap_or_default());
    lines.add("key", s.settings.owner.as_deref().unwrap_or_default());
    lines.pairs("labels", &s.settings.metadata);
    lines.pairs("environment", &s.env);
}

/// Adds an operation and its steps, one step per line.
fn operation(lines: &mut DetailLines, name: &str, times: Option<&OperationSteps>) {
    let Some(times) = times else { return };
    lines.add(name, format!("{}, in {:.1} ms", times.operation, times.ms));
    for step in &times.steps {
        lines.add("", format!("  {:>9.3} ms  {}", step.ms, step.step));
    }
}

/// Formats the timeout of a sandbox and the action at its end.
fn timeout(s: &SandboxInfo) -> String {
    let Some(seconds) = s.settings.timeout_s else {
        return "none".to_owned();
    };
    let action = match s.settings.on_timeout {
        OnTimeout::Kill => "then killed".to_owned(),
        OnTimeout::Pause => format!("then {}", paused(s)),
    };
    match (&s.state, s.deadline_ms) {
        (SandboxState::Running, Some(at)) => {
            format!("{seconds} s, expires {}, {action}", table::time_left(at))
        }
        _ => format!("{seconds} s after the next start, {action}"),
    }
}

/// Returns the state of a sandbox after a pause without a request.
fn paused(s: &SandboxInfo) -> &'static str {
    if s.settings.pause_mode.is_full() {
        "paused"
    } else {
        "paused without memory"
    }
}

/// Adds the details of a snapshot.
fn snapshot(lines: &mut DetailLines, s: &SnapshotInfo) {
    lines.add("snapshot", &s.id);
    lines.add("name", s.name.as_deref().unwrap_or_default());
    lines.add("taken", table::taken(s));
    lines.add("sandbox", &s.sandbox);
    lines.add("template", &s.template);
    lines.add("engine", &s.engine);
    lines.add("parent", s.parent.as_deref().unwrap_or_default());
    lines.add("size", size(&s.size));
    lines.add(
        "on disk",
        format!("{} without its ancestors", Bytes(s.bytes)),
    );
    lines.add("age", age(s.created_ms));
    let duration = format!(
        "{:.1} ms, guest stopped for {:.1} ms",
        s.total_ms, s.stopped_ms
    );
    lines.add("duration", duration);
    lines.add("key", s.owner.as_deref().unwrap_or_default());
    lines.pairs("environment", &s.env);
}
