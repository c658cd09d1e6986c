//! The daemon as what is measured, and several operations at once.

use super::counters::Counters;
use crate::client::{Client, NewSandbox};
use anyhow::{Context, ensure};
use jiffy_agent_client::ProcessSpec;
use jiffy_engine::SandboxSize;
use jiffy_host::{SandboxRecord, SnapshotRecord};
use std::collections::BTreeMap;
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
pub struct Target(Client);

impl Target {
    /// The daemon of this host, and template `base` ready for it.
    pub async fn open() -> anyhow::Result<Self> {
        crate::run::prepare("base")?;
        Ok(Self(Client::local().await?))
    }

    /// Makes a sandbox of template `base`.
    pub async fn base(&self, size: SandboxSize) -> anyhow::Result<SandboxRecord> {
        let wanted = NewSandbox::of("base", BTreeMap::new()).of_size(size);
        self.0.create(&wanted).await
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
        let wanted = NewSandbox::of(snapshot, BTreeMap::new());
        self.0.create(&wanted).await
    }

    /// Takes a snapshot.
    pub async fn snapshot(&self, id: &str) -> anyhow::Result<SnapshotRecord> {
        self.0.take(id, None).await
    }

    /// Forks `count` children, all of which must answer.
    pub async fn fork(&self, id: &str, count: usize) -> anyhow::Result<Vec<SandboxRecord>> {
        let mut children = Vec::with_capacity(count);
        for child in self.0.fork(id, count).await? {
            let failed = || child.error.map_or(String::new(), |why| why.message);
            children.push(child.sandbox.with_context(failed)?.record);
        }
        Ok(children)
    }

    /// Puts one to sleep.
    pub async fn pause(&self, id: &str) -> anyhow::Result<()> {
        self.0.pause(id).await
    }

    /// Wakes one.
    pub async fn resume(&self, id: &str) -> anyhow::Result<()> {
        self.0.resume(id).await.map(drop)
    }

    /// Puts a sandbox back to a snapshot.
    pub async fn rollback(&self, id: &str, snapshot: &str) -> anyhow::Result<SandboxRecord> {
        self.0.rollback(id, snapshot).await
    }

    /// Removes a sandbox.
    pub async fn remove(&self, id: &str) -> anyhow::Result<()> {
        self.0.delete(id, true).await
    }

    /// Removes a snapshot.
    pub async fn forget(&self, snapshot: &str) -> anyhow::Result<()> {
        self.0.remove_snapshot(snapshot).await.map(drop)
    }

    /// Counters of the sandbox's VMM process.
    pub async fn counters(&self, id: &str) -> anyhow::Result<Counters> {
        let process = self.0.process(id).await?;
        Counters::of(process.pid, process.exits)
    }

    /// Runs a shell command, which must succeed.
    pub async fn exec(&self, id: &str, command: &str) -> anyhow::Result<()> {
        let sandbox = self.0.sandbox(id).await?.record;
        self.exec_in(&sandbox, command).await
    }

    /// The same in a sandbox that is known.
    pub async fn exec_in(&self, sandbox: &SandboxRecord, command: &str) -> anyhow::Result<()> {
        let agent = self.0.agent(&sandbox.clone().into())?;
        let spec = ProcessSpec::new("/bin/sh", ["-c", command]);
        let (status, _, stderr) = agent.start(&spec).await?.output(1 << 16).await?;
        ensure!(
            status.exit_code == 0,
            "`{command}` exited with {}: {}",
            status.exit_code,
            String::from_utf8_lossy(&stderr)
        );
        Ok(())
    }
}
