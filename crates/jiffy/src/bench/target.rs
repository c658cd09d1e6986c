//! The daemon as what is measured, and several operations at once.

use super::counters::Counters;
use crate::daemon::Daemon;
use crate::serve::routes::{ForkAnswer, ForkBody, ProcessAnswer, RollbackBody, SnapshotBody};
use anyhow::{Context, ensure};
use hyper::Method;
use jiffy_agent_client::{AgentClient, ProcessSpec};
use jiffy_engine::SandboxSize;
use jiffy_host::{CreateSpec, SandboxRecord, SnapshotRecord, Source, Terms};
use jiffy_proto::agent::ENVD_PORT;
use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

/// Milliseconds.
pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// What came of `work`, and how many milliseconds it took.
pub async fn timed<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<(T, f64)> {
    let began = Instant::now();
    let done = work.await?;
    Ok((done, ms(began.elapsed())))
}

/// Does `work` for all of `items` at once; what came of each, in order, and the wall time from the first to the last.
pub async fn at_once<I, T, F, Fut>(items: &[I], work: F) -> anyhow::Result<(Vec<T>, f64)>
where
    I: Clone,
    F: Fn(I) -> Fut,
    Fut: Future<Output = anyhow::Result<T>> + Send + 'static,
    T: Send + 'static,
{
    let began = Instant::now();
    let under_way: Vec<_> = items
        .iter()
        .map(|item| tokio::spawn(work(item.clone())))
        .collect();
    let mut done = Vec::with_capacity(items.len());
    for task in under_way {
        done.push(task.await.context("an operation was lost")??);
    }
    Ok((done, ms(began.elapsed())))
}

/// Sandboxes of a daemon; those made here are removed when they have served.
#[derive(Clone)]
pub struct Target(Daemon);

impl Target {
    /// The daemon, and template `base` ready for it.
    pub async fn open() -> anyhow::Result<Self> {
        crate::run::prepare("base")?;
        Ok(Self(Daemon::find_or_start().await?))
    }

    /// Makes a sandbox.
    pub async fn create(
        &self,
        source: Source,
        size: Option<SandboxSize>,
    ) -> anyhow::Result<SandboxRecord> {
        let spec = CreateSpec {
            source,
            size,
            env: BTreeMap::new(),
            terms: Terms::default(),
        };
        self.0.call(Method::POST, "/sandboxes", &spec).await
    }

    /// Makes one of template `base`.
    pub async fn base(&self, size: SandboxSize) -> anyhow::Result<SandboxRecord> {
        self.create(Source::Template("base".to_owned()), Some(size))
            .await
    }

    /// Makes `count` of them, one after the other; their ids.
    pub async fn several(&self, count: usize, size: SandboxSize) -> anyhow::Result<Vec<String>> {
        let mut ids = Vec::with_capacity(count);
        for _ in 0..count {
            ids.push(self.base(size).await?.id);
        }
        Ok(ids)
    }

    /// Makes one of a snapshot.
    pub async fn restored(&self, snapshot: &str) -> anyhow::Result<SandboxRecord> {
        self.create(Source::Snapshot(snapshot.to_owned()), None)
            .await
    }

    /// Takes a snapshot.
    pub async fn snapshot(&self, id: &str) -> anyhow::Result<SnapshotRecord> {
        let path = format!("/sandboxes/{id}/snapshot");
        self.0
            .call(Method::POST, &path, &SnapshotBody { name: None })
            .await
    }

    /// Forks `count` children, all of which must answer.
    pub async fn fork(&self, id: &str, count: usize) -> anyhow::Result<Vec<SandboxRecord>> {
        let path = format!("/sandboxes/{id}/fork");
        let body = ForkBody { count };
        let answer: ForkAnswer = self.0.call(Method::POST, &path, &body).await?;
        ensure!(answer.failed.is_empty(), "{:?}", answer.failed);
        Ok(answer.children)
    }

    /// An operation without arguments.
    pub async fn post(&self, id: &str, operation: &str) -> anyhow::Result<SandboxRecord> {
        let path = format!("/sandboxes/{id}/{operation}");
        self.0.call(Method::POST, &path, &()).await
    }

    /// Puts a sandbox back to a snapshot.
    pub async fn rollback(&self, id: &str, snapshot: &str) -> anyhow::Result<SandboxRecord> {
        let body = RollbackBody {
            snapshot: snapshot.to_owned(),
        };
        let path = format!("/sandboxes/{id}/rollback");
        self.0.call(Method::POST, &path, &body).await
    }

    /// Removes a sandbox.
    pub async fn remove(&self, id: &str) -> anyhow::Result<()> {
        let _: SandboxRecord = self
            .0
            .call(Method::DELETE, &format!("/sandboxes/{id}"), &())
            .await?;
        Ok(())
    }

    /// Removes a snapshot.
    pub async fn forget(&self, snapshot: &str) -> anyhow::Result<()> {
        let _: SnapshotRecord = self
            .0
            .call(Method::DELETE, &format!("/snapshots/{snapshot}"), &())
            .await?;
        Ok(())
    }

    /// Counters of the sandbox's VMM process.
    pub async fn counters(&self, id: &str) -> anyhow::Result<Counters> {
        let path = format!("/sandboxes/{id}/process");
        let answer: ProcessAnswer = self.0.call(Method::GET, &path, &()).await?;
        Counters::of(answer.pid, answer.exits)
    }

    /// Runs a shell command, which must succeed.
    pub async fn exec(&self, id: &str, command: &str) -> anyhow::Result<()> {
        let (daemon, owner) = (self.0.clone(), id.to_owned());
        let client = AgentClient::new(move || {
            let (daemon, owner) = (daemon.clone(), owner.clone());
            async move {
                let stream = daemon.connect(&owner, ENVD_PORT).await;
                stream.map_err(io::Error::other)
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
