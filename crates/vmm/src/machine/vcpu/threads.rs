//! The threads that run vCPUs, and how the event loop stops them, reads them and lets them go on.

use super::run::{Step, VcpuEnd, step};
use super::state::VcpuState;
use crate::error::VmmError;
use crate::machine::bus::Bus;
use crate::seccomp;
use kvm_ioctls::VcpuFd;
use nix::sys::pthread::{Pthread, pthread_kill};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use std::cell::Cell;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};
use vmm_sys_util::eventfd::EventFd;

const KICK: Signal = Signal::SIGUSR1;
const STACK: usize = 256 * 1024;

thread_local! {
    /// `immediate_exit` of the vCPU that this thread runs; null elsewhere.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

/// Makes the next, or the current, stay in the guest end at once. Setting the flag in the handler closes the gap between
/// looking for commands and entering the guest.
extern "C" fn on_kick(_signal: libc::c_int) {
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: the pointer was set by this very thread to a byte of a mapping that lives as long as its vCPU.
        unsafe { flag.write_volatile(1) };
    }
}

enum Command {
    Run,
    Pause(Sender<()>),
    Save(Arc<Vec<u32>>, Sender<Result<VcpuState, VmmError>>),
}

struct Thread {
    commands: Sender<Command>,
    handle: JoinHandle<()>,
}

/// All vCPUs of a machine. They start paused.
pub struct Vcpus {
    threads: Vec<Thread>,
    ends: Receiver<VcpuEnd>,
    /// Fires when a vCPU ended.
    pub ended: EventFd,
}

impl Vcpus {
    /// Starts a confined, paused thread for each vCPU.
    pub fn start(vcpus: Vec<VcpuFd>, bus: &Arc<Bus>, ended: EventFd) -> Result<Self, VmmError> {
        let action = SigAction::new(
            SigHandler::Handler(on_kick),
            SaFlags::empty(),
            SigSet::empty(),
        );
        // SAFETY: the handler only writes one byte through a thread-local pointer.
        unsafe { sigaction(KICK, &action) }.map_err(|e| VmmError::host("sigaction", e))?;
        let (tell, ends) = channel();
        let mut threads = Vec::with_capacity(vcpus.len());
        for (id, vcpu) in vcpus.into_iter().enumerate() {
            let (commands, inbox) = channel();
            let worker = Worker {
                vcpu,
                bus: bus.clone(),
                inbox,
                tell: tell.clone(),
                ended: ended
                    .try_clone()
                    .map_err(|e| VmmError::host("eventfd", e))?,
            };
            let handle = Builder::new()
                .name(format!("vcpu{id}"))
                .stack_size(STACK)
                .spawn(move || worker.main())
                .map_err(|e| VmmError::host("starting a vCPU thread", e))?;
            threads.push(Thread { commands, handle });
        }
        Ok(Self {
            threads,
            ends,
            ended,
        })
    }

    /// Lets all of them go.
    pub fn resume(&self) {
        for thread in &self.threads {
            // A thread that is gone has told its end.
            let _ = thread.commands.send(Command::Run);
        }
    }

    /// Stops all of them and returns when each is outside the guest with no exit unfinished.
    pub fn pause(&self) {
        let waits: Vec<Receiver<()>> = self
            .threads
            .iter()
            .map(|thread| {
                let (tell, done) = channel();
                let _ = thread.commands.send(Command::Pause(tell));
                let id: Pthread = thread.handle.as_pthread_t();
                let _ = pthread_kill(id, KICK);
                done
            })
            .collect();
        for done in waits {
            // An error means that the thread is gone, which is as stopped as can be.
            let _ = done.recv();
        }
    }

    /// Reads the state of all of them; they must be paused.
    pub fn save(&self, msrs: &Arc<Vec<u32>>) -> Result<Vec<VcpuState>, VmmError> {
        let gone = || VmmError::Guest("a vCPU had ended already".to_owned());
        self.threads
            .iter()
            .map(|thread| {
                let (tell, state) = channel();
                let command = Command::Save(msrs.clone(), tell);
                thread.commands.send(command).map_err(|_| gone())?;
                state.recv().map_err(|_| gone())?
            })
            .collect()
    }

    /// Why a vCPU ended, if one did.
    pub fn take_end(&self) -> Option<VcpuEnd> {
        self.ends.try_recv().ok()
    }
}

struct Worker {
    vcpu: VcpuFd,
    bus: Arc<Bus>,
    inbox: Receiver<Command>,
    tell: Sender<VcpuEnd>,
    ended: EventFd,
}

impl Worker {
    fn main(mut self) {
        IMMEDIATE_EXIT.set(&raw mut self.vcpu.get_kvm_run().immediate_exit);
        let end = match seccomp::confine_vcpu() {
            Ok(()) => self.obey(),
            Err(e) => Some(VcpuEnd::Failed(e)),
        };
        IMMEDIATE_EXIT.set(ptr::null_mut());
        if let Some(end) = end {
            let _ = self.tell.send(end);
            let _ = self.ended.write(1);
        }
    }

    /// Paused: takes commands until told to run, then runs until kicked, and so on. `None` when nobody commands any more.
    fn obey(&mut self) -> Option<VcpuEnd> {
        loop {
            match self.inbox.recv().ok()? {
                Command::Pause(tell) => {
                    let _ = tell.send(());
                }
                Command::Save(msrs, tell) => {
                    let _ = tell.send(VcpuState::save(&self.vcpu, &msrs));
                }
                Command::Run => match self.run() {
                    Ok(paused) => {
                        let _ = paused.send(());
                    }
                    Err(end) => return Some(end),
                },
            }
        }
    }

    /// Runs the guest until a pause is asked for; returns whom to tell.
    fn run(&mut self) -> Result<Sender<()>, VcpuEnd> {
        loop {
            match step(&mut self.vcpu, &self.bus) {
                Step::Served => {}
                Step::End(end) => return Err(end),
                Step::Kicked => {
                    // Only now is the last exit finished: KVM completes it on the way in, and a kick ends the way in.
                    self.vcpu.set_kvm_immediate_exit(0);
                    while let Ok(command) = self.inbox.try_recv() {
                        if let Command::Pause(tell) = command {
                            // Keeps the guest's watchdogs quiet about the time to come; guests without the clock do not mind.
                            let _ = self.vcpu.kvmclock_ctrl();
                            return Ok(tell);
                        }
                    }
                }
            }
        }
    }
}
