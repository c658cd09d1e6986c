//! Daemon on a temporary data directory.

use crate::data_directory::DataDirectory;
use anyhow::{Context, bail, ensure};
use hyper::Method;
use jiffy_benchmark::daemon::{BenchmarkDaemon, jiffy_program, ms};
use jiffy_client::{Client, ServerOptions};
use jiffy_daemon::local_daemon;
use serde_json::Value;
use std::fs::{self, File};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::process::{Child, Command};

/// Timeout of the start and of the stop of a daemon.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Interval between connection attempts to a starting daemon.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Daemon that is killed when this value is dropped, unless it was stopped.
pub struct OwnDaemon {
    process: Child,
    /// Client with owner rights, over the socket.
    pub daemon: BenchmarkDaemon,
    /// Client with a key, over TCP.
    pub keyed: Client,
    /// Time from the start of the process to the first answer, in milliseconds.
    pub first_answer_ms: f64,
}

impl OwnDaemon {
    /// Starts a daemon, and requests `path` as soon as it answers.
    pub async fn start(directory: &DataDirectory, path: &str) -> anyhow::Result<Self> {
        let output = directory.path().join("output");
        let program = jiffy_program()?;
        let began = Instant::now();
        let mut process = Command::new(program)
            // A warm pool would use processors and memory during the measurement.
            .args(["serve", "--listen", "127.0.0.1:0", "--warm-pool", "0"])
            .arg("--log-file")
            .arg(directory.path().join("log"))
            .env("JIFFY_HOME", directory.path())
            .stdin(Stdio::null())
            .stdout(File::create(&output)?)
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a daemon")?;
        let home = directory.home()?;
        // Polls the socket, since the time of the first connection is measured.
        let stream = loop {
            if let Some(stream) = local_daemon::connect(&home).await {
                break stream;
            }
            // A daemon that exited would otherwise be waited for until the timeout.
            if let Some(status) = process.try_wait()? {
                let log = fs::read_to_string(directory.path().join("log")).unwrap_or_default();
                let last = log.lines().last().unwrap_or("its log is empty");
                bail!("a daemon exited with {status} while it started: {last}");
            }
            ensure!(began.elapsed() < TIMEOUT, "a daemon does not answer");
            tokio::time::sleep(POLL_INTERVAL).await;
        };
        let owner = local_daemon::client_over(&home, stream).await?;
        let _: Value = owner.call(Method::GET, path, &()).await?;
        let first_answer_ms = ms(began.elapsed());
        // The rest of this function is not part of the measured time.
        let text = fs::read_to_string(&output)?;
        let mut lines = text.lines();
        // The port was chosen by the kernel.
        let url = lines.find_map(|line| line.strip_prefix("listening on "));
        let options = ServerOptions {
            url: Some(url.context("a daemon printed no address")?.to_owned()),
            key_file: Some(directory.path().join("api-key")),
        };
        Ok(Self {
            process,
            daemon: BenchmarkDaemon::owned(owner, home),
            keyed: jiffy_daemon::open_client(&options).await?,
            first_answer_ms,
        })
    }

    /// Stops the daemon. No sandbox may be running.
    pub async fn stop(mut self, directory: &DataDirectory) -> anyhow::Result<()> {
        let kill_sandboxes = false;
        stop(directory, kill_sandboxes).await?;
        let exit = tokio::time::timeout(TIMEOUT, self.process.wait()).await;
        exit.context("a daemon does not exit")??;
        Ok(())
    }
}

/// Stops the daemon of a data directory, and kills its sandboxes if `kill_sandboxes` is set.
pub async fn stop(directory: &DataDirectory, kill_sandboxes: bool) -> anyhow::Result<()> {
    let mut command = Command::new(jiffy_program()?);
    command
        .args(["serve", "--stop"])
        .env("JIFFY_HOME", directory.path());
    if kill_sandboxes {
        command.arg("--kill-sandboxes");
    }
    let output = command.output().await.context("cannot start `jiffy`")?;
    ensure!(
        output.status.success(),
        "`jiffy serve --stop` failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
