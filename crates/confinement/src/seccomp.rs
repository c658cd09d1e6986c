//! Lists of allowed or denied system calls, enforced by seccomp filters. Each confined process has
//! its own list.

use libc::{c_int, c_long};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter, apply_filter_all_threads,
};
use std::collections::BTreeMap;
use std::io;

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// Condition on an argument of a system call.
#[derive(Debug, Clone)]
pub struct ArgumentCondition {
    index: u8,
    length: SeccompCmpArgLen,
    operator: SeccompCmpOp,
    value: u64,
}

/// Requires that the low 32 bits of the argument at `index` equal `value`.
pub const fn equals(index: u8, value: c_int) -> ArgumentCondition {
    equals_unsigned(index, value.cast_unsigned() as u64)
}

/// Requires that the low 32 bits of the argument at `index` equal `value`.
pub const fn equals_unsigned(index: u8, value: u64) -> ArgumentCondition {
    condition(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

/// Requires that all 64 bits of the argument at `index` equal `value`.
pub const fn equals_long(index: u8, value: u64) -> ArgumentCondition {
    condition(index, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)
}

const fn condition(
    index: u8,
    length: SeccompCmpArgLen,
    operator: SeccompCmpOp,
    value: u64,
) -> ArgumentCondition {
    ArgumentCondition {
        index,
        length,
        operator,
        value,
    }
}

/// Requires that the flags of a call of `clone` request a thread or, if `is_thread` is `false`, a
/// process.
const fn clones(is_thread: bool) -> ArgumentCondition {
    let flag = libc::CLONE_THREAD.cast_unsigned() as u64;
    let masked = SeccompCmpOp::MaskedEq(flag);
    let value = if is_thread { flag } else { 0 };
    condition(0, SeccompCmpArgLen::Dword, masked, value)
}

/// Returns rules that match `calls` with any arguments.
fn rules_of(calls: &[c_long]) -> Rules {
    calls.iter().map(|call| (*call, Vec::new())).collect()
}

/// Returns a rule that matches if all conditions hold.
fn rule(conditions: Vec<ArgumentCondition>) -> io::Result<SeccompRule> {
    let conditions = conditions.into_iter().map(|condition| {
        let (index, length) = (condition.index, condition.length);
        SeccompCondition::new(index, length, condition.operator, condition.value)
    });
    let conditions: Result<_, _> = conditions.collect();
    conditions
        .and_then(SeccompRule::new)
        .map_err(io::Error::other)
}

/// Compiled list of system calls.
#[derive(Debug)]
pub struct SyscallFilter(BpfProgram);

impl SyscallFilter {
    /// Compiles rules. Calls that match a rule get the action `listed`, all others `others`.
    fn compile(rules: Rules, listed: SeccompAction, others: SeccompAction) -> io::Result<Self> {
        SeccompFilter::new(rules, others, listed, TargetArch::x86_64)
            .and_then(TryInto::try_into)
            .map(Self)
            .map_err(io::Error::other)
    }

    /// Restricts the calling thread and all threads that it starts. Does not allocate memory, so
    /// that it can run between fork and exec.
    pub fn apply(&self) -> io::Result<()> {
        // The library's error type would allocate memory.
        apply_filter(&self.0).map_err(|_| io::Error::last_os_error())
    }
}

/// System calls that a process is allowed to make.
#[derive(Debug)]
pub struct AllowedCalls {
    /// A call is allowed if one of its rules matches, or if it has no rules.
    rules: Rules,
    /// True if clone3 must appear to be missing, so that libc uses clone.
    hides_clone3: bool,
    /// Action for other calls.
    others: SeccompAction,
}

impl AllowedCalls {
    /// Allows `calls` with any arguments. Other calls fail with EPERM.
    pub fn new(calls: &[c_long]) -> Self {
        Self {
            rules: rules_of(calls),
            hides_clone3: false,
            others: SeccompAction::Errno(libc::EPERM.cast_unsigned()),
        }
    }

    /// Allows `calls` with any arguments. Other calls kill the process.
    pub fn or_kill(calls: &[c_long]) -> Self {
        Self {
            others: SeccompAction::KillProcess,
            ..Self::new(calls)
        }
    }

    /// Allows `call` if all conditions of one of the `alternatives` hold.
    pub fn allow_if(
        &mut self,
        call: c_long,
        alternatives: impl IntoIterator<Item = Vec<ArgumentCondition>>,
    ) -> io::Result<()> {
        let rules = alternatives
            .into_iter()
            .map(rule)
            .collect::<io::Result<Vec<_>>>()?;
        // An empty list would allow all arguments.
        if rules.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.rules.insert(call, rules);
        Ok(())
    }

    /// Allows the start of threads, but not of processes.
    pub fn allow_threads(&mut self) -> io::Result<()> {
        self.allow_if(libc::SYS_clone, [vec![clones(true)]])?;
        self.hides_clone3 = true;
        Ok(())
    }

    /// Allows threads to set their names.
    pub fn allow_thread_names(&mut self) -> io::Result<()> {
        self.allow_if(libc::SYS_prctl, [vec![equals(0, libc::PR_SET_NAME)]])
    }

    /// Compiles the list into one filter. Fails after [`Self::allow_threads`], which requires a
    /// second filter that only [`Self::enforce`] installs.
    pub fn compile(self) -> io::Result<SyscallFilter> {
        if self.hides_clone3 {
            Err(io::ErrorKind::InvalidInput.into())
        } else {
            SyscallFilter::compile(self.rules, SeccompAction::Allow, self.others)
        }
    }

    /// Restricts the calling thread and all threads that it starts.
    pub fn enforce(mut self) -> io::Result<()> {
        if std::mem::take(&mut self.hides_clone3) {
            // A filter cannot read the flags of clone3, which lie in memory. If clone3 fails with
            // ENOSYS, libc starts threads by clone. This ENOSYS filter is installed before the
            // list, because the list may deny seccomp(2).
            let absent = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
            let clone3 = rules_of(&[libc::SYS_clone3]);
            SyscallFilter::compile(clone3, absent, SeccompAction::Allow)?.apply()?;
            // The kernel applies the strictest result of all filters. The list must therefore allow
            // clone3, so that the ENOSYS filter decides.
            self.rules.insert(libc::SYS_clone3, Vec::new());
        }
        self.compile()?.apply()
    }

    /// Restricts all threads of the process. They can start no further threads.
    pub fn enforce_on_all_threads(self) -> io::Result<()> {
        let filter = self.compile()?;
        apply_filter_all_threads(&filter.0).map_err(io::Error::other)
    }
}

/// System calls that a program of the host is not allowed to make, for programs whose other calls
/// are not known in advance. Denied calls fail with ENOSYS.
#[derive(Debug)]
pub struct DeniedCalls(Rules);

impl DeniedCalls {
    /// Denies `calls`.
    pub fn new(calls: &[c_long]) -> Self {
        Self(rules_of(calls))
    }

    /// Denies the start of processes, which could outlive the program. Threads are allowed.
    pub fn deny_processes(&mut self) -> io::Result<()> {
        // Without clone3, libc starts threads by clone, whose flags can be filtered.
        let calls = [libc::SYS_clone3, libc::SYS_fork, libc::SYS_vfork];
        self.0.extend(rules_of(&calls));
        let rule = rule(vec![clones(false)])?;
        self.0.insert(libc::SYS_clone, vec![rule]);
        Ok(())
    }

    /// Compiles the list.
    pub fn compile(self) -> io::Result<SyscallFilter> {
        let denied = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
        SyscallFilter::compile(self.0, denied, SeccompAction::Allow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn error_of(result: c_long) -> Option<i32> {
        let error = io::Error::last_os_error().raw_os_error();
        if result == -1 { error } else { None }
    }

    /// Duplicates `fd` to the lowest free descriptor that is at least `minimum`.
    fn duplicate(fd: c_int, command: c_int, minimum: c_int) -> Option<i32> {
        // SAFETY: the call accesses no memory.
        error_of(unsafe { libc::syscall(libc::SYS_fcntl, fd, command, minimum) })
    }

    /// Runs `check` in a thread that may only make the system calls of a thread, and conditionally
    /// `fcntl`.
    fn confined(check: impl FnOnce() + Send + 'static) {
        let thread = thread::spawn(move || {
            // SAFETY: no pointer is passed. Required for the installation of a filter.
            let result = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            assert_eq!(result, 0);
            let thread_calls = [
                libc::SYS_brk,
                libc::SYS_close,
                libc::SYS_exit,
                libc::SYS_futex,
                libc::SYS_gettid,
                libc::SYS_madvise,
                libc::SYS_mmap,
                libc::SYS_mprotect,
                libc::SYS_munmap,
                libc::SYS_rseq,
                libc::SYS_rt_sigprocmask,
                libc::SYS_sched_getaffinity,
                libc::SYS_seccomp,
                libc::SYS_set_robust_list,
                libc::SYS_sigaltstack,
                libc::SYS_write,
            ];
            let mut calls = AllowedCalls::new(&thread_calls);
            calls.allow_threads().unwrap();
            let alternatives = [
                vec![equals(1, libc::F_GETFD)],
                vec![equals(1, libc::F_DUPFD), equals_unsigned(2, 100)],
            ];
            calls.allow_if(libc::SYS_fcntl, alternatives).unwrap();
            calls.enforce().unwrap();
            check();
        });
        thread.join().unwrap();
    }

    #[test]
    fn a_call_needs_all_conditions_of_one_alternative() {
        confined(|| {
            assert_eq!(duplicate(1, libc::F_GETFD, 7), None);
            assert_eq!(duplicate(1, libc::F_DUPFD, 100), None);
            assert_eq!(duplicate(1, libc::F_DUPFD, 101), Some(libc::EPERM));
            assert_eq!(duplicate(1, libc::F_GETFL, 100), Some(libc::EPERM));
            // SAFETY: the call has no arguments.
            let other = unsafe { libc::syscall(libc::SYS_getppid) };
            assert_eq!(error_of(other), Some(libc::EPERM));
        });
    }

    #[test]
    fn threads_can_be_started_and_processes_cannot() {
        confined(|| {
            thread::spawn(|| ()).join().unwrap();
            // SAFETY: the flags start a process; the call is denied.
            let process = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
            assert_eq!(error_of(process), Some(libc::EPERM));
            // SAFETY: the call is denied before it reads its arguments.
            let process = unsafe { libc::syscall(libc::SYS_clone3, 0, 0) };
            assert_eq!(error_of(process), Some(libc::ENOSYS));
        });
    }

    #[test]
    fn a_call_without_alternatives_and_threads_of_a_whole_process_are_rejected() {
        let mut calls = AllowedCalls::new(&[]);
        assert!(calls.allow_if(libc::SYS_fcntl, []).is_err());
        calls.allow_threads().unwrap();
        assert!(calls.enforce_on_all_threads().is_err());
    }
}
