//! The program `jiffy-gvisor` and the socket to it.

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

/// Descriptor of the socket in the helper.
const CONTROL: i32 = 3;
/// Capabilities that making sandboxes takes: users and groups of their processes, their namespaces,
/// roots and cards, and looking after them.
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
/// Mapping the only user of a namespace into a further one takes it (user_namespaces(7), Linux
/// 5.12).
const MAP_ONLY_USER: CapabilitySet = CapabilitySet::SETFCAP;

/// Specification of a sandbox, in the helper's words.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct SentrySpec {
    pub directory: PathBuf,
    pub base: PathBuf,
    pub images: Vec<PathBuf>,
    pub env: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    pub memory_bytes: u64,
    pub overhead_bytes: u64,
    pub vcpus: u32,
    pub tasks: u64,
}

/// Request to the helper.
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
    fn what(&self) -> &'static str {
        match self {
            Self::Version => "tell its version",
            Self::Create { .. } => "make a sandbox",
            Self::Start => "start a sandbox",
            Self::Restore { .. } => "restore a sandbox",
            Self::Checkpoint { .. } => "take a snapshot",
            Self::Resume => "let a sandbox go on",
            Self::Connect { .. } => "connect to the guest agent",
            Self::Load => "take over a sandbox",
            Self::Detach => "keep a sandbox",
            Self::Ended => "tell how a sandbox ended",
            Self::Destroy => "remove a sandbox",
        }
    }
}

#[derive(Serialize)]
struct Request<'a> {
    number: u64,
    id: &'a str,
    #[serde(flatten)]
    ask: &'a HelperRequest,
}

/// Answer of the helper.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Reply {
    number: u64,
    error: String,
    /// It has no such sandbox.
    unknown: bool,
    /// Process that isolates the sandbox.
    pub pid: u32,
    /// Time for which it stood still, in microseconds.
    pub stopped_us: u64,
    /// Of gVisor.
    pub version: String,
    /// Exit status of its first process; none: it was killed, or that is not known.
    pub exit: Option<i32>,
    /// The kernel ended it, as it needed more memory than it may use.
    pub out_of_memory: bool,
    /// Signal that killed it; 0: none, or that is not known.
    pub signal: i32,
}

type HelperAnswer = (Reply, Vec<OwnedFd>);

/// One run of the program.
#[derive(Debug)]
struct HelperProcess {
    channel: AsyncFd<Channel>,
    next: AtomicU64,
    /// None: it has ended.
    waiting: Mutex<Option<HashMap<u64, oneshot::Sender<HelperAnswer>>>>,
}

/// The helper program; started when it is needed first, and anew if it ends.
#[derive(Debug, Clone)]
pub struct Helper(Arc<HelperState>);

#[derive(Debug)]
struct HelperState {
    program: PathBuf,
    directory: PathBuf,
    /// True if control groups limit what a sandbox uses.
    limited: bool,
    /// True if the directory goes with the program.
    brief: bool,
    /// Nothing is asked any more.
    closed: AtomicBool,
    run: tokio::sync::Mutex<Option<RunningHelper>>,
}

/// A run, and the task that reads from it and ends when the process has.
#[derive(Debug)]
struct RunningHelper(Arc<HelperProcess>, JoinHandle<()>);

impl Helper {
    /// The helper of the sandboxes in `directory`, which is theirs alone.
    pub fn new(program: PathBuf, directory: PathBuf, limited: bool) -> Result<Self, GvisorError> {
        Self::make(program, directory, limited, false)
    }

    /// A helper of sandboxes that nobody keeps: when this process ends, however it does, they end,
    /// and `directory` goes with all in it.
    pub fn brief(program: PathBuf, directory: PathBuf, limited: bool) -> Result<Self, GvisorError> {
        Self::make(program, directory, limited, true)
    }

    fn make(
        program: PathBuf,
        directory: PathBuf,
        limited: bool,
        brief: bool,
    ) -> Result<Self, GvisorError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o711)
            .create(&directory)
            .map_err(GvisorError::file(&directory))?;
        Ok(Self(Arc::new(HelperState {
            program,
            directory,
            limited,
            brief,
            closed: AtomicBool::new(false),
            run: tokio::sync::Mutex::default(),
        })))
    }

    /// Lets the program end for good, and returns when it has. What is not kept ends first.
    pub async fn close(&self) {
        self.0.closed.store(true, Ordering::Release);
        if let Some(RunningHelper(run, reading)) = self.0.run.lock().await.take() {
            run.shut();
            // It has ended in whatever way.
            let _ = reading.await;
        }
    }

    /// Returns the directory of its sandboxes.
    pub(crate) fn directory(&self) -> &Path {
        &self.0.directory
    }

    /// True if control groups limit what a sandbox uses.
    pub(crate) fn limited(&self) -> bool {
        self.0.limited
    }

    /// Version of gVisor.
    pub async fn version(&self) -> Result<String, GvisorError> {
        Ok(self.ask("", &HelperRequest::Version).await?.0.version)
    }

    /// Asks, and waits for the answer.
    pub(crate) async fn ask(
        &self,
        id: &str,
        ask: &HelperRequest,
    ) -> Result<HelperAnswer, GvisorError> {
        let run = self.run(ask).await?;
        let mut answer = run.ask(id, ask).await?;
        if answer.0.unknown && !matches!(ask, HelperRequest::Load) {
            // It was made by an earlier run.
            let loaded = run.ask(id, &HelperRequest::Load).await?;
            check(loaded, &HelperRequest::Load)?;
            answer = run.ask(id, ask).await?;
        }
        check(answer, ask)
    }

    /// Asks without waiting for anything.
    pub(crate) fn tell(&self, id: &str, ask: HelperRequest) {
        // Without a runtime this process ends, and with it all that is not kept.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (helper, id) = (self.clone(), id.to_owned());
            runtime.spawn(async move {
                if let Err(e) = helper.ask(&id, &ask).await {
                    tracing::debug!("sandbox {id}: {e}");
                }
            });
        }
    }

    async fn run(&self, ask: &HelperRequest) -> Result<Arc<HelperProcess>, GvisorError> {
        let mut run = self.0.run.lock().await;
        if self.0.closed.load(Ordering::Acquire) {
            return Err(GvisorError::Gone(ask.what()));
        }
        if let Some(RunningHelper(run, _)) = &*run
            && run.lives()
        {
            return Ok(run.clone());
        }
        let RunningHelper(started, _) = run.insert(self.start()?);
        Ok(started.clone())
    }

    fn start(&self) -> Result<RunningHelper, GvisorError> {
        let shared = &self.0;
        let (channel, theirs) = Channel::pair()?;
        let nonblocking = FcntlArg::F_SETFL(OFlag::O_NONBLOCK);
        fcntl(channel.as_fd(), nonblocking).map_err(ChannelError::Io)?;
        // SAFETY: a Channel owns its descriptor, returns the same one always, and closes it only
        // when dropped.
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
            .arg(if shared.brief { "serve-brief" } else { "serve" })
            .arg(&shared.directory)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        // It finds `ip`, and nothing else is its business.
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
        let kept = match jiffy_rootless::maps_only_itself() {
            true => CAPABILITIES | MAP_ONLY_USER,
            false => CAPABILITIES,
        };
        // SAFETY: only system calls between fork and exec.
        unsafe {
            std::os::unix::process::CommandExt::pre_exec(&mut command, move || {
                limit_privileges(kept)
            });
        }
        // A terminal's signals to a daemon in its foreground are not for it: it ends when the
        // daemon has.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = Command::from(command).spawn().map_err(failed)?;
        let run = Arc::new(HelperProcess {
            channel,
            next: AtomicU64::new(1),
            waiting: Mutex::new(Some(HashMap::new())),
        });
        let asked = run.clone();
        let reading = tokio::spawn(async move {
            let error = loop {
                match asked.receive().await {
                    Ok(answer) => asked.give(answer),
                    Err(e) => break e,
                }
            };
            tracing::debug!("the socket to jiffy-gvisor: {error}");
            asked.end();
            // It is not left a zombie.
            let _ = child.wait().await;
        });
        Ok(RunningHelper(run, reading))
    }
}

impl Drop for HelperState {
    fn drop(&mut self) {
        if let Some(RunningHelper(run, _)) = self.run.get_mut() {
            run.shut();
        }
    }
}

fn check(answer: HelperAnswer, ask: &HelperRequest) -> Result<HelperAnswer, GvisorError> {
    match answer.0.error.is_empty() {
        true => Ok(answer),
        false => Err(GvisorError::Refused {
            what: ask.what(),
            reason: answer.0.error,
        }),
    }
}

impl HelperProcess {
    fn waiting(&self) -> MutexGuard<'_, Option<HashMap<u64, oneshot::Sender<HelperAnswer>>>> {
        self.waiting.lock()
    }

    /// It reads that nobody is there any more, and ends what is not kept.
    fn shut(&self) {
        let socket = self.channel.get_ref().as_fd();
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    }

    fn lives(&self) -> bool {
        self.waiting().is_some()
    }

    fn end(&self) {
        *self.waiting() = None;
    }

    fn give(&self, answer: HelperAnswer) {
        let asker = self
            .waiting()
            .as_mut()
            .and_then(|w| w.remove(&answer.0.number));
        if let Some(asker) = asker {
            // The one that asked may have gone.
            let _ = asker.send(answer);
        }
    }

    async fn ask(&self, id: &str, ask: &HelperRequest) -> Result<HelperAnswer, GvisorError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (give, take) = oneshot::channel();
        match &mut *self.waiting() {
            Some(waiting) => waiting.insert(number, give),
            None => return Err(GvisorError::Gone(ask.what())),
        };
        self.send(&Request { number, id, ask }).await?;
        take.await.map_err(|_| GvisorError::Gone(ask.what()))
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
