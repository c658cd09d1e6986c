//! Benchmark `run`: the command `jiffy run`, with a guest that the command starts itself or that
//! the daemon provides. A *warm pool* contains sandboxes that the daemon starts in advance.

use crate::daemon::{BenchmarkDaemon, jiffy_program, ms};
use crate::{Measured, Series, goals};
use anyhow::{Context, ensure};
use jiffy_client::ServerOptions;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::process::Command;

/// Interval between checks of a warm pool that is being filled.
const POOL_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Pause before each run, in which removals and refills of the previous run complete.
const PAUSE: Duration = Duration::from_secs(1);
/// Number of sandboxes in the warm pool.
const POOL_SIZE: u64 = 2;

/// Origin of the guest of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GuestOrigin {
    /// Started by the process of `jiffy run` itself, without a daemon.
    Local,
    /// As `Local`, and without a network.
    LocalWithoutNetwork,
    /// Created by the daemon while its warm pool is empty.
    Daemon,
    /// Taken from the warm pool of the daemon.
    WarmPool,
}

impl GuestOrigin {
    const ALL: [Self; 4] = [
        Self::WarmPool,
        Self::Daemon,
        Self::Local,
        Self::LocalWithoutNetwork,
    ];

    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Local => &["--no-daemon"],
            Self::LocalWithoutNetwork => &["--no-daemon", "--network", "off"],
            Self::Daemon | Self::WarmPool => &[],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Local => "without a daemon",
            Self::LocalWithoutNetwork => "without a daemon, without network",
            Self::Daemon => "daemon, no warm pool",
            Self::WarmPool => "daemon, warm pool",
        }
    }
}

/// Measures `jiffy run -- echo hello` with the daemon of this host, with and without a warm pool,
/// and without a daemon.
pub async fn run(n: usize, warm_up: usize, server: &ServerOptions) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let before = daemon.pool_size().await?;
    // The size is restored even if a sample failed, so the error is returned afterwards.
    let series = samples(&daemon, n, warm_up).await;
    daemon.set_pool_size(before).await?;
    Ok(Measured {
        name: "run",
        method: "time of the command `jiffy run -- echo hello`, from the creation of its process \
            to its exit. The sandbox of the daemon, or the network of a local guest, is removed \
            after the answer. The pause between runs is one second. The warm pool (2) is full \
            before a run that uses it",
        limits: "the first run on a host, which unpacks the kernel and builds the template; \
            concurrent runs",
        not_available: vec![
            "KVM exits and page faults of a run: not available: the VMM exits with the command \
             (`create` and `exec` have them)"
                .to_owned(),
        ],
        series: series?,
    })
}

/// Measures `n` runs for each origin of a guest, after `warm_up` runs that do not count.
async fn samples(
    daemon: &BenchmarkDaemon,
    n: usize,
    warm_up: usize,
) -> anyhow::Result<Vec<Series>> {
    let mut series = Vec::new();
    for origin in GuestOrigin::ALL {
        daemon
            .set_pool_size(if origin == GuestOrigin::WarmPool {
                POOL_SIZE
            } else {
                0
            })
            .await?;
        let mut samples = Vec::new();
        for round in 0..warm_up + n {
            // The refill of the pool is not part of a run.
            while origin == GuestOrigin::WarmPool && daemon.pool_ready().await? < POOL_SIZE {
                tokio::time::sleep(POOL_POLL_INTERVAL).await;
            }
            tokio::time::sleep(PAUSE).await;
            let took = once(origin).await?;
            if round >= warm_up {
                samples.push(took);
            }
        }
        let goal = (origin == GuestOrigin::WarmPool).then_some(goals::RUN);
        let name = format!("jiffy run -- echo hello; {}", origin.name());
        series.push(Series::new(name, "ms", goal, samples));
    }
    Ok(series)
}

/// Returns the duration of one run in milliseconds.
async fn once(origin: GuestOrigin) -> anyhow::Result<f64> {
    let mut command = Command::new(jiffy_program()?);
    command
        .arg("run")
        .args(origin.options())
        .args(["--", "echo", "hello"])
        .stdin(Stdio::null());
    let began = Instant::now();
    let output = command.output().await.context("cannot start `jiffy run`")?;
    let took = ms(began.elapsed());
    ensure!(
        output.status.success() && output.stdout == b"hello\n",
        "`jiffy run -- echo hello` failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(took)
}
