//! Goals of instruments on a host without VT-x, and *references*: total times of a batch that
//! CubeSandbox publishes for its own host (16 vCPUs, PVM). Times are in milliseconds, and memory is
//! in MiB.

pub use jiffy_benchmark::goals::{CREATE, EXEC, if_sequential, of_base};

use jiffy_benchmark::goals::lookup;

/// Total time of a cold boot.
pub const BOOT: f64 = 900.0;
/// Private memory of a VMM without the memory of its guest.
pub const VMM_MEMORY: f64 = 5.0;
/// Time for which a snapshot stops the guest.
pub const STOPPED: f64 = 10.0;
/// Time until a snapshot is captured, regardless of the amount written.
pub const CAPTURED: f64 = 20.0;
/// Time of a request for a snapshot.
pub const SNAPSHOT: f64 = 30.0;
/// Time of a request for a rollback.
pub const ROLLBACK: f64 = 5.0;
/// Time of a request for a pause.
pub const PAUSE: f64 = 8.0;
/// Time of a request for a resume.
pub const RESUME: f64 = 10.0;
/// Processor time of a create and the removal.
pub const LIFE_PROCESSOR_MS: f64 = 12.0;
/// Time from the restart of a daemon to its first answer, regardless of the number of sandboxes.
pub const RESTART: f64 = 1000.0;
/// Memory of a daemon with 10,000 paused sandboxes.
pub const PAUSED_SANDBOXES_MIB: f64 = 100.0;
/// Ratio of a call's cost at the largest number to the cost at the smallest number.
pub const GROWTH: f64 = 1.5;

/// Total time of a batch of creates from a snapshot, by concurrency.
pub fn restore_reference(concurrency: usize) -> Option<f64> {
    lookup(&[(1, 66.7), (10, 387.9), (20, 701.3)], concurrency)
}

/// Total time of a batch of snapshots.
pub fn snapshot_reference(concurrency: usize) -> Option<f64> {
    lookup(&[(1, 41.4), (5, 58.2), (10, 114.1)], concurrency)
}

/// Total time of a batch of snapshots, each followed by a rollback to it.
pub fn rollback_reference(concurrency: usize) -> Option<f64> {
    lookup(&[(1, 90.0), (5, 325.5), (10, 821.4)], concurrency)
}

/// Total time of a batch of pauses.
pub fn pause_reference(concurrency: usize) -> Option<f64> {
    lookup(&[(1, 370.8), (10, 1586.0)], concurrency)
}

/// Total time of a batch of resumes.
pub fn resume_reference(concurrency: usize) -> Option<f64> {
    lookup(&[(1, 18.9), (10, 26.6)], concurrency)
}

/// Goal and reference for a snapshot, by the MB written.
pub fn dirty(mb: u64) -> (Option<f64>, Option<f64>) {
    // Published only for these numbers, so no interpolation is made.
    let reference = match mb {
        0 => Some(42.1),
        10 => Some(55.3),
        50 => Some(67.7),
        100 => Some(85.7),
        200 => Some(100.9),
        500 => Some(168.6),
        800 => Some(215.8),
        1024 => Some(257.5),
        _ => None,
    };
    let goal = match mb {
        0 | 10 => Some(SNAPSHOT),
        100 => Some(60.0),
        1024 => Some(250.0),
        _ => None,
    };
    (goal, reference)
}

/// Goal and reference for a fork of one sandbox of a template, by the number of children.
pub fn forks(count: usize, template: &str) -> (Option<f64>, Option<f64>) {
    let goal = match (template, count) {
        ("base", 1) => Some(20.0),
        ("base", 20) => Some(200.0),
        ("code-interpreter-v1", 1) => Some(40.0),
        ("code-interpreter-v1", 20) => Some(300.0),
        _ => None,
    };
    (goal, lookup(&[(1, 270.6), (10, 541.6), (20, 789.7)], count))
}
