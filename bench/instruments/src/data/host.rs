//! Measurements on the host without a sandbox.

use super::requests::{ANSWER, drain, per_second, receive, send};
use super::{
    CONNECTIONS, SAMPLE_TIME, SERVER_SCRIPT, STREAM_BYTES, Sample, WORK_MIB, WORK_SCRIPT,
    work_samples,
};
use anyhow::{Context, ensure};
use hyper::Request;
use jiffy_agent_client::{ConnectionPool, RequestBody};
use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

/// Server, which is killed when this value is dropped, and a directory for files.
pub(super) struct HostSide {
    _server: Child,
    port: u16,
    place: TempDir,
}

impl HostSide {
    /// Starts the server.
    pub async fn start() -> anyhow::Result<Self> {
        let place = tempfile::tempdir()?;
        fs::write(place.path().join("server.py"), SERVER_SCRIPT)?;
        fs::write(place.path().join("work.py"), WORK_SCRIPT)?;
        let mut server = Command::new("python3")
            .arg(place.path().join("server.py"))
            // Port 0: the kernel selects a free port.
            .arg("0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("python3 is not installed on this host")?;
        let output = server.stdout.take().context("the server has no output")?;
        // When the server listens, it prints the port that the kernel has selected.
        let line = BufReader::new(output).lines().next_line().await?;
        let port = line.as_deref().and_then(|line| line.rsplit(' ').next());
        let port = port.and_then(|port| port.parse().ok());
        Ok(Self {
            _server: server,
            port: port.context("the server did not start")?,
            place,
        })
    }

    /// Takes one sample of each measurement.
    pub async fn sample(&self) -> anyhow::Result<Vec<Sample>> {
        self.sample_of(STREAM_BYTES, WORK_MIB, SAMPLE_TIME).await
    }

    /// Takes one sample of each measurement with the given amounts.
    pub async fn sample_of(
        &self,
        bytes: u64,
        mib: u64,
        time: Duration,
    ) -> anyhow::Result<Vec<Sample>> {
        let port = self.port;
        let pool = ConnectionPool::new(move || TcpStream::connect(("127.0.0.1", port)));
        let mut samples = Vec::new();
        for connections in CONNECTIONS {
            // The pool reuses its connections, like the client of a sandbox.
            let pool = pool.clone();
            let request = move || get(pool.clone());
            let (rate, _) = per_second(connections, time, request).await?;
            let name = format!("requests to the server, c={connections}");
            samples.push(Sample::new(name, "per second", rate));
        }
        // The rate assumes STREAM_BYTES, so the time of fewer bytes is extrapolated.
        let scaled = |name: &str, took: Duration| {
            let whole = STREAM_BYTES as f64 / bytes as f64;
            Sample::stream(name, took.mul_f64(whole))
        };
        let connect = || TcpStream::connect(("127.0.0.1", port));
        samples.push(scaled("stream in", send(connect().await?, bytes).await?));
        samples.push(scaled(
            "stream out",
            receive(connect().await?, bytes).await?,
        ));
        samples.push(scaled("output of a command", output(bytes).await?));
        samples.push(scaled("a copied file", self.copy(bytes).await?));
        samples.extend(self.work(mib, time).await?);
        Ok(samples)
    }

    /// Measures a copy of a file in the temporary directory.
    async fn copy(&self, bytes: u64) -> anyhow::Result<Duration> {
        let (from, to) = (self.place.path().join("from"), self.place.path().join("to"));
        fs::write(&from, vec![0x5a; usize::try_from(bytes)?])?;
        let began = Instant::now();
        // The file is in the page cache, because it was just written.
        tokio::fs::copy(&from, &to).await?;
        let took = began.elapsed();
        fs::remove_file(from)?;
        fs::remove_file(to)?;
        Ok(took)
    }

    /// Runs the work script on the host.
    async fn work(&self, mib: u64, time: Duration) -> anyhow::Result<Vec<Sample>> {
        let mut command = Command::new("python3");
        command
            .arg(self.place.path().join("work.py"))
            .arg(self.place.path())
            .arg(mib.to_string())
            .arg(time.as_secs_f64().to_string());
        let done = command.output().await?;
        let stderr = String::from_utf8_lossy(&done.stderr);
        ensure!(
            done.status.success(),
            "the work script on this host failed: {stderr}"
        );
        work_samples(&done.stdout)
    }
}

/// Sends a request to the server, and reads its answer.
pub(super) async fn get(pool: ConnectionPool) -> anyhow::Result<()> {
    let request = Request::get("/").header("host", "localhost");
    let answer = pool.send(request.body(RequestBody::Whole(None))?).await?;
    let body = answer.collect(1 << 10).await?;
    ensure!(&body[..] == ANSWER, "the server answered {body:?}");
    Ok(())
}

/// Measures the output of a command through a pipe.
async fn output(bytes: u64) -> anyhow::Result<Duration> {
    let began = Instant::now();
    let mut child = Command::new("head")
        .args(["-c", &bytes.to_string(), "/dev/zero"])
        .stdout(Stdio::piped())
        .spawn()?;
    let received = drain(child.stdout.take().context("no output")?).await?;
    ensure!(received == bytes, "received {received} of {bytes} bytes");
    child.wait().await?;
    Ok(began.elapsed())
}
