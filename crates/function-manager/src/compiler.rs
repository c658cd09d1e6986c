//! Compilation of a module by a process of its own, `jiffy-functions compile`: starts the process,
//! passes the module, receives the machine code and enforces time limits. A *slot* is the
//! permission of a compiler to run, which compilers use in turn.

use crate::compile_slots::{CompileSlot, CompileSlots};
use crate::deploy_step::{DeployStep, reached};
use crate::disk_quota::DeployQuota;
use crate::tenant_process::ProcessError;
use jiffy_proto::function::{CompileLimits, MAX_ARTIFACT_BYTES};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Interval at which the exit, the time slice and the timeout of a compiler are checked.
const COMPILE_POLL_MS: u16 = 5;
/// Time slice, after which a compiler yields its slot to a waiting compiler.
const TIME_SLICE: Duration = Duration::from_millis(200);
/// Maximum length in bytes of a compiler's message that is passed on.
const MAX_MESSAGE_BYTES: usize = 4 << 10;
/// Number of machine code bytes written at once.
const CHUNK_BYTES: usize = 64 << 10;

/// Settings of a compilation.
#[derive(Debug, Clone, Copy)]
pub struct CompilerSettings<'a> {
    /// Program `jiffy-functions`.
    pub program: &'a Path,
    /// Owner of the module.
    pub owner: &'a str,
    /// Limits of the compilation. Without a jail, only the time limit applies.
    pub limits: CompileLimits,
    /// True if the compiler is confined. False in tests on hosts without user namespaces.
    pub jailed: bool,
}

/// Process of a compiler, killed when this value is dropped.
#[derive(Debug)]
struct CompilerProcess<'a> {
    child: Child,
    slots: &'a CompileSlots,
    /// `None` while the process is stopped.
    slot: Option<CompileSlot<'a>>,
    /// Time at which the process yields its slot, if another compiler waits.
    slice_end: Instant,
    /// Time at which the compilation times out. Time without a slot does not count.
    deadline: Instant,
}

impl Drop for CompilerProcess<'_> {
    fn drop(&mut self) {
        // The call fails if the process has already been waited for; ignore the error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Compiles the module in `source` to the file `target` in a new process. Returns the digest of the
/// compiled file in hexadecimal digits. Reserves the written bytes in `quota`. Blocks until one of
/// `slots` is free and the compiler has exited.
pub fn compile(
    settings: &CompilerSettings<'_>,
    source: File,
    target: &Path,
    quota: &DeployQuota,
    slots: &CompileSlots,
) -> Result<String, ProcessError> {
    // The caller has removed the file of an earlier attempt, so that `create_new` succeeds.
    let mut file = File::options().write(true).create_new(true).open(target)?;
    // Messages go to a file, because a pipe that is not read would block the compiler.
    let messages = tempfile::tempfile()?;
    let limits = &settings.limits;
    let mut command = Command::new(settings.program);
    command
        .env_clear()
        .args(["compile", "--owner", settings.owner])
        .args(["--cpu-s", &limits.cpu_s.to_string()])
        .args(["--memory-bytes", &limits.memory_bytes.to_string()]);
    if !settings.jailed {
        command.arg("--no-jail");
    }
    command
        .stdin(source)
        .stdout(Stdio::piped())
        .stderr(messages.try_clone()?);
    let slot = slots.take();
    let started = Instant::now();
    let mut process = CompilerProcess {
        // Inherits no environment and no descriptor except standard input, output and error.
        child: command.spawn()?,
        slots,
        slot: Some(slot),
        slice_end: started + TIME_SLICE,
        deadline: started + limits.time,
    };
    reached(DeployStep::Compile);
    let digest = process.receive(&mut file, quota)?;
    // Only the exit status shows whether the output is complete.
    let status = process.wait()?;
    if !status.success() {
        return Err(ProcessError::Compile(message(messages, status)));
    }
    Ok(digest.to_hex().to_string())
}

impl<'a> CompilerProcess<'a> {
    /// Writes the process's output to `file` until the process closes it.
    fn receive(
        &mut self,
        file: &mut File,
        quota: &DeployQuota,
    ) -> Result<blake3::Hash, ProcessError> {
        let output = self.child.stdout.take();
        let mut output = output.ok_or_else(|| io::Error::other("the compiler has no output"))?;
        let mut hasher = blake3::Hasher::new();
        let (mut buffer, mut written) = (vec![0; CHUNK_BYTES], 0_u64);
        loop {
            self.enforce_time_limits()?;
            // The output is polled with a timeout, so that the time limits are checked while the
            // compiler is silent.
            if !is_readable(&output)? {
                continue;
            }
            let count = match output.read(&mut buffer) {
                Ok(0) => return Ok(hasher.finalize()),
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e.into()),
            };
            let bytes = buffer.get(..count).unwrap_or_default();
            let length = u64::try_from(count).unwrap_or(u64::MAX);
            written = written.saturating_add(length);
            // The limit also holds for a compiler that was taken over by a malicious module.
            if written > MAX_ARTIFACT_BYTES {
                let max_mib = MAX_ARTIFACT_BYTES >> 20;
                let message = format!("the compiled module is larger than {max_mib} MiB");
                return Err(ProcessError::Compile(message));
            }
            // Reserve the bytes before the write, so that an owner never exceeds the quota.
            quota.grow(length).map_err(ProcessError::QuotaExceeded)?;
            hasher.update(bytes);
            file.write_all(bytes)?;
        }
    }

    /// Waits for the exit of the process.
    fn wait(&mut self) -> Result<ExitStatus, ProcessError> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            self.enforce_time_limits()?;
            std::thread::sleep(Duration::from_millis(COMPILE_POLL_MS.into()));
        }
    }

    /// Fails if the process has timed out. At the end of the time slice, stops the process and
    /// yields its slot if another compiler waits.
    fn enforce_time_limits(&mut self) -> Result<(), ProcessError> {
        let now = Instant::now();
        if now > self.deadline {
            return Err(ProcessError::Compile(
                "the module takes too long to compile".to_owned(),
            ));
        }
        if now < self.slice_end || !self.slots.has_waiters() {
            return Ok(());
        }
        // The process id is not reused, because an exited compiler has not been waited for yet.
        let signal = |child: &Child, signal| {
            let id = i32::try_from(child.id()).map_err(io::Error::other)?;
            kill(Pid::from_raw(id), signal).map_err(io::Error::from)
        };
        signal(&self.child, Signal::SIGSTOP)?;
        // The slot must be free before the process waits for its next slot.
        self.slot = None;
        self.slot = Some(self.slots.take());
        signal(&self.child, Signal::SIGCONT)?;
        let started = Instant::now();
        self.slice_end = started + TIME_SLICE;
        // The time without a slot does not count.
        self.deadline += started.saturating_duration_since(now);
        Ok(())
    }
}

/// Polls `output` for [`COMPILE_POLL_MS`]. Returns whether it has bytes or was closed.
fn is_readable(output: &ChildStdout) -> io::Result<bool> {
    let mut polled = [PollFd::new(output.as_fd(), PollFlags::POLLIN)];
    match poll(&mut polled, PollTimeout::from(COMPILE_POLL_MS)) {
        Ok(count) => Ok(count > 0),
        Err(nix::errno::Errno::EINTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Returns the compiler's message, or a message about its limits. A process without a status code
/// was killed by a signal: by the kernel at the limit of processor time, or by its own abort after
/// a failed allocation. The output of a killed process is not returned.
fn message(mut file: File, status: ExitStatus) -> String {
    use std::io::Seek;
    let mut text = Vec::new();
    let read = file.rewind().and_then(|()| {
        let limit = u64::try_from(MAX_MESSAGE_BYTES).unwrap_or(u64::MAX);
        file.take(limit).read_to_end(&mut text)
    });
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    match (read, text.is_empty(), status.code()) {
        (Ok(_), false, Some(_)) => text,
        _ => format!("the compiler ran out of memory or time ({status})"),
    }
}
