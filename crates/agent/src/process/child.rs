//! Creation of a process without copying the agent.
//!
//! `clone(CLONE_VM | CLONE_VFORK)`: the child runs in the agent's memory on a stack of its own
//! while the calling thread is suspended, until it executes the program. No page tables are copied,
//! which is most of the cost of `fork`. In return the child must not allocate, lock or touch thread
//! state: [`run`] makes raw system calls only and reports failure by writing to the parent's
//! memory.
//!
//! The calls on the working directory and the program may wait for a file system, so that a worker
//! thread creates the process.

use crate::workers::lock;
use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::io;
use std::os::fd::RawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Everything the child needs, prepared beforehand.
pub struct SpawnPlan<'a> {
    /// Absolute path of the program.
    pub program: &'a CStr,
    /// Arguments, null-terminated.
    pub argv: &'a [*const c_char],
    /// Environment, null-terminated.
    pub envp: &'a [*const c_char],
    /// Working directory.
    pub cwd: &'a CStr,
    /// Become descriptors 0, 1 and 2. All are above 2.
    pub stdio: [RawFd; 3],
    /// Make descriptor 0 the controlling terminal.
    pub terminal: bool,
    /// User, group and all groups; `None` keeps the agent's.
    pub identity: Option<(u32, u32, &'a [u32])>,
    /// For `prlimit`.
    pub limits: &'a [(u32, libc::rlimit)],
}

/// Step of a child before its program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpawnStep {
    /// Session, terminal or descriptors.
    Setup,
    /// ProcessLimits.
    ProcessLimits,
    /// User and groups.
    Identity,
    /// Working directory.
    Cwd,
    /// The program itself.
    Exec,
}

/// A process that could not be made.
#[derive(Debug)]
pub struct SpawnError {
    /// The step that failed.
    pub step: SpawnStep,
    /// The cause.
    pub error: io::Error,
}

struct ChildContext<'a> {
    plan: &'a SpawnPlan<'a>,
    pid: &'a AtomicU32,
    failed: Option<(SpawnStep, c_int)>,
}

const STACK: usize = 64 * 1024;

/// A stack on which children run, one at a time.
pub struct ChildStack {
    base: *mut c_void,
}

// SAFETY: the mapping belongs to its owner, whichever thread that is on.
unsafe impl Send for ChildStack {}

impl ChildStack {
    /// Reserves the stack.
    pub fn new() -> io::Result<Self> {
        // SAFETY: a fresh anonymous mapping.
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

    /// Starts a process. Returns its pid once the program runs. The child stores its pid in `pid`
    /// before anything else, so that its exit can be attributed to it from the first moment.
    pub fn spawn(&mut self, plan: &SpawnPlan<'_>, pid: &AtomicU32) -> Result<u32, SpawnError> {
        let mut context = ChildContext {
            plan,
            pid,
            failed: None,
        };
        // SAFETY: the stack is used here only (`&mut self`) and CLONE_VFORK suspends this thread
        // until the child has left it; `context` outlives that. The child only makes system calls
        // and writes `context.failed`.
        let pid = unsafe {
            libc::clone(
                run,
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
        // SAFETY: `context` is live; volatile because the child wrote it behind the compiler's
        // back.
        let failed = unsafe { (&raw const context.failed).read_volatile() };
        match failed {
            // The failed child is reaped with all others.
            Some((step, errno)) => Err(SpawnError {
                step,
                error: io::Error::from_raw_os_error(errno),
            }),
            None => Ok(pid.unsigned_abs()),
        }
    }
}

/// Stacks that no child runs on.
static STACKS: Mutex<Vec<ChildStack>> = Mutex::new(Vec::new());
/// Number of attempts to execute a program that is open for writing.
const BUSY_ATTEMPTS: u32 = 10;
/// Pause between these attempts.
const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// [`ChildStack::spawn`] on any stack.
///
/// A program that was just written may be open for writing in a child of another thread, which has
/// copies of the agent's descriptors for a moment. The execution is attempted again then.
pub fn spawn(plan: &SpawnPlan<'_>, pid: &AtomicU32) -> Result<u32, SpawnError> {
    let failed = |error| SpawnError {
        step: SpawnStep::Setup,
        error,
    };
    let kept = lock(&STACKS).pop();
    let mut stack = kept.map_or_else(ChildStack::new, Ok).map_err(failed)?;
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
    lock(&STACKS).push(stack);
    result
}

impl SpawnError {
    fn is_busy(&self) -> bool {
        self.step == SpawnStep::Exec && self.error.raw_os_error() == Some(libc::ETXTBSY)
    }
}

impl Drop for ChildStack {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, no child is on it.
        unsafe { libc::munmap(self.base, STACK) };
    }
}

extern "C" fn run(argument: *mut c_void) -> c_int {
    let context = argument.cast::<ChildContext<'_>>();
    // SAFETY: `spawn` passes a live ChildContext; the parent is suspended, so there is no other
    // user of it.
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

/// Does everything up to and including `execve`; returns only on failure.
///
/// # Safety
/// Runs in a vforked child. The plan's pointers must be valid.
unsafe fn prepare(plan: &SpawnPlan<'_>) -> (SpawnStep, c_int) {
    // Raw system calls: libc's wrappers for setuid and friends would signal the agent's other
    // threads.
    macro_rules! attempt {
        ($step:expr, $($argument:expr),+) => {
            // SAFETY: the pointers come from the plan and are valid; the rest are numbers.
            if unsafe { libc::syscall($($argument),+) } < 0 {
                // SAFETY: errno of the calling thread, which is suspended in `spawn`.
                return ($step, unsafe { *libc::__errno_location() });
            }
        };
    }
    attempt!(SpawnStep::Setup, libc::SYS_setsid);
    let [stdin, stdout, stderr] = plan.stdio;
    for (target, source) in [(0, stdin), (1, stdout), (2, stderr)] {
        attempt!(SpawnStep::Setup, libc::SYS_dup2, source, target);
    }
    // The calls below may wait for ever. Copies of the agent's descriptors would keep its
    // connections and other processes' pipes open meanwhile. All are closed on execution at the
    // latest, so that a kernel without this call is fine.
    // SAFETY: no pointers.
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
    attempt!(SpawnStep::Cwd, libc::SYS_chdir, plan.cwd.as_ptr());
    // SIGPIPE is the only signal that the agent ignores; handlers it has none.
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
