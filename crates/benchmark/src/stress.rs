//! Benchmark `stress`: complete lifetimes of many sandboxes at once, and the resources that remain.

use crate::counters::Meter;
use crate::daemon::{BenchmarkDaemon, ms};
use crate::leftovers::Leftovers;
use crate::{Measured, Series};
use anyhow::Context;
use jiffy_client::ServerOptions;
use jiffy_client::has_error_code;
use jiffy_engine_api::SandboxSize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Steps of a lifetime, in order.
const STEPS: [&str; 8] = [
    "create",
    "exec",
    "snapshot",
    "pause",
    "resume",
    "exec after resume",
    "delete",
    "delete of the snapshot",
];
/// Error code of a host without free capacity. Clients wait and retry.
const BUSY_ERROR_CODE: &str = "host_busy";
/// Delay before a rejected step is retried.
const BUSY_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Maximum time of retries, after which a lifetime counts as failed.
const MAX_BUSY_TIME: Duration = Duration::from_secs(120);
/// Maximum number of failures that are printed.
const MAX_PRINTED_FAILURES: usize = 5;
/// Command that creates a file in memory. If the file exists after a resume, the guest's memory was
/// preserved.
const MARK: &str = "echo $PPID-stress > /dev/shm/mark";

/// Result of one lifetime.
struct Life {
    /// Duration of each successful step in milliseconds, in order, without waiting for capacity.
    steps: Vec<f64>,
    /// Time from the first request to the last answer in milliseconds.
    whole: f64,
    /// Number of requests that the host rejected for lack of capacity.
    busy_responses: usize,
    failure: Option<anyhow::Error>,
}

impl Life {
    /// Performs one step, and retries it while the host has no capacity.
    async fn step<T, F>(&mut self, work: impl Fn() -> F) -> anyhow::Result<T>
    where
        F: Future<Output = anyhow::Result<T>>,
    {
        let first = Instant::now();
        loop {
            let began = Instant::now();
            match work().await {
                Ok(done) => {
                    // Only the successful attempt is counted.
                    self.steps.push(ms(began.elapsed()));
                    return Ok(done);
                }
                Err(error) if is_full(&error) && first.elapsed() < MAX_BUSY_TIME => {
                    self.busy_responses += 1;
                    tokio::time::sleep(BUSY_RETRY_DELAY).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Performs all steps. If a step fails, removes the created sandboxes and snapshots.
    async fn live(daemon: BenchmarkDaemon) -> Self {
        let mut life = Self {
            steps: Vec::with_capacity(STEPS.len()),
            whole: 0.0,
            busy_responses: 0,
            failure: None,
        };
        let began = Instant::now();
        let (mut sandbox, mut snapshot) = (None, None);
        let lived = life.run(&daemon, &mut sandbox, &mut snapshot).await;
        life.whole = ms(began.elapsed());
        if let Err(error) = lived {
            let step = STEPS.get(life.steps.len()).copied().unwrap_or("life");
            life.failure = Some(error.context(step));
            if let Some(id) = sandbox {
                daemon.remove(&id).await.ok();
            }
            if let Some(id) = snapshot {
                daemon.remove_snapshot(&id).await.ok();
            }
        }
        life
    }

    /// Performs the steps of one life of a sandbox: create, command, snapshot, pause, resume,
    /// command, removal.
    async fn run(
        &mut self,
        daemon: &BenchmarkDaemon,
        // `sandbox` and `snapshot` receive the ids as soon as the objects exist, so that the caller
        // can remove the objects after a failure.
        sandbox: &mut Option<String>,
        snapshot: &mut Option<String>,
    ) -> anyhow::Result<()> {
        let size = SandboxSize::default();
        let created = self.step(|| daemon.create_with_token(size)).await?;
        let id = sandbox.insert(created.record.id.clone()).clone();
        self.step(|| daemon.exec_in(&created, MARK)).await?;
        let taken = self.step(|| daemon.snapshot(&id)).await?;
        let snapshot_id = snapshot.insert(taken.id).clone();
        self.step(|| daemon.pause(&id)).await?;
        self.step(|| daemon.resume(&id)).await?;
        self.step(|| daemon.exec(&id, "test -s /dev/shm/mark"))
            .await?;
        self.step(|| daemon.remove(&id)).await?;
        *sandbox = None;
        self.step(|| daemon.remove_snapshot(&snapshot_id)).await?;
        *snapshot = None;
        Ok(())
    }
}

fn is_full(error: &anyhow::Error) -> bool {
    has_error_code(error, BUSY_ERROR_CODE)
}

/// Runs `n` lifetimes, `c` at a time. Fails if a lifetime failed, or if resources remain on the
/// host.
pub async fn stress(
    n: usize,
    warm_up: usize,
    c: usize,
    server: &ServerOptions,
) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    lives(warm_up, c, &daemon).await?;
    // Read the leftovers after the warm-up, which creates the template's snapshot.
    let before = Leftovers::read(&daemon).await?;
    let (lives, wall) = lives(n, c, &daemon).await?;
    let remaining = before.settled(&daemon).await?;
    let failed = lives.iter().filter(|life| life.failure.is_some()).count();
    // Failures are reported before remaining resources, since a failed lifetime explains them.
    report_failures(&lives)?;
    anyhow::ensure!(
        remaining.is_empty(),
        "{n} lives left on the host: {remaining}; `jiffy ls --all` and `jiffy snapshots` show what the \
         daemon knows of it"
    );
    let mut series: Vec<Series> = STEPS
        .iter()
        .enumerate()
        .map(|(at, step)| {
            let samples = lives.iter().filter_map(|life| life.steps.get(at).copied());
            Series::new(format!("{step}, c={c}"), "ms", None, samples.collect())
        })
        .collect();
    let whole = lives.iter().map(|life| life.whole).collect();
    series.push(Series::new(format!("whole life, c={c}"), "ms", None, whole));
    let rows = [
        (
            "lives per second",
            "per second",
            n as f64 / wall.as_secs_f64(),
        ),
        (
            "lives that succeeded",
            "%",
            100.0 * (n - failed) as f64 / n as f64,
        ),
        (
            "rejected requests of a full host, each retried",
            "count",
            lives.iter().map(|life| life.busy_responses).sum::<usize>() as f64,
        ),
    ];
    let rows = rows.map(|(name, unit, value)| Series::new(name, unit, None, vec![value]));
    series.extend(rows);
    Ok(Measured {
        method: "lifetimes of sandboxes (2 vCPUs, 512 MiB), C at a time: create, write a file in \
            memory, snapshot, pause, resume, check the file, delete, delete the snapshot. A step \
            that a full host rejects is retried after 100 ms. Afterwards, no sandbox, snapshot, \
            process or file remains",
        limits: "guests under load; a network between client and host",
        ..Measured::new("stress", series, &Meter::new())
    })
}

/// Fails if a life has failed. The message counts equal errors.
fn report_failures(lives: &[Life]) -> anyhow::Result<()> {
    let failures: Vec<String> = lives
        .iter()
        .filter_map(|life| life.failure.as_ref())
        .map(|error| format!("{error:#}"))
        .collect();
    let mut kinds = BTreeMap::<&str, usize>::new();
    for failure in &failures {
        // Many lifetimes usually fail for the same reason.
        *kinds.entry(failure.as_str()).or_default() += 1;
    }
    let texts: Vec<String> = kinds
        .iter()
        .take(MAX_PRINTED_FAILURES)
        .map(|(failure, times)| format!("{times} x {failure}"))
        .collect();
    anyhow::ensure!(
        failures.is_empty(),
        "{} of {} lives failed: {}",
        failures.len(),
        lives.len(),
        texts.join("; ")
    );
    Ok(())
}

/// Runs `number` lives, at most `concurrency` at the same time. Returns their results and the total
/// duration.
async fn lives(
    number: usize,
    concurrency: usize,
    daemon: &BenchmarkDaemon,
) -> anyhow::Result<(Vec<Life>, Duration)> {
    let began = Instant::now();
    let mut in_flight = JoinSet::new();
    let mut lives = Vec::with_capacity(number);
    for _ in 0..number {
        // At the limit, another lifetime starts only after one has ended.
        if in_flight.len() >= concurrency {
            let done = in_flight.join_next().await;
            lives.push(done.context("no lifetime in flight")??);
        }
        in_flight.spawn(Life::live(daemon.clone()));
    }
    while let Some(done) = in_flight.join_next().await {
        lives.push(done?);
    }
    Ok((lives, began.elapsed()))
}
