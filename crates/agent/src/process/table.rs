//! Processes that clients know.

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

/// Most ended processes that can still be connected to.
const MAX_ENDED_PROCESSES: usize = 64;

/// A process started through us.
pub struct GuestProcess {
    /// Process id, also of its process group and session.
    pub pid: u32,
    /// Configuration at start.
    pub config: ProcessConfig,
    /// Its tag.
    pub tag: Option<String>,
    /// Its output.
    pub hub: FrameHub,
    /// Its input.
    pub input: ProcessInput,
    /// Set when it was reaped.
    pub exit: Cell<Option<(ProcessExit, bool)>>,
    /// Its final frames, once all output was read.
    pub end: OnceCell<Bytes>,
    /// The task that reads its output, to be woken at exit.
    pub pump: RefCell<Option<Waker>>,
    /// We killed it ourselves.
    pub killed: Cell<bool>,
    /// Number of processes that were started before it.
    pub before: Cell<u64>,
}

impl AsRef<FrameHub> for GuestProcess {
    fn as_ref(&self) -> &FrameHub {
        &self.hub
    }
}

impl GuestProcess {
    /// Sends a signal to the process and all in its group.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        if self.exit.get().is_some() {
            // The number may already belong to another process.
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        if signal == libc::SIGKILL {
            self.killed.set(true);
        }
        // SAFETY: no pointers.
        sys::check(unsafe { libc::kill(-self.pid.cast_signed(), signal) })?;
        Ok(())
    }

    /// Kills the rest of the group of a process that has ended.
    ///
    /// The kernel keeps the number while the group has members. Once it is empty another process
    /// may have it, which then exists under that number.
    pub fn kill_orphans(&self) {
        let pid = self.pid.cast_signed();
        // SAFETY: no pointers. It fails unless a process has this number.
        if sys::check(unsafe { libc::kill(pid, 0) }).is_err() {
            // SAFETY: no pointers.
            let _ = sys::check(unsafe { libc::kill(-pid, libc::SIGKILL) });
        }
    }
}

/// A process that a worker starts.
struct StartingProcess {
    slot: SpawnSlot,
    /// Exit status and whether the OOM killer ended the process. `None` until it is reaped.
    exit: Option<(ProcessExit, bool)>,
}

/// All processes, and the resources to start more.
pub struct ProcessTable {
    running: RefCell<HashMap<u32, Rc<GuestProcess>>>,
    ended: RefCell<VecDeque<Rc<GuestProcess>>>,
    /// Processes that workers start.
    starting: RefCell<Vec<StartingProcess>>,
    /// Buffer into which output is read, one read at a time.
    pub scratch: RefCell<Box<[u8]>>,
    /// `/dev/null`.
    pub null: Arc<OwnedFd>,
    oom: OomWatch,
    victims: OomVictims,
    /// Number of processes that were started so far.
    started: Cell<u64>,
    /// A kill for want of memory of which no process has been told yet: the number of processes
    /// that had been started when it was noticed. Those that came later are not its victims.
    kill: Cell<Option<u64>>,
    /// Told to the console, where nothing else tells of kills.
    pub counted_kills: RefCell<Option<CountedKills>>,
}

impl ProcessTable {
    /// An empty table.
    pub fn new() -> io::Result<Self> {
        let null = std::fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/null")?;
        Ok(Self {
            running: RefCell::default(),
            ended: RefCell::default(),
            starting: RefCell::default(),
            scratch: RefCell::new(vec![0; super::output_pump::PIPE_CHUNK_BYTES].into()),
            null: Arc::new(null.into()),
            oom: OomWatch::new(),
            victims: OomVictims::new(),
            started: Cell::new(0),
            kill: Cell::new(None),
            counted_kills: RefCell::default(),
        })
    }

    /// Registers a process that a worker is about to start, so that its exit is recorded even if it
    /// is reaped before [`Self::insert`].
    pub fn begin(&self, slot: &SpawnSlot) {
        self.starting.borrow_mut().push(StartingProcess {
            slot: slot.clone(),
            exit: None,
        });
    }

    /// Forgets a process that could not be started.
    pub fn abandon(&self, slot: &SpawnSlot) {
        self.starting.borrow_mut().retain(|s| s.slot != *slot);
    }

    /// Registers a process that was started with `slot`.
    pub fn insert(&self, process: &Rc<GuestProcess>, slot: &SpawnSlot) {
        process.before.set(self.started.get());
        self.started.set(self.started.get() + 1);
        self.ended.borrow_mut().retain(|p| p.pid != process.pid);
        self.victims.forget(process.pid);
        let mut starting = self.starting.borrow_mut();
        let mut own = starting.extract_if(.., |s| s.slot == *slot);
        let exit = own.next().and_then(|s| s.exit);
        drop(own);
        drop(starting);
        match exit {
            Some((exit, oom)) => self.end(process, exit, oom),
            None => {
                self.running
                    .borrow_mut()
                    .insert(process.pid, Rc::clone(process));
            }
        }
    }

    /// The kernel said that a child ended.
    pub fn reaped(&self, pid: u32, exit: ProcessExit) {
        let process = self.running.borrow_mut().remove(&pid);
        let counted = self.counted_kills.borrow().is_some();
        if counted || exit.is_sigkill() {
            self.notice_kills();
        }
        let oom = exit.is_sigkill() && self.is_oom_victim(pid, exit, counted, process.as_deref());
        if let Some(kills) = &mut *self.counted_kills.borrow_mut() {
            let known = process.as_ref().filter(|_| exit.is_sigkill());
            kills.child_ended(pid, known.map(|p| p.config.cmd.as_str()));
        }
        let Some(process) = process else {
            let mut starting = self.starting.borrow_mut();
            if let Some(starting) = starting.iter_mut().find(|s| s.slot.pid() == pid) {
                starting.exit = Some((exit, oom));
            }
            return;
        };
        self.end(&process, exit, oom);
    }

    fn end(&self, process: &Rc<GuestProcess>, exit: ProcessExit, oom: bool) {
        process.exit.set(Some((exit, oom && !process.killed.get())));
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

    /// Notices a kill for want of memory since the last call. Called also when one is heard of: its
    /// victim may be the child of a command that goes on, and is not to be taken for one that is
    /// killed later.
    pub fn notice_kills(&self) {
        if self.oom.happened() {
            self.kill.set(Some(self.started.get()));
        }
    }

    /// Returns whether a process that looks killed is the victim of an out-of-memory kill. The
    /// kernel's log names victims; a process that exits with the status of a killed child is not
    /// named itself.
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
                self.kill.set(None);
                true
            }
            Some(false) => false,
            None => self.take_kill(process),
        }
    }

    /// Tells if a process that looks killed is the victim of a kill that was noticed. That is told
    /// of one process only, also of one that no client waits for.
    fn take_kill(&self, process: Option<&GuestProcess>) -> bool {
        match (self.kill.get(), process) {
            (Some(kill), Some(process)) if process.before.get() >= kill => false,
            (kill, _) => {
                self.kill.set(None);
                kill.is_some()
            }
        }
    }

    /// All that run, by pid.
    pub fn list(&self) -> Vec<Rc<GuestProcess>> {
        let mut all: Vec<_> = self.running.borrow().values().cloned().collect();
        all.sort_by_key(|p| p.pid);
        all
    }

    /// A running process.
    pub fn running(&self, selector: &ProcessSelector) -> Result<Rc<GuestProcess>, RpcError> {
        let running = self.running.borrow();
        find(running.values(), selector)
    }

    /// A running process, or one that ended a moment ago.
    pub fn running_or_ended(
        &self,
        selector: &ProcessSelector,
    ) -> Result<Rc<GuestProcess>, RpcError> {
        self.running(selector)
            .or_else(|_| find(self.ended.borrow().iter().rev(), selector))
    }
}

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
                "name a process by pid or tag",
            ));
        }
    };
    found
        .cloned()
        .ok_or_else(|| RpcError::new(RpcCode::NotFound, format!("process {name} not found")))
}
