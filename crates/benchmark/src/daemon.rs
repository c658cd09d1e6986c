//! Client of the measured daemon, and helpers that run and time operations.
//!
//! Benchmarks measure a daemon that runs on this host or another one, by calls of its API.
//!
//! A *warm pool* contains sandboxes that the daemon starts in advance. A snapshot is *captured*
//! when its memory is frozen in a process that outlives the daemon.

use crate::counters::Counters;
use anyhow::{Context, ensure};
use bytes::Bytes;
use hyper::Method;
use jiffy_agent_client::{AgentClient, PooledResponse, ProcessSpec};
use jiffy_api_types::{SandboxInfo, SnapshotInfo};
use jiffy_client::ServerOptions;
use jiffy_client::{Client, NewSandbox, Sandbox, SandboxSettings, SnapshotAck};
use jiffy_daemon::local_daemon;
use jiffy_engine_api::{EngineDescription, SandboxSize};
use jiffy_engines::{EngineFacts, Host};
use jiffy_image::Home;
use jiffy_installation::Installation;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::process::Command;

/// Converts a duration to milliseconds.
pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// Returns the result of `work` and its duration in milliseconds.
pub async fn timed<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<(T, f64)> {
    let began = Instant::now();
    let done = work.await?;
    Ok((done, ms(began.elapsed())))
}

/// Runs `work` for all `items` concurrently. Returns the results in order, and the time from the
/// first start to the last completion.
pub async fn run_concurrently<I, T, F, Fut>(items: &[I], work: F) -> anyhow::Result<(Vec<T>, f64)>
where
    I: Clone,
    F: Fn(I) -> Fut,
    Fut: Future<Output = anyhow::Result<T>> + Send + 'static,
    T: Send + 'static,
{
    let began = Instant::now();
    // All tasks are started before the first one is awaited, so that they overlap.
    let in_flight: Vec<_> = items
        .iter()
        .map(|item| tokio::spawn(work(item.clone())))
        .collect();
    let mut done = Vec::with_capacity(items.len());
    for task in in_flight {
        done.push(task.await.context("the task of an operation failed")??);
    }
    Ok((done, ms(began.elapsed())))
}

/// Returns the path of the program `jiffy` next to the running program.
pub fn jiffy_program() -> anyhow::Result<PathBuf> {
    let installation = Installation::current().context("cannot find the running program")?;
    Ok(installation.jiffy())
}

/// Builds template `base` if it is missing. Fails if no engine can run on this host.
pub async fn prepare_base() -> anyhow::Result<()> {
    let facts = EngineFacts::of(&Host::open()?);
    facts
        .check(facts.choose().engine)
        .map_err(anyhow::Error::msg)?;
    // A separate process is required, because builds start `jiffy` in other roles.
    let building = Command::new(jiffy_program()?)
        .args(["template", "build", "base"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    let status = building.await.context("cannot start `jiffy`")?;
    ensure!(status.success(), "cannot build template `base`: {status}");
    Ok(())
}

/// Client of the daemon that is measured.
#[derive(Clone)]
pub struct BenchmarkDaemon {
    client: Client,
    /// Client for calls that only the owner of a host may make. `None` if the daemon is on another
    /// host.
    owner: Option<Client>,
    /// Data directory of the daemon, if the daemon is on this host.
    home: Home,
}

impl BenchmarkDaemon {
    /// Connects to the daemon selected by `options`. Prepares template `base` for the daemon of
    /// this host.
    pub async fn open(options: &ServerOptions) -> anyhow::Result<Self> {
        let client = jiffy_daemon::open_client(options).await?;
        let home = Home::locate()?;
        // Templates of another host cannot be built from here.
        if !client.is_remote() {
            prepare_base().await?;
            return Ok(Self::owned(client, home));
        }
        // The address may belong to this host. The local socket then gives the rights of the owner.
        let owner = match local_daemon::connect(&home).await {
            Some(stream) => Some(local_daemon::client_over(&home, stream).await?),
            None => None,
        };
        Ok(Self {
            client,
            owner,
            home,
        })
    }

    /// Uses a client with owner rights and its data directory `home`.
    pub fn owned(client: Client, home: Home) -> Self {
        Self {
            owner: Some(client.clone()),
            client,
            home,
        }
    }

    /// Returns the client of the control plane.
    pub fn client(&self) -> &Client {
        &self.client
    }

    fn owner(&self) -> anyhow::Result<&Client> {
        let owner = self.owner.as_ref();
        owner.context(
            "this task measures the daemon of this host, but JIFFY_URL or --url selects another daemon",
        )
    }

    /// Returns the process and the data directory of the daemon, or `None` if the daemon is on
    /// another host.
    pub async fn place(&self) -> anyhow::Result<Option<(u32, PathBuf)>> {
        if self.owner.is_none() {
            return Ok(None);
        }
        let stream = local_daemon::connect(&self.home)
            .await
            .context("the daemon has exited")?;
        let (pid, _) = local_daemon::process_of(&stream).context("no process id of the daemon")?;
        let home = self.home.path().to_owned();
        Ok(Some((pid.as_raw().try_into()?, home)))
    }

    /// Returns the ids of all sandboxes and of all snapshots.
    pub async fn names(&self) -> anyhow::Result<(BTreeSet<String>, BTreeSet<String>)> {
        let with_killed = false;
        let sandboxes = self.client.sandboxes(with_killed).await?.into_iter();
        let snapshots = self.client.snapshots(None).await?.into_iter();
        let sandboxes = sandboxes.map(|sandbox| sandbox.id).collect();
        Ok((
            sandboxes,
            snapshots.map(|snapshot| snapshot.record.id).collect(),
        ))
    }

    /// Returns the resident memory of the daemon in KiB.
    pub async fn memory_kib(&self) -> anyhow::Result<f64> {
        // Fails early with a message that names the cause.
        self.owner()?;
        let (pid, _) = self.place().await?.context("the daemon has exited")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
        let kib = line.context("no VmRSS")?.trim().trim_end_matches(" kB");
        Ok(kib.parse()?)
    }

    /// Returns the current and the configured number of sandboxes of template `base` in the warm
    /// pool.
    async fn pool(&self) -> anyhow::Result<(u64, u64)> {
        let all: Vec<Value> = self.client.call(Method::GET, "/pools", &()).await?;
        let base = all.iter().find(|pool| pool["templateID"] == "base");
        // A template without an entry has no warm pool.
        let number = |name: &str| base.and_then(|pool| pool[name].as_u64()).unwrap_or(0);
        Ok((number("ready"), number("size")))
    }

    /// Returns the number of sandboxes of template `base` in the warm pool.
    pub async fn pool_ready(&self) -> anyhow::Result<u64> {
        Ok(self.pool().await?.0)
    }

    /// Returns the configured number of sandboxes of template `base` in the warm pool.
    pub async fn pool_size(&self) -> anyhow::Result<u64> {
        Ok(self.pool().await?.1)
    }

    /// Configures the number of sandboxes of template `base` in the warm pool.
    pub async fn set_pool_size(&self, size: u64) -> anyhow::Result<()> {
        let body = json!({ "size": size });
        let _: Value = self.client.call(Method::PUT, "/pools/base", &body).await?;
        Ok(())
    }

    /// Creates a sandbox of a template in the template's size.
    pub async fn create_from(&self, template: &str) -> anyhow::Result<Sandbox> {
        self.client
            .create(&NewSandbox::of(template, BTreeMap::new()))
            .await
    }

    /// Creates a sandbox of template `base`, with the access token of its agent.
    pub async fn create_with_token(&self, size: SandboxSize) -> anyhow::Result<Sandbox> {
        let request = NewSandbox::of("base", BTreeMap::new()).with_size(size);
        self.client.create(&request).await
    }

    /// Creates a sandbox of template `base` on an engine.
    pub async fn create_on(&self, engine: &str, size: SandboxSize) -> anyhow::Result<Sandbox> {
        let settings = SandboxSettings {
            engine: Some(engine.to_owned()),
            ..SandboxSettings::default()
        };
        let request = NewSandbox::of("base", BTreeMap::new()).with_size(size);
        self.client.create(&request.with_settings(settings)).await
    }

    /// Returns the engines of the daemon.
    pub async fn engines(&self) -> anyhow::Result<Vec<EngineDescription>> {
        self.client.engines().await
    }

    /// Opens a stream to a TCP port of a sandbox.
    pub async fn port_stream(
        &self,
        id: &str,
        port: u16,
    ) -> anyhow::Result<impl AsyncRead + AsyncWrite + Send + Unpin + use<>> {
        self.client.stream(id, port).await
    }

    /// Returns a client of the sandbox's agent.
    pub fn agent(&self, sandbox: &Sandbox) -> anyhow::Result<AgentClient> {
        self.client.agent(sandbox)
    }

    /// Sends a request to a server in the sandbox.
    pub async fn request_port(
        &self,
        sandbox: &Sandbox,
        port: u16,
        method: Method,
        path: &str,
        body: Option<Bytes>,
    ) -> anyhow::Result<PooledResponse> {
        self.client
            .request_port(sandbox, port, method, path, body)
            .await
    }

    /// Creates a sandbox of template `base`.
    pub async fn create_base(&self, size: SandboxSize) -> anyhow::Result<SandboxInfo> {
        Ok(self.create_with_token(size).await?.record)
    }

    /// Creates `count` sandboxes sequentially, and returns their ids.
    pub async fn create_several(
        &self,
        count: usize,
        size: SandboxSize,
    ) -> anyhow::Result<Vec<String>> {
        let mut ids = Vec::with_capacity(count);
        for _ in 0..count {
            ids.push(self.create_base(size).await?.id);
        }
        Ok(ids)
    }

    /// Creates a sandbox from a snapshot.
    pub async fn create_from_snapshot(&self, snapshot: &str) -> anyhow::Result<SandboxInfo> {
        Ok(self.create_from(snapshot).await?.record)
    }

    /// Takes a snapshot.
    pub async fn snapshot(&self, id: &str) -> anyhow::Result<SnapshotInfo> {
        let ack = SnapshotAck::Stored;
        self.client.snapshot_sandbox(id, None, ack).await
    }

    /// Takes a snapshot, and returns when it is captured.
    pub async fn capture(&self, id: &str) -> anyhow::Result<SnapshotInfo> {
        let ack = SnapshotAck::Captured;
        self.client.snapshot_sandbox(id, None, ack).await
    }

    /// Forks a sandbox. Returns when all `count` children answer.
    pub async fn fork(&self, id: &str, count: usize) -> anyhow::Result<Vec<SandboxInfo>> {
        let mut children = Vec::with_capacity(count);
        for child in self.client.fork(id, count).await? {
            let failed = || child.error.map_or(String::new(), |why| why.message);
            children.push(child.sandbox.with_context(failed)?.added.jiffy);
        }
        Ok(children)
    }

    /// Pauses a sandbox.
    pub async fn pause(&self, id: &str) -> anyhow::Result<()> {
        let durable = false;
        self.client.pause(id, durable).await
    }

    /// Resumes a sandbox.
    pub async fn resume(&self, id: &str) -> anyhow::Result<()> {
        self.client.resume(id).await.map(drop)
    }

    /// Rolls back a sandbox to a snapshot.
    pub async fn rollback(&self, id: &str, snapshot: &str) -> anyhow::Result<SandboxInfo> {
        self.client.rollback(id, snapshot).await
    }

    /// Removes a sandbox.
    pub async fn remove(&self, id: &str) -> anyhow::Result<()> {
        let forget_record = true;
        self.client.delete(id, forget_record).await
    }

    /// Removes a snapshot.
    pub async fn remove_snapshot(&self, snapshot: &str) -> anyhow::Result<()> {
        self.client.remove_snapshot(snapshot).await.map(drop)
    }

    /// Returns the counters of the sandbox's VMM process.
    pub async fn counters(&self, id: &str) -> anyhow::Result<Counters> {
        let process = self.owner()?.process(id).await?;
        Counters::of(process.pid, process.exits)
    }

    /// Runs a shell command, which must succeed.
    pub async fn exec(&self, id: &str, command: &str) -> anyhow::Result<()> {
        let sandbox = self.client.sandbox(id).await?;
        self.exec_in(&sandbox, command).await
    }

    /// Runs a shell command in a sandbox whose details are already available.
    pub async fn exec_in(&self, sandbox: &Sandbox, command: &str) -> anyhow::Result<()> {
        let agent = self.agent(sandbox)?;
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
