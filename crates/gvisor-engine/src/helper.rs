//! [`Helper`]: starts the helper program `jiffy-gvisor`, and sends requests to it over a socket.
//!
//! The *sentry* is gVisor's kernel in user space, one process per sandbox.

use crate::error::GvisorError;
use command_fds::{CommandFdExt, FdMapping};
use jiffy_confinement::{CapabilitySet, limit_privileges};
use jiffy_proto::channel::{Channel, ChannelError};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::DirBuilder;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::Command;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Descriptor of the socket in the helper process.
const CONTROL: i32 = 3;
/// Capabilities of the helper. It sets users and groups of sentries, creates their namespaces, root
/// directories and network interfaces, and monitors them.
const CAPABILITIES: CapabilitySet = CapabilitySet::SETUID
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::NET_ADMIN)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::SYS_RESOURCE);
/// Additional capability if the helper's user namespace maps only one user, which has id 0 there.
/// Required to map this user into the nested namespace of a sentry (user_namespaces(7), Linux
/// 5.12).
const MAP_ONLY_USER: CapabilitySet = CapabilitySet::SETFCAP;

/// Specification of a sandbox, in the format of the helper.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct SentrySpec {
    pub directory: PathBuf,
    /// EROFS image with the agent.
    pub base: PathBuf,
    /// Images of the root file system, lowest first.
    pub images: Vec<PathBuf>,
    /// Environment of the agent.
    pub env: Vec<String>,
    /// Path of the network namespace. `None` without a network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<PathBuf>,
    /// Control group of the sandbox. `None` if resources are not limited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Memory of the guest.
    pub memory_bytes: u64,
    /// Additional memory for the sentry.
    pub overhead_bytes: u64,
    pub vcpus: u32,
    /// Maximum number of threads and processes, including the sentry's.
    pub tasks: u64,
}

/// Request to the helper. `Create` creates a sentry, in which `Start` boots a guest, or `Restore`
/// restores one from a checkpoint. After a `Checkpoint` without `resume`, the sandbox remains
/// paused until `Resume`. `Load` adopts a sandbox that an earlier helper has detached. `Ended`
/// waits for the end of a sandbox, and reports its exit status.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub(crate) enum HelperRequest {
    Version,
    Create {
        sandbox: SentrySpec,
    },
    Start,
    Restore {
        image: PathBuf,
    },
    Checkpoint {
        image: PathBuf,
        resume: bool,
    },
    Resume,
    Connect {
        port: u16,
    },
    Load,
    #[serde(rename = "keep")]
    Detach,
    Ended,
    Destroy,
}

impl HelperRequest {
    /// Returns a description for error messages.
    fn description(&self) -> &'static str {
        match self {
            Self::Version => "report its version",
            Self::Create { .. } => "create a sandbox",
            Self::Start => "start a sandbox",
            Self::Restore { .. } => "restore a sandbox",
            Self::Checkpoint { .. } => "take a snapshot",
            Self::Resume => "resume a sandbox",
            Self::Connect { .. } => "connect to the guest agent",
            Self::Load => "adopt a sandbox",
            Self::Detach => "detach a sandbox",
            Self::Ended => "report the exit status of a sandbox",
            Self::Destroy => "remove a sandbox",
        }
    }
}

/// Message to the helper. Its reply has the same number.
#[derive(Serialize)]
struct Request<'a> {
    number: u64,
    id: &'a str,
    #[serde(flatten)]
    request: &'a HelperRequest,
}

/// Reply of the helper.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Reply {
    number: u64,
    error: String,
    /// True if the helper does not know the sandbox.
    unknown: bool,
    /// Id of the process that isolates the sandbox.
    pub pid: u32,
    /// Time for which the sandbox was paused, in microseconds.
    pub stopped_us: u64,
    /// Version of gVisor.
    pub version: String,
    /// Exit status of the sandbox's first process. `None` if it was killed or if the status is
    /// unknown.
    pub exit: Option<i32>,
    /// True if the kernel killed the sandbox because it exceeded its memory limit.
    pub out_of_memory: bool,
    /// Signal that killed the sandbox. 0 if it was not killed or if the signal is unknown.
    pub signal: i32,
}

/// Reply of the helper, and the descriptors that it passed.
type HelperAnswer = (Reply, Vec<OwnedFd>);

/// Running helper process.
#[derive(Debug)]
struct HelperProcess {
    channel: AsyncFd<Channel>,
    next: AtomicU64,
    /// Requests that wait for a reply, by number. `None` after the process has exited.
    waiting: Mutex<Option<HashMap<u64, oneshot::Sender<HelperAnswer>>>>,
}

/// Handle of the helper program. The process is started on first use, and again if it exits.
#[derive(Debug, Clone)]
pub struct Helper(Arc<HelperState>);

#[derive(Debug)]
struct HelperState {
    program: PathBuf,
    directory: PathBuf,
    /// True if sandboxes have control groups that limit their resources.
    limited: bool,
    /// True if the helper removes the directory when it exits.
    ephemeral: bool,
    /// Set by [`Helper::close`]: no further requests are sent.
    closed: AtomicBool,
    run: tokio::sync::Mutex<Option<RunningHelper>>,
}

/// Helper process, and the task that receives its replies. The task ends when the process has
/// exited.
#[derive(Debug)]
struct RunningHelper(Arc<HelperProcess>, JoinHandle<()>);

impl Helper {
    /// Creates a helper for the sandboxes in `directory`, which must not be used by another
    /// process. `limited` states whether sandboxes have control groups.
    pub fn new(program: PathBuf, directory: PathBuf, limited: bool) -> Result<Self, GvisorError> {
        Self::create(program, directory, limited, false)
    }

    /// Creates a helper for sandboxes that are never detached. When this process exits for any
    /// reason, the sandboxes are terminated and `directory` is removed.
    pub fn ephemeral(
        program: PathBuf,
        directory: PathBuf,
        limited: bool,
    ) -> Result<Self, GvisorError> {
        Self::create(program, directory, limited, true)
    }

    /// Creates the directory. The first request starts the program.
    fn create(
        program: PathBuf,
        directory: PathBuf,
        limited: bool,
        ephemeral: bool,
    ) -> Result<Self, GvisorError> {
        DirBuilder::new()
            .recursive(true)
            // Sentries run as other users, and must reach the directories of their sandboxes.
            .mode(0o711)
            .create(&directory)
            .map_err(GvisorError::file(&directory))?;
        Ok(Self(Arc::new(HelperState {
            program,
            directory,
            limited,
            ephemeral,
            closed: AtomicBool::new(false),
            run: tokio::sync::Mutex::default(),
        })))
    }

    /// Stops the helper process permanently and returns when it has exited. Sandboxes that are not
    /// detached are terminated first.
    pub async fn close(&self) {
        // Before the lock is taken: a request that waits for the lock then fails.
        self.0.closed.store(true, Ordering::Release);
        if let Some(RunningHelper(run, reading)) = self.0.run.lock().await.take() {
            run.shut_down();
            // Ignore the result: the task has ended in any case.
            let _ = reading.await;
        }
    }

    /// Returns the directory of the sandboxes.
    pub(crate) fn directory(&self) -> &Path {
        &self.0.directory
    }

    /// Returns whether sandboxes have control groups that limit their resources.
    pub(crate) fn limited(&self) -> bool {
        self.0.limited
    }

    /// Returns the version of gVisor.
    pub async fn version(&self) -> Result<String, GvisorError> {
        Ok(self.request("", &HelperRequest::Version).await?.0.version)
    }

    /// Sends a request about sandbox `id` and waits for the reply.
    pub(crate) async fn request(
        &self,
        id: &str,
        request: &HelperRequest,
    ) -> Result<HelperAnswer, GvisorError> {
        let run = self.run(request).await?;
        let mut answer = run.request(id, request).await?;
        if answer.0.unknown && !matches!(request, HelperRequest::Load) {
            // The sandbox was created by an earlier helper process. The new helper process must
            // load the sandbox first.
            let loaded = run.request(id, &HelperRequest::Load).await?;
            check(loaded, &HelperRequest::Load)?;
            answer = run.request(id, request).await?;
        }
        check(answer, request)
    }

    /// Sends a request without waiting for the reply.
    pub(crate) fn send_in_background(&self, id: &str, request: HelperRequest) {
        // Without a runtime, this process is exiting: all sandboxes that are not detached are
        // terminated anyway.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (helper, id) = (self.clone(), id.to_owned());
            runtime.spawn(async move {
                if let Err(e) = helper.request(&id, &request).await {
                    tracing::debug!(sandbox_id = id, error = %e, "a request to jiffy-gvisor failed");
                }
            });
        }
    }

    /// Returns the running process. Starts it if it is not running.
    async fn run(&self, request: &HelperRequest) -> Result<Arc<HelperProcess>, GvisorError> {
        let mut run = self.0.run.lock().await;
        if self.0.closed.load(Ordering::Acquire) {
            return Err(GvisorError::Gone(request.description()));
        }
        if let Some(RunningHelper(run, _)) = &*run
            && run.is_running()
        {
            return Ok(run.clone());
        }
        let RunningHelper(started, _) = run.insert(self.start()?);
        Ok(started.clone())
    }

    /// Starts the process, and the task that receives its replies.
    fn start(&self) -> Result<RunningHelper, GvisorError> {
        let shared = &self.0;
        let (channel, theirs) = Channel::pair()?;
        let nonblocking = FcntlArg::F_SETFL(OFlag::O_NONBLOCK);
        fcntl(channel.as_fd(), nonblocking).map_err(ChannelError::Io)?;
        // SAFETY: a Channel owns its descriptor, always returns the same descriptor, and closes it
        // only when it is dropped.
        let channel = unsafe {
            let both = Interest::READABLE | Interest::WRITABLE;
            AsyncFd::register_with_interest(channel, both)
        };
        let failed = |source| GvisorError::Spawn {
            path: shared.program.clone(),
            source,
        };
        let channel = channel.map_err(|e| failed(e.into_parts().1))?;
        let mut command = std::process::Command::new(&shared.program);
        command
            .arg(if shared.ephemeral {
                "serve-brief"
            } else {
                "serve"
            })
            .arg(&shared.directory)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        // Search path for programs that gVisor's runtime may start. Only the variables below are
        // passed in addition.
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        if let Some(log) = std::env::var_os("JIFFY_GVISOR_LOG") {
            command.env("JIFFY_GVISOR_LOG", log);
        }
        if shared.limited {
            command.env("JIFFY_CGROUPS", "1");
        }
        let mapping = FdMapping {
            parent_fd: theirs,
            child_fd: CONTROL,
        };
        command
            .fd_mappings(vec![mapping])
            .map_err(|e| failed(std::io::Error::other(e)))?;
        let capabilities = if jiffy_rootless::maps_only_itself() {
            CAPABILITIES | MAP_ONLY_USER
        } else {
            CAPABILITIES
        };
        // SAFETY: the closure only makes system calls, which are safe between fork and exec.
        unsafe {
            std::os::unix::process::CommandExt::pre_exec(&mut command, move || {
                limit_privileges(capabilities)
            });
        }
        // A process group of its own: signals from the terminal of a daemon in the foreground must
        // not reach the helper. It exits after the daemon.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = Command::from(command).spawn().map_err(failed)?;
        let run = Arc::new(HelperProcess {
            channel,
            next: AtomicU64::new(1),
            waiting: Mutex::new(Some(HashMap::new())),
        });
        let reader = run.clone();
        let reading = tokio::spawn(async move {
            let error = loop {
                match reader.receive().await {
                    Ok(answer) => reader.deliver(answer),
                    Err(e) => break e,
                }
            };
            tracing::debug!(error = %error, "the socket to jiffy-gvisor was closed");
            reader.mark_exited();
            // Reap the process, so that it does not remain a zombie.
            let _ = child.wait().await;
        });
        Ok(RunningHelper(run, reading))
    }
}

impl Drop for HelperState {
    fn drop(&mut self) {
        if let Some(RunningHelper(run, _)) = self.run.get_mut() {
            run.shut_down();
        }
    }
}

/// Returns the reply, or the error that it contains.
fn check(answer: HelperAnswer, request: &HelperRequest) -> Result<HelperAnswer, GvisorError> {
    if answer.0.error.is_empty() {
        Ok(answer)
    } else {
        Err(GvisorError::Refused {
            what: request.description(),
            reason: answer.0.error,
        })
    }
}

/// Entry of a caller that waits for a reply. Dropping this value removes the entry.
struct WaitingEntry<'a> {
    of: &'a HelperProcess,
    number: u64,
}

impl Drop for WaitingEntry<'_> {
    fn drop(&mut self) {
        if let Some(waiting) = &mut *self.of.waiting() {
            waiting.remove(&self.number);
        }
    }
}

impl HelperProcess {
    fn waiting(&self) -> MutexGuard<'_, Option<HashMap<u64, oneshot::Sender<HelperAnswer>>>> {
        self.waiting.lock()
    }

    /// Shuts the socket down. The helper then terminates all sandboxes that are not detached, and
    /// exits.
    fn shut_down(&self) {
        let socket = self.channel.get_ref().as_fd();
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    }

    /// Returns whether the process has not exited.
    fn is_running(&self) -> bool {
        self.waiting().is_some()
    }

    /// Drops all waiting requests, whose callers then receive an error.
    fn mark_exited(&self) {
        *self.waiting() = None;
    }

    /// Passes a reply to the caller that waits for it.
    fn deliver(&self, answer: HelperAnswer) {
        let caller = self
            .waiting()
            .as_mut()
            .and_then(|w| w.remove(&answer.0.number));
        if let Some(caller) = caller {
            // Ignore the error: the caller was cancelled.
            let _ = caller.send(answer);
        }
    }

    /// Sends a request about sandbox `id`, and waits for the answer with the same number.
    async fn request(
        &self,
        id: &str,
        request: &HelperRequest,
    ) -> Result<HelperAnswer, GvisorError> {
        // Only the uniqueness of the number matters.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, reply) = oneshot::channel();
        match &mut *self.waiting() {
            Some(waiting) => waiting.insert(number, sender),
            None => return Err(GvisorError::Gone(request.description())),
        };
        // A request that is not sent receives no reply.
        let _entry = WaitingEntry { of: self, number };
        self.send(&Request {
            number,
            id,
            request,
        })
        .await?;
        reply
            .await
            .map_err(|_| GvisorError::Gone(request.description()))
    }

    async fn send(&self, request: &Request<'_>) -> Result<(), ChannelError> {
        loop {
            let mut ready = self.channel.writable().await.map_err(errno)?;
            match self.channel.get_ref().send(request, &[]) {
                Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
                other => return other,
            }
        }
    }

    async fn receive(&self) -> Result<HelperAnswer, ChannelError> {
        loop {
            let mut ready = self.channel.readable().await.map_err(errno)?;
            match self.channel.get_ref().recv::<Reply>() {
                Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
                other => return other,
            }
        }
    }
}

fn errno(error: std::io::Error) -> ChannelError {
    ChannelError::Io(Errno::from_raw(error.raw_os_error().unwrap_or(0)))
}
