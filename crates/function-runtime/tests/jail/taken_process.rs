//! Stopped thread of a process under the test's control. It executes system calls of the test, as
//! an attacker's code in the process would.

use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

/// Machine code of `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Machine code of the system call instruction of 32-bit programs.
const SYSCALL_32: [u8; 2] = [0xcd, 0x80];
/// Size of the memory for arguments in bytes.
const ROOM_BYTES: u64 = 64 << 10;

/// Result of a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallEnd {
    /// Returned value: a negative error number, or a result.
    Returned(i64),
    /// Signal that killed the process, or would have killed it.
    Killed(Signal),
}

/// Stopped thread. It continues at its previous position when this value is dropped.
pub struct TakenThread {
    thread: libc::pid_t,
    before: libc::user_regs_struct,
    memory: File,
    /// Address of machine code that executes a system call.
    code: u64,
    /// Start and end address of free memory.
    room: (u64, u64),
    is_gone: bool,
}

/// Sends a ptrace request. The caller must ensure that an address in `data` is valid.
fn trace(request: libc::c_uint, thread: libc::pid_t, data: usize) -> io::Result<()> {
    // SAFETY: no address of this process is used, except for registers that the callers pass, which
    // are valid until the call returns.
    match unsafe { libc::ptrace(request, thread, 0usize, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Waits until a thread has stopped or exited. An exited thread remains waitable for its parent.
fn wait(thread: libc::pid_t) -> io::Result<WaitStatus> {
    let thread = || Id::Pid(Pid::from_raw(thread));
    let changes = WaitPidFlag::WEXITED | WaitPidFlag::WSTOPPED | WaitPidFlag::__WALL;
    match waitid(thread(), changes | WaitPidFlag::WNOWAIT)? {
        ended @ (WaitStatus::Signaled(..) | WaitStatus::Exited(..)) => Ok(ended),
        _ => Ok(waitid(thread(), changes)?),
    }
}

impl TakenThread {
    /// Stops a thread of another process. This requires root, as the processes are not dumpable.
    pub fn take(thread: libc::pid_t) -> io::Result<Self> {
        let options = usize::try_from(libc::PTRACE_O_EXITKILL).map_err(io::Error::other)?;
        trace(libc::PTRACE_SEIZE, thread, options)?;
        trace(libc::PTRACE_INTERRUPT, thread, 0)?;
        wait(thread)?;
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{thread}/mem"))?;
        let code = find_code(thread, &memory)?;
        let mut taken = Self {
            thread,
            before: registers(thread)?,
            memory,
            code,
            room: (0, 0),
            is_gone: false,
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let (protection, kind) = (protection as u64, kind as u64);
        let arguments = [0, ROOM_BYTES, protection, kind, u64::MAX, 0];
        match taken.call(libc::SYS_mmap, arguments)? {
            CallEnd::Returned(at @ 1..) => {
                let at = at.cast_unsigned();
                taken.room = (at, at + ROOM_BYTES);
                Ok(taken)
            }
            other => Err(io::Error::other(format!("mmap: {other:?}"))),
        }
    }

    /// Suspends the seccomp filter of the thread while this process traces the thread.
    pub fn suspend_filter(&self) -> io::Result<()> {
        let options = libc::PTRACE_O_EXITKILL | libc::PTRACE_O_SUSPEND_SECCOMP;
        let options = usize::try_from(options).map_err(io::Error::other)?;
        trace(libc::PTRACE_SETOPTIONS, self.thread, options)
    }

    /// Writes bytes to the thread's memory, and returns their address.
    pub fn put(&mut self, bytes: &[u8]) -> io::Result<u64> {
        let at = self.room.0;
        self.room.0 += u64::try_from(bytes.len()).map_err(io::Error::other)?;
        self.room.0 = self.room.0.next_multiple_of(16);
        assert!(
            self.room.0 <= self.room.1,
            "the memory for arguments is full"
        );
        self.memory.write_all_at(bytes, at)?;
        Ok(at)
    }

    /// Executes a system call.
    pub fn call(&mut self, number: libc::c_long, arguments: [u64; 6]) -> io::Result<CallEnd> {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let registers = libc::user_regs_struct {
            rax: number.cast_unsigned(),
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..self.before
        };
        self.step(registers)
    }

    /// Executes a system call like a 32-bit program.
    pub fn call_32(&mut self, number: u64, arguments: [u64; 3]) -> io::Result<CallEnd> {
        let [rbx, rcx, rdx] = arguments;
        self.memory.write_all_at(&SYSCALL_32, self.code)?;
        let registers = libc::user_regs_struct {
            rax: number,
            rbx,
            rcx,
            rdx,
            ..self.before
        };
        let ended = self.step(registers);
        if !self.is_gone {
            self.memory.write_all_at(&SYSCALL, self.code)?;
        }
        ended
    }

    /// Runs one instruction.
    fn step(&mut self, registers: libc::user_regs_struct) -> io::Result<CallEnd> {
        let registers = libc::user_regs_struct {
            rip: self.code,
            // The interrupted system call is not restarted.
            orig_rax: u64::MAX,
            ..registers
        };
        set_registers(self.thread, &registers)?;
        trace(libc::PTRACE_SINGLESTEP, self.thread, 0)?;
        match wait(self.thread)? {
            WaitStatus::PtraceEvent(_, Signal::SIGTRAP, _) => {}
            WaitStatus::PtraceEvent(_, signal, _) => return Ok(CallEnd::Killed(signal)),
            WaitStatus::Signaled(_, signal, _) => {
                self.is_gone = true;
                return Ok(CallEnd::Killed(signal));
            }
            other => return Err(io::Error::other(format!("{other:?}"))),
        }
        let after = self::registers(self.thread)?;
        Ok(CallEnd::Returned(after.rax.cast_signed()))
    }
}

impl Drop for TakenThread {
    fn drop(&mut self) {
        if !self.is_gone {
            // The thread may have been killed in the meantime.
            let _ = set_registers(self.thread, &self.before);
            let _ = trace(libc::PTRACE_DETACH, self.thread, 0);
        }
    }
}

fn registers(thread: libc::pid_t) -> io::Result<libc::user_regs_struct> {
    // SAFETY: the structure contains integers, for which zero is valid.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    let at = &raw mut registers;
    trace(libc::PTRACE_GETREGS, thread, at.expose_provenance())?;
    Ok(registers)
}

fn set_registers(thread: libc::pid_t, registers: &libc::user_regs_struct) -> io::Result<()> {
    let at = &raw const *registers;
    trace(libc::PTRACE_SETREGS, thread, at.expose_provenance())
}

/// Finds an instruction that executes a system call, in the machine code of a process.
fn find_code(process: libc::pid_t, memory: &File) -> io::Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{process}/maps"))?;
    for line in maps.lines().filter(|line| line.contains(" r-xp ")) {
        let range = line
            .split_once(' ')
            .and_then(|(range, _)| range.split_once('-'));
        let (from, to) = range.ok_or_else(|| io::Error::other("no range"))?;
        let [from, to] = [from, to].map(|digits| u64::from_str_radix(digits, 16).unwrap());
        let mut bytes = vec![0; usize::try_from(to - from).map_err(io::Error::other)?];
        if memory.read_exact_at(&mut bytes, from).is_err() {
            continue;
        }
        if let Some(at) = bytes.windows(2).position(|code| code == SYSCALL) {
            return Ok(from + u64::try_from(at).map_err(io::Error::other)?);
        }
    }
    Err(io::Error::other(
        "the process has no system call instruction",
    ))
}
