//! Threads that run vCPUs. The event loop pauses, saves and resumes them by commands.

use super::run::{VcpuEnd, VcpuStep, run_once};
use super::state::VcpuState;
use crate::confined_thread::ConfinedThread;
use crate::error::VmmError;
use crate::machine::bus::Bus;
use kvm_ioctls::VcpuFd;
use nix::sys::pthread::{Pthread, pthread_kill};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use std::cell::Cell;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

// Unused by the C library and by Rust's runtime.
const KICK_SIGNAL: Signal = Signal::SIGUSR1;

thread_local! {
    /// `immediate_exit` of the vCPU that this thread runs; null elsewhere.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

/// Makes the current or the next `KVM_RUN` return at once. The handler sets a flag for `KVM_RUN`,
/// so that a kick between checking for commands and entering the guest is not lost.
extern "C" fn on_kick(_signal: libc::c_int) {
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: this thread set the pointer to a byte of a mapping that exists as long as its
        // vCPU.
        unsafe { flag.write_volatile(1) };
    }
}

/// Command to the thread of a vCPU. The thread sends the result to the sender in it.
enum VcpuCommand {
    Run,
    Pause(Sender<()>),
    /// Saves the state, with the values of these MSRs.
    Save(Arc<Vec<u32>>, Sender<Result<VcpuState, VmmError>>),
    /// Checks that the vCPU has the CPUID of the state.
    CheckCpuid(Arc<VcpuState>, Sender<Result<(), VmmError>>),
    /// Replaces the state of the vCPU, for a rollback in place.
    Revert(Arc<VcpuState>, Sender<Result<(), VmmError>>),
}

/// Thread of a vCPU, from the outside.
struct VcpuThread {
    commands: Sender<VcpuCommand>,
    handle: JoinHandle<()>,
}

impl VcpuThread {
    /// Sends a command. The returned receiver delivers its result.
    fn start_command<T>(
        &self,
        command: impl FnOnce(Sender<Result<T, VmmError>>) -> VcpuCommand,
    ) -> Receiver<Result<T, VmmError>> {
        let (reply, result) = channel();
        // Ignore the error: a thread that has ended drops the sender of the result.
        let _ = self.commands.send(command(reply));
        result
    }
}

/// Waits for the results of a command that was sent to all threads.
fn results<T>(pending: Vec<Receiver<Result<T, VmmError>>>) -> Result<Vec<T>, VmmError> {
    let exited = |_| VmmError::Guest("a vCPU had ended already".to_owned());
    pending
        .into_iter()
        .map(|result| result.recv().map_err(exited)?)
        .collect()
}

/// All vCPUs of a machine. They start paused.
pub struct Vcpus {
    threads: Vec<VcpuThread>,
    ends: Receiver<VcpuEnd>,
    /// Signalled when a vCPU thread has ended.
    pub ended: EventFd,
}

impl Vcpus {
    /// Moves each paused vCPU to one of `threads`.
    pub fn start(
        vcpus: Vec<VcpuFd>,
        threads: Vec<ConfinedThread>,
        bus: &Arc<Bus>,
        ended: EventFd,
    ) -> Result<Self, VmmError> {
        // Without `SA_RESTART`, the signal interrupts `KVM_RUN`.
        let action = SigAction::new(
            SigHandler::Handler(on_kick),
            SaFlags::empty(),
            SigSet::empty(),
        );
        // SAFETY: the handler only writes one byte through a thread-local pointer.
        unsafe { sigaction(KICK_SIGNAL, &action) }.map_err(|e| VmmError::host("sigaction", e))?;
        let (end_sender, ends) = channel();
        let mut running = Vec::with_capacity(vcpus.len());
        for (vcpu, thread) in vcpus.into_iter().zip(threads) {
            let (commands, inbox) = channel();
            let worker = VcpuWorker {
                vcpu,
                bus: bus.clone(),
                inbox,
                end_sender: end_sender.clone(),
                ended: ended
                    .try_clone()
                    .map_err(|e| VmmError::host("eventfd", e))?,
            };
            let handle = thread.run(move |confined| worker.main(confined));
            running.push(VcpuThread { commands, handle });
        }
        Ok(Self {
            threads: running,
            ends,
            ended,
        })
    }

    /// Resumes all vCPUs.
    pub fn resume(&self) {
        for thread in &self.threads {
            // Ignore the error: a thread that has ended has sent its reason.
            let _ = thread.commands.send(VcpuCommand::Run);
        }
    }

    /// Pauses all vCPUs. Returns when each is outside the guest with no unfinished exit.
    pub fn pause(&self) {
        for done in self.begin_pause() {
            // Ignore the error: the thread has ended.
            let _ = done.recv();
        }
    }

    /// Same as [`Self::pause`], for a process that is exiting: waits for at most `limit`.
    pub fn pause_within(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        for done in self.begin_pause() {
            // Ignore the error: the thread has ended, or the time is over.
            let _ = done.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }

    /// Requests a pause of all vCPU threads, and returns without waiting. Each receiver reports
    /// when its thread has left the guest.
    fn begin_pause(&self) -> Vec<Receiver<()>> {
        let threads = self.threads.iter();
        let pauses = threads.map(|thread| {
            let (reply, done) = channel();
            // Send the command before the kick: the thread checks its inbox after each kick. Ignore
            // both errors: the thread has ended.
            let _ = thread.commands.send(VcpuCommand::Pause(reply));
            let id: Pthread = thread.handle.as_pthread_t();
            let _ = pthread_kill(id, KICK_SIGNAL);
            done
        });
        pauses.collect()
    }

    /// Saves the state of all vCPUs, which must be paused.
    pub fn save(&self, msrs: &Arc<Vec<u32>>) -> Result<Vec<VcpuState>, VmmError> {
        let threads = self.threads.iter();
        let saving = threads
            .map(|thread| thread.start_command(|reply| VcpuCommand::Save(msrs.clone(), reply)));
        results(saving.collect())
    }

    /// Pauses all vCPUs, and checks that they can be reverted to `states`. Each thread performs the
    /// check immediately after the pause, without another command.
    pub fn pause_and_check(&self, states: &[Arc<VcpuState>]) -> Result<(), VmmError> {
        let paused = self.begin_pause();
        let checked = self.start_on_each(states, VcpuCommand::CheckCpuid);
        for done in paused {
            // Ignore the error: the thread has ended.
            let _ = done.recv();
        }
        if states.len() != self.threads.len() {
            let reason = "the snapshot has another number of vCPUs".to_owned();
            return Err(VmmError::Config(reason));
        }
        results(checked).map(drop)
    }

    /// Reverts all vCPUs, which must be paused, to `states`.
    pub fn revert(&self, states: &[Arc<VcpuState>]) -> Result<(), VmmError> {
        results(self.start_on_each(states, VcpuCommand::Revert)).map(drop)
    }

    /// Starts a command on all vCPU threads, each with the state of its vCPU. The threads work at
    /// the same time.
    fn start_on_each(
        &self,
        states: &[Arc<VcpuState>],
        command: fn(Arc<VcpuState>, Sender<Result<(), VmmError>>) -> VcpuCommand,
    ) -> Vec<Receiver<Result<(), VmmError>>> {
        let threads = self.threads.iter().zip(states);
        let pending = threads
            .map(|(thread, state)| thread.start_command(|reply| command(state.clone(), reply)));
        pending.collect()
    }

    /// Returns the reason why a vCPU ended. `None` if all are running or paused.
    pub fn take_end(&self) -> Option<VcpuEnd> {
        self.ends.try_recv().ok()
    }
}

/// State of a vCPU's thread.
struct VcpuWorker {
    vcpu: VcpuFd,
    bus: Arc<Bus>,
    inbox: Receiver<VcpuCommand>,
    end_sender: Sender<VcpuEnd>,
    ended: EventFd,
}

impl VcpuWorker {
    /// Body of a vCPU thread. It executes commands until the VM ends, then reports the reason to
    /// the event loop. `confined` is the result of the thread's confinement, for example by its
    /// seccomp filter.
    fn main(mut self, confined: Result<(), VmmError>) {
        IMMEDIATE_EXIT.set(&raw mut self.vcpu.get_kvm_run().immediate_exit);
        let end = match confined {
            Ok(()) => self.run_commands(),
            Err(e) => Some(VcpuEnd::Failed(e)),
        };
        IMMEDIATE_EXIT.set(ptr::null_mut());
        // Send the reason before signalling: the event loop reads it when the eventfd is ready.
        if let Some(end) = end {
            let _ = self.end_sender.send(end);
            let _ = self.ended.write(1);
        }
    }

    /// Executes commands and runs the guest between `Run` and `Pause`. Returns `None` when the
    /// sender of commands is dropped.
    fn run_commands(&mut self) -> Option<VcpuEnd> {
        loop {
            // Ignore errors of the replies: the sender of the command no longer waits.
            match self.inbox.recv().ok()? {
                VcpuCommand::Pause(reply) => {
                    let _ = reply.send(());
                }
                VcpuCommand::Save(msrs, reply) => {
                    let _ = reply.send(VcpuState::save(&self.vcpu, &msrs));
                }
                VcpuCommand::CheckCpuid(state, reply) => {
                    let _ = reply.send(state.check_cpuid(&self.vcpu));
                }
                VcpuCommand::Revert(state, reply) => {
                    let _ = reply.send(state.revert(&self.vcpu));
                }
                VcpuCommand::Run => match self.run() {
                    Ok(paused) => {
                        let _ = paused.send(());
                    }
                    Err(end) => return Some(end),
                },
            }
        }
    }

    /// Runs the guest until a `Pause` command. Returns the channel that confirms the command.
    fn run(&mut self) -> Result<Sender<()>, VcpuEnd> {
        // A kick that arrived before this thread set `IMMEDIATE_EXIT` is lost, but its command is
        // in the inbox.
        if let Some(reply) = self.pause_command() {
            return Ok(reply);
        }
        loop {
            match run_once(&mut self.vcpu, &self.bus) {
                VcpuStep::Served => {}
                VcpuStep::End(end) => return Err(end),
                VcpuStep::Kicked => {
                    // The exit before the kick is complete: KVM completes an exit on the next
                    // entry, which the kick then aborted. Clear the flag before reading the inbox,
                    // so that a later kick sets it again.
                    self.vcpu.set_kvm_immediate_exit(0);
                    if let Some(reply) = self.pause_command() {
                        return Ok(reply);
                    }
                }
            }
        }
    }

    /// Returns the channel that confirms a `Pause` command, if one has arrived.
    fn pause_command(&self) -> Option<Sender<()>> {
        while let Ok(command) = self.inbox.try_recv() {
            // While the guest runs, the event loop sends only `Pause`, so no other command is
            // dropped.
            if let VcpuCommand::Pause(reply) = command {
                // Prevents the guest's watchdogs from firing after the pause. Ignore the error: KVM
                // rejects the request if the guest does not use kvmclock.
                let _ = self.vcpu.kvmclock_ctrl();
                return Some(reply);
            }
        }
        None
    }
}
