//! Reads the output of a process, distributes it to its readers, and reports its exit.

use super::frame_hub::FrameHub;
use super::table::{GuestProcess, ProcessTable};
use crate::rpc::{RpcCode, RpcError, frame};
use crate::state::Agent;
use crate::sys;
use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::time::{Sleep, sleep};

/// Maximum number of bytes in one data event.
pub const CHUNK_BYTES: usize = 32 * 1024;
/// Capacity of the pipe of a process that writes much output, in bytes.
const WIDE_PIPE_BYTES: libc::c_int = 256 * 1024;
/// If a read from a terminal returns at least this many bytes, the next read is part of the same
/// event. The kernel returns at most 4 KiB per read.
const PTY_MORE_BYTES: usize = 1024;
/// Time after a process's exit during which background processes with an open output delay the
/// `end` event. Later output is dropped, and the `end` event states this.
const OUTPUT_GRACE: Duration = Duration::from_millis(200);
/// Time between SIGTERM and SIGKILL for a process that exceeded its timeout.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// Time for a process to exit after SIGKILL. After this time its reader is informed that the
/// process still runs.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of reads per poll, so that other tasks run in between.
const READS_PER_POLL: usize = 16;

/// An output of a process.
pub struct ProcessOutput {
    /// Descriptor to read from.
    pub fd: Rc<AsyncFd<OwnedFd>>,
    /// `stdout`, `stderr` or `pty`.
    pub field: &'static str,
    /// Set for a terminal, and after the capacity of a pipe was increased.
    pub is_wide: Cell<bool>,
}

/// Reason why the pump stops reading for now.
enum OutputStatus {
    /// No data is available.
    Waiting,
    /// A queue of a reader is full.
    Blocked,
    /// The maximum number of reads per poll is reached.
    Yielded,
    /// The output was closed.
    Closed,
}

impl ProcessOutput {
    /// Increases the capacity of the pipe once, so that the process and the agent switch less
    /// often.
    fn widen(&self) {
        if !self.is_wide.replace(true) {
            // Ignore the error: the pipe then retains its capacity.
            // SAFETY: the call takes no pointers.
            unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_SETPIPE_SZ, WIDE_PIPE_BYTES) };
        }
    }

    /// Reads one output of the process and publishes it, until the output is empty, a reader's
    /// queue is full or the limit of reads is reached.
    fn drain(&self, hub: &FrameHub, scratch: &mut [u8], cx: &mut Context<'_>) -> OutputStatus {
        for _ in 0..READS_PER_POLL {
            if hub.poll_room(cx).is_pending() {
                return OutputStatus::Blocked;
            }
            let mut ready = match self.fd.poll_read_ready(cx) {
                Poll::Pending => return OutputStatus::Waiting,
                Poll::Ready(Ok(ready)) => ready,
                Poll::Ready(Err(_)) => return OutputStatus::Closed,
            };
            let read = |fd: &AsyncFd<OwnedFd>| match self.field {
                "pty" => read_terminal(fd.as_raw_fd(), scratch),
                _ => sys::read(fd.as_raw_fd(), scratch),
            };
            match ready.try_io(read) {
                Ok(Ok(0)) => return OutputStatus::Closed,
                Ok(Ok(n)) => {
                    // A full read indicates that the process writes faster than the agent reads.
                    if n == CHUNK_BYTES {
                        self.widen();
                    }
                    // Output without a reader is discarded, as the process must not block.
                    if hub.has_readers() {
                        hub.publish(&frame::data_event(self.field, &scratch[..n]));
                    }
                }
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                // A terminal returns EIO after its last process has exited.
                Ok(Err(_)) => return OutputStatus::Closed,
                Err(_would_block) => {}
            }
        }
        OutputStatus::Yielded
    }
}

/// Reads from a terminal until it has little output or the buffer is full.
fn read_terminal(fd: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    let mut total = sys::read(fd, buffer)?;
    let mut last = total;
    while last >= PTY_MORE_BYTES && total < buffer.len() {
        // An error is returned again by the next call.
        let Ok(count) = sys::read(fd, &mut buffer[total..]) else {
            break;
        };
        total += count;
        last = count;
    }
    Ok(total)
}

/// Timeout of a process.
pub struct ProcessDeadline {
    timer: Pin<Box<Sleep>>,
    /// Id of the reader that receives the report of the timeout.
    reader: u64,
    stage: TerminationStage,
}

impl ProcessDeadline {
    /// Starts a timeout of `limit`, which is reported to `reader`.
    pub fn new(limit: Duration, reader: u64) -> Self {
        Self {
            timer: Box::pin(sleep(limit)),
            reader,
            stage: TerminationStage::Running,
        }
    }
}

/// Last signal that was sent to the process because of its timeout.
#[derive(Clone, Copy)]
enum TerminationStage {
    /// No signal was sent.
    Running,
    /// SIGTERM was sent.
    Terminated,
    /// SIGKILL was sent.
    Killed,
}

/// Task that distributes the output of one process.
pub struct OutputPump {
    /// The process.
    pub process: Rc<GuestProcess>,
    /// Outputs that are still open.
    pub outputs: Vec<ProcessOutput>,
    /// Timeout of the process.
    pub deadline: Option<ProcessDeadline>,
    /// Timer of `OUTPUT_GRACE`. Starts when the process has exited and its own output was read.
    pub grace: Option<Pin<Box<Sleep>>>,
}

impl OutputPump {
    /// Runs until the process has exited and all outputs are closed.
    pub async fn run(mut self, agent: Rc<Agent>) {
        poll_fn(|cx| self.poll(&agent.processes, cx)).await;
    }

    /// Reads all outputs. After the exit of the process, waits briefly for the rest of its output,
    /// and then publishes the exit. Completes when no output is open.
    fn poll(&mut self, table: &ProcessTable, cx: &mut Context<'_>) -> Poll<()> {
        self.check_deadline(cx);
        let mut quiet = true;
        let mut scratch = table.scratch.borrow_mut();
        let hub = &self.process.hub;
        self.outputs
            .retain(|output| match output.drain(hub, &mut scratch, cx) {
                OutputStatus::Waiting => true,
                OutputStatus::Blocked => {
                    quiet = false;
                    true
                }
                OutputStatus::Yielded => {
                    quiet = false;
                    // The output has more data: poll again after other tasks have run.
                    cx.waker().wake_by_ref();
                    true
                }
                OutputStatus::Closed => false,
            });
        drop(scratch);
        if self.process.end.get().is_some() {
            // Only background children still have the output open. Their output is read and
            // discarded, so that they do not block.
            return if self.outputs.is_empty() {
                Poll::Ready(())
            } else {
                Poll::Pending
            };
        }
        let Some((exit, oom)) = self.process.exit.get() else {
            *self.process.pump.borrow_mut() = Some(cx.waker().clone());
            return Poll::Pending;
        };
        if !self.outputs.is_empty() {
            // The timer starts after all output of the process itself was read.
            let over = match &mut self.grace {
                Some(grace) => grace.as_mut().poll_elapsed(cx),
                None if quiet => self
                    .grace
                    .insert(Box::pin(sleep(OUTPUT_GRACE)))
                    .as_mut()
                    .poll_elapsed(cx),
                None => false,
            };
            if !over {
                return Poll::Pending;
            }
        }
        // The `end` event reports open outputs, because clients receive no frames after it.
        let output_open = !self.outputs.is_empty();
        let last = self
            .process
            .end
            .get_or_init(|| exit.frames(oom, output_open));
        self.process.hub.close(last);
        self.process.input.release();
        // After the exit of its session leader, a terminal is hung up. A pipe is read to its end.
        self.outputs.retain(|output| output.field != "pty");
        if self.outputs.is_empty() {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Terminates a process that exceeded its timeout: SIGTERM to its process group, then SIGKILL.
    /// The reader is informed only after the exit, so that the report is correct.
    fn check_deadline(&mut self, cx: &mut Context<'_>) {
        while let Some(deadline) = &mut self.deadline {
            let report = if self.process.exit.get().is_some() {
                match deadline.stage {
                    TerminationStage::Running => None,
                    _ => {
                        self.process.kill_orphans();
                        Some("the process ran into its timeout and was killed")
                    }
                }
            } else if deadline.timer.as_mut().poll_elapsed(cx) {
                // An error means that the process has exited. The reaper reports this in a moment.
                match deadline.stage {
                    TerminationStage::Running => {
                        let _ = self.process.signal(libc::SIGTERM);
                        deadline.timer = Box::pin(sleep(TERM_GRACE));
                        deadline.stage = TerminationStage::Terminated;
                        continue;
                    }
                    TerminationStage::Terminated => {
                        let _ = self.process.signal(libc::SIGKILL);
                        deadline.timer = Box::pin(sleep(KILL_TIMEOUT));
                        deadline.stage = TerminationStage::Killed;
                        continue;
                    }
                    TerminationStage::Killed => Some(
                        "the process ran into its timeout and was sent SIGKILL, but has not ended yet",
                    ),
                }
            } else {
                return;
            };
            if let Some(report) = report {
                let error = RpcError::new(RpcCode::DeadlineExceeded, report);
                let end = frame::end(Some(&error));
                self.process.hub.close_one(deadline.reader, end);
            }
            self.deadline = None;
        }
    }
}

/// Polls of timers.
trait PollElapsed {
    /// Returns whether the timer has elapsed. Otherwise the task is woken when it elapses.
    fn poll_elapsed(self, cx: &mut Context<'_>) -> bool;
}

impl PollElapsed for Pin<&mut Sleep> {
    fn poll_elapsed(self, cx: &mut Context<'_>) -> bool {
        Future::poll(self, cx).is_ready()
    }
}
