//! Measurements in a sandbox of one engine.

use super::host::get;
use super::requests::{ANSWER, per_second, receive, send};
use super::{
    CONNECTIONS, LOOPBACK_PORT, PORT, SAMPLE_TIME, SERVER_SCRIPT, STREAM_BYTES, Sample, WORK_MIB,
    WORK_SCRIPT, work_samples,
};
use crate::gateway::{LARGE_SIZE, download, sh, upload};
use anyhow::ensure;
use hyper::Method;
use jiffy_agent_client::{AgentClient, ConnectionPool, ProcessEvent, ProcessSpec};
use jiffy_benchmark::counters::Counters;
use jiffy_benchmark::daemon::{BenchmarkDaemon, jiffy_program};
use jiffy_client::Sandbox;
use std::fs;
use std::time::{Duration, Instant};
use tokio::process::Command;

/// Number of megabytes per mebibyte.
const MIB_IN_MB: f64 = 1.048_576;
/// Maximum number of bytes that are read from the output and from the errors of the work script.
const MAX_OUTPUT_BYTES: usize = 1 << 16;

/// Sandbox in which the test server runs.
pub(super) struct SandboxSide {
    daemon: BenchmarkDaemon,
    sandbox: Sandbox,
    agent: AgentClient,
    engine: String,
}

impl SandboxSide {
    /// Creates a sandbox and starts the server.
    pub async fn create(daemon: &BenchmarkDaemon, engine: &str) -> anyhow::Result<Self> {
        let sandbox = daemon.create_on(engine, LARGE_SIZE).await?;
        let this = Self {
            daemon: daemon.clone(),
            agent: daemon.agent(&sandbox)?,
            sandbox,
            engine: engine.to_owned(),
        };
        match this.start_server().await {
            Ok(()) => Ok(this),
            Err(e) => {
                // An error of the removal is ignored, because the cause is the error of the start.
                this.remove().await.ok();
                Err(e)
            }
        }
    }

    /// Starts the test server on an address of the sandbox and on its loopback interface, and waits
    /// up to 10 s until both listen.
    async fn start_server(&self) -> anyhow::Result<()> {
        self.agent
            .write("/tmp/server.py", None, SERVER_SCRIPT)
            .await?;
        self.agent.write("/tmp/work.py", None, WORK_SCRIPT).await?;
        let start = format!(
            "nohup python3 /tmp/server.py {PORT} 0.0.0.0 >/tmp/said 2>&1 & \
             nohup python3 /tmp/server.py {LOOPBACK_PORT} >/tmp/loopback 2>&1 & \
             for i in $(seq 500); do \
             grep -q listening /tmp/said && grep -q listening /tmp/loopback && exit 0; \
             sleep 0.02; done; cat /tmp/said /tmp/loopback >&2; exit 1"
        );
        sh(&self.agent, &start).await
    }

    /// Returns the engine of the sandbox.
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// Removes the sandbox.
    pub async fn remove(self) -> anyhow::Result<()> {
        self.daemon.remove(&self.sandbox.record.id).await
    }

    /// Takes one sample of each measurement.
    pub async fn sample(&self) -> anyhow::Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for connections in CONNECTIONS {
            let (daemon, sandbox) = (self.daemon.clone(), self.sandbox.clone());
            let request = move || through_gateway(daemon.clone(), sandbox.clone(), PORT);
            let name = format!("requests through the gateway, c={connections}");
            samples.extend(self.requests(&name, connections, request).await?);
            let (daemon, sandbox) = (self.daemon.clone(), self.sandbox.clone());
            // The agent connects to a loopback address. Other addresses are reached over the
            // network.
            let request = move || through_gateway(daemon.clone(), sandbox.clone(), LOOPBACK_PORT);
            let name =
                format!("requests through the gateway to a loopback address, c={connections}");
            samples.extend(self.requests(&name, connections, request).await?);
            let pool = self.forwarded();
            let name = format!("requests through a forwarded port, c={connections}");
            let request = move || get(pool.clone());
            samples.extend(self.requests(&name, connections, request).await?);
        }
        let (daemon, id) = (&self.daemon, &self.sandbox.record.id);
        let stream = daemon.port_stream(id, PORT).await?;
        samples.push(Sample::stream(
            "stream in",
            send(stream, STREAM_BYTES).await?,
        ));
        let stream = daemon.port_stream(id, PORT).await?;
        samples.push(Sample::stream(
            "stream out",
            receive(stream, STREAM_BYTES).await?,
        ));
        // `upload` and `download` return MiB/s, but the rates of streams are in MB/s.
        let up = upload(&self.agent).await? * MIB_IN_MB;
        samples.push(Sample::new("a file up", "MB/s", up));
        let down = download(&self.agent).await? * MIB_IN_MB;
        samples.push(Sample::new("a file down", "MB/s", down));
        samples.push(Sample::stream("output of a command", self.output().await?));
        samples.extend(self.copies().await?);
        samples.extend(self.work().await?);
        Ok(samples)
    }

    /// Measures requests per second, and KVM exits per request if they are counted.
    async fn requests<F, Fut>(
        &self,
        name: &str,
        connections: usize,
        request: F,
    ) -> anyhow::Result<Vec<Sample>>
    where
        F: Fn() -> Fut + Clone + Send + 'static,
        Fut: Future<Output = anyhow::Result<()>> + Send,
    {
        let before = self.counters().await;
        let (rate, sent) = per_second(connections, SAMPLE_TIME, request).await?;
        let mut samples = vec![Sample::new(name, "per second", rate)];
        let exits = before.zip(self.counters().await);
        let exits = exits.and_then(|(before, after)| after.since(before).exits());
        if let Some(exits) = exits {
            let title = format!("exits for each of the {name}");
            samples.push(Sample::new(title, "count", exits / sent as f64));
        }
        Ok(samples)
    }

    /// Returns the counters of the sandbox's VMM. `None` for a sandbox of another host, or an
    /// engine without KVM.
    async fn counters(&self) -> Option<Counters> {
        let counters = self.daemon.counters(&self.sandbox.record.id).await;
        counters.ok()
    }

    /// Returns connections in the way that `jiffy port-forward` opens them.
    fn forwarded(&self) -> ConnectionPool {
        let (daemon, id) = (self.daemon.clone(), self.sandbox.record.id.clone());
        ConnectionPool::new(move || {
            let (daemon, id) = (daemon.clone(), id.clone());
            async move {
                let stream = daemon.port_stream(&id, PORT).await;
                stream.map_err(std::io::Error::other)
            }
        })
    }

    /// Measures the output of a command through the agent.
    async fn output(&self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let spec = ProcessSpec::new("head", ["-c", &STREAM_BYTES.to_string(), "/dev/zero"]);
        let mut process = self.agent.start(&spec).await?;
        let mut received = 0;
        while let Some(event) = process.next_event().await? {
            if let ProcessEvent::Stdout(bytes) = event {
                received += bytes.len() as u64;
            }
        }
        ensure!(
            received == STREAM_BYTES,
            "received {received} of {STREAM_BYTES} bytes"
        );
        Ok(began.elapsed())
    }

    /// Measures `jiffy cp` to the sandbox's memory and back.
    async fn copies(&self) -> anyhow::Result<Vec<Sample>> {
        let place = tempfile::tempdir()?;
        let file = place.path().join("file");
        fs::write(&file, vec![0x5a; usize::try_from(STREAM_BYTES)?])?;
        let (local, remote) = (
            file.display().to_string(),
            format!("{}:/dev/shm/file", self.sandbox.record.id),
        );
        let into = self.copy(&local, &remote).await?;
        // The second copy creates the file again, so that its size proves the transfer.
        fs::remove_file(&file)?;
        let out = self.copy(&remote, &local).await?;
        ensure!(
            fs::metadata(&file)?.len() == STREAM_BYTES,
            "`jiffy cp` returned a file with other content"
        );
        sh(&self.agent, "rm -f /dev/shm/file").await?;
        Ok(vec![
            Sample::stream("`jiffy cp` in", into),
            Sample::stream("`jiffy cp` out", out),
        ])
    }

    /// Runs `jiffy cp` once.
    async fn copy(&self, from: &str, to: &str) -> anyhow::Result<Duration> {
        let mut command = Command::new(jiffy_program()?);
        let began = Instant::now();
        let done = command.args(["cp", from, to]).output().await?;
        let stderr = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "`jiffy cp` failed: {stderr}");
        Ok(began.elapsed())
    }

    /// Runs the work script in the sandbox. The directory is on the disk of the sandbox.
    async fn work(&self) -> anyhow::Result<Vec<Sample>> {
        let seconds = SAMPLE_TIME.as_secs_f64().to_string();
        let (mib, place) = (WORK_MIB.to_string(), "/var/tmp");
        let spec = ProcessSpec::new("python3", ["/tmp/work.py", place, &mib, &seconds]);
        let (status, stdout, stderr) = self
            .agent
            .start(&spec)
            .await?
            .output(MAX_OUTPUT_BYTES)
            .await?;
        let stderr = String::from_utf8_lossy(&stderr);
        ensure!(
            status.exit_code == 0,
            "the work script in a sandbox failed: {stderr}"
        );
        work_samples(&stdout)
    }
}

/// Sends one request through the gateway, and checks the response.
async fn through_gateway(
    daemon: BenchmarkDaemon,
    sandbox: Sandbox,
    port: u16,
) -> anyhow::Result<()> {
    let answer = daemon.request_port(&sandbox, port, Method::GET, "/", None);
    let body = answer.await?.collect(1 << 10).await?;
    ensure!(&body[..] == ANSWER, "the server answered {body:?}");
    Ok(())
}
