//! Calibration of processes: costs of starting processes and threads on this host.

use super::{Cost, batches};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Number of round trips between two threads per batch.
const ROUND_TRIPS: u32 = 200;

/// Measures a fork of this process that executes `true`, until its exit.
pub(super) fn fork_and_exec() -> Result<Cost, String> {
    let mut command = Command::new("true");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: the closure does nothing. With a closure, the process is copied with its page tables,
    // as by fork(2), instead of sharing them until the exec.
    unsafe { command.pre_exec(|| Ok(())) };
    batches(1, || {
        let began = Instant::now();
        let status = command
            .status()
            .map_err(|e| format!("cannot run `true`: {e}"))?;
        if status.success() {
            Ok(began.elapsed())
        } else {
            Err(format!("`true` failed: {status}"))
        }
    })
}

/// Measures a switch between two threads on one processor, including the wake-up through a pipe.
pub(super) fn context_switch() -> Result<Cost, String> {
    // A separate thread performs the measurement, so that no other thread remains bound to a
    // processor.
    let measuring = std::thread::spawn(ping_pong);
    let panicked = |_| "the measurement thread panicked".to_owned();
    measuring.join().map_err(panicked)?
}

/// Measures a switch between two threads on one processor.
fn ping_pong() -> Result<Cost, String> {
    let failed = |e: std::io::Error| format!("pipe between two threads: {e}");
    // On one processor, each message forces a switch. On two, the threads would run in parallel.
    bind_to_one_processor().map_err(|e| format!("cannot bind a thread to a processor: {e}"))?;
    let (mut replies, reply_writer) = pipe().map_err(failed)?;
    let (messages, mut message_writer) = pipe().map_err(failed)?;
    // The new thread inherits the processor affinity.
    let echo = std::thread::spawn(move || echo(messages, reply_writer));
    let cost = batches(2 * ROUND_TRIPS, || {
        let round_trips = round_trips(&mut message_writer, &mut replies);
        round_trips.map_err(failed)
    });
    // The echo thread then reads the end of its pipe and exits.
    drop(message_writer);
    let panicked = |_| "a measurement thread panicked".to_owned();
    echo.join().map_err(panicked)?.map_err(failed)?;
    cost
}

/// Binds the calling thread to one processor, so that each round trip includes two switches between
/// threads.
fn bind_to_one_processor() -> nix::Result<()> {
    let this = Pid::from_raw(0);
    let allowed = sched_getaffinity(this)?;
    let mut one = CpuSet::new();
    let mut all = 0..CpuSet::count();
    let first = all.find(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    one.set(first.unwrap_or(0))?;
    sched_setaffinity(this, &one)
}

/// Sends a byte to the echo thread and waits for its reply, [`ROUND_TRIPS`] times.
fn round_trips(messages: &mut PipeWriter, replies: &mut PipeReader) -> std::io::Result<Duration> {
    let mut byte = [0];
    let began = Instant::now();
    for _ in 0..ROUND_TRIPS {
        messages.write_all(&byte)?;
        replies.read_exact(&mut byte)?;
    }
    Ok(began.elapsed())
}

/// Returns each received byte to the other thread, until the end of the pipe.
fn echo(mut from: PipeReader, mut to: PipeWriter) -> std::io::Result<()> {
    let mut byte = [0];
    while from.read(&mut byte)? == 1 {
        to.write_all(&byte)?;
    }
    Ok(())
}
