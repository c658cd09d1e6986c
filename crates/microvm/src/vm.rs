//! Running microVM.

use crate::cgroup::{CgroupError, VmmLimits};
use crate::control_socket::ControlSocket;
use crate::exit_reason::printable;
use crate::host_kvm::{self, KvmError};
use crate::jail::{JailError, LimitTask, Vmm};
use crate::snapshot_context::SnapshotContext;
use crate::spec::BootSpec;
use crate::vmm_driver::{BootStep, VmmDriver};
use crate::vmm_process::{KeptSocket, VmmProcess};
use jiffy_agent_client::GreetingError;
use jiffy_engine::{BootMode, BootReport, ExitReason};
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

/// Time for a guest from its first instruction to the agent's confirmation.
pub(crate) const BOOT_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for a VMM to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a VMM to exit by itself before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// Failure to boot or restore a microVM.
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
        /// Path of the program.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The VMM could not be confined.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// The VMM could not be limited.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// A host resource is missing.
    #[error("{what}: {source}")]
    Host {
        /// Attempted operation.
        what: &'static str,
        /// Cause.
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
        /// Reason.
        end: ExitReason,
        /// Last console output of the guest.
        console: String,
    },
    /// The agent broke the protocol.
    #[error("{source}")]
    Greeting {
        /// Violation.
        source: GreetingError,
        /// Last console output of the guest.
        console: String,
    },
    /// The agent did not answer in time.
    #[error("the guest agent did not answer within {} s", BOOT_TIMEOUT.as_secs())]
    Timeout {
        /// Last console output of the guest.
        console: String,
    },
}

impl BootError {
    /// Last console output, if a guest had started.
    pub fn console(&self) -> Option<&str> {
        match self {
            Self::Ended { console, .. }
            | Self::Greeting { console, .. }
            | Self::Timeout { console } => Some(console),
            _ => None,
        }
    }
}

/// Failure to open a stream to the guest.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No socket pair.
    #[error("cannot make a socket pair: {0}")]
    Host(#[from] io::Error),
    /// The VMM takes no requests.
    #[error("the sandbox's VMM took no connection within {} s", CONNECT_TIMEOUT.as_secs())]
    Busy,
    /// The VMM is gone.
    #[error("the sandbox is gone: {0}")]
    Gone(#[from] ChannelError),
}

/// Opener of streams to one guest.
#[derive(Debug, Clone)]
pub struct Connector(Arc<ControlSocket>);

impl Connector {
    /// Opens a stream to vsock `port` in the guest. A refused connection reads as closed. Waits for
    /// a VMM that is busy with other connections.
    pub async fn connect(&self, port: u32) -> Result<UnixStream, ConnectError> {
        // The VMM sets the mode of its own end.
        let (ours, theirs) = BlockingStream::pair()?;
        let request = Request::Connect { port };
        let fds = [theirs.as_fd()];
        let sent = self.0.send_when_writable(&request, &fds);
        tokio::time::timeout(CONNECT_TIMEOUT, sent)
            .await
            .map_err(|_| ConnectError::Busy)??;
        ours.set_nonblocking(true)?;
        Ok(UnixStream::from_std(ours)?)
    }
}

/// Guest whose agent has answered. Dropping it ends the guest, unless it is kept.
#[derive(Debug)]
pub struct MicroVm {
    pub(crate) link: Arc<ControlSocket>,
    console: Arc<ConsoleRing>,
    end: watch::Receiver<Option<ExitReason>>,
    driver: JoinHandle<()>,
    kill: mpsc::Sender<()>,
    report: BootReport,
    pid: u32,
    pub(crate) kept: KeptSocket,
    pub(crate) context: Arc<Mutex<SnapshotContext>>,
    identity: watch::Sender<Option<Identity>>,
    limit_task: Option<LimitTask>,
    disk_failure: Arc<OnceLock<String>>,
}

/// Parts of a [`MicroVm`].
pub(crate) struct MicroVmParts {
    pub link: ControlSocket,
    pub vmm: Vmm,
    pub process: VmmProcess,
    pub pid: u32,
    pub kept: KeptSocket,
    pub console: ConsoleRing,
    pub overlay: File,
    /// Parent snapshot.
    pub parent: Option<(String, Hold)>,
    /// True if it has a network interface.
    pub net: bool,
    /// Checksum of the image with its kernel's modules, if it has one.
    pub modules: Option<String>,
    /// None: assigned later.
    pub identity: Option<Identity>,
    pub report: BootReport,
    /// Receives the steps of its boot; none if it is up.
    pub steps: Option<mpsc::Sender<BootStep>>,
}

/// Differences between a boot and a restore.
pub(crate) struct LaunchSpec<'a> {
    pub vmm: &'a Vmm,
    pub limits: VmmLimits,
    /// None: assigned later.
    pub identity: Option<Identity>,
    pub mode: BootMode,
    /// Snapshot that it is restored from.
    pub parent: Option<(String, Hold)>,
    /// True if it has a network interface.
    pub net: bool,
    /// Checksum of the image with its kernel's modules, if it has one.
    pub modules: Option<String>,
}

pub(crate) fn console_ring() -> Result<ConsoleRing, BootError> {
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
        let console = console_ring()?;
        let host = |source| BootError::Host {
            what: "duplicating a descriptor",
            source,
        };
        let shared = console.fd().try_clone_to_owned().map_err(host)?;
        let boot = spec.request(&kvm, shared.as_fd());
        let request = Request::Start(Box::new(boot.config));
        let launch = LaunchSpec {
            vmm: &spec.vmm,
            limits: VmmLimits {
                memory: u64::from(spec.size.memory_mib) << 20,
            },
            identity: Some(spec.identity.clone()),
            mode: BootMode::Cold,
            parent: None,
            net: spec.net.is_some(),
            modules: spec.modules.as_ref().map(|image| image.sha256.clone()),
        };
        let overlay = spec.overlay.try_clone().map_err(host)?;
        let (mut vm, mut steps) = Self::launch(launch, &request, &boot.fds, console, overlay)?;
        drop(boot.fds);
        vm.wait_until_up_in_time(asked, &mut steps).await?;
        Ok(vm)
    }

    /// Starts a VMM and sends its first request.
    pub(crate) fn launch(
        launch: LaunchSpec<'_>,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        console: ConsoleRing,
        overlay: File,
    ) -> Result<(Self, mpsc::Receiver<BootStep>), BootError> {
        let (channel, theirs) = Channel::pair()?;
        let (child, limit_task) = launch.vmm.spawn(theirs, launch.limits)?;
        let pid = child.id().unwrap_or(0);
        let kept = KeptSocket::default();
        let process = VmmProcess::child(child, kept.clone());
        channel.send(request, fds)?;
        let (step_sender, steps) = mpsc::channel(4);
        let mut vm = Self::assemble(MicroVmParts {
            link: ControlSocket::new(channel)?,
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
            steps: Some(step_sender),
        });
        vm.limit_task = limit_task;
        Ok((vm, steps))
    }

    /// Starts the driver of a VMM.
    pub(crate) fn assemble(parts: MicroVmParts) -> Self {
        let link = Arc::new(parts.link);
        let console = Arc::new(parts.console);
        let (kill, killed) = mpsc::channel(1);
        let (end_sender, end) = watch::channel(None);
        let (reply, replies) = mpsc::unbounded_channel();
        let (identity, identity_receiver) = watch::channel(parts.identity);
        let disk_failure = Arc::new(OnceLock::new());
        let driver = VmmDriver {
            link: link.clone(),
            vmm: parts.vmm,
            pid: parts.pid,
            process: parts.process,
            kept: parts.kept.clone(),
            console: console.clone(),
            identity: identity_receiver,
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
            driver: tokio::spawn(driver.run(end_sender)),
            kill,
            report: parts.report,
            pid: parts.pid,
            kept: parts.kept,
            context: Arc::new(Mutex::new(SnapshotContext::new(
                replies,
                parts.overlay,
                parts.parent,
                parts.net,
                parts.modules,
            ))),
            identity,
            limit_task: None,
            disk_failure,
        }
    }

    pub(crate) async fn wait_until_up_in_time(
        &mut self,
        asked: Instant,
        steps: &mut mpsc::Receiver<BootStep>,
    ) -> Result<(), BootError> {
        match tokio::time::timeout(BOOT_TIMEOUT, self.wait_until_up(asked, steps)).await {
            Ok(report) => {
                self.report = report?;
                self.wait_for_limits().await
            }
            Err(_) => Err(BootError::Timeout {
                console: self.console_tail(),
            }),
        }
    }

    /// Waits until the VMM is in its control groups.
    async fn wait_for_limits(&mut self) -> Result<(), BootError> {
        let Some(limit_task) = self.limit_task.take() else {
            return Ok(());
        };
        let done = limit_task.await.map_err(|e| BootError::Host {
            what: "limiting the VMM",
            source: io::Error::other(e),
        })?;
        Ok(done?)
    }

    async fn wait_until_up(
        &mut self,
        asked: Instant,
        steps: &mut mpsc::Receiver<BootStep>,
    ) -> Result<BootReport, BootError> {
        let mut running = asked;
        let mut hello = None;
        loop {
            match steps.recv().await {
                Some(BootStep::Running) => running = Instant::now(),
                Some(BootStep::Hello { hello: said }) => {
                    // The clock of a restored guest counts from its first boot.
                    let init_us = match self.report.mode {
                        BootMode::Cold => said.hello_us.saturating_sub(said.init_us),
                        _ => 0,
                    };
                    hello = Some((Instant::now(), init_us));
                    self.context.lock().await.hello = Some(said);
                }
                // Of an identity that was taken back since.
                Some(BootStep::Ready { id: Some(id), .. }) if !self.has_identity(&id) => {}
                Some(BootStep::Ready {
                    greeted: Ok(greeting),
                    ..
                }) => {
                    self.context.lock().await.greeting = greeting;
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
                Some(BootStep::Ready {
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

    /// Boot mode and times.
    pub fn report(&self) -> BootReport {
        self.report
    }

    /// VmmProcess id of the VMM.
    pub fn vmm_pid(&self) -> u32 {
        self.pid
    }

    /// Opener of streams to the guest that is independent of this value's lifetime.
    pub fn connector(&self) -> Connector {
        Connector(self.link.clone())
    }

    /// Asks the guest to return `target_mib` MiB of its memory.
    pub fn set_balloon(&self, target_mib: u32) -> Result<(), ChannelError> {
        self.link.send(&Request::Balloon { target_mib }, &[])
    }

    /// Waits until the sandbox has ended; returns the reason.
    pub async fn ended(&self) -> ExitReason {
        let mut end = self.end.clone();
        let result = end.wait_for(Option::is_some).await;
        match result.as_deref() {
            Ok(Some(end)) => end.clone(),
            _ => ExitReason::Requested,
        }
    }

    /// Reason that the sandbox ended, if it has.
    pub fn end(&self) -> Option<ExitReason> {
        self.end.borrow().clone()
    }

    /// Ends the sandbox; returns when nothing of it is left, with the reason that it ended, which
    /// may precede this call.
    pub async fn stop(self) -> ExitReason {
        self.stop_shared().await
    }

    /// Like [`Self::stop`] for a shared value; may be called repeatedly.
    pub async fn stop_shared(&self) -> ExitReason {
        let _ = self.link.send(&Request::Stop, &[]);
        match tokio::time::timeout(STOP_TIMEOUT, self.ended()).await {
            Ok(end) => end,
            Err(_) => {
                let _ = self.kill.try_send(());
                self.ended().await
            }
        }
    }

    /// Sets the identity that the agent gets.
    pub(crate) fn set_identity(&self, identity: Identity) {
        self.identity.send_replace(Some(identity));
    }

    /// Returns true if the agent is to be `id` now.
    fn has_identity(&self, id: &str) -> bool {
        let current = self.identity.borrow();
        current.as_ref().is_some_and(|identity| identity.id == id)
    }

    /// Takes the identity back: the agent's greeting ends, and it greets anew.
    pub(crate) async fn take_identity_back(&self) {
        self.context.lock().await.greeting = None;
        self.identity.send_replace(None);
    }

    /// Failure of the host to serve a disk of the guest, which then saw I/O errors. None without a
    /// failure, or if another process controlled the VMM when it happened.
    pub fn disk_failure(&self) -> Option<String> {
        self.disk_failure.get().cloned()
    }

    /// Last console output of the guest, without control characters.
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
