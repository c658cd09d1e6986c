//! Creation of a process without copying the agent.
//!
//! `clone(CLONE_VM | CLONE_VFORK)`: the child runs in the agent's memory on a stack of its own
//! while the agent is suspended, until it executes the program. No page tables are copied, which is
//! most of the cost of `fork`. In return the child must not allocate, lock or touch thread state:
//! [`run`] makes raw system calls only and reports failure by writing to the parent's memory.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::io;
use std::os::fd::RawFd;

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
    failed: Option<(SpawnStep, c_int)>,
}

const STACK: usize = 64 * 1024;

/// The stack on which children run, one at a time.
pub struct ChildStack {
    base: *mut c_void,
}

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

    /// Starts a process. Returns its pid once the program runs.
    pub fn spawn(&mut self, plan: &SpawnPlan<'_>) -> Result<u32, SpawnError> {
        let mut context = ChildContext { plan, failed: None };
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
