//! Metrics of this host, and observation of single sandboxes: usage, process, console, connections.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.
//!
//! The *warm pool* has guests that were started in advance and wait for a create.

mod processes;

use super::entry::SandboxEntry;
use super::idle_verdict::is_busy;
use super::{OperationError, Sandboxes, SandboxesInner, Snapshots, WarmPool};
use crate::admission::{FreeResources, HostFigures, ReservedResources};
use crate::metrics::{BootTimes, CurrentFigures, Figure, FigureFamily};
use crate::operation_times::SandboxTimes;
use crate::usage::UsageSample;
use jiffy_agent_client::ClientError;
use jiffy_api_types::StateName;
use jiffy_engine_api::{ConnectionRecords, EngineError, GuestCounters, now_ms};
use jiffy_proto::agent::ENVD_PORT;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Figures of all sandboxes and of their host: states, durations, reservations.
#[derive(Clone, Copy)]
pub struct SandboxFigures<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Returns the figures of all sandboxes and their host.
    pub fn figures(&self) -> SandboxFigures<'_> {
        SandboxFigures(&self.0)
    }
}

/// Observation of one sandbox: resource usage, process, console, connections.
#[derive(Clone, Copy)]
pub struct Observation<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Returns the operations that observe one sandbox.
    pub fn observe(&self) -> Observation<'_> {
        Observation(&self.0)
    }
}

/// Returns the answer of the agent of a sandbox, at most [`ANSWER_LIMIT`] later.
async fn answer_of<T>(
    id: &str,
    answer: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, OperationError> {
    let failed = |problem: String| OperationError::Connect {
        id: id.to_owned(),
        port: ENVD_PORT,
        source: std::io::Error::other(problem),
    };
    let answer = tokio::time::timeout(ANSWER_LIMIT, answer).await;
    let answer = answer.map_err(|e| failed(e.to_string()))?;
    answer.map_err(|e| failed(e.to_string()))
}

/// Number of sandboxes that are sampled before the task yields.
const BATCH: usize = 32;
/// Time limit for an answer of the agent.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Function that returns figures of another component.
type Source<T> = Box<dyn Fn() -> Vec<T> + Send + Sync>;

/// Sources of further metrics, which are read at every scrape.
#[derive(Default)]
pub(super) struct FigureSources {
    figures: Mutex<Vec<Source<Figure>>>,
    families: Mutex<Vec<Source<FigureFamily>>>,
}

impl Sandboxes {
    /// Starts the task that samples the usage of running sandboxes while the sandboxes exist.
    pub(super) fn spawn_sampling(&self, every: Duration) {
        let inner = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                if each_running(&inner, sample).await.is_none() {
                    return;
                }
            }
        });
    }
}

impl Observation<'_> {
    /// Returns the resource usage of a sandbox from `start_ms` to `end_ms` (milliseconds since
    /// 1970) as measured by the host, oldest first.
    pub fn history(
        self,
        id: &str,
        start_ms: Option<u64>,
        end_ms: Option<u64>,
    ) -> Result<Vec<UsageSample>, OperationError> {
        Ok(self.0.entry(id)?.history().between(start_ms, end_ms))
    }

    /// Returns the durations of the create and of the last operation of a sandbox, as far as this
    /// daemon performed them. Empty if the sandbox is unknown.
    pub fn times(self, id: &str) -> SandboxTimes {
        let entry = self.0.entry(id);
        entry.map_or_else(|_| SandboxTimes::default(), |entry| entry.times())
    }

    /// Returns the present resource usage as measured by the guest's kernel. Runs code in the
    /// guest, also if it is idle.
    pub async fn measure(self, id: &str) -> Result<UsageSample, OperationError> {
        let entry = self.0.entry(id)?;
        let agent = entry.agent("measure")?;
        let usage = answer_of(id, agent.metrics()).await?;
        let record = entry.record();
        Ok(UsageSample {
            at_ms: now_ms(),
            cpu_count: record.size.vcpus,
            // The guest reports the usage and may report any number.
            cpu_used_pct: (usage.cpu_used_pct as f32).clamp(0.0, 100.0),
            mem_used: usage.mem_used,
            mem_total: usage.mem_total,
            mem_cache: usage.mem_cache,
            disk_used: usage.disk_used,
            disk_total: usage.disk_total,
            net_out: None,
            net_in: None,
        })
    }

    /// Returns the present resource usage as measured by the host, without running code in the
    /// guest. `None` if the sandbox is not running.
    pub fn now(self, id: &str) -> Result<Option<UsageSample>, OperationError> {
        let entry = self.0.entry(id)?;
        let usage = entry.guest().and_then(|guest| guest.usage());
        let history = entry.history();
        Ok(usage.map(|usage| history.peek(now_ms(), entry.size(), usage)))
    }

    /// Returns the newest connections and connection attempts of a sandbox since this daemon has
    /// managed it, oldest first.
    pub async fn connections(self, id: &str) -> Result<ConnectionRecords, OperationError> {
        let entry = self.0.entry(id)?;
        // The logs are read in the order of their guests' lifetimes, oldest first.
        let (mut all, last) = entry.connection_history().all();
        let logs = [last, entry.connections()];
        let read = tokio::task::spawn_blocking(move || {
            logs.iter().flatten().for_each(|log| all.extend(log.read()));
            all
        });
        read.await.map_err(|e| OperationError::Lost(e.to_string()))
    }

    /// Returns the id of the process that isolates a running sandbox, and the number of VM exits of
    /// its guest if the engine counts them.
    pub async fn process(self, id: &str) -> Result<(u32, Option<u64>), OperationError> {
        let entry = self.0.entry(id)?;
        let guest = entry.running(crate::sandbox::SandboxOperation::Connect, "inspect")?;
        let none = || EngineError::Unsupported {
            engine: guest.engine(),
            what: "report the process id of a sandbox",
            instead: None,
        };
        let process = guest.pid().ok_or_else(none);
        let pid = process.map_err(OperationError::engine("inspect the process of the sandbox"))?;
        Ok((pid, guest.exits().await))
    }

    /// Returns the end of the console of a sandbox. `None` if it has no guest, unless the guest
    /// exited by itself while this daemon was running.
    pub fn console_tail(self, id: &str) -> Result<Option<String>, OperationError> {
        Ok(self.0.entry(id)?.console())
    }

    /// Returns the error with which the host failed to serve the disk of a sandbox since its guest
    /// was started.
    pub fn disk_failure(self, id: &str) -> Option<String> {
        let entry = self.0.entries.lock().get(id).cloned();
        entry?.guest()?.disk_failure()
    }
}

impl SandboxFigures<'_> {
    /// Returns the durations of boots, by mode.
    pub fn boot_times(self) -> Vec<BootTimes> {
        self.0.metrics.boots()
    }

    /// Returns the number of sandboxes in each state.
    pub fn states(self) -> BTreeMap<&'static str, usize> {
        let mut states = self.0.indexes.states.lock().clone();
        states.retain(|_, count| *count > 0);
        states
    }

    /// Adds the figures of `source` to the metrics at every scrape.
    pub fn add_figures(self, source: impl Fn() -> Vec<Figure> + Send + Sync + 'static) {
        self.0.figure_sources.figures.lock().push(Box::new(source));
    }

    /// Adds the families of `source` to the metrics at every scrape.
    pub fn add_families(self, source: impl Fn() -> Vec<FigureFamily> + Send + Sync + 'static) {
        self.0.figure_sources.families.lock().push(Box::new(source));
    }

    /// Returns all metrics in the format that Prometheus scrapes (`application/openmetrics-text;
    /// version=1.0.0`).
    pub fn render(self) -> String {
        let mut now = CurrentFigures::new();
        // All states are listed, so that a scrape shows 0 instead of a missing series.
        let mut states: BTreeMap<&'static str, usize> = StateName::ALL
            .into_iter()
            .map(|state| (state.name(), 0))
            .collect();
        states.extend(self.states());
        let states = states.into_iter().map(|(name, n)| (name, n as f64));
        now.add_each("sandboxes", "Sandboxes by state", "state", states);
        now.add(
            "warm_pool",
            "Guests in the warm pool",
            WarmPool(self.0).waiting() as f64,
        );
        let reservations = self.reservations();
        now.add(
            "memory_committed_bytes",
            "Maximum memory of all guests",
            (reservations.memory_mib << 20) as f64,
        );
        now.count_each(
            "admission_refusals",
            "Rejected guests, by scarce resource",
            "reason",
            reservations
                .rejections
                .iter()
                .map(|(why, n)| (why.name(), *n)),
        );
        let (figures, limit) = self.host();
        // A figure that the kernel does not report is omitted.
        let mut mib = |name, help, value: Option<u64>| {
            if let Some(value) = value {
                now.add(name, help, value.saturating_mul(1 << 20) as f64);
            }
        };
        mib(
            "memory_commit_limit_bytes",
            "Limit of the maximum memory of all guests",
            limit,
        );
        let available = figures.memory_available_mib;
        mib(
            "host_memory_available_bytes",
            "Available memory of the host",
            available,
        );
        mib(
            "host_memory_bytes",
            "Memory of the host",
            figures.memory_total_mib,
        );
        mib(
            "host_disk_free_bytes",
            "Free space of the data directory's file system",
            figures.disk_free_mib,
        );
        if let Some(p) = figures.pressure {
            let values = [
                ("cpu_some", p.cpu_some),
                ("memory_some", p.memory_some),
                ("memory_full", p.memory_full),
                ("io_full", p.io_full),
            ];
            let values = values.map(|(what, percent)| (what, percent / 100.0));
            let help = "Share of the last 10 s in which some or all tasks waited";
            now.add_each("host_pressure_ratio", help, "what", values);
        }
        now.add(
            "snapshots",
            "Snapshots on this host",
            Snapshots(self.0).count() as f64,
        );
        // Read the size in a separate statement, so that the index is unlocked before the sources
        // are called.
        let bytes = self.0.catalog.read().bytes();
        now.add(
            "snapshot_bytes",
            "Disk space of all snapshots",
            bytes as f64,
        );
        Sandboxes(self.0.clone()).upload_figures(&mut now);
        // Sources must not add other sources: the list is locked.
        for source in self.0.figure_sources.figures.lock().iter() {
            source().iter().for_each(|figure| now.figure(figure));
        }
        for source in self.0.figure_sources.families.lock().iter() {
            source().iter().for_each(|family| now.family(family));
        }
        self.0.metrics.render(now)
    }

    /// Returns the number of bytes that may be written to the data directory's disk in addition to
    /// the reservations of guests. `None` if the free space is unknown.
    pub fn writable_disk_bytes(self) -> Option<u64> {
        let mib = self.0.admission.writable_disk_mib()?;
        Some(mib.saturating_mul(1 << 20))
    }

    /// Returns the number of guests that continue to run when this process exits, for adoption by
    /// the next daemon.
    pub fn running_guests(self) -> usize {
        // The index is copied, so that it is not locked together with the entries.
        let running = self.0.indexes.running.lock().clone();
        let entries = self.0.entries.lock();
        let running = running.iter().filter_map(|id| entries.get(id));
        running.filter(|e| e.guest().is_some()).count()
    }

    /// Returns the reservations of sandboxes and the warm pool, and the numbers of rejections.
    pub fn reservations(self) -> ReservedResources {
        self.0.admission.reservations()
    }

    /// Returns the resources that the admission would grant to further sandboxes at present.
    pub fn free(self) -> FreeResources {
        self.0.admission.free()
    }

    /// Returns the free resources of the host, and the limit of the sum of memory sizes, in MiB.
    pub fn host(self) -> (HostFigures, Option<u64>) {
        let figures = self.0.admission.figures();
        (figures, self.0.admission.memory_limit_mib(&figures))
    }
}

/// Calls `measure` with each running sandbox. Returns `None` once the sandboxes are dropped.
pub(super) async fn each_running(
    inner: &Weak<SandboxesInner>,
    measure: fn(&SandboxEntry),
) -> Option<()> {
    let inner = inner.upgrade()?;
    let ids: Vec<_> = inner.indexes.running.lock().iter().cloned().collect();
    let entries = {
        let entries = inner.entries.lock();
        let running = ids.iter().filter_map(|id| entries.get(id).cloned());
        running.collect::<Vec<_>>()
    };
    // This task must not prevent the drop of `SandboxesInner` while it yields.
    drop(inner);
    // A host may run thousands of sandboxes, and each sample takes several system calls.
    for batch in entries.chunks(BATCH) {
        batch.iter().for_each(|entry| measure(entry));
        tokio::task::yield_now().await;
    }
    Some(())
}

/// Adds the present usage of a running sandbox to its history.
pub(super) fn sample(entry: &SandboxEntry) {
    let Some(guest) = entry.guest() else {
        return;
    };
    let usage = guest.usage();
    entry.meter_counters(usage.map(GuestCounters::from));
    if let Some(usage) = usage {
        let sample = entry.history().add(now_ms(), entry.size(), usage);
        if is_busy(&sample) {
            entry.uses().record();
        }
    }
}
