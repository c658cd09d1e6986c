//! A daemon on a data directory of its own.

use super::scratch_home::ScratchHome;
use crate::daemon::ms;
use anyhow::{Context, bail, ensure};
use hyper::Method;
use jiffy_client::{Client, ServerOptions};
use jiffy_daemon::local_daemon;
use serde_json::Value;
use std::fs::{self, File};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::process::{Child, Command};

/// Longest time until a daemon answers, or has ended.
const LIMIT: Duration = Duration::from_secs(300);
/// Time between two looks at a daemon that starts.
const POLL: Duration = Duration::from_millis(1);

/// The daemon, killed if it was not stopped.
pub(super) struct ScratchDaemon {
    process: Child,
    /// Its owner, over its socket.
    pub owner: Client,
    /// The same with a key, over TCP.
    pub keyed: Client,
    /// Milliseconds from the start of its process to its first answer.
    pub first_answer_ms: f64,
}

impl ScratchDaemon {
    /// Starts one, and asks for `path` until it answers.
    pub async fn start(home: &ScratchHome, path: &str) -> anyhow::Result<Self> {
        let said = home.path().join("said");
        let program = std::env::current_exe().context("cannot find our own program")?;
        let began = Instant::now();
        let mut process = Command::new(program)
            .args(["serve", "--listen", "127.0.0.1:0", "--warm-pool", "0"])
            .arg("--log-file")
            .arg(home.path().join("log"))
            .env("JIFFY_HOME", home.path())
            .stdin(Stdio::null())
            .stdout(File::create(&said)?)
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a daemon")?;
        let directory = home.home()?;
        let stream = loop {
            if let Some(stream) = local_daemon::connect(&directory).await {
                break stream;
            }
            if let Some(status) = process.try_wait()? {
                let log = fs::read_to_string(home.path().join("log")).unwrap_or_default();
                let last = log.lines().last().unwrap_or("it logged nothing");
                bail!("a daemon with a data directory of its own ended with {status}: {last}");
            }
            ensure!(began.elapsed() < LIMIT, "a daemon does not answer");
            tokio::time::sleep(POLL).await;
        };
        let owner = jiffy_daemon::local_daemon::client_over(&directory, stream).await?;
        let _: Value = owner.call(Method::GET, path, &()).await?;
        let first_answer_ms = ms(began.elapsed());
        let text = fs::read_to_string(&said)?;
        let url = text
            .lines()
            .find_map(|line| line.strip_prefix("listening on "));
        let options = ServerOptions {
            url: Some(
                url.context("a daemon does not tell its address")?
                    .to_owned(),
            ),
            key_file: Some(home.path().join("api-key")),
        };
        Ok(Self {
            process,
            owner,
            keyed: jiffy_daemon::open_client(&options).await?,
            first_answer_ms,
        })
    }

    /// Resident memory in KiB.
    pub fn memory_kib(&self) -> anyhow::Result<f64> {
        let pid = self.process.id().context("the daemon ended by itself")?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.context("no VmRSS")?.trim().trim_end_matches(" kB");
        Ok(kib.parse()?)
    }

    /// Ends it. Nothing runs in it that could outlive it, unless a measurement failed.
    pub async fn stop(mut self, home: &ScratchHome) -> anyhow::Result<()> {
        stop(home, false).await?;
        let ended = tokio::time::timeout(LIMIT, self.process.wait()).await;
        ended.context("a daemon does not end")??;
        Ok(())
    }
}

/// Ends the daemon of a data directory, with what runs in it if that is to be.
pub(super) async fn stop(home: &ScratchHome, kill_sandboxes: bool) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("cannot find our own program")?;
    let mut command = Command::new(program);
    command
        .args(["serve", "--stop"])
        .env("JIFFY_HOME", home.path());
    if kill_sandboxes {
        command.arg("--kill-sandboxes");
    }
    let output = command.output().await.context("cannot run ourselves")?;
    ensure!(
        output.status.success(),
        "`jiffy serve --stop` failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
