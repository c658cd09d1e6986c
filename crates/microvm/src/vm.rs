//! A running microVM.

use crate::cgroup::{CgroupError, Limits};
use crate::driver::{Driver, Step};
use crate::host_kvm::{self, KvmError};
use crate::jail::{JailError, Limiting, Vmm};
use crate::link::Link;
use crate::process::{Kept, Process};
use crate::saving::Saving;
use crate::spec::BootSpec;
use crate::verdict::printable;
use jiffy_agent_client::GreetingError;
use jiffy_engine::{BootMode, BootReport, SandboxEnd};
use jiffy_proto::agent::Identity;
use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::vm::Request;
use jiffy_snapshot::{Hold, SnapshotError};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinHandle;

/// Time a guest has from its first instruction to the agent's word.
pub(crate) const BOOT_LIMIT: Duration = Duration::from_secs(30);
/// Time a VMM has to take a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Time a VMM has to leave by itself before it is killed.
const STOP_LIMIT: Duration = Duration::from_millis(500);

/// Why a microVM did not come up.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The host has no usable KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The VMM program could not be started.
    #[error(
        "cannot start the VMM program {path}: {source}; build it with `make build`, or name it in JIFFY_VMM"
    )]
    Spawn {
        /// Which program.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It could not be confined.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// It could not be limited.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// A host resource is missing.
    #[error("{what}: {source}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The snapshot cannot be used.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The control socket failed.
    #[error(transparent)]
    Control(#[from] ChannelError),
    /// The VM ended before the agent answered.
    #[error("{end}")]
    Ended {
        /// Why.
        end: SandboxEnd,
        /// The guest's last output.
        console: String,
    },
    /// The agent misbehaved.
    #[error("{source}")]
    Greeting {
        /// How.
        source: GreetingError,
        /// The guest's last output.
        console: String,
    },
    /// The agent did not answer in time.
    #[error("the guest agent did not answer within {} s", BOOT_LIMIT.as_secs())]
    Timeout {
        /// The guest's last output.
        console: String,
    },
}

impl BootError {
    /// The guest's last output where there was a guest.
    pub fn console(&self) -> Option<&str> {
        match self {
            Self::Ended { console, .. }
            | Self::Greeting { console, .. }
            | Self::Timeout { console } => Some(console),
            _ => None,
        }
    }
}

/// Why a stream to the guest could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No socket pair.
    #[error("cannot make a socket pair: {0}")]
    Host(#[from] io::Error),
    /// The VMM takes no requests.
    #[error("the sandbox's VMM took no connection within {} s", CONNECT_LIMIT.as_secs())]
    Busy,
    /// The VMM is gone.
    #[error("the sandbox is gone: {0}")]
    Gone(#[from] ChannelError),
}

/// Opens streams to one guest.
#[derive(Debug, Clone)]
pub struct Connector(Arc<Link>);

impl Connector {
    /// Opens a stream to vsock `port` in the guest. A refused connection reads as closed. A VMM that is busy with other
    /// connections is waited for.
    pub async fn connect(&self, port: u32) -> Result<UnixStream, ConnectError> {
        // The VMM makes its end as it wants it.
        let (ours, theirs) = BlockingStream::pair()?;
        let request = Request::Connect { port };
        let fds = [theirs.as_fd()];
        let sent = self.0.send_in_turn(&request, &fds);
        tokio::time::timeout(CONNECT_LIMIT, sent)
            .await
            .map_err(|_| ConnectError::Busy)??;
        ours.set_nonblocking(true)?;
        Ok(UnixStream::from_std(ours)?)
    }
}

/// A guest whose agent has answered. Dropping it ends the guest, unless it is kept.
#[derive(Debug)]
pub struct MicroVm {
    pub(crate) link: Arc<Link>,
    console: Arc<ConsoleRing>,
    end: watch::Receiver<Option<SandboxEnd>>,
    driver: JoinHandle<()>,
    kill: mpsc::Sender<()>,
    report: BootReport,
    pid: u32,
    pub(crate) kept: Kept,
    pub(crate) saving: Arc<Mutex<Saving>>,
    identity: watch::Sender<Option<Identity>>,
    limiting: Option<Limiting>,
    disk_failure: Arc<OnceLock<String>>,
}

/// A VMM and what commands it.
pub(crate) struct Parts {
    pub link: Link,
    pub vmm: Vmm,
    pub process: Process,
    pub pid: u32,
    pub kept: Kept,
    pub console: ConsoleRing,
    pub overlay: File,
    /// What it descends from.
    pub parent: Option<(String, Hold)>,
    /// Whether it has a network card.
    pub net: bool,
    /// Checksum of the image with its kernel's modules, if it has one.
    pub modules: Option<String>,
    /// None: it is told later.
    pub identity: Option<Identity>,
    pub report: BootReport,
    /// Takes what happens on its way up; none if it is up.
    pub steps: Option<mpsc::Sender<Step>>,
}

/// What differs between the ways to start a VMM.
pub(crate) struct Launch<'a> {
    pub vmm: &'a Vmm,
    pub limits: Limits,
    /// None: it is told later.
    pub identity: Option<Identity>,
    pub mode: BootMode,
    /// What it is restored from.
    pub parent: Option<(String, Hold)>,
    /// Whether it has a network card.
    pub net: bool,
    /// Checksum of the image with its kernel's modules, if it has one.
    pub modules: Option<String>,
}

pub(crate) fn ring() -> Result<ConsoleRing, BootError> {
    ConsoleRing::create().map_err(|e| BootError::Host {
        what: "console ring",
        source: e.into(),
    })
}

impl MicroVm {
    /// Starts a VMM, boots the guest, and returns when its agent has taken its identity.
    pub async fn boot(spec: BootSpec) -> Result<Self, BootError> {
        let asked = Instant::now();
        let kvm = host_kvm::open()?;
        let console = ring()?;
        let host = |source| BootError::Host {
            what: "duplicating a descriptor",
            source,
        };
        let shared = console.fd().try_clone_to_owned().map_err(host)?;
        let wire = spec.wire(&kvm, shared.as_fd());
        let request = Request::Start(Box::new(wire.config));
        let launch = Launch {
            vmm: &spec.vmm,
            limits: Limits {
                memory: u64::from(spec.size.memory_mib) << 20,
            },
            identity: Some(spec.identity.clone()),
            mode: BootMode::Cold,
            parent: None,
            net: spec.net.is_some(),
            modules: spec.modules.as_ref().map(|image| image.sha256.clone()),
        };
        let overlay = spec.overlay.try_clone().map_err(host)?;
        let (mut vm, mut steps) = Self::launch(launch, &request, &wire.fds, console, overlay)?;
        drop(wire.fds);
        vm.come_up_in_time(asked, &mut steps).await?;
        Ok(vm)
    }

    /// Starts a VMM and tells it what to be.
    pub(crate) fn launch(
        launch: Launch<'_>,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        console: ConsoleRing,
        overlay: File,
    ) -> Result<(Self, mpsc::Receiver<Step>), BootError> {
        let (channel, theirs) = Channel::pair()?;
        let (child, limiting) = launch.vmm.spawn(theirs, launch.limits)?;
        let pid = child.id().unwrap_or(0);
        let kept = Kept::default();
        let process = Process::child(child, kept.clone());
        channel.send(request, fds)?;
        let (tell_step, steps) = mpsc::channel(4);
        let mut vm = Self::assemble(Parts {
            link: Link::new(channel)?,
            vmm: launch.vmm.clone(),
            process,
            pid,
            kept,
            console,
            overlay,
            parent: launch.parent,
            net: launch.net,
            modules: launch.modules,
            identity: launch.identity,
            report: BootReport {
                mode: launch.mode,
                vmm_us: 0,
                kernel_us: 0,
                init_us: 0,
                agent_us: 0,
                total_us: 0,
            },
            steps: Some(tell_step),
        });
        vm.limiting = limiting;
        Ok((vm, steps))
    }

    /// Begins to listen to a VMM.
    pub(crate) fn assemble(parts: Parts) -> Self {
        let link = Arc::new(parts.link);
        let console = Arc::new(parts.console);
        let (kill, killed) = mpsc::channel(1);
        let (tell_end, end) = watch::channel(None);
        let (reply, replies) = mpsc::unbounded_channel();
        let (identity, told) = watch::channel(parts.identity);
        let disk_failure = Arc::new(OnceLock::new());
        let driver = Driver {
            link: link.clone(),
            vmm: parts.vmm,
            pid: parts.pid,
            process: parts.process,
            kept: parts.kept.clone(),
            console: console.clone(),
            identity: told,
            restored: parts.steps.is_none() || parts.report.mode != BootMode::Cold,
            steps: parts.steps,
            killed,
            cause: None,
            disk_failure: disk_failure.clone(),
            replies: reply,
        };
        Self {
            link,
            console,
            end,
            driver: tokio::spawn(driver.run(tell_end)),
            kill,
            report: parts.report,
            pid: parts.pid,
            kept: parts.kept,
            saving: Arc::new(Mutex::new(Saving::new(
                replies,
                parts.overlay,
                parts.parent,
                parts.net,
                parts.modules,
            ))),
            identity,
            limiting: None,
            disk_failure,
        }
    }

    pub(crate) async fn come_up_in_time(
        &mut self,
        asked: Instant,
        steps: &mut mpsc::Receiver<Step>,
    ) -> Result<(), BootError> {
        match tokio::time::timeout(BOOT_LIMIT, self.come_up(asked, steps)).await {
            Ok(report) => {
                self.report = report?;
                self.limited().await
            }
            Err(_) => Err(BootError::Timeout {
                console: self.console_tail(),
            }),
        }
    }

    /// Waits until what it uses is limited.
    async fn limited(&mut self) -> Result<(), BootError> {
        let Some(limiting) = self.limiting.take() else {
            return Ok(());
        };
        let done = limiting.await.map_err(|e| BootError::Host {
            what: "limiting the VMM",
            source: io::Error::other(e),
        })?;
        Ok(done?)
    }

    async fn come_up(
        &mut self,
        asked: Instant,
        steps: &mut mpsc::Receiver<Step>,
    ) -> Result<BootReport, BootError> {
        let mut running = asked;
        let mut hello = None;
        loop {
            match steps.recv().await {
                Some(Step::Running) => running = Instant::now(),
                Some(Step::Hello { hello: said }) => {
                    // Of a restored guest its clock tells when it was booted, once.
                    let init_us = match self.report.mode {
                        BootMode::Cold => said.hello_us.saturating_sub(said.init_us),
                        _ => 0,
                    };
                    hello = Some((Instant::now(), init_us));
                    self.saving.lock().await.hello = Some(said);
                }
                // Of an identity that was taken back since.
                Some(Step::Ready { id: Some(id), .. }) if !self.is_told(&id) => {}
                Some(Step::Ready {
                    greeted: Ok(greeting),
                    ..
                }) => {
                    self.saving.lock().await.greeting = greeting;
                    let (heard, init_us) = hello.unwrap_or((Instant::now(), 0));
                    let to_hello = micros(heard - running);
                    let init_us = init_us.min(to_hello);
                    let vmm_us = micros(running - asked);
                    let agent_us = micros(heard.elapsed());
                    return Ok(BootReport {
                        mode: self.report.mode,
                        vmm_us,
                        kernel_us: to_hello - init_us,
                        init_us,
                        agent_us,
                        total_us: vmm_us + to_hello + agent_us,
                    });
                }
                Some(Step::Ready {
                    greeted: Err(source),
                    ..
                }) => {
                    return Err(BootError::Greeting {
                        source,
                        console: self.console_tail(),
                    });
                }
                None => {
                    let end = self.ended().await;
                    return Err(BootError::Ended {
                        end,
                        console: self.console_tail(),
                    });
                }
            }
        }
    }

    /// How it came up.
    pub fn report(&self) -> BootReport {
        self.report
    }

    /// Process id of the VMM.
    pub fn vmm_pid(&self) -> u32 {
        self.pid
    }

    /// Something that opens streams to the guest and can be kept beside the sandbox.
    pub fn connector(&self) -> Connector {
        Connector(self.link.clone())
    }

    /// Asks the guest to give back `target_mib` MiB of its memory.
    pub fn set_balloon(&self, target_mib: u32) -> Result<(), ChannelError> {
        self.link.send(&Request::Balloon { target_mib }, &[])
    }

    /// Waits until the sandbox is gone and says why.
    pub async fn ended(&self) -> SandboxEnd {
        let mut end = self.end.clone();
        let result = end.wait_for(Option::is_some).await;
        match result.as_deref() {
            Ok(Some(end)) => end.clone(),
            _ => SandboxEnd::Requested,
        }
    }

    /// Why the sandbox is gone, if it is.
    pub fn end(&self) -> Option<SandboxEnd> {
        self.end.borrow().clone()
    }

    /// Ends the sandbox now and returns when nothing of it is left; says why it ended, which may have been before it was asked to.
    pub async fn stop(self) -> SandboxEnd {
        self.end_now().await
    }

    /// The same for whoever shares it; asking twice is no error.
    pub async fn end_now(&self) -> SandboxEnd {
        let _ = self.link.send(&Request::Stop, &[]);
        match tokio::time::timeout(STOP_LIMIT, self.ended()).await {
            Ok(end) => end,
            Err(_) => {
                let _ = self.kill.try_send(());
                self.ended().await
            }
        }
    }

    /// Tells the agent who it is, if nobody has.
    pub(crate) fn tell(&self, identity: Identity) {
        self.identity.send_replace(Some(identity));
    }

    /// Whether the agent is to be `id` now.
    fn is_told(&self, id: &str) -> bool {
        let told = self.identity.borrow();
        told.as_ref().is_some_and(|identity| identity.id == id)
    }

    /// Takes the identity back: the agent's greeting ends, and it greets anew.
    pub(crate) async fn untell(&self) {
        self.saving.lock().await.greeting = None;
        self.identity.send_replace(None);
    }

    /// Why the host could not serve a disk of the guest, which saw I/O errors then. None if it could, or
    /// if another process commanded the VMM when it happened.
    pub fn disk_failure(&self) -> Option<String> {
        self.disk_failure.get().cloned()
    }

    /// The guest's last console output, cleaned for a terminal.
    pub fn console_tail(&self) -> String {
        printable(&self.console.tail())
    }
}

impl Drop for MicroVm {
    fn drop(&mut self) {
        // The driver owns the process, which is killed with it unless it is kept.
        self.driver.abort();
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
