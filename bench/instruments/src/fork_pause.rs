//! Instruments `clone`, `pause` and `sleep`.

use crate::goals;
use jiffy_benchmark::counters::Meter;
use jiffy_benchmark::daemon::{BenchmarkDaemon, run_concurrently, timed};
use jiffy_benchmark::{Measured, Series};
use jiffy_client::ServerOptions;
use jiffy_engine_api::SandboxSize;
use std::time::Duration;
use tokio::time::sleep;

/// Measures the fork of `c` sandboxes at once, each until its N children answer.
pub async fn fork(
    template: &str,
    n: usize,
    warm_up: usize,
    c: usize,
    server: &ServerOptions,
) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let meter = Meter::new();
    let mut ids = Vec::with_capacity(c);
    for _ in 0..c {
        ids.push(daemon.create_from(template).await?.record.id);
    }
    // Children then share written memory with their parent, like children of a used sandbox.
    for id in &ids {
        daemon
            .exec(id, "head -c 10000000 /dev/urandom > /dev/shm/x")
            .await?;
    }
    let mut series = Vec::new();
    for count in [1usize, 10, 20] {
        let (mut calls, mut walls) = (Vec::new(), Vec::new());
        for round in 0..warm_up + n {
            let (forked, wall) = run_concurrently(&ids, |id| {
                let daemon = daemon.clone();
                async move { timed(daemon.fork(&id, count)).await }
            })
            .await?;
            for (children, took) in forked {
                for child in children {
                    if round >= warm_up {
                        // The VMM of a child is new: its counters started at zero.
                        let cost = daemon.counters(&child.id).await?;
                        meter.add(&format!("child of {count}"), cost);
                    }
                    daemon.remove(&child.id).await?;
                }
                if round >= warm_up {
                    calls.push(took);
                }
            }
            if round >= warm_up {
                walls.push(wall);
            }
        }
        // The goals, and the references (times that another product publishes), are for one fork at
        // a time.
        let (goal, reference) = match c {
            1 => goals::forks(count, template),
            _ => (None, None),
        };
        series.push(Series::new(format!("fork {count}"), "ms", goal, calls).against(reference));
        if c > 1 {
            let name = format!("wall of {c} forks of {count}");
            series.push(Series::new(name, "ms", None, walls));
        }
    }
    for id in &ids {
        daemon.remove(id).await?;
    }
    Ok(Measured {
        method: "one POST fork of a running sandbox with 10 MB written, until all N children have \
            answered; C such sandboxes at once; counters of each child's VMM from its start to the \
            answer",
        limits: "later work of the children",
        ..Measured::new("clone", series, &meter)
    })
}

/// Measures pause and resume of idle 2 GiB sandboxes, `c` at once. They are paused for the time
/// `paused_time`.
pub async fn pause(
    task: &'static str,
    paused_time: Duration,
    n: usize,
    warm_up: usize,
    c: usize,
    server: &ServerOptions,
) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let meter = Meter::new();
    let size = SandboxSize {
        memory_mib: 2048,
        ..SandboxSize::default()
    };
    // The same sandboxes are paused in each round.
    let ids = daemon.create_several(c, size).await?;
    let [
        mut pause_times,
        mut pause_walls,
        mut resume_times,
        mut resume_walls,
    ] = [const { Vec::new() }; 4];
    // Resumes (`true`) or pauses (`false`) all sandboxes at once. Returns the time of each, and the
    // time of all.
    let together = |resume: bool| {
        let daemon = daemon.clone();
        let ids = ids.clone();
        async move {
            run_concurrently(&ids, |id| {
                let daemon = daemon.clone();
                async move {
                    timed(async {
                        if resume {
                            daemon.resume(&id).await
                        } else {
                            daemon.pause(&id).await
                        }
                    })
                    .await
                }
            })
            .await
        }
    };
    for round in 0..warm_up + n {
        let (pauses, pausing) = together(false).await?;
        // Background work of the pause, such as merges, continues during this time.
        sleep(paused_time).await;
        let (resumes, resuming) = together(true).await?;
        for id in &ids {
            if round >= warm_up {
                meter.add("resume", daemon.counters(id).await?);
            }
            // Checks that the guest works. Not measured.
            daemon.exec(id, "true").await?;
        }
        if round >= warm_up {
            pause_times.extend(pauses.iter().map(|(_, took)| took));
            pause_walls.push(pausing);
            resume_times.extend(resumes.iter().map(|(_, took)| took));
            resume_walls.push(resuming);
        }
    }
    for id in &ids {
        daemon.remove(id).await?;
    }
    let series = vec![
        Series::new(
            "pause",
            "ms",
            goals::if_sequential(goals::PAUSE, c),
            pause_times,
        ),
        Series::new(format!("wall of {c} pauses"), "ms", None, pause_walls)
            .against(goals::pause_reference(c)),
        Series::new(
            "resume",
            "ms",
            goals::if_sequential(goals::RESUME, c),
            resume_times,
        ),
        Series::new(format!("wall of {c} resumes"), "ms", None, resume_walls)
            .against(goals::resume_reference(c)),
    ];
    let mut measured = Measured {
        method: "C idle sandboxes of 2 vCPUs and 2 GiB at once: POST pause until they occupy no \
            memory; POST resume, at once (pause) or 2 s later (sleep), until their agents have \
            answered; `true` in each in between, not timed; counters of the new VMM from its start \
            to the answer",
        limits: "synced storage; guests that have written much",
        ..Measured::new(task, series, &meter)
    };
    let ended = "counters of a pause: not available: the process exits";
    measured.not_available.push(ended.to_owned());
    Ok(measured)
}
