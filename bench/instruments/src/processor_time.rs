//! Instrument `processor-time`: processor time of the whole host per operation, because an
//! operation involves many processes.

use crate::goals;
use anyhow::Context;
use jiffy_benchmark::counters::Meter;
use jiffy_benchmark::daemon::BenchmarkDaemon;
use jiffy_benchmark::{Measured, Series};
use jiffy_client::ServerOptions;
use std::fs;
use std::time::{Duration, Instant};

/// Duration of the idle measurement before the work, and of the wait for background work
/// afterwards.
const OBSERVATION_TIME: Duration = Duration::from_secs(1);
/// Number of children of a fork.
const CHILDREN: usize = 10;

/// Measures the processor time of some work, without the background load of the host.
struct HostMeter {
    busy_at: f64,
    began: Instant,
    /// Background load before the work, in milliseconds of processor time per second.
    background: f64,
}

impl HostMeter {
    /// Measures the background load for a second, and starts the measurement.
    async fn begin() -> anyhow::Result<Self> {
        let (before, began) = (busy_ms()?, Instant::now());
        tokio::time::sleep(OBSERVATION_TIME).await;
        let busy_at = busy_ms()?;
        Ok(Self {
            busy_at,
            background: (busy_at - before) / began.elapsed().as_secs_f64(),
            began: Instant::now(),
        })
    }

    /// Returns the milliseconds per operation since the start, including background work after the
    /// last answer.
    async fn end(self, operations: usize) -> anyhow::Result<f64> {
        // Removals and merges continue after the answer. They belong to the operation.
        tokio::time::sleep(OBSERVATION_TIME).await;
        let background = self.background * self.began.elapsed().as_secs_f64();
        let spent = busy_ms()? - self.busy_at - background;
        // Less background load than before would give a negative result.
        Ok(spent.max(0.0) / operations as f64)
    }
}

/// Measures the processor time of operations: `n` of each kind, in `rounds` rounds.
pub async fn processor_time(
    template: &str,
    n: usize,
    rounds: usize,
    server: &ServerOptions,
) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let guest = daemon.create_from(template).await?;
    let id = &guest.record.id;
    let [
        mut creates,
        mut commands,
        mut children,
        mut rollbacks,
        mut pauses,
    ] = [const { Vec::new() }; 5];
    // All rollbacks return to this snapshot, so that the chain of snapshots does not grow.
    let snapshot = daemon.snapshot(id).await?.id;
    // The additional first round warms up caches.
    for round in 0..=rounds {
        // One operation of each kind suffices to warm up.
        let number = if round == 0 { 1 } else { n };
        let meter = HostMeter::begin().await?;
        for _ in 0..number {
            let created = daemon.create_from(template).await?;
            daemon.remove(&created.record.id).await?;
        }
        creates.push(meter.end(number).await?);
        let meter = HostMeter::begin().await?;
        for _ in 0..number {
            daemon.exec_in(&guest, "true").await?;
        }
        commands.push(meter.end(number).await?);
        let meter = HostMeter::begin().await?;
        for _ in 0..number.div_ceil(CHILDREN) {
            for child in daemon.fork(id, CHILDREN).await? {
                daemon.remove(&child.id).await?;
            }
        }
        // Forks have a fixed number of children, so there may be more than `number`.
        let forked = number.div_ceil(CHILDREN) * CHILDREN;
        children.push(meter.end(forked).await?);
        let meter = HostMeter::begin().await?;
        for _ in 0..number {
            daemon.rollback(id, &snapshot).await?;
        }
        rollbacks.push(meter.end(number).await?);
        let meter = HostMeter::begin().await?;
        for _ in 0..number {
            daemon.pause(id).await?;
            daemon.resume(id).await?;
        }
        pauses.push(meter.end(number).await?);
    }
    daemon.remove(id).await?;
    daemon.remove_snapshot(&snapshot).await?;
    let life = goals::of_base(goals::LIFE_PROCESSOR_MS, template);
    let series = [
        ("create and removal", life, creates),
        ("command", None, commands),
        ("child of a fork of 10, and its removal", None, children),
        ("rollback", None, rollbacks),
        ("pause and resume", None, pauses),
    ];
    let series = series.map(|(name, goal, mut samples)| {
        // The warm-up round.
        samples.remove(0);
        Series::new(name, "ms", goal, samples)
    });
    Ok(Measured {
        method: "processor time of the whole host, including its kernel and guests, for N \
            sequential operations and for background work within a second of the last answer, \
            minus the background load in the second before, divided by N; one sample per round",
        limits: "concurrent operations; background load that differs between the rounds",
        ..Measured::new("processor-time", series.into(), &Meter::new())
    })
}

/// Returns the processor time of all processors since boot in milliseconds.
fn busy_ms() -> anyhow::Result<f64> {
    let stat = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let ticks = busy_ticks(&stat).context("no line of all processors in /proc/stat")?;
    // The kernel reports hundredths of a second to user space, regardless of its own tick.
    Ok(ticks as f64 * 10.0)
}

/// Returns the ticks in which processors were not idle. User time includes guest time.
fn busy_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields: Vec<u64> = line.split_whitespace().flat_map(str::parse).collect();
    let [
        user,
        nice,
        system,
        // Waits for I/O are idle time too.
        _idle,
        _waits,
        interrupts,
        soft_interrupts,
        ..,
    ] = fields[..]
    else {
        return None;
    };
    Some(user + nice + system + interrupts + soft_interrupts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_waiting_and_stolen_time_is_not_busy() {
        let stat = "cpu  1 20 300 9999 8888 4000 50000 7777 1 0\ncpu0 5 5 5 5 5 5 5 5 5 5\n";
        // The fields that count are 1, 20, 300, 4000 and 50000.
        assert_eq!(busy_ticks(stat), Some(54_321));
        assert_eq!(busy_ticks("intr 0\n"), None);
        assert_eq!(busy_ticks("cpu  1 2 3\n"), None);
    }
}
