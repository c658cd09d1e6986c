//! Instrument `data`: performance of gateway, streams and disks, compared to the host. A *side* is
//! the host without a sandbox, or a sandbox of one engine.

mod host;
mod requests;
mod sandbox;

use anyhow::ensure;
use host::HostSide;
use jiffy_benchmark::counters::Meter;
use jiffy_benchmark::daemon::BenchmarkDaemon;
use jiffy_benchmark::{Measured, Series};
use jiffy_client::ServerOptions;
use sandbox::SandboxSide;
use serde::Deserialize;
use std::time::Duration;

/// Server that runs on both sides.
const SERVER_SCRIPT: &str = include_str!("data/server.py");
/// Programs that run on both sides.
const WORK_SCRIPT: &str = include_str!("data/work.py");
/// Port of the server that listens on all addresses of a sandbox.
const PORT: u16 = 8080;
/// Port of the server that listens only on the loopback address.
const LOOPBACK_PORT: u16 = 8081;
/// Numbers of concurrent connections.
const CONNECTIONS: [usize; 2] = [1, 32];
/// Duration of one sample of requests, and of one kind of work.
const SAMPLE_TIME: Duration = Duration::from_millis(500);
/// Number of bytes transferred per sample.
const STREAM_BYTES: u64 = 256 << 20;
/// Size in MiB of a file that is written sequentially, and then read and written at random.
const WORK_MIB: u64 = 256;
/// Name of the side without a sandbox.
const HOST: &str = "host";

/// One sample.
#[derive(Debug)]
struct Sample {
    name: String,
    unit: &'static str,
    value: f64,
}

impl Sample {
    fn new(name: impl Into<String>, unit: &'static str, value: f64) -> Self {
        Self {
            name: name.into(),
            unit,
            value,
        }
    }

    /// Creates a sample for a stream of [`STREAM_BYTES`] with the given duration.
    fn stream(name: &str, took: Duration) -> Self {
        let megabytes = STREAM_BYTES as f64 / 1e6;
        Self::new(name, "MB/s", megabytes / took.as_secs_f64())
    }
}

/// Result line of the work script: name, unit, value.
#[derive(Debug, Deserialize)]
struct WorkFigure(String, String, f64);

/// Parses the results of a run of the work script.
fn work_samples(printed: &[u8]) -> anyhow::Result<Vec<Sample>> {
    let figures: Vec<WorkFigure> = serde_json::from_slice(printed)?;
    let sample = |WorkFigure(name, unit, value)| {
        // Units of series are static strings.
        let unit = if unit == "MB/s" { "MB/s" } else { "per second" };
        Sample::new(name, unit, value)
    };
    Ok(figures.into_iter().map(sample).collect())
}

/// Samples by side.
type Sides = Vec<(String, Vec<f64>)>;

/// Samples of each measurement by side, in the order of their first sample.
#[derive(Default)]
struct Table(Vec<(String, &'static str, Sides)>);

impl Table {
    /// Adds the values that were measured on one side.
    fn add(&mut self, side: &str, samples: Vec<Sample>) {
        for Sample { name, unit, value } in samples {
            // A list preserves the order of the measurements.
            let at = self.0.iter().position(|(known, ..)| *known == name);
            let at = at.unwrap_or_else(|| {
                self.0.push((name, unit, Vec::new()));
                self.0.len() - 1
            });
            let sides = &mut self.0[at].2;
            match sides.iter_mut().find(|(known, _)| known == side) {
                Some((_, values)) => values.push(value),
                None => sides.push((side.to_owned(), vec![value])),
            }
        }
    }

    /// Returns one series per measurement and side.
    fn series(self) -> Vec<Series> {
        let mut series = Vec::new();
        for (name, unit, sides) in self.0 {
            for (side, values) in sides {
                let one = Series::new(format!("{name}: {side}"), unit, None, values);
                // Only rates have goals, which are minimum values.
                series.push(one.at_least(goal(&name, &side)));
            }
        }
        series
    }
}

/// Goals for sandboxes.
fn goal(name: &str, side: &str) -> Option<f64> {
    if side == HOST {
        return None;
    }
    match name {
        "requests through the gateway, c=32" => Some(15_000.0),
        "a file up" | "a file down" | "output of a command" => Some(400.0),
        "buffered sequential writes" => Some(600.0),
        _ => None,
    }
}

/// Measures the host and each of its engines in turn.
pub async fn data(n: usize, warm_up: usize, server: &ServerOptions) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let engines = daemon.engines().await?;
    let (usable, others): (Vec<_>, Vec<_>) = engines.into_iter().partition(|e| e.usable);
    ensure!(!usable.is_empty(), "no engine works on this host");
    let not_available = others.into_iter().map(|engine| {
        let why = engine.why.unwrap_or_default();
        format!("engine {}: not available: {why}", engine.name)
    });
    let mut not_available: Vec<String> = not_available.collect();
    not_available.push(
        "network of a sandbox to and from the world: not available: sandboxes do not reach this \
         host; `bench/network` has a world of its own"
            .to_owned(),
    );
    let host = HostSide::start().await?;
    let mut sandboxes = Vec::new();
    let mut measured = Ok(Table::default());
    for engine in usable {
        match SandboxSide::create(&daemon, &engine.name).await {
            Ok(made) => sandboxes.push(made),
            // The other engines are still created, and removed below.
            Err(e) => measured = Err(e.context(format!("a sandbox on {}", engine.name))),
        }
    }
    if measured.is_ok() {
        measured = rounds(&host, &sandboxes, n, warm_up).await;
    }
    // Sandboxes are removed even if a measurement failed. The error is returned below.
    for sandbox in sandboxes {
        sandbox.remove().await?;
    }
    Ok(Measured {
        method: "a sandbox of 2 vCPUs and 4 GiB on each engine, and this host itself, in turn: \
            requests of a client on persistent connections to a small server (Python, one thread) \
            for half a second each, with the KVM exits per request. One server listens on all \
            addresses of the sandbox, a second one on the loopback address only. Transfers of 256 \
            MiB through streams, files, `jiffy cp` and a command's output. A program (Python) that \
            measures system calls, pages, processes and its disk in the temporary directory. On \
            the host, the same server is connected to directly, files are copied, and the program \
            runs there",
        limits: "a network between client and host, TLS; servers faster than Python; concurrent \
            sandboxes; disks beyond the page cache",
        not_available,
        ..Measured::new("data", measured?.series(), &Meter::new())
    })
}

/// Samples the host and all sandboxes in turn, so that a change of the load affects all sides.
async fn rounds(
    host: &HostSide,
    sandboxes: &[SandboxSide],
    n: usize,
    warm_up: usize,
) -> anyhow::Result<Table> {
    let mut table = Table::default();
    for round in 0..warm_up + n {
        let on_host = host.sample().await?;
        let mut in_sandboxes = Vec::new();
        for sandbox in sandboxes {
            in_sandboxes.push((sandbox.engine(), sandbox.sample().await?));
        }
        if round < warm_up {
            continue;
        }
        table.add(HOST, on_host);
        for (engine, samples) in in_sandboxes {
            table.add(engine, samples);
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_each_measurement_of_the_host_and_of_each_engine() {
        let mut table = Table::default();
        for value in [1.0, 2.0] {
            table.add(HOST, vec![Sample::new("forks", "per second", value)]);
            table.add(
                "microvm",
                vec![Sample::new("forks", "per second", 10.0 * value)],
            );
        }
        let series = table.series();
        let rows: Vec<(&str, f64)> = series.iter().map(|s| (s.name.as_str(), s.max)).collect();
        assert_eq!(rows, [("forks: host", 2.0), ("forks: microvm", 20.0)]);
    }

    #[tokio::test]
    async fn the_host_side_answers_requests_moves_streams_and_works() {
        let host = match HostSide::start().await {
            Ok(host) => host,
            Err(e) => return println!("SKIPPED: the host side of `data`: {e:#}"),
        };
        let samples = host.sample_of(1 << 20, 1, Duration::from_millis(10)).await;
        let samples = samples.unwrap();
        for wanted in [
            "requests to the server, c=1",
            "stream in",
            "stream out",
            "output of a command",
            "a copied file",
            "forks",
            "4 KiB and fsync",
        ] {
            let found = samples.iter().find(|sample| sample.name == wanted);
            assert!(
                found.is_some_and(|s| s.value > 0.0),
                "{wanted}: {samples:?}"
            );
        }
    }
}
