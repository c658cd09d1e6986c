//! List of the system calls that a process may make, enforced by a seccomp filter.

use libc::{c_int, c_long};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter, apply_filter_all_threads,
};
use std::collections::BTreeMap;
use std::io;

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// Condition on the low 32 bits of an argument of a system call.
#[derive(Debug, Clone)]
pub struct ArgumentCondition {
    index: u8,
    operator: SeccompCmpOp,
    value: u64,
}

/// The argument at `index` is `value`.
pub const fn equals(index: u8, value: c_int) -> ArgumentCondition {
    equals_unsigned(index, value.cast_unsigned() as u64)
}

/// The argument at `index` is `value`.
pub const fn equals_unsigned(index: u8, value: u64) -> ArgumentCondition {
    let operator = SeccompCmpOp::Eq;
    ArgumentCondition {
        index,
        operator,
        value,
    }
}

/// System calls that a process may make. Other calls fail with EPERM.
#[derive(Debug)]
pub struct AllowedCalls {
    /// A call is allowed if one of its rules holds, or if it has none.
    rules: Rules,
    hides_clone3: bool,
}

impl AllowedCalls {
    /// Allows `calls` with any arguments.
    pub fn new(calls: &[c_long]) -> Self {
        Self {
            rules: calls.iter().map(|call| (*call, Vec::new())).collect(),
            hides_clone3: false,
        }
    }

    /// Allows `call` if all conditions of one of the `alternatives` hold.
    pub fn allow_if(
        &mut self,
        call: c_long,
        alternatives: impl IntoIterator<Item = Vec<ArgumentCondition>>,
    ) -> io::Result<()> {
        let rule = |conditions: Vec<ArgumentCondition>| {
            let conditions = conditions.into_iter().map(|condition| {
                let (index, value) = (condition.index, condition.value);
                SeccompCondition::new(index, SeccompCmpArgLen::Dword, condition.operator, value)
            });
            SeccompRule::new(conditions.collect::<Result<_, _>>()?)
        };
        let rules: Result<Vec<_>, _> = alternatives.into_iter().map(rule).collect();
        let rules = rules.map_err(io::Error::other)?;
        // An empty list would allow all arguments.
        if rules.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.rules.insert(call, rules);
        Ok(())
    }

    /// Allows the start of threads, but not of processes.
    pub fn allow_threads(&mut self) -> io::Result<()> {
        let flag = u64::from(libc::CLONE_THREAD.cast_unsigned());
        let starts_thread = ArgumentCondition {
            index: 0,
            operator: SeccompCmpOp::MaskedEq(flag),
            value: flag,
        };
        self.allow_if(libc::SYS_clone, [vec![starts_thread]])?;
        self.hides_clone3 = true;
        Ok(())
    }

    /// Allows threads to set their names.
    pub fn allow_thread_names(&mut self) -> io::Result<()> {
        self.allow_if(libc::SYS_prctl, [vec![equals(0, libc::PR_SET_NAME)]])
    }

    /// Restricts the calling thread and threads that it starts.
    pub fn enforce(mut self) -> io::Result<()> {
        if self.hides_clone3 {
            // A filter cannot read the flags of clone3, which lie in memory. Without clone3, libc
            // starts threads by clone. This filter is installed first because the other one denies
            // the installation of further filters.
            let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
            let absent = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
            let hiding = compile(clone3, absent, SeccompAction::Allow)?;
            apply_filter(&hiding).map_err(io::Error::other)?;
            self.rules.insert(libc::SYS_clone3, Vec::new());
        }
        apply_filter(&allowing(self.rules)?).map_err(io::Error::other)
    }

    /// Restricts all threads of the process, which can start no further ones.
    pub fn enforce_on_all_threads(self) -> io::Result<()> {
        if self.hides_clone3 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        apply_filter_all_threads(&allowing(self.rules)?).map_err(io::Error::other)
    }
}

fn allowing(rules: Rules) -> io::Result<BpfProgram> {
    let denied = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    compile(rules, SeccompAction::Allow, denied)
}

fn compile(rules: Rules, listed: SeccompAction, others: SeccompAction) -> io::Result<BpfProgram> {
    SeccompFilter::new(rules, others, listed, TargetArch::x86_64)
        .and_then(TryInto::try_into)
        .map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn error_of(result: c_long) -> Option<i32> {
        let error = io::Error::last_os_error().raw_os_error();
        if result == -1 { error } else { None }
    }

    /// Duplicates `fd` with the lowest number from `minimum` on.
    fn duplicate(fd: c_int, command: c_int, minimum: c_int) -> Option<i32> {
        // SAFETY: the call reads its arguments only.
        error_of(unsafe { libc::syscall(libc::SYS_fcntl, fd, command, minimum) })
    }

    /// Runs `check` in a thread that may make the calls of a thread and `fcntl` with conditions.
    fn confined(check: impl FnOnce() + Send + 'static) {
        let thread = thread::spawn(move || {
            // SAFETY: no pointer is passed. A filter cannot be installed without this.
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
