//! Generator and test of `docs/metrics.md`, the reference of the metrics: it consists of the help
//! texts of a scrape.

// The fake engine belongs to the tests of another crate.
#[path = "../../../sandbox-manager/tests/fake_engine/fake/mod.rs"]
mod fake;

use super::add_gateway_counters;
use crate::functions;
use crate::traces::TraceExport;
use fake::{Bench, base};
use jiffy_api::{App, Config, Keys};
use jiffy_function_manager::egress::EgressSettings;
use jiffy_function_manager::{FunctionHostSettings, Functions};
use jiffy_gateway::GatewayCounters;
use jiffy_image::{Home, Templates};
use jiffy_proto::function::{CompileLimits, TenantLimits};
use jiffy_sandbox_manager::{
    FigureFamily, HostFigures, HostLimits, HostOptions, HostReader, Pressure, Shortage,
};
use jiffy_store::host::{RemoteSettings, RemoteStore, STORE_TIMEOUT};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Environment variable that makes the test write the document instead of comparing it.
const WRITE: &str = "JIFFY_WRITE_DOCS";
/// Columns of a line.
const WIDTH: usize = 100;
/// Labels whose values are not listed, because they depend on the use of the host.
const OPEN_LABELS: [&str; 7] = [
    "boot_mode",
    "function",
    "key",
    "le",
    "operation",
    "outcome",
    "step",
];

const INTRODUCTION: &str = "# Metrics

Generated from the daemon's help texts; `make docs` writes this page. `GET /metrics` answers in
OpenMetrics text. It needs a key with the scope `admin` or `read`, or an address of its own
(`--metrics-listen`). [Observability](observability.md) explains operations, steps and traces.

- A counter only grows, and starts at 0 when the daemon starts. Use `rate()` or `increase()`.
- A gauge is the value at the time of the scrape. Requests, failures and processor time of functions
  are gauges that only grow until the daemon restarts.
- A histogram `NAME` has the series `NAME_bucket` (label `le`), `NAME_count` and `NAME_sum`.
- The unit is the end of the name: `_bytes`, `_seconds`, or `_ratio` (0 to 1). Other metrics are
  counts.
- `outcome` is `ok` or the kind of the error: `unknown`, `invalid`, `conflict`, `busy`,
  `too_large`, `quota`, `disk_quota` or `failed`. `boot_mode` is `cold`, `snapshot`, `warm-pool`,
  `fork`, or `none` if the create failed before the choice.
- A metric without a value is absent. Examples are operations before their first use, the store
  without `--store`, unset limits of a key, and pressure on kernels that do not report it.
";

/// Groups of metrics: prefix of the name after `jiffy_`, and title. The first group that matches is
/// used.
const GROUPS: [(&str, &str); 6] = [
    ("gateway_", "Gateway"),
    ("key_", "Keys"),
    ("function_", "Functions"),
    ("store_", "Snapshot store"),
    ("trace_", "Traces"),
    ("", "Sandboxes and host"),
];

/// Alerts: condition, expression, and cause or remedy.
const ALERTS: [(&str, &str, &str); 14] = [
    (
        "The host rejects sandboxes",
        "sum by (reason) (rate(jiffy_admission_refusals_total[5m])) > 0",
        "`reason` names the scarce resource: stop sandboxes, or add a host.",
    ),
    (
        "Operations fail",
        "sum by (operation) (rate(jiffy_operations_total{outcome=\"failed\"}[10m])) > 0",
        "An error of the host. The daemon's log has the cause.",
    ),
    (
        "Creates are slow",
        "histogram_quantile(0.99, sum by (le) (rate(jiffy_create_duration_seconds_bucket[10m]))) > 2",
        "`jiffy_operation_step_seconds` shows which step takes the time.",
    ),
    (
        "Sandboxes are broken",
        "jiffy_sandboxes{state=\"broken\"} > 0",
        "Guests stopped unexpectedly. Roll the sandboxes back to a snapshot, or kill them.",
    ),
    (
        "The memory of the guests is nearly committed",
        "jiffy_memory_committed_bytes / jiffy_memory_commit_limit_bytes > 0.9",
        "The next creates will be rejected.",
    ),
    (
        "The host has little memory",
        "jiffy_host_memory_available_bytes / jiffy_host_memory_bytes < 0.1",
        "Pause or stop sandboxes, or lower `--memory-overcommit`.",
    ),
    (
        "All tasks wait for memory or disks",
        "jiffy_host_pressure_ratio{what=~\"memory_full|io_full\"} > 0.2",
        "The host is overloaded. Alert if it lasts for 5 minutes.",
    ),
    (
        "The disk is nearly full",
        "jiffy_host_disk_free_bytes < 20e9",
        "Run `jiffy prune`, remove snapshots, or enlarge the file system.",
    ),
    (
        "A key is near its disk limit",
        "jiffy_key_disk_bytes / on (key) jiffy_key_disk_limit_bytes > 0.9",
        "The owner of the key removes snapshots, or the operator raises the limit.",
    ),
    (
        "Uploads to the store fail",
        "increase(jiffy_store_uploads_total{outcome=\"failed\"}[15m]) > 3",
        "The store is unreachable or rejects requests. Uploads are retried.",
    ),
    (
        "Uploads to the store are late",
        "jiffy_store_uploads_pending{state=\"waiting\"} > 100",
        "Raise the upload limit. These snapshots exist on this host only.",
    ),
    (
        "A damaged snapshot was not repaired",
        "increase(jiffy_store_mended_snapshots_total{outcome=\"failed\"}[1h]) > 0",
        "Check the disk of the host. The log names the snapshot.",
    ),
    (
        "The gateway rejects clients",
        "rate(jiffy_gateway_connections_refused_total[5m]) + rate(jiffy_gateway_limited_total[5m]) > 0",
        "Too many connections or in-flight requests, of all clients or of one key.",
    ),
    (
        "Sandboxes are unreachable",
        "rate(jiffy_gateway_unavailable_total[5m]) > 1",
        "Guests hang or stop while they answer.",
    ),
];

/// Resources in the label `reason`, which a scrape has only after a refusal.
const SHORTAGES: [Shortage; 9] = [
    Shortage::Sandboxes,
    Shortage::ReservedMemory,
    Shortage::Memory,
    Shortage::Pressure,
    Shortage::Disk,
    Shortage::ReservedDisk,
    Shortage::Tasks,
    Shortage::Descriptors,
    Shortage::Size,
];

/// Host that reports every figure that is a metric.
#[derive(Debug)]
struct FullHost;

impl HostReader for FullHost {
    fn read(&self) -> HostFigures {
        HostFigures {
            memory_total_mib: Some(1 << 20),
            memory_available_mib: Some(1 << 20),
            disk_free_mib: Some(1 << 20),
            disk_total_mib: Some(1 << 20),
            // Only admission uses these two numbers.
            tasks_free: None,
            descriptors_free: None,
            pressure: Some(Pressure {
                cpu_some: 0.0,
                memory_some: 0.0,
                memory_full: 0.0,
                io_full: 0.0,
            }),
        }
    }
}

/// Adds a value to each family, because a scrape omits families without one.
fn with_a_value(mut families: Vec<FigureFamily>) -> Vec<FigureFamily> {
    for family in &mut families {
        family.values.push(("x".to_owned(), 0.0));
    }
    families
}

/// Scrape of a host that uses every feature.
async fn scrape() -> String {
    let bench = Bench::new();
    let dir = bench.dir.path();
    let remote = RemoteStore::open(&RemoteSettings {
        url: format!("file://{}/bucket", dir.display()).parse().unwrap(),
        keyring: None,
        home: dir.join("host"),
        cache_bytes: 1 << 20,
        upload_bytes_per_second: None,
        timeout: STORE_TIMEOUT,
    });
    let options = HostOptions {
        reader: Some(Arc::new(FullHost)),
        limits: HostLimits {
            sandboxes: Some(1),
            ..HostLimits::default()
        },
        remote: Some(remote.unwrap()),
        ..HostOptions::default()
    };
    let sandboxes = bench.open_with(options).await;
    sandboxes.create(base()).await.unwrap();
    // The maximum is reached, so that a rejection is counted.
    sandboxes.create(base()).await.unwrap_err();

    let home = Home::at(dir.join("home")).unwrap();
    let keys = Arc::new(Keys::open(dir).unwrap());
    let templates = Arc::new(Templates::new(&home));
    let app = App::new(sandboxes.clone(), keys, templates, Config::default());
    let functions = Functions::open(FunctionHostSettings {
        directory: dir.join("functions"),
        program: None,
        jailed: false,
        cgroups: None,
        limits: TenantLimits::default(),
        compile: CompileLimits::default(),
        idle: Duration::from_secs(60),
        grace: Duration::from_secs(1),
        egress: EgressSettings::default(),
    });
    let figures = sandboxes.figures();
    figures.add_families(move || with_a_value(app.figures()));
    figures.add_families(move || with_a_value(functions::figures(&functions)));
    add_gateway_counters(&sandboxes, Arc::new(GatewayCounters::default()));
    // No collector listens at this address: only the help texts of the counters are read.
    let traces = TraceExport::start("http://127.0.0.1:9").unwrap();
    traces.add_metrics(&sandboxes);
    figures.render()
}

/// One metric of a scrape.
#[derive(Default)]
struct Metric {
    help: String,
    kind: String,
    labels: BTreeMap<String, BTreeSet<String>>,
}

/// Reads a scrape: metrics by the name of their family.
fn metrics(text: &str) -> BTreeMap<String, Metric> {
    let mut metrics: BTreeMap<String, Metric> = BTreeMap::new();
    let mut family = String::new();
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').unwrap();
            name.clone_into(&mut family);
            help.clone_into(&mut metrics.entry(family.clone()).or_default().help);
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            kind.clone_into(&mut metrics.get_mut(name).unwrap().kind);
        } else if let Some((_, labels)) = line.split_once('{') {
            let (labels, _) = labels.split_once('}').unwrap();
            for label in labels.split(',') {
                let (label, value) = label.split_once('=').unwrap();
                let metric = metrics.get_mut(&family).unwrap();
                let values = metric.labels.entry(label.to_owned()).or_default();
                values.insert(value.trim_matches('"').to_owned());
            }
        }
    }
    metrics
}

/// Name of the series of a metric, as queries use it.
fn series(name: &str, metric: &Metric) -> String {
    if metric.kind == "counter" {
        format!("{name}_total")
    } else {
        name.to_owned()
    }
}

/// Appends `text` as an item of a list, in lines of at most [`WIDTH`] characters.
fn wrap(out: &mut String, text: &str) {
    let options = textwrap::Options::new(WIDTH)
        .initial_indent("- ")
        .subsequent_indent("  ")
        .word_splitter(textwrap::WordSplitter::NoHyphenation)
        .break_words(false);
    out.push_str(&textwrap::fill(text, options));
    out.push('\n');
}

/// Appends one metric as an item of a list.
fn describe(out: &mut String, name: &str, metric: &Metric) {
    let mut text = format!("`{}` ({}", series(name, metric), metric.kind);
    for (label, values) in &metric.labels {
        // The bounds of histogram buckets are not part of the reference.
        if label == "le" {
            continue;
        }
        // Writing to a string does not fail.
        let _ = write!(text, ", `{label}`");
        if !OPEN_LABELS.contains(&label.as_str()) {
            let values: Vec<_> = values.iter().map(|value| format!("`{value}`")).collect();
            let _ = write!(text, " of {}", values.join(", "));
        }
    }
    let _ = write!(text, "): {}", metric.help);
    wrap(out, &text);
}

/// Returns the reference of all metrics and the alerts as Markdown.
fn reference(metrics: &BTreeMap<String, Metric>) -> String {
    let mut groups: BTreeMap<&str, String> = BTreeMap::new();
    for (name, metric) in metrics {
        let rest = name.strip_prefix("jiffy_").unwrap();
        let group = GROUPS.iter().find(|(prefix, _)| rest.starts_with(prefix));
        describe(groups.entry(group.unwrap().1).or_default(), name, metric);
    }
    let mut out = INTRODUCTION.to_owned();
    for (title, list) in &groups {
        let _ = write!(out, "\n## {title}\n{list}");
    }
    out.push_str(
        "\n## Alerts\nThe thresholds are starting points. Alert on `up == 0` as well: the daemon \
         does not run.\n",
    );
    for (title, expression, remedy) in ALERTS {
        let _ = write!(
            out,
            "\n### {title}\n{remedy}\n\n```promql\n{expression}\n```\n"
        );
    }
    out
}

/// Names of metrics in an expression.
fn names(expression: &str) -> impl Iterator<Item = &str> {
    expression
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("jiffy_"))
}

#[tokio::test]
async fn the_reference_of_the_metrics_is_current() {
    let mut metrics = metrics(&scrape().await);
    for metric in metrics.values_mut() {
        if let Some(reasons) = metric.labels.get_mut("reason") {
            reasons.extend(SHORTAGES.map(|shortage| shortage.name().to_owned()));
        }
    }
    let known: BTreeSet<_> = metrics
        .iter()
        .map(|(n, metric)| series(n, metric))
        .collect();
    for name in ALERTS
        .iter()
        .flat_map(|(_, expression, _)| names(expression))
    {
        // The scrape declares a histogram by the name of its family.
        let name = name.strip_suffix("_bucket").unwrap_or(name);
        assert!(
            known.contains(name),
            "an alert names the unknown metric {name}"
        );
    }
    let reference = reference(&metrics);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, reference).unwrap();
        return;
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == reference,
        "docs/metrics.md differs from the daemon's metrics; update it with: make docs"
    );
}
