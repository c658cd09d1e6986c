//! Table of the processes that clients started: running processes, recently exited processes, and
//! the attribution of out-of-memory kills to them.

use super::exit::ProcessExit;
use super::frame_hub::FrameHub;
use super::input::ProcessInput;
use super::message::{ProcessConfig, ProcessSelector};
use super::oom::{OomVictims, OomWatch};
use super::oom_log::CountedKills;
use super::start::SpawnSlot;
use crate::rpc::{RpcCode, RpcError};
use crate::sys;
use bytes::Bytes;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

/// Maximum number of exited processes to which clients can still connect.
const MAX_ENDED_PROCESSES: usize = 64;

/// A process that the agent started for a client.
pub struct GuestProcess {
    /// Process id. Also the id of its process group and session.
    pub pid: u32,
    /// Configuration at start.
    pub config: ProcessConfig,
    /// Tag.
    pub tag: Option<String>,
    /// False for terminals and services of the sandbox.
    pub is_command: bool,
    /// Distribution of its output.
    pub hub: FrameHub,
    /// Input.
    pub input: ProcessInput,
    /// Exit status, and whether the OOM killer ended the process. Set when the process was reaped.
    pub exit: Cell<Option<(ProcessExit, bool)>>,
    /// Final frames of its stream. Set when all output was read.
    pub end: OnceCell<Bytes>,
    /// Waker of the task that reads its output. The task is woken when the process exits.
    pub pump: RefCell<Option<Waker>>,
    /// Set if the agent killed the process.
    pub killed: Cell<bool>,
    /// Number of processes that had been started before this one.
    pub start_index: Cell<u64>,
}

impl AsRef<FrameHub> for GuestProcess {
    fn as_ref(&self) -> &FrameHub {
        &self.hub
    }
}

impl GuestProcess {
    /// Sends a signal to the process and all processes in its group.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        if self.exit.get().is_some() {
            // The process id may already belong to another process.
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        if signal == libc::SIGKILL {
            self.killed.set(true);
        }
        // SAFETY: the call takes no pointers.
        sys::check(unsafe { libc::kill(-self.pid.cast_signed(), signal) })?;
        Ok(())
    }

    /// Kills the remaining processes in the group of a process that has exited.
    ///
    /// The kernel does not reuse the id while the group has members. If the group is empty, the id
    /// may belong to a new process. The processes in the group are therefore killed only if no
    /// process has this id.
    pub fn kill_orphans(&self) {
        let pid = self.pid.cast_signed();
        // SAFETY: the call takes no pointers. It fails unless a process has this id.
        if sys::check(unsafe { libc::kill(pid, 0) }).is_err() {
            // SAFETY: the call takes no pointers.
            let _ = sys::check(unsafe { libc::kill(-pid, libc::SIGKILL) });
        }
    }
}

/// A process that a worker is about to start.
struct StartingProcess {
    slot: SpawnSlot,
    /// Pid, exit status and whether the OOM killer ended the process. `None` until it is reaped.
    /// The pid may belong to a failed child: a busy program is executed again in another child.
    exit: Option<(u32, ProcessExit, bool)>,
}

/// All processes, and the resources for starting processes.
pub struct ProcessTable {
    /// Running processes by process id.
    running: RefCell<HashMap<u32, Rc<GuestProcess>>>,
    /// Processes that have exited, the latest last.
    ended: RefCell<VecDeque<Rc<GuestProcess>>>,
    /// Processes that workers are about to start.
    starting: RefCell<Vec<StartingProcess>>,
    /// Buffer for reading output. It is used for one read at a time.
    pub scratch: RefCell<Box<[u8]>>,
    /// Open file `/dev/null`.
    pub null: Arc<OwnedFd>,
    /// Detects kills by the counter of the kernel.
    oom: OomWatch,
    /// Names the killed processes by the log of the kernel.
    victims: OomVictims,
    /// Number of processes that were started so far.
    started: Cell<u64>,
    /// An out-of-memory kill that was not attributed to a process yet. The value is the number of
    /// processes that had been started when the kill was detected. Processes that were started
    /// later are not its victims.
    unattributed_kill: Cell<Option<u64>>,
    /// Time at which the last command ended.
    command_ended: Cell<Option<Instant>>,
    /// Reports kills on the console on kernels without a log.
    pub counted_kills: RefCell<Option<CountedKills>>,
}

impl ProcessTable {
    /// Creates an empty table.
    pub fn new() -> io::Result<Self> {
        let null = std::fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/null")?;
        Ok(Self {
            running: RefCell::default(),
            ended: RefCell::default(),
            starting: RefCell::default(),
            scratch: RefCell::new(vec![0; super::output_pump::CHUNK_BYTES].into()),
            null: Arc::new(null.into()),
            oom: OomWatch::new(),
            victims: OomVictims::new(),
            started: Cell::new(0),
            unattributed_kill: Cell::new(None),
            command_ended: Cell::new(None),
            counted_kills: RefCell::default(),
        })
    }

    /// Registers a process that a worker is about to start. Its exit is then recorded even if the
    /// process is reaped before [`Self::insert`].
    pub fn begin(&self, slot: &SpawnSlot) {
        self.starting.borrow_mut().push(StartingProcess {
            slot: slot.clone(),
            exit: None,
        });
    }

    /// Removes a process that could not be started.
    pub fn abandon(&self, slot: &SpawnSlot) {
        self.starting.borrow_mut().retain(|s| s.slot != *slot);
    }

    /// Registers a process that was started with `slot`.
    pub fn insert(&self, process: &Rc<GuestProcess>, slot: &SpawnSlot) {
        process.start_index.set(self.started.get());
        self.started.set(self.started.get() + 1);
        // If the kernel reused the pid of an exited process, requests with this pid now select the
        // new process.
        self.ended.borrow_mut().retain(|p| p.pid != process.pid);
        self.victims.forget(process.pid);
        let mut starting = self.starting.borrow_mut();
        let mut own = starting.extract_if(.., |s| s.slot == *slot);
        let exit = own.next().and_then(|s| s.exit);
        let exit = exit.filter(|(pid, ..)| *pid == process.pid);
        // Both borrows must end before `end`, which borrows other parts of the table and wakes a
        // task.
        drop(own);
        drop(starting);
        match exit {
            Some((_, exit, oom)) => self.end(process, exit, oom),
            None => {
                self.running
                    .borrow_mut()
                    .insert(process.pid, Rc::clone(process));
            }
        }
    }

    /// Records the exit of a child that was reaped.
    pub fn reaped(&self, pid: u32, exit: ProcessExit) {
        let process = self.running.borrow_mut().remove(&pid);
        let counted = self.counted_kills.borrow().is_some();
        // Without a kernel log (gVisor), kills are detected only here, so the counter is read at
        // every exit.
        if counted || exit.is_sigkill() {
            self.notice_kills();
        }
        let oom = exit.is_sigkill() && self.is_oom_victim(pid, exit, counted, process.as_deref());
        if let Some(kills) = &mut *self.counted_kills.borrow_mut() {
            let command = process.as_ref().filter(|_| exit.is_sigkill());
            kills.child_ended(pid, command.map(|p| p.config.cmd.as_str()));
        }
        let Some(process) = process else {
            // A process that a worker has just started may exit before the event loop registers it.
            let mut starting = self.starting.borrow_mut();
            if let Some(starting) = starting.iter_mut().find(|s| s.slot.pid() == pid) {
                starting.exit = Some((pid, exit, oom));
            }
            return;
        };
        self.end(&process, exit, oom);
    }

    /// Records the exit of a process, and notifies the task that reads its output. `oom` is true if
    /// the kernel killed it at a memory limit.
    fn end(&self, process: &Rc<GuestProcess>, exit: ProcessExit, oom: bool) {
        // A process that the agent killed is not reported as a victim, even if the kernel counted a
        // kill.
        process.exit.set(Some((exit, oom && !process.killed.get())));
        if process.is_command {
            self.command_ended.set(Some(Instant::now()));
        }
        let mut ended = self.ended.borrow_mut();
        ended.push_back(Rc::clone(process));
        if ended.len() > MAX_ENDED_PROCESSES {
            ended.pop_front();
        }
        drop(ended);
        if let Some(waker) = process.pump.borrow_mut().take() {
            waker.wake();
        }
    }

    /// Checks for an out-of-memory kill since the last call. Also called when the kernel's log
    /// reports a kill, because the agent does not reap a victim whose parent still runs. Without
    /// that call, the kill would be attributed to a process that is started and killed later.
    pub fn notice_kills(&self) {
        if self.oom.happened() {
            self.unattributed_kill.set(Some(self.started.get()));
        }
    }

    /// Returns whether a process that was apparently killed is the victim of an out-of-memory kill.
    /// The kernel's log names the victims. A shell that exits with the status of its killed child
    /// is not named. `counted` is set on kernels without a log.
    fn is_oom_victim(
        &self,
        pid: u32,
        exit: ProcessExit,
        counted: bool,
        process: Option<&GuestProcess>,
    ) -> bool {
        let is_signalled = matches!(exit, ProcessExit::Signal(_));
        let named = if is_signalled && !counted {
            self.victims.contains(pid)
        } else {
            None
        };
        match named {
            Some(true) => {
                self.unattributed_kill.set(None);
                true
            }
            Some(false) => false,
            None => self.take_unattributed_kill(process),
        }
    }

    /// Returns whether an apparently killed process is the victim of the detected kill. A kill is
    /// attributed to one process only. This may be a process that no client started (`None`).
    fn take_unattributed_kill(&self, process: Option<&GuestProcess>) -> bool {
        match (self.unattributed_kill.get(), process) {
            (Some(unattributed), Some(process)) if process.start_index.get() >= unattributed => {
                false
            }
            (unattributed, _) => {
                self.unattributed_kill.set(None);
                unattributed.is_some()
            }
        }
    }

    /// Returns all running processes, sorted by pid.
    pub fn list(&self) -> Vec<Rc<GuestProcess>> {
        let mut all: Vec<_> = self.running.borrow().values().cloned().collect();
        all.sort_by_key(|p| p.pid);
        all
    }

    /// Returns the number of running commands, and the time since the last command ended.
    pub fn commands(&self) -> (usize, Option<Duration>) {
        let running = self.running.borrow();
        let running = running.values().filter(|process| process.is_command);
        (
            running.count(),
            self.command_ended.get().map(|at| at.elapsed()),
        )
    }

    /// Returns the selected running process.
    pub fn running(&self, selector: &ProcessSelector) -> Result<Rc<GuestProcess>, RpcError> {
        let running = self.running.borrow();
        find(running.values(), selector)
    }

    /// Returns the selected process if it runs or has recently exited.
    pub fn running_or_ended(
        &self,
        selector: &ProcessSelector,
    ) -> Result<Rc<GuestProcess>, RpcError> {
        self.running(selector)
            .or_else(|_| find(self.ended.borrow().iter().rev(), selector))
    }
}

/// Returns the process with the pid, or the first one with the tag.
fn find<'a>(
    mut among: impl Iterator<Item = &'a Rc<GuestProcess>>,
    selector: &ProcessSelector,
) -> Result<Rc<GuestProcess>, RpcError> {
    let (found, name) = match selector {
        ProcessSelector { pid: Some(pid), .. } => (among.find(|p| p.pid == *pid), pid.to_string()),
        ProcessSelector { tag: Some(tag), .. } => (
            among.find(|p| p.tag.as_ref() == Some(tag)),
            format!("tagged '{tag}'"),
        ),
        _ => {
            return Err(RpcError::new(
                RpcCode::InvalidArgument,
                "select a process by pid or tag",
            ));
        }
    };
    found
        .cloned()
        .ok_or_else(|| RpcError::new(RpcCode::NotFound, format!("process {name} not found")))
}

#[cfg(test)]
mod tests {
    use super::super::input::InputSink;
    use super::*;
    use std::sync::atomic::Ordering;

    /// Returns a process that has not exited.
    fn process(pid: u32) -> Rc<GuestProcess> {
        let config = serde_json::json!({ "cmd": "program" });
        Rc::new(GuestProcess {
            pid,
            config: serde_json::from_value(config).unwrap(),
            tag: None,
            is_command: true,
            hub: FrameHub::default(),
            input: ProcessInput::new(InputSink::Closed),
            exit: Cell::new(None),
            end: OnceCell::new(),
            pump: RefCell::new(None),
            killed: Cell::new(false),
            start_index: Cell::new(0),
        })
    }

    #[test]
    fn an_exit_belongs_to_the_child_with_its_pid_although_an_earlier_child_failed() {
        let table = ProcessTable::new().unwrap();
        for early_exit in [None, Some(ProcessExit::Code(3))] {
            let slot = SpawnSlot::default();
            table.begin(&slot);
            // The program was busy: the first child exits with 127, and a second one runs it.
            slot.0.store(70_001, Ordering::Release);
            table.reaped(70_001, ProcessExit::Code(127));
            slot.0.store(70_002, Ordering::Release);
            if let Some(exit) = early_exit {
                table.reaped(70_002, exit);
            }
            let process = process(70_002);
            table.insert(&process, &slot);
            assert_eq!(process.exit.get(), early_exit.map(|exit| (exit, false)));
            table.reaped(70_002, ProcessExit::Code(0));
        }
    }
}
