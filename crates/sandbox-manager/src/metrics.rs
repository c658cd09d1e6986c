//! [`Metrics`]: counters and histograms of operations on this host, and their text for Prometheus.

use crate::operation_times::OperationTimes;
use jiffy_engine_api::BootMode;
use parking_lot::Mutex;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Number of boots of each mode from which percentiles are computed.
const MAX_REMEMBERED_BOOTS: usize = 1024;

/// Name and value of one label.
type OneLabel = [(&'static str, &'static str); 1];
/// Names and values of two labels.
type TwoLabels = [(&'static str, &'static str); 2];

/// Figure of another component, added to the metrics.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// Name after `jiffy_`. A counter's name has no `_total`.
    pub name: &'static str,
    /// Help text.
    pub help: &'static str,
    /// True for a counter, false for a gauge.
    pub counter: bool,
    /// Value.
    pub value: f64,
}

/// Figures of one name that differ in a label.
#[derive(Debug, Clone, PartialEq)]
pub struct FigureFamily {
    /// Name after `jiffy_`.
    pub name: &'static str,
    /// Help text.
    pub help: &'static str,
    /// Name of the label.
    pub label: &'static str,
    /// Values of the label and of the figure.
    pub values: Vec<(String, f64)>,
}

/// Durations of the last 1,024 boots of one mode, in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BootTimes {
    /// Boot mode.
    pub mode: BootMode,
    /// Number of boots since the start of the daemon.
    pub count: u64,
    /// Median.
    pub p50_ms: f64,
    /// 95th percentile.
    pub p95_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Maximum.
    pub max_ms: f64,
}

/// Boots of one mode.
#[derive(Debug, Default)]
struct BootSeries {
    count: u64,
    /// Durations of the last boots in milliseconds, oldest first.
    last: VecDeque<f64>,
}

/// Counts and durations of operations.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    operations: Family<TwoLabels, Counter>,
    durations: Family<TwoLabels, Histogram, fn() -> Histogram>,
    steps: Family<TwoLabels, Histogram, fn() -> Histogram>,
    creates: Family<TwoLabels, Counter>,
    hooks: Family<TwoLabels, Counter>,
    create_durations: Family<OneLabel, Histogram, fn() -> Histogram>,
    /// Boots by the name of their mode.
    boots: Mutex<HashMap<&'static str, (BootMode, BootSeries)>>,
}

/// Buckets from 1 ms to 33 s.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 16))
}

/// Buckets from 0.1 ms to 13 s.
fn step_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.0001, 2.0, 18))
}

/// Returns the value of the label `boot_mode`.
fn word(mode: BootMode) -> &'static str {
    match mode {
        BootMode::Cold => "cold",
        BootMode::Snapshot => "snapshot",
        BootMode::WarmPool => "warm-pool",
        BootMode::Fork => "fork",
    }
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("jiffy");
        let operations = Family::default();
        let durations = Family::new_with_constructor(seconds as fn() -> Histogram);
        let steps = Family::new_with_constructor(step_seconds as fn() -> Histogram);
        let creates = Family::default();
        let hooks = Family::default();
        let create_durations = Family::new_with_constructor(seconds as fn() -> Histogram);
        // The registry appends `_total` to the names of counters.
        registry.register("operations", "Operations on sandboxes", operations.clone());
        registry.register("hooks", "Hooks of guests", hooks.clone());
        registry.register(
            "operation_duration_seconds",
            "Duration of operations",
            durations.clone(),
        );
        registry.register(
            "operation_step_seconds",
            "Duration of the steps of operations",
            steps.clone(),
        );
        registry.register(
            "creates",
            "Requested sandboxes, by origin of the guest",
            creates.clone(),
        );
        registry.register(
            "create_duration_seconds",
            "Duration of successful creates until the agent is ready, by origin of the guest",
            create_durations.clone(),
        );
        Self {
            registry,
            operations,
            durations,
            steps,
            creates,
            hooks,
            create_durations,
            boots: Mutex::default(),
        }
    }

    /// Counts an operation that has ended.
    pub fn operation(&self, name: &'static str, outcome: &'static str, took: Duration) {
        let labels = [("operation", name), ("outcome", outcome)];
        self.operations.get_or_create(&labels).inc();
        self.durations
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
    }

    /// Records the durations of the steps of an operation that has ended.
    pub fn steps(&self, times: &OperationTimes) {
        for step in &times.steps {
            let labels = [("operation", times.operation), ("step", step.name)];
            let histogram = self.steps.get_or_create(&labels);
            histogram.observe(step.duration.as_secs_f64());
        }
    }

    /// Counts a hook of a guest, by moment and outcome.
    pub fn hook(&self, moment: &'static str, outcome: &'static str) {
        let labels = [("moment", moment), ("outcome", outcome)];
        self.hooks.get_or_create(&labels).inc();
    }

    /// Counts a create. `mode` is `None` if the create failed before a boot mode was chosen.
    pub fn create(&self, mode: Option<BootMode>, outcome: &'static str, took: Duration) {
        let labels = [
            ("boot_mode", mode.map_or("none", word)),
            ("outcome", outcome),
        ];
        self.creates.get_or_create(&labels).inc();
        // Failed creates have no duration that could be compared.
        if let Some(mode) = mode.filter(|_| outcome == "ok") {
            let labels = [("boot_mode", word(mode))];
            let seconds = took.as_secs_f64();
            self.create_durations
                .get_or_create(&labels)
                .observe(seconds);
        }
    }

    /// Records the duration of a boot in milliseconds.
    pub fn boot(&self, mode: BootMode, ms: f64) {
        let mut boots = self.boots.lock();
        let (_, boots) = boots
            .entry(word(mode))
            .or_insert((mode, BootSeries::default()));
        boots.count += 1;
        // The number is bounded, so that percentiles describe recent boots.
        if boots.last.len() >= MAX_REMEMBERED_BOOTS {
            boots.last.pop_front();
        }
        boots.last.push_back(ms);
    }

    /// Returns the durations of boots by mode.
    pub fn boots(&self) -> Vec<BootTimes> {
        let boots = self.boots.lock();
        let mut modes: Vec<_> = boots.iter().collect();
        // Hash maps have a random order, and the output must be stable.
        modes.sort_by_key(|(word, _)| **word);
        let times = modes.into_iter().map(|(_, (mode, boots))| {
            let mut sorted: Vec<f64> = boots.last.iter().copied().collect();
            sorted.sort_by(f64::total_cmp);
            let at = |percent: usize| {
                // Nearest-rank method: the smallest value such that at least `percent` % of all
                // values are not above it.
                let rank = (sorted.len() * percent).div_ceil(100).max(1);
                sorted.get(rank - 1).copied().unwrap_or(0.0)
            };
            BootTimes {
                mode: *mode,
                count: boots.count,
                p50_ms: at(50),
                p95_ms: at(95),
                p99_ms: at(99),
                max_ms: at(100),
            }
        });
        times.collect()
    }

    /// Returns all metrics and `now` as OpenMetrics text.
    pub fn render(&self, now: CurrentFigures) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode_registry(&mut text, &self.registry);
        let _ = encode_registry(&mut text, &now.0);
        let _ = encode_eof(&mut text);
        text
    }
}

/// Gauges and counters whose values are read when the metrics are rendered.
pub(crate) struct CurrentFigures(Registry);

impl CurrentFigures {
    pub fn new() -> Self {
        Self(Registry::with_prefix("jiffy"))
    }

    /// Adds a gauge.
    pub fn add(&mut self, name: &'static str, help: &'static str, value: f64) {
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(value);
        self.0.register(name, help, gauge);
    }

    /// Adds a gauge for each value of `label`.
    pub fn add_each(
        &mut self,
        name: &'static str,
        help: &'static str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'static str, f64)>,
    ) {
        let family = Family::<OneLabel, Gauge<f64, AtomicU64>>::default();
        for (value, figure) in values {
            family.get_or_create(&[(label, value)]).set(figure);
        }
        self.0.register(name, help, family);
    }

    /// Adds a counter for each value of `label`.
    pub fn count_each(
        &mut self,
        name: &'static str,
        help: &'static str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'static str, u64)>,
    ) {
        // A new family for each scrape, so that labels without a value disappear.
        let family = Family::<OneLabel, Counter>::default();
        for (value, count) in values {
            family.get_or_create(&[(label, value)]).inc_by(count);
        }
        self.0.register(name, help, family);
    }

    /// Adds a family of another component.
    pub fn family(&mut self, of: &FigureFamily) {
        let family = Family::<[(&'static str, String); 1], Gauge<f64, AtomicU64>>::default();
        for (value, figure) in &of.values {
            let labels = [(of.label, value.clone())];
            family.get_or_create(&labels).set(*figure);
        }
        self.0.register(of.name, of.help, family);
    }

    /// Adds a figure of another component.
    pub fn figure(&mut self, figure: &Figure) {
        if figure.counter {
            // The counter is new at each scrape, so adding the value sets it.
            let counter = Counter::<f64, AtomicU64>::default();
            counter.inc_by(figure.value);
            self.0.register(figure.name, figure.help, counter);
        } else {
            self.add(figure.name, figure.help, figure.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_engine_api::steps::StepDuration;

    #[test]
    fn percentiles_cover_the_last_boots_of_each_mode() {
        let metrics = Metrics::new();
        for ms in 0..2000 {
            metrics.boot(BootMode::Snapshot, f64::from(ms));
        }
        metrics.boot(BootMode::Fork, 3.0);
        let boots = metrics.boots();
        let (fork, snapshot) = (&boots[0], &boots[1]);
        assert_eq!(
            (fork.mode, fork.p50_ms, fork.p99_ms),
            (BootMode::Fork, 3.0, 3.0)
        );
        assert_eq!((snapshot.count, snapshot.max_ms), (2000, 1999.0));
        // The last 1,024 boots took 976 to 1,999 ms, and the median is the 512th of them.
        assert_eq!(snapshot.p50_ms, 1487.0);
    }

    #[test]
    fn metrics_are_rendered_in_the_prometheus_format() {
        let metrics = Metrics::new();
        metrics.operation("pause", "ok", Duration::from_millis(7));
        let step = StepDuration {
            name: "snapshot",
            duration: Duration::from_micros(300),
        };
        metrics.steps(&OperationTimes::new("pause", Duration::ZERO, vec![step]));
        metrics.create(Some(BootMode::WarmPool), "ok", Duration::from_millis(3));
        metrics.create(None, "busy", Duration::ZERO);
        let mut now = CurrentFigures::new();
        now.add_each("sandboxes", "By state", "state", [("running", 2.0)]);
        now.figure(&Figure {
            name: "gateway_requests",
            help: "Requests",
            counter: true,
            value: 5.0,
        });
        now.family(&FigureFamily {
            name: "key_disk_bytes",
            help: "Bytes",
            label: "key",
            values: vec![("k1".to_owned(), 7.0), ("k2".to_owned(), 8.0)],
        });
        let text = metrics.render(now);
        for line in [
            "jiffy_operations_total{operation=\"pause\",outcome=\"ok\"} 1",
            "jiffy_operation_duration_seconds_bucket{le=\"0.008\",operation=\"pause\",outcome=\"ok\"} 1",
            "jiffy_operation_step_seconds_bucket{le=\"0.0004\",operation=\"pause\",step=\"snapshot\"} 1",
            "jiffy_creates_total{boot_mode=\"warm-pool\",outcome=\"ok\"} 1",
            "jiffy_creates_total{boot_mode=\"none\",outcome=\"busy\"} 1",
            "jiffy_sandboxes{state=\"running\"} 2.0",
            "jiffy_gateway_requests_total 5.0",
            "jiffy_key_disk_bytes{key=\"k1\"} 7.0",
            "jiffy_key_disk_bytes{key=\"k2\"} 8.0",
            "# EOF",
        ] {
            assert!(text.lines().any(|l| l == line), "no {line} in {text}");
        }
    }
}
