//! Creation of a process without copying the agent.
//!
//! `clone(CLONE_VM | CLONE_VFORK)`: the child runs in the agent's memory on a separate stack, while
//! the calling thread is suspended, until it executes the program. No page tables are copied, which
//! is most of the cost of `fork`. In return, the child must not allocate, lock or touch thread
//! state: [`run`] makes only raw system calls, and reports a failure by writing to the parent's
//! memory.
//!
//! The system calls on the working directory and the program may wait for a file system. Therefore
//! a worker thread creates the process.

use super::private_mounts::{self, MountStep};
use crate::workers::lock;
use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::io;
use std::os::fd::RawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Values that the child needs. The parent prepares them before the child is created.
pub struct SpawnPlan<'a> {
    /// Absolute path of the program.
    pub program: &'a CStr,
    /// Arguments, null-terminated.
    pub argv: &'a [*const c_char],
    /// Environment, null-terminated.
    pub envp: &'a [*const c_char],
    /// Working directory.
    pub cwd: &'a CStr,
    /// Descriptors that become 0, 1 and 2. All are above 2.
    pub stdio: [RawFd; 3],
    /// Descriptor 0 becomes the controlling terminal.
    pub terminal: bool,
    /// User, primary group and all groups. Defaults to the identity of the agent.
    pub identity: Option<(u32, u32, &'a [u32])>,
    /// Resource limits in the form of `prlimit`.
    pub limits: &'a [(u32, libc::rlimit)],
    /// Mounts of a mount namespace of its own. `None` if the process uses the agent's namespace.
    pub mounts: Option<&'a [MountStep]>,
}

/// Step of a child before its program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpawnStep {
    /// Session, terminal or descriptors.
    Setup,
    /// Mounts.
    Mounts,
    /// Resource limits.
    ProcessLimits,
    /// User and groups.
    Identity,
    /// Working directory.
    Cwd,
    /// The program itself.
    Exec,
}

/// Error of creating a process.
#[derive(Debug)]
pub struct SpawnError {
    /// The step that failed.
    pub step: SpawnStep,
    /// The cause.
    pub error: io::Error,
}

/// Argument of the child's function.
struct ChildContext<'a> {
    plan: &'a SpawnPlan<'a>,
    pid: &'a AtomicU32,
    /// Step that failed, with its error number. The parent reads it, because both share memory.
    failed: Option<(SpawnStep, c_int)>,
}

/// Size of the child's stack in bytes. The child calls only [`run`] and [`prepare`].
const STACK: usize = 64 * 1024;

/// Stack of a child. One child at a time uses it.
pub struct ChildStack {
    base: *mut c_void,
}

// SAFETY: the mapping belongs to this value and is not bound to a thread.
unsafe impl Send for ChildStack {}

impl ChildStack {
    /// Reserves the stack.
    pub fn new() -> io::Result<Self> {
        // SAFETY: a new anonymous mapping.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                STACK,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base })
    }

    /// Starts a process. Returns its pid when the program runs. The child first stores its pid in
    /// `pid`, so that the reaper recognises its exit even before this function returns.
    pub fn spawn(&mut self, plan: &SpawnPlan<'_>, pid: &AtomicU32) -> Result<u32, SpawnError> {
        let mut context = ChildContext {
            plan,
            pid,
            failed: None,
        };
        // SAFETY: only this function uses the stack (`&mut self`). CLONE_VFORK suspends this thread
        // until the child no longer uses it, and `context` lives longer than that. The child only
        // makes system calls and writes `context.pid` and `context.failed`.
        let pid = unsafe {
            libc::clone(
                run,
                // The stack grows downwards, so the child starts at its upper end.
                self.base.byte_add(STACK),
                libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
                (&raw mut context).cast(),
            )
        };
        if pid < 0 {
            return Err(SpawnError {
                step: SpawnStep::Setup,
                error: io::Error::last_os_error(),
            });
        }
        // SAFETY: `context` is alive. The read is volatile, because the compiler does not know that
        // the child wrote the value.
        let failed = unsafe { (&raw const context.failed).read_volatile() };
        match failed {
            // The reaper collects the failed child like all others.
            Some((step, errno)) => Err(SpawnError {
                step,
                error: io::Error::from_raw_os_error(errno),
            }),
            None => Ok(pid.unsigned_abs()),
        }
    }
}

/// Unused stacks.
static STACKS: Mutex<Vec<ChildStack>> = Mutex::new(Vec::new());
/// Maximum number of attempts to execute a program that is open for writing.
const BUSY_ATTEMPTS: u32 = 10;
/// Pause between the attempts.
const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// Calls [`ChildStack::spawn`] on an unused stack.
///
/// A program that was just written may still be open for writing in a child of another thread,
/// which has copies of the agent's descriptors for a moment. In this case the execution is
/// attempted again.
pub fn spawn(plan: &SpawnPlan<'_>, pid: &AtomicU32) -> Result<u32, SpawnError> {
    let failed = |error| SpawnError {
        step: SpawnStep::Setup,
        error,
    };
    let stack = lock(&STACKS).pop();
    let mut stack = stack.map_or_else(ChildStack::new, Ok).map_err(failed)?;
    let mut attempts = 1;
    let result = loop {
        match stack.spawn(plan, pid) {
            Err(e) if e.is_busy() && attempts < BUSY_ATTEMPTS => {
                attempts += 1;
                std::thread::sleep(BUSY_PAUSE);
            }
            result => break result,
        }
    };
    // The child has executed its program or has exited, so its stack is free again.
    lock(&STACKS).push(stack);
    result
}

impl SpawnError {
    /// Returns whether the program is open for writing.
    fn is_busy(&self) -> bool {
        self.step == SpawnStep::Exec && self.error.raw_os_error() == Some(libc::ETXTBSY)
    }
}

impl Drop for ChildStack {
    fn drop(&mut self) {
        // SAFETY: this is the mapping of `new`, and no child uses it.
        unsafe { libc::munmap(self.base, STACK) };
    }
}

/// Entry point of the child, which shares the memory of its parent until `exec`. Returns only after
/// a failure.
extern "C" fn run(argument: *mut c_void) -> c_int {
    let context = argument.cast::<ChildContext<'_>>();
    // SAFETY: `spawn` passes a live ChildContext, and the parent, which is its only other user, is
    // suspended.
    unsafe {
        let pid = libc::syscall(libc::SYS_getpid);
        let pid = u32::try_from(pid).unwrap_or(0);
        (*context).pid.store(pid, Ordering::Release);
        let failure = prepare((*context).plan);
        (&raw mut (*context).failed).write_volatile(Some(failure));
        libc::syscall(libc::SYS_exit_group, 127);
    }
    127
}

/// Performs all steps up to and including `execve`. Returns the failed step and the error number.
/// Does not return if the program was executed.
///
/// # Safety
/// Must run in a vforked child. The plan's pointers must be valid.
unsafe fn prepare(plan: &SpawnPlan<'_>) -> (SpawnStep, c_int) {
    // Raw system calls, because libc's wrappers for setuid and similar calls would signal the
    // agent's other threads.
    macro_rules! attempt {
        ($step:expr, $($argument:expr),+) => {
            // SAFETY: the pointers belong to the plan and are valid. The other arguments are
            // numbers.
            if unsafe { libc::syscall($($argument),+) } < 0 {
                // SAFETY: reads errno of the calling thread, which is suspended in `spawn`.
                return ($step, unsafe { *libc::__errno_location() });
            }
        };
    }
    attempt!(SpawnStep::Setup, libc::SYS_setsid);
    let [stdin, stdout, stderr] = plan.stdio;
    for (target, source) in [(0, stdin), (1, stdout), (2, stderr)] {
        attempt!(SpawnStep::Setup, libc::SYS_dup2, source, target);
    }
    // The system calls below may wait forever. Meanwhile, copies of the agent's descriptors would
    // keep its connections and the pipes of other processes open. All descriptors are closed by the
    // execution at the latest, so the result of this call is ignored.
    // SAFETY: the call takes no pointers.
    let _ = unsafe { jiffy_proto::kernel::close_range(3, u32::MAX, 0) };
    if plan.terminal {
        attempt!(
            SpawnStep::Setup,
            libc::SYS_ioctl,
            0,
            libc::TIOCSCTTY as c_long,
            0
        );
    }
    // Mount before the change of the user, because only root may mount file systems.
    if let Some(mounts) = plan.mounts {
        // SAFETY: the caller guarantees the conditions of `enter`, which are the same.
        if let Err(errno) = unsafe { private_mounts::enter(mounts) } {
            return (SpawnStep::Mounts, errno);
        }
    }
    // Set the limits before the change of the user, because only root may raise a hard limit.
    for (resource, limit) in plan.limits {
        attempt!(
            SpawnStep::ProcessLimits,
            libc::SYS_prlimit64,
            0,
            *resource,
            &raw const *limit,
            std::ptr::null_mut::<libc::rlimit>()
        );
    }
    if let Some((uid, gid, groups)) = plan.identity {
        attempt!(
            SpawnStep::Identity,
            libc::SYS_setgroups,
            groups.len(),
            groups.as_ptr()
        );
        attempt!(SpawnStep::Identity, libc::SYS_setresgid, gid, gid, gid);
        attempt!(SpawnStep::Identity, libc::SYS_setresuid, uid, uid, uid);
    }
    // Change the directory after the user, so that the kernel checks the access of this user.
    attempt!(SpawnStep::Cwd, libc::SYS_chdir, plan.cwd.as_ptr());
    // SIGPIPE is the only signal that the agent ignores, and the agent has no signal handlers. An
    // all-zero `sigaction` of the kernel (32 bytes) is the default action. The last argument of
    // both calls is the size of a signal set in bytes.
    let default = [0_u64; 4];
    attempt!(
        SpawnStep::Setup,
        libc::SYS_rt_sigaction,
        libc::SIGPIPE,
        default.as_ptr(),
        std::ptr::null_mut::<u64>(),
        8
    );
    let none = 0_u64;
    attempt!(
        SpawnStep::Setup,
        libc::SYS_rt_sigprocmask,
        libc::SIG_SETMASK,
        &raw const none,
        std::ptr::null_mut::<u64>(),
        8
    );
    attempt!(
        SpawnStep::Exec,
        libc::SYS_execve,
        plan.program.as_ptr(),
        plan.argv.as_ptr(),
        plan.envp.as_ptr()
    );
    (SpawnStep::Exec, libc::ENOSYS)
}
