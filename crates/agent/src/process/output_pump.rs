//! Copying of a process's output to its readers, and the report of its end.

use super::frame_hub::FrameHub;
use super::table::{GuestProcess, ProcessTable};
use crate::rpc::{RpcCode, RpcError, frame};
use crate::state::Agent;
use crate::sys;
use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::time::{Sleep, sleep};

/// Most bytes of one data event from a pipe.
pub const PIPE_CHUNK_BYTES: usize = 32 * 1024;
/// Room in the pipe of a process that fills events.
const WIDE_PIPE_BYTES: libc::c_int = 256 * 1024;
/// Most bytes of one data event from a terminal.
pub const PTY_CHUNK_BYTES: usize = 16 * 1024;
/// Time after a process's exit for which a background process that has its output open delays the
/// end. Output after it is dropped, and the end event says so.
const OUTPUT_GRACE: Duration = Duration::from_millis(200);
/// Time for a process over its time limit to end after SIGTERM, before SIGKILL follows.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// Time for a process to end after SIGKILL; then its reader gets a report that it goes on.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
/// Reads per poll, so that other tasks run in between.
const READS_PER_POLL: usize = 16;

/// An output of the process.
pub struct ProcessOutput {
    /// Descriptor to read from.
    pub fd: Rc<AsyncFd<OwnedFd>>,
    /// `stdout`, `stderr` or `pty`.
    pub field: &'static str,
    /// True once its pipe has more room than others.
    pub is_wide: Cell<bool>,
}

enum OutputStatus {
    /// Nothing there now.
    Waiting,
    /// Readers have to catch up first.
    Blocked,
    /// Reads per poll are used up.
    Yielded,
    /// It ended.
    Closed,
}

impl ProcessOutput {
    /// Makes room in the pipe of a process that writes much, once: it and we take turns less often.
    fn widen(&self) {
        if !self.is_wide.replace(true) {
            // SAFETY: no pointers. It fails for a terminal, which stays as it is.
            unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_SETPIPE_SZ, WIDE_PIPE_BYTES) };
        }
    }

    fn drain(&self, hub: &FrameHub, scratch: &mut [u8], cx: &mut Context<'_>) -> OutputStatus {
        let chunk = if self.field == "pty" {
            PTY_CHUNK_BYTES
        } else {
            PIPE_CHUNK_BYTES
        };
        for _ in 0..READS_PER_POLL {
            if hub.poll_room(cx).is_pending() {
                return OutputStatus::Blocked;
            }
            let mut ready = match self.fd.poll_read_ready(cx) {
                Poll::Pending => return OutputStatus::Waiting,
                Poll::Ready(Ok(ready)) => ready,
                Poll::Ready(Err(_)) => return OutputStatus::Closed,
            };
            match ready.try_io(|fd| sys::read(fd.as_raw_fd(), &mut scratch[..chunk])) {
                Ok(Ok(0)) => return OutputStatus::Closed,
                Ok(Ok(n)) => {
                    if n == PIPE_CHUNK_BYTES {
                        self.widen();
                    }
                    if hub.has_readers() {
                        hub.publish(&frame::data_event(self.field, &scratch[..n]));
                    }
                }
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                // A terminal says EIO when its last process is gone.
                Ok(Err(_)) => return OutputStatus::Closed,
                Err(_would_block) => {}
            }
        }
        OutputStatus::Yielded
    }
}

/// Time limit of a process.
pub struct ProcessDeadline {
    timer: Pin<Box<Sleep>>,
    /// Reader that gets the report of the limit.
    reader: u64,
    stage: TerminationStage,
}

impl ProcessDeadline {
    /// A limit of `limit` from now, reported to `reader`.
    pub fn new(limit: Duration, reader: u64) -> Self {
        Self {
            timer: Box::pin(sleep(limit)),
            reader,
            stage: TerminationStage::Running,
        }
    }
}

/// Signal that the process was sent last because of its time limit.
#[derive(Clone, Copy)]
enum TerminationStage {
    Running,
    Terminated,
    Killed,
}

/// The task of one process.
pub struct OutputPump {
    /// The process.
    pub process: Rc<GuestProcess>,
    /// Its outputs.
    pub outputs: Vec<ProcessOutput>,
    /// Its time limit.
    pub deadline: Option<ProcessDeadline>,
    /// Runs since its exit.
    pub grace: Option<Pin<Box<Sleep>>>,
}

impl OutputPump {
    /// Runs until all output was read.
    pub async fn run(mut self, agent: Rc<Agent>) {
        poll_fn(|cx| self.poll(&agent.processes, cx)).await;
    }

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
                    cx.waker().wake_by_ref();
                    true
                }
                OutputStatus::Closed => false,
            });
        drop(scratch);
        if self.process.end.get().is_some() {
            // Only background children are left; their output is discarded, but must not block
            // them.
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
            // Once everything was read that the process itself wrote, the grace begins.
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
        // Marked in the `end` event: the frames after it could reach no client.
        let output_open = !self.outputs.is_empty();
        let last = self
            .process
            .end
            .get_or_init(|| exit.frames(oom, output_open));
        self.process.hub.close(last);
        self.process.input.release();
        // A terminal whose leader is gone is hung up; a pipe is read to its end.
        self.outputs.retain(|output| output.field != "pty");
        if self.outputs.is_empty() {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Ends a process that is over its time: SIGTERM to its group, then SIGKILL. Its reader gets
    /// the report only after its end, so that the report is true.
    fn check_deadline(&mut self, cx: &mut Context<'_>) {
        while let Some(deadline) = &mut self.deadline {
            let told = if self.process.exit.get().is_some() {
                match deadline.stage {
                    TerminationStage::Running => None,
                    _ => {
                        self.process.kill_orphans();
                        Some("the process ran into its timeout and was killed")
                    }
                }
            } else if deadline.timer.as_mut().poll_elapsed(cx) {
                // An error means that the process has ended: the reaper reports it in a moment.
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
            if let Some(told) = told {
                let error = RpcError::new(RpcCode::DeadlineExceeded, told);
                let end = frame::end(Some(&error));
                self.process.hub.close_one(deadline.reader, end);
            }
            self.deadline = None;
        }
    }
}

trait PollElapsed {
    fn poll_elapsed(self, cx: &mut Context<'_>) -> bool;
}

impl PollElapsed for Pin<&mut Sleep> {
    fn poll_elapsed(self, cx: &mut Context<'_>) -> bool {
        Future::poll(self, cx).is_ready()
    }
}
