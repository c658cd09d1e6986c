//! Moves a process's output to its readers, and tells them its end.

use super::hub::Hub;
use super::table::{Process, ProcessTable};
use crate::rpc::{Code, RpcError, frame};
use crate::state::Agent;
use crate::sys;
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
pub const PIPE_CHUNK: usize = 32 * 1024;
/// Most bytes of one data event from a terminal.
pub const PTY_CHUNK: usize = 16 * 1024;
/// How long after the process's exit a background child that holds its output open delays the end.
const GRACE: Duration = Duration::from_millis(200);
/// How long a process over its time has to end after SIGTERM before SIGKILL follows.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// How long the end of a process is awaited after SIGKILL before its reader is told that it goes on.
const KILL_WAIT: Duration = Duration::from_secs(2);
/// Reads before others get their turn.
const TURN: usize = 16;

/// An output of the process.
pub struct Output {
    /// Where to read.
    pub fd: Rc<AsyncFd<OwnedFd>>,
    /// `stdout`, `stderr` or `pty`.
    pub field: &'static str,
}

enum Drained {
    /// Nothing there now.
    Waiting,
    /// Readers have to catch up first.
    Blocked,
    /// The turn is over.
    More,
    /// It ended.
    Closed,
}

impl Output {
    fn drain(&self, hub: &Hub, scratch: &mut [u8], cx: &mut Context<'_>) -> Drained {
        let chunk = if self.field == "pty" {
            PTY_CHUNK
        } else {
            PIPE_CHUNK
        };
        for _ in 0..TURN {
            if hub.poll_room(cx).is_pending() {
                return Drained::Blocked;
            }
            let mut ready = match self.fd.poll_read_ready(cx) {
                Poll::Pending => return Drained::Waiting,
                Poll::Ready(Ok(ready)) => ready,
                Poll::Ready(Err(_)) => return Drained::Closed,
            };
            match ready.try_io(|fd| sys::read(fd.as_raw_fd(), &mut scratch[..chunk])) {
                Ok(Ok(0)) => return Drained::Closed,
                Ok(Ok(n)) => {
                    if hub.has_readers() {
                        hub.publish(&frame::data_event(self.field, &scratch[..n]));
                    }
                }
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                // A terminal says EIO when its last process is gone.
                Ok(Err(_)) => return Drained::Closed,
                Err(_would_block) => {}
            }
        }
        Drained::More
    }
}

/// Time limit of a process.
pub struct Deadline {
    timer: Pin<Box<Sleep>>,
    /// Reader that is told that the limit was reached.
    reader: u64,
    stage: Stage,
}

impl Deadline {
    /// A limit of `limit` from now, which `reader` is told about.
    pub fn new(limit: Duration, reader: u64) -> Self {
        Self {
            timer: Box::pin(sleep(limit)),
            reader,
            stage: Stage::Running,
        }
    }
}

/// Signal that the process was sent last because of its time limit.
#[derive(Clone, Copy)]
enum Stage {
    Running,
    Terminated,
    Killed,
}

/// The task of one process.
pub struct Pump {
    /// The process.
    pub process: Rc<Process>,
    /// Its outputs.
    pub outputs: Vec<Output>,
    /// Its time limit.
    pub deadline: Option<Deadline>,
    /// Runs since its exit.
    pub grace: Option<Pin<Box<Sleep>>>,
}

impl Pump {
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
                Drained::Waiting => true,
                Drained::Blocked => {
                    quiet = false;
                    true
                }
                Drained::More => {
                    quiet = false;
                    cx.waker().wake_by_ref();
                    true
                }
                Drained::Closed => false,
            });
        drop(scratch);
        if self.process.end.get().is_some() {
            // Only background children are left; what they write goes nowhere, but must not stop them.
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
                    .insert(Box::pin(sleep(GRACE)))
                    .as_mut()
                    .poll_elapsed(cx),
                None => false,
            };
            if !over {
                return Poll::Pending;
            }
        }
        let last = self.process.end.get_or_init(|| exit.frames(oom));
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

    /// Ends a process that is over its time: SIGTERM to its group, then SIGKILL. Its reader is told
    /// when it has ended, so that what it is told is true.
    fn check_deadline(&mut self, cx: &mut Context<'_>) {
        while let Some(deadline) = &mut self.deadline {
            let told = if self.process.exit.get().is_some() {
                match deadline.stage {
                    Stage::Running => None,
                    _ => {
                        self.process.kill_orphans();
                        Some("the process ran into its timeout and was killed")
                    }
                }
            } else if deadline.timer.as_mut().poll_elapsed(cx) {
                // An error says that the process has ended: the reaper tells in a moment.
                match deadline.stage {
                    Stage::Running => {
                        let _ = self.process.signal(libc::SIGTERM);
                        deadline.timer = Box::pin(sleep(TERM_GRACE));
                        deadline.stage = Stage::Terminated;
                        continue;
                    }
                    Stage::Terminated => {
                        let _ = self.process.signal(libc::SIGKILL);
                        deadline.timer = Box::pin(sleep(KILL_WAIT));
                        deadline.stage = Stage::Killed;
                        continue;
                    }
                    Stage::Killed => Some(
                        "the process ran into its timeout and was sent SIGKILL, but has not ended yet",
                    ),
                }
            } else {
                return;
            };
            if let Some(told) = told {
                let error = RpcError::new(Code::DeadlineExceeded, told);
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
