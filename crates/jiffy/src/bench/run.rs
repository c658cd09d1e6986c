//! `jiffy run` as a user types it, whoever makes the guest.

use super::target::{Target, ms};
use super::{Measured, Series, goal};
use anyhow::{Context, ensure};
use jiffy_client::ServerOptions;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::process::Command;

/// Time between two looks at a warm pool that fills.
const POOL_POLL: Duration = Duration::from_millis(20);
/// Sandboxes in the warm pool.
const POOL: u64 = 2;

/// Maker of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Maker {
    Own,
    OwnWithoutNetwork,
    Daemon,
    Pool,
}

impl Maker {
    const ALL: [Self; 4] = [Self::Pool, Self::Daemon, Self::Own, Self::OwnWithoutNetwork];

    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Own => &["--no-daemon"],
            Self::OwnWithoutNetwork => &["--no-daemon", "--network", "off"],
            Self::Daemon | Self::Pool => &[],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Own => "without a daemon",
            Self::OwnWithoutNetwork => "without a daemon, without network",
            Self::Daemon => "daemon, no warm pool",
            Self::Pool => "daemon, warm pool",
        }
    }
}

/// `jiffy run -- echo hello` with the daemon of this host, with and without a warm pool, and
/// without a daemon.
pub async fn run(n: usize, warm_up: usize, host: &ServerOptions) -> anyhow::Result<Measured> {
    let target = Target::open(host).await?;
    let before = target.pool_size().await?;
    let series = samples(&target, n, warm_up).await;
    target.set_pool(before).await?;
    Ok(Measured {
        name: "run",
        method: "the command `jiffy run -- echo hello`, from before its process is created to after it has exited; a sandbox of the daemon, and the network of one that has none, are removed behind the answer; before a run out of the warm pool (2) one waits there",
        limits: "the first run on a host, which unpacks the kernel and builds the template; several at once",
        not_available: vec![
            "KVM exits and page faults of a run: not available: the process ends with it (`boot`, `create` and `exec` have them)".to_owned(),
        ],
        series: series?,
    })
}

async fn samples(target: &Target, n: usize, warm_up: usize) -> anyhow::Result<Vec<Series>> {
    let mut series = Vec::new();
    for maker in Maker::ALL {
        target
            .set_pool(if maker == Maker::Pool { POOL } else { 0 })
            .await?;
        let mut samples = Vec::new();
        for round in 0..warm_up + n {
            while maker == Maker::Pool && target.waiting().await? < POOL {
                tokio::time::sleep(POOL_POLL).await;
            }
            let took = once(maker).await?;
            if round >= warm_up {
                samples.push(took);
            }
        }
        let goal = (maker == Maker::Pool).then_some(goal::RUN);
        let name = format!("jiffy run -- echo hello; {}", maker.name());
        series.push(Series::new(name, "ms", goal, samples));
    }
    Ok(series)
}

/// Milliseconds of one run.
async fn once(maker: Maker) -> anyhow::Result<f64> {
    let program = std::env::current_exe().context("cannot find our own program")?;
    let began = Instant::now();
    let mut command = Command::new(&program);
    command
        .arg("run")
        .args(maker.options())
        .args(["--", "echo", "hello"])
        .stdin(Stdio::null());
    let output = command.output().await.context("cannot run ourselves")?;
    let took = ms(began.elapsed());
    ensure!(
        output.status.success() && output.stdout == b"hello\n",
        "`jiffy run -- echo hello` failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(took)
}
