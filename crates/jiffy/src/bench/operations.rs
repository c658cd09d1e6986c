//! Operations on sandboxes, asked of the daemon as any client would.

use super::{Measured, Series, memory};
use crate::daemon::Daemon;
use crate::serve::routes::{ForkAnswer, ForkBody, RollbackBody, SnapshotBody};
use anyhow::{Context, ensure};
use hyper::Method;
use jiffy_agent_client::{AgentClient, ProcessSpec};
use jiffy_engine::SandboxSize;
use jiffy_host::{CreateSpec, SandboxRecord, SnapshotRecord, Source};
use jiffy_proto::agent::ENVD_PORT;
use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Where to be on a host without VT-x, and what CubeSandbox publishes for its own (16 vCPUs, PVM): averages or walls in milliseconds.
mod goal {
    pub const CREATE: f64 = 25.0;
    pub const CREATE_EXEC: f64 = 40.0;
    pub const STOPPED: f64 = 10.0;
    pub const SNAPSHOT: f64 = 20.0;
    pub const ROLLBACK: f64 = 20.0;
    pub const PAUSE: f64 = 40.0;
    pub const RESUME: f64 = 15.0;
    pub const DENSITY_MIB: f64 = 12.0;

    /// By concurrency.
    pub fn create_reference(concurrency: usize) -> Option<f64> {
        match concurrency {
            1 => Some(66.7),
            10 => Some(170.9),
            20 => Some(364.6),
            _ => None,
        }
    }

    /// By MB written: the goal and the reference for a snapshot.
    pub fn dirty(mb: u64) -> (Option<f64>, Option<f64>) {
        let reference = [
            (0, 42.1),
            (10, 55.3),
            (50, 67.7),
            (100, 85.7),
            (200, 100.9),
            (500, 168.6),
            (800, 215.8),
            (1024, 257.5),
        ];
        let reference = reference.iter().find(|(size, _)| *size == mb).map(|r| r.1);
        let goal = match mb {
            0 | 10 => Some(SNAPSHOT),
            1024 => Some(250.0),
            _ => None,
        };
        (goal, reference)
    }

    /// By number of children.
    pub fn clones(count: usize) -> (Option<f64>, Option<f64>) {
        match count {
            1 => (Some(60.0), Some(270.6)),
            10 => (None, Some(541.6)),
            20 => (Some(600.0), Some(789.7)),
            _ => (None, None),
        }
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// Sandboxes of a daemon; those made here are removed when they have served.
#[derive(Clone)]
struct Target(Daemon);

impl Target {
    async fn open() -> anyhow::Result<Self> {
        crate::run::prepare("base")?;
        Ok(Self(Daemon::find_or_start().await?))
    }

    async fn create(
        &self,
        source: Source,
        size: Option<SandboxSize>,
    ) -> anyhow::Result<SandboxRecord> {
        let spec = CreateSpec {
            source,
            size,
            env: BTreeMap::new(),
        };
        self.0.call(Method::POST, "/sandboxes", &spec).await
    }

    async fn base(&self, size: SandboxSize) -> anyhow::Result<SandboxRecord> {
        self.create(Source::Template("base".to_owned()), Some(size))
            .await
    }

    async fn snapshot(&self, id: &str) -> anyhow::Result<SnapshotRecord> {
        let path = format!("/sandboxes/{id}/snapshot");
        self.0
            .call(Method::POST, &path, &SnapshotBody { name: None })
            .await
    }

    async fn post(&self, id: &str, operation: &str) -> anyhow::Result<SandboxRecord> {
        let path = format!("/sandboxes/{id}/{operation}");
        self.0.call(Method::POST, &path, &()).await
    }

    async fn rollback(&self, id: &str, snapshot: &str) -> anyhow::Result<SandboxRecord> {
        let body = RollbackBody {
            snapshot: snapshot.to_owned(),
        };
        let path = format!("/sandboxes/{id}/rollback");
        self.0.call(Method::POST, &path, &body).await
    }

    async fn remove(&self, id: &str) -> anyhow::Result<()> {
        let _: SandboxRecord = self
            .0
            .call(Method::DELETE, &format!("/sandboxes/{id}"), &())
            .await?;
        Ok(())
    }

    async fn forget(&self, snapshot: &str) -> anyhow::Result<()> {
        let _: SnapshotRecord = self
            .0
            .call(Method::DELETE, &format!("/snapshots/{snapshot}"), &())
            .await?;
        Ok(())
    }

    async fn exec(&self, id: &str, command: &str) -> anyhow::Result<()> {
        let (daemon, owner) = (self.0.clone(), id.to_owned());
        let client = AgentClient::new(move || {
            let (daemon, owner) = (daemon.clone(), owner.clone());
            async move {
                daemon
                    .connect(&owner, ENVD_PORT)
                    .await
                    .map_err(io::Error::other)
            }
        });
        let spec = ProcessSpec::new("/bin/sh", ["-c", command]);
        let (status, _, stderr) = client.start(&spec).await?.output(1 << 16).await?;
        ensure!(
            status.exit_code == 0,
            "`{command}` exited with {}: {}",
            status.exit_code,
            String::from_utf8_lossy(&stderr)
        );
        Ok(())
    }
}

/// Runs `number` rounds of `work`, `concurrency` at a time; returns what they measured and the wall time.
async fn load<F, Fut>(
    number: usize,
    concurrency: usize,
    work: F,
) -> anyhow::Result<(Vec<Vec<f64>>, f64)>
where
    F: Fn() -> Fut,
    Fut: Future<Output = anyhow::Result<Vec<f64>>> + Send + 'static,
{
    let began = Instant::now();
    let mut under_way = JoinSet::new();
    let mut samples = Vec::with_capacity(number);
    for _ in 0..number {
        if under_way.len() >= concurrency {
            samples.push(
                under_way
                    .join_next()
                    .await
                    .context("no round under way")???,
            );
        }
        under_way.spawn(work());
    }
    while let Some(done) = under_way.join_next().await {
        samples.push(done??);
    }
    Ok((samples, ms(began.elapsed())))
}

fn column(rows: &[Vec<f64>], at: usize) -> Vec<f64> {
    rows.iter().filter_map(|row| row.get(at).copied()).collect()
}

/// Create from the template, and from there to the exit code of `true`.
pub async fn create(n: usize, warm_up: usize, c: usize) -> anyhow::Result<Measured> {
    let target = Target::open().await?;
    let round = || {
        let target = target.clone();
        async move {
            let began = Instant::now();
            let sandbox = target.base(SandboxSize::default()).await?;
            let created = ms(began.elapsed());
            target.exec(&sandbox.id, "true").await?;
            let used = ms(began.elapsed());
            target.remove(&sandbox.id).await?;
            Ok(vec![created, used])
        }
    };
    load(warm_up, c, round).await?;
    let (rows, wall) = load(n, c, round).await?;
    Ok(Measured {
        name: "create",
        method: "POST /sandboxes to the daemon on its socket until the answer, which comes after the agent of that sandbox has; then `true` in it over a new stream; then DELETE, not timed; C at a time",
        limits: "a public HTTP API in between; cold page cache; larger guests",
        series: vec![
            Series::new(
                format!("create, c={c}"),
                "ms",
                (c == 1).then_some(goal::CREATE),
                column(&rows, 0),
            )
            .against(goal::create_reference(c)),
            Series::new(
                format!("create + exec, c={c}"),
                "ms",
                (c == 1).then_some(goal::CREATE_EXEC),
                column(&rows, 1),
            ),
            Series::new(
                format!("wall / n, with DELETE, c={c}"),
                "ms",
                None,
                vec![wall / n as f64],
            ),
        ],
    })
}

/// Snapshot of a running sandbox that has hardly written, create from it, rollback to it.
pub async fn snapshot(n: usize, warm_up: usize) -> anyhow::Result<Measured> {
    let target = Target::open().await?;
    let sandbox = target.base(SandboxSize::default()).await?;
    let (mut call, mut stopped, mut restored) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..warm_up + n {
        // About 8 MB in memory, as the reference has it.
        target
            .exec(&sandbox.id, "head -c 8000000 /dev/urandom > /dev/shm/x")
            .await?;
        let began = Instant::now();
        let taken = target.snapshot(&sandbox.id).await?;
        let took = ms(began.elapsed());
        let began = Instant::now();
        let child = target
            .create(Source::Snapshot(taken.id.clone()), None)
            .await?;
        let made = ms(began.elapsed());
        target.remove(&child.id).await?;
        if round >= warm_up {
            call.push(took);
            stopped.push(taken.stopped_ms);
            restored.push(made);
        }
        // Back to where it came from, so that lineages stay short.
        target.rollback(&sandbox.id, &taken.id).await?;
    }
    target.remove(&sandbox.id).await?;
    Ok(Measured {
        name: "snapshot",
        method: "POST snapshot of a running sandbox (2 vCPUs, 512 MiB, 8 MB written in between) until the answer, which comes when it is complete in the page cache (not synced); how long the guest stood still; POST /sandboxes from that snapshot",
        limits: "snapshots at the same time; storage that is synced",
        series: vec![
            Series::new("snapshot, 8 MB written", "ms", Some(goal::SNAPSHOT), call)
                .against(Some(41.4)),
            Series::new("guest stood still", "ms", Some(goal::STOPPED), stopped)
                .against(Some(56.0)),
            Series::new("create from it", "ms", Some(goal::CREATE), restored).against(Some(66.7)),
        ],
    })
}

/// Snapshots against the amount written since the last one.
pub async fn dirty(n: usize) -> anyhow::Result<Measured> {
    let target = Target::open().await?;
    let size = SandboxSize {
        memory_mib: 3072,
        ..SandboxSize::default()
    };
    let mut series = Vec::new();
    for mb in [0u64, 10, 50, 100, 200, 500, 800, 1024] {
        let (mut call, mut stopped, mut restored) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..n {
            let sandbox = target.base(size).await?;
            let write = format!(
                "mount -o remount,size=2G /dev/shm 2>/dev/null; head -c {mb}M /dev/urandom > /dev/shm/x"
            );
            target
                .exec(&sandbox.id, &format!("sudo sh -c '{write}'"))
                .await?;
            let began = Instant::now();
            let taken = target.snapshot(&sandbox.id).await?;
            call.push(ms(began.elapsed()));
            stopped.push(taken.stopped_ms);
            let began = Instant::now();
            let child = target
                .create(Source::Snapshot(taken.id.clone()), None)
                .await?;
            restored.push(ms(began.elapsed()));
            target.remove(&child.id).await?;
            target.remove(&sandbox.id).await?;
            target.forget(&taken.id).await?;
        }
        let (goal, reference) = goal::dirty(mb);
        series.push(Series::new(format!("{mb} MB: snapshot"), "ms", goal, call).against(reference));
        series.push(Series::new(
            format!("{mb} MB: stood still"),
            "ms",
            Some(goal::STOPPED),
            stopped,
        ));
        series.push(
            Series::new(
                format!("{mb} MB: create from it"),
                "ms",
                Some(goal::CREATE),
                restored,
            )
            .against(Some(66.7)),
        );
    }
    Ok(Measured {
        name: "dirty",
        method: "a fresh sandbox of 3 GiB writes so many MB of random bytes to memory; then as `snapshot`",
        limits: "storage that is synced; several at once",
        series,
    })
}

/// Rollback alone, and with the snapshot before it.
pub async fn rollback(n: usize, warm_up: usize, c: usize) -> anyhow::Result<Measured> {
    let target = Target::open().await?;
    let round = || {
        let target = target.clone();
        async move {
            let sandbox = target.base(SandboxSize::default()).await?;
            let began = Instant::now();
            let taken = target.snapshot(&sandbox.id).await?;
            let from = Instant::now();
            target.rollback(&sandbox.id, &taken.id).await?;
            let row = vec![ms(from.elapsed()), ms(began.elapsed())];
            target.exec(&sandbox.id, "true").await?;
            target.remove(&sandbox.id).await?;
            target.forget(&taken.id).await?;
            Ok(row)
        }
    };
    load(warm_up, c, round).await?;
    let (rows, _) = load(n, c, round).await?;
    let reference = match c {
        1 => Some(90.0),
        5 => Some(325.5),
        10 => Some(821.4),
        _ => None,
    };
    Ok(Measured {
        name: "rollback",
        method: "POST rollback of a running sandbox to a snapshot of it until its agent has answered; and the same with the snapshot before; C at a time",
        limits: "snapshots far back in a long lineage",
        series: vec![
            Series::new(
                format!("rollback, c={c}"),
                "ms",
                (c == 1).then_some(goal::ROLLBACK),
                column(&rows, 0),
            ),
            Series::new(
                format!("snapshot + rollback, c={c}"),
                "ms",
                None,
                column(&rows, 1),
            )
            .against(reference),
        ],
    })
}

/// One call that leaves N more answering sandboxes.
pub async fn clone(n: usize, warm_up: usize) -> anyhow::Result<Measured> {
    let target = Target::open().await?;
    let sandbox = target.base(SandboxSize::default()).await?;
    target
        .exec(&sandbox.id, "head -c 10000000 /dev/urandom > /dev/shm/x")
        .await?;
    let mut series = Vec::new();
    for count in [1usize, 10, 20] {
        let mut walls = Vec::new();
        for round in 0..warm_up + n {
            let began = Instant::now();
            let path = format!("/sandboxes/{}/fork", sandbox.id);
            let answer: ForkAnswer = target
                .0
                .call(Method::POST, &path, &ForkBody { count })
                .await?;
            let wall = ms(began.elapsed());
            ensure!(answer.failed.is_empty(), "{:?}", answer.failed);
            for child in answer.children {
                target.remove(&child.id).await?;
            }
            if round >= warm_up {
                walls.push(wall);
            }
        }
        let (goal, reference) = goal::clones(count);
        series.push(Series::new(format!("fork {count}"), "ms", goal, walls).against(reference));
    }
    target.remove(&sandbox.id).await?;
    Ok(Measured {
        name: "clone",
        method: "one POST fork of a live sandbox with 10 MB written, until N more sandboxes have answered",
        limits: "the children's later work",
        series,
    })
}

/// Sleep and waking of an idle 2 GiB sandbox.
pub async fn pause(n: usize, warm_up: usize) -> anyhow::Result<Measured> {
    let target = Target::open().await?;
    let size = SandboxSize {
        memory_mib: 2048,
        ..SandboxSize::default()
    };
    let sandbox = target.base(size).await?;
    let (mut slept, mut woke) = (Vec::new(), Vec::new());
    for round in 0..warm_up + n {
        let began = Instant::now();
        target.post(&sandbox.id, "pause").await?;
        let pausing = ms(began.elapsed());
        let began = Instant::now();
        target.post(&sandbox.id, "resume").await?;
        let resuming = ms(began.elapsed());
        target.exec(&sandbox.id, "true").await?;
        if round >= warm_up {
            slept.push(pausing);
            woke.push(resuming);
        }
    }
    target.remove(&sandbox.id).await?;
    Ok(Measured {
        name: "pause",
        method: "an idle sandbox of 2 vCPUs and 2 GiB: POST pause until it holds no memory; POST resume until its agent has answered; `true` in it in between, not timed",
        limits: "storage that is synced; guests that have written much",
        series: vec![
            Series::new("pause", "ms", Some(goal::PAUSE), slept).against(Some(370.8)),
            Series::new("resume", "ms", Some(goal::RESUME), woke).against(Some(18.9)),
        ],
    })
}

/// Memory of idle sandboxes.
pub async fn density(n: usize) -> anyhow::Result<Measured> {
    let target = Target::open().await?;
    // The first brings the template's snapshot into the page cache.
    let first = target.base(SandboxSize::default()).await?;
    target.remove(&first.id).await?;
    let before = memory::available_mib()?;
    let mut ids = Vec::new();
    for _ in 0..n {
        ids.push(target.base(SandboxSize::default()).await?.id);
    }
    let each = |after: f64| (before - after) / n as f64;
    let at_once = each(memory::available_mib()?);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let later = each(memory::available_mib()?);
    for id in &ids {
        target.remove(id).await?;
    }
    Ok(Measured {
        name: "density",
        method: "fall of MemAvailable while N idle sandboxes of 2 vCPUs and 512 MiB were created, divided by N: when the last had answered, and 60 s later",
        limits: "sandboxes that work; other users of this host's memory in between",
        series: vec![
            Series::new(
                format!("memory each at T=0, {n} live"),
                "MiB",
                None,
                vec![at_once],
            )
            .against(Some(34.0)),
            Series::new(
                format!("memory each at T=60 s, {n} live"),
                "MiB",
                Some(goal::DENSITY_MIB),
                vec![later],
            )
            .against(Some(34.0)),
        ],
    })
}
