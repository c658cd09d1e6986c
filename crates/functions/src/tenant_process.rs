//! Starter's side of a tenant's process and of compilers.

use crate::control::{CONTROL_FD, ControlRequest, ControlResponse, LISTENER_FD};
use crate::limits::{FunctionLimits, TenantLimits};
use crate::world::World;
use command_fds::{CommandFdExt, FdMapping};
use jiffy_proto::channel::{Channel, ChannelError};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::TimeVal;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time within which a process starts, and answers an order.
const ANSWER_TIMEOUT_S: i64 = 30;
/// Time for a compilation.
pub const COMPILE_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval at which the end of a compiler is looked for.
const COMPILE_POLL: Duration = Duration::from_millis(5);
/// Longest message of a compiler that is passed on, in bytes.
const MAX_MESSAGE_BYTES: usize = 4 << 10;

/// Failure of a tenant's process or of a compiler.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// It cannot be started.
    #[error("starting jiffy-functions: {0}")]
    Start(#[from] io::Error),
    /// It does not answer.
    #[error("the process of functions does not answer: {0}")]
    Control(#[from] ChannelError),
    /// It refused an order.
    #[error("{0}")]
    Refused(String),
    /// The module was not compiled. The message is its author's.
    #[error("{0}")]
    Compile(String),
}

/// Process of a tenant. It ends with this value.
#[derive(Debug)]
pub struct TenantProcess {
    /// Present until the value is taken apart.
    child: Option<Child>,
    id: u32,
    control: Channel,
    engine: String,
}

impl TenantProcess {
    /// Starts the process of `owner` with the program at `program`, and waits until it serves.
    pub fn start(
        program: &Path,
        owner: &str,
        limits: &TenantLimits,
        listener: UnixListener,
        jailed: bool,
    ) -> Result<Self, ProcessError> {
        let (control, theirs) = Channel::pair()?;
        let mut command = Command::new(program);
        command
            .env_clear()
            .args(["serve", "--owner", owner])
            .args(["--slots", &limits.slots.to_string()])
            .args(["--memory-bytes", &limits.memory_bytes.to_string()])
            .args(["--connections", &limits.connections.to_string()])
            .args(["--reset", limits.reset.word()])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        if !jailed {
            command.arg("--no-jail");
        }
        let mappings = vec![
            FdMapping {
                parent_fd: theirs,
                child_fd: CONTROL_FD,
            },
            FdMapping {
                parent_fd: listener.into(),
                child_fd: LISTENER_FD,
            },
        ];
        command.fd_mappings(mappings).map_err(io::Error::other)?;
        let child = command.spawn()?;
        // The process has its copies of these descriptors; ours would keep the socket open.
        drop(command);
        let timeout = TimeVal::new(ANSWER_TIMEOUT_S, 0);
        setsockopt(&control, sockopt::ReceiveTimeout, &timeout).map_err(io::Error::from)?;
        let mut process = Self {
            id: child.id(),
            child: Some(child),
            control,
            engine: String::new(),
        };
        match process.control.recv()?.0 {
            ControlResponse::Ready { engine } => process.engine = engine,
            other => {
                return Err(ProcessError::Refused(format!(
                    "unexpected answer {other:?}"
                )));
            }
        }
        Ok(process)
    }

    /// Fingerprint of its engine: compiled files of another one are compiled again.
    #[must_use]
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// Process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Closes the control socket, at which the process ends, and returns it to be waited for.
    pub fn close(mut self) -> Option<Child> {
        self.child.take()
    }

    /// Carries out an order.
    pub fn order(&self, order: &ControlRequest) -> Result<ControlResponse, ProcessError> {
        self.send(order, None)
    }

    /// Loads a compiled file whose digest is `digest` in hexadecimal digits.
    pub fn load(
        &self,
        function: &str,
        file: &File,
        digest: &str,
        limits: FunctionLimits,
    ) -> Result<World, ProcessError> {
        let order = ControlRequest::Load {
            function: function.to_owned(),
            digest: digest.to_owned(),
            limits,
        };
        match self.send(&order, Some(file))? {
            ControlResponse::Loaded { world } => Ok(world),
            other => Err(ProcessError::Refused(format!(
                "unexpected answer {other:?}"
            ))),
        }
    }

    fn send(
        &self,
        order: &ControlRequest,
        file: Option<&File>,
    ) -> Result<ControlResponse, ProcessError> {
        let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        self.control.send(order, &files)?;
        match self.control.recv()?.0 {
            ControlResponse::Refused { message } => Err(ProcessError::Refused(message)),
            answer => Ok(answer),
        }
    }
}

impl Drop for TenantProcess {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Already ended, or ends now.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Compiles the module in `source` to `target` by a process of its own, and returns the digest of
/// the compiled file in hexadecimal digits.
pub fn compile(
    program: &Path,
    owner: &str,
    source: File,
    target: &Path,
    jailed: bool,
) -> Result<String, ProcessError> {
    let file = File::options().write(true).create_new(true).open(target)?;
    let messages = tempfile::tempfile()?;
    let mut command = Command::new(program);
    command.env_clear().args(["compile", "--owner", owner]);
    if !jailed {
        command.arg("--no-jail");
    }
    command
        .stdin(source)
        .stdout(file)
        .stderr(messages.try_clone()?);
    let mut child = command.spawn()?;
    let deadline = Instant::now() + COMPILE_TIMEOUT;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            return Err(ProcessError::Compile(
                "the module takes too long to compile".to_owned(),
            ));
        }
        std::thread::sleep(COMPILE_POLL);
    };
    if !status.success() {
        return Err(ProcessError::Compile(message(messages, status)));
    }
    let digest = blake3::Hasher::new()
        .update_reader(File::open(target)?)?
        .finalize();
    Ok(digest.to_hex().to_string())
}

fn message(mut file: File, status: std::process::ExitStatus) -> String {
    use std::io::{Read, Seek};
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
