//! Adoption of guests that outlive the process that started them.
//!
//! A VMM is identified by its [`ProcessInstance`] (process id and start time). Its messages and
//! descriptors are checked, because its guest may have compromised it since.
//!
//! The *greeting* is the first message of the agent, which then receives the identity of its
//! sandbox. A *detached* VMM continues to run when its daemon exits.
//!
//! A *draft* is the directory of a snapshot that is not published yet. A snapshot is *captured*
//! when its memory is frozen in a process of the VMM, which then completes the snapshot even if the
//! daemon exits. A *prepared* snapshot is complete, but neither committed nor aborted.

use crate::control_path::{connect_to, control_socket_path, listen_at, parse_socket_name};
use crate::control_socket::ControlSocket;
use crate::snapshot_context::{CapturedDraft, SaveError, SnapshotSpec};
use crate::vm::{MicroVm, MicroVmParts, VmmRequests};
use crate::vmm::Vmm;
use crate::vmm_process::{DetachedSocket, VmmProcess};
use jiffy_engine_api::{BootReport, ProcessInstance, steps};
use jiffy_proto::agent::{Hello, Identity};
use jiffy_proto::channel::ChannelError;
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::snapshot::{AfterSnapshot, CapturedSnapshot, SnapshotDecision};
use jiffy_proto::vm::{CONTROL_PROTOCOL_VERSION, Event, FdIndex, Request};
use jiffy_snapshot::{Durability, Store};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// Timeout of a VMM's reply to its adoption. A VMM that is writing a snapshot while its guest is
/// paused replies afterwards.
const ADOPT_TIMEOUT: Duration = Duration::from_secs(15);
/// Time after which an unknown VMM is killed if it does not stop on request.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// Error of adopting a VMM.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The process does not exist.
    #[error("the VMM exited while no daemon was running")]
    Gone,
    /// The process cannot be monitored.
    #[error("cannot monitor the VMM: {0}")]
    Host(io::Error),
    /// The connection failed.
    #[error("cannot connect to the VMM: {0}")]
    Control(#[from] ChannelError),
    /// The protocol version of the VMM differs.
    #[error(
        "the VMM uses version {0} of the protocol, but this program uses version {CONTROL_PROTOCOL_VERSION}: the VMM was started by another version of jiffy"
    )]
    Version(u32),
    /// The VMM did not reply in time.
    #[error("the VMM did not reply within {} s", ADOPT_TIMEOUT.as_secs())]
    Silent,
    /// The VMM's descriptors are not the descriptors that it received when it was started.
    #[error("the VMM passed invalid descriptors: {0}")]
    Foreign(&'static str),
}

/// Recorded state of a VMM that will be adopted.
#[derive(Debug)]
pub struct AdoptSpec<'a> {
    /// Process of the VMM.
    pub mark: ProcessInstance,
    /// VMM program.
    pub vmm: &'a Vmm,
    /// Directory of the control sockets.
    pub directory: &'a Path,
    /// Store that contains the VM's snapshots.
    pub store: &'a Store,
    /// Snapshot on which the VM is based.
    pub parent: Option<String>,
    /// True if the VM has a network interface.
    pub net: bool,
    /// Checksum of the image with the kernel modules. `None` without modules.
    pub modules: Option<String>,
    /// Identity that is sent if the agent greets again.
    pub identity: Identity,
    /// Greeting of the agent.
    pub hello: Option<Hello>,
    /// Boot mode and times.
    pub report: BootReport,
    /// Snapshot that the earlier process captured and did not publish. [`MicroVm::finish_captured`]
    /// completes it. Any other captured snapshot is aborted.
    pub captured: Option<CapturedSpec>,
}

/// Snapshot that an earlier process captured.
#[derive(Debug)]
pub struct CapturedSpec {
    /// Snapshot id.
    pub id: String,
    /// Template of the sandbox.
    pub template: String,
}

/// State that an adopted VMM passes to its new controller.
struct AdoptedState {
    link: ControlSocket,
    console: ConsoleRing,
    overlay: File,
    supported_requests: VmmRequests,
    captured: Option<CapturedDraft>,
    /// Number of memory layers of the VMM, if reported.
    memory_layers: Option<usize>,
}

impl MicroVm {
    /// Detaches the guest: it continues to run after this process exits. The VMM's control socket
    /// is created in `directory`, which must be inaccessible to other users. Error messages of the
    /// VMM are written to `log`.
    pub async fn detach(&self, directory: &Path, log: &File) -> Result<ProcessInstance, SaveError> {
        // The lock is held until the VMM has replied: requests of another operation must not be
        // sent in between.
        let mut context = self.context.lock().await;
        let host = |what| move |source| SaveError::Host { what, source };
        let mark = ProcessInstance::of(self.vmm_pid()).map_err(|_| SaveError::Gone)?;
        let path = control_socket_path(&mark, directory);
        let listener = listen_at(&path).map_err(host("cannot create the VMM's control socket"))?;
        let greeting = context.greeting.take();
        let mut fds = vec![listener.as_fd(), log.as_fd()];
        fds.extend(greeting.as_ref().map(AsFd::as_fd));
        let request = Request::Detach {
            listener: FdIndex(0),
            log: Some(FdIndex(1)),
            greeting: greeting.as_ref().map(|_| FdIndex(2)),
            request_id: steps::request_id().map(|id| id.to_string()),
        };
        let detached = match self.link.send(&request, &fds) {
            Ok(()) => {
                let detached = |event| matches!(event, Event::Detached).then_some(());
                context.reply(detached).await
            }
            Err(e) => Err(e.into()),
        };
        if let Err(e) = detached {
            // Ignore the error: `end_unadopted` removes remaining sockets.
            let _ = fs::remove_file(&path);
            return Err(e);
        }
        // From here on, dropping the VM no longer terminates it.
        let _ = self.detached_socket.set(path);
        Ok(mark)
    }

    /// Returns the agent's greeting, which the adoption of the guest needs.
    pub async fn hello(&self) -> Option<Hello> {
        self.context.lock().await.hello.clone()
    }

    /// Returns the checksum of the image with the kernel modules. `None` without modules.
    pub async fn modules(&self) -> Option<String> {
        self.context.lock().await.modules.clone()
    }

    /// Adopts a VMM that an earlier process detached. If the adoption fails, terminates the VMM
    /// unless it cannot be monitored ([`AdoptError::Host`]).
    pub async fn adopt(spec: AdoptSpec<'_>) -> Result<Self, AdoptError> {
        let path = control_socket_path(&spec.mark, spec.directory);
        let detached_socket = DetachedSocket::from(std::sync::OnceLock::from(path.clone()));
        let mut process = VmmProcess::find(&spec.mark, detached_socket.clone()).map_err(|e| {
            // The process has no /proc entry, or does not exist.
            let has_exited =
                e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH);
            if !has_exited {
                return AdoptError::Host(e);
            }
            // Ignore the error: the socket may not exist.
            let _ = fs::remove_file(&path);
            AdoptError::Gone
        })?;
        let result = tokio::time::timeout(ADOPT_TIMEOUT, take_control(&path, &spec)).await;
        let adopted = match result.unwrap_or(Err(AdoptError::Silent)) {
            Ok(adopted) => adopted,
            Err(e) => {
                // Wait for the exit: the control group can only be removed afterwards.
                process.kill();
                let _ = process.wait().await;
                spec.vmm.remove_group(spec.mark.pid);
                let _ = fs::remove_file(&path);
                return Err(e);
            }
        };
        // Without its parent, the sandbox continues to run but cannot be saved.
        let mut lineage_lost = false;
        let memory_layers = adopted.memory_layers;
        let parent = spec.parent.and_then(|id| {
            let parent = spec.store.get(&id);
            // The earlier process published a snapshot of the disk only, to pause the sandbox, and
            // exited before it stopped the guest. The guest's memory is based on an ancestor of
            // this snapshot. The snapshot's manifest excludes that memory (`memory.complete`), so
            // a later snapshot with this parent would lose it.
            lineage_lost = memory_layers > Some(1)
                && parent.as_ref().is_ok_and(|parent| {
                    let manifest = parent.manifest();
                    manifest.disk_only && manifest.memory.complete
                });
            let hold = parent.and_then(|parent| parent.hold());
            let hold = hold.inspect_err(|e| {
                tracing::warn!(id, error = %e, "a sandbox depends on an unusable snapshot");
                lineage_lost = true;
            });
            Some((id, hold.ok()?))
        });
        let vm = Self::assemble(MicroVmParts {
            link: adopted.link,
            vmm: spec.vmm.clone(),
            process,
            pid: spec.mark.pid,
            detached_socket,
            console: adopted.console,
            overlay: adopted.overlay,
            parent,
            net: spec.net,
            modules: spec.modules,
            identity: Some(spec.identity),
            report: spec.report,
            supported_requests: adopted.supported_requests,
            steps: None,
            fresh_memory: memory_layers == Some(0),
        });
        let mut context = vm.context.lock().await;
        context.lineage_lost = lineage_lost;
        context.hello = spec.hello;
        context.captured = adopted.captured;
        drop(context);
        Ok(vm)
    }
}

/// Connects to a VMM and brings it into a defined state: no prepared snapshot except a captured
/// one, and a running guest.
async fn take_control(path: &Path, spec: &AdoptSpec<'_>) -> Result<AdoptedState, AdoptError> {
    let store = spec.store;
    let link = ControlSocket::new(connect_to(path)?)?;
    let mut reattached = reattach(&link).await?;
    let mut captured = expected_capture(&reattached, spec);
    if captured.is_none() && reattached.captured.is_some() {
        // The earlier process did not record the captured snapshot, or its files cannot be opened.
        link.send(&Request::AbortCapture, &[])?;
        reattached = reattach(&link).await?;
    }
    // A captured snapshot may be the prepared one. `MicroVm::finish_captured` then commits or
    // aborts it.
    if let Some(id) = reattached.prepared_snapshot.take()
        && captured.is_none()
    {
        // The store is authoritative: the earlier process may have published the snapshot without
        // sending the decision.
        let published = store.ids().is_ok_and(|ids| ids.contains(&id));
        let decision = SnapshotDecision::from(published);
        link.send(&Request::ResolveSnapshot { decision }, &[])?;
        let resolved = |event| match event {
            (Event::SnapshotResolved { failure }, _) => Some(failure),
            _ => None,
        };
        if let Some(failure) = wait_for_event(&link, resolved).await? {
            tracing::warn!(id, reason = %failure, "cannot undo the interrupted snapshot of an adopted sandbox");
        }
        reattached = reattach(&link).await?;
    }
    // The earlier process exited while the guest was paused for an operation.
    if !reattached.running {
        link.send(&Request::Resume, &[])?;
        wait_for_event(&link, |event| {
            matches!(event.0, Event::Resumed).then_some(())
        })
        .await?;
        if captured.is_some() {
            // If the snapshot was completed before the reply, its report was dropped. Request the
            // report again.
            reattached = reattach(&link).await?;
            captured = expected_capture(&reattached, spec);
        }
    }
    let console = ConsoleRing::open(reattached.console)
        .map_err(|_| AdoptError::Foreign("the console has an invalid format"))?;
    check_overlay(&reattached.overlay, store)?;
    Ok(AdoptedState {
        link,
        console,
        overlay: reattached.overlay,
        supported_requests: reattached.supported_requests,
        captured,
        memory_layers: reattached.memory_layers,
    })
}

/// Opens the draft of the captured snapshot, if the VMM and the earlier process agree on its id.
fn expected_capture(reattached: &ReattachedVmm, spec: &AdoptSpec<'_>) -> Option<CapturedDraft> {
    let (captured, expected) = reattached.captured.as_ref().zip(spec.captured.as_ref())?;
    if captured.id != expected.id {
        return None;
    }
    // Every VM of this engine has one writable disk.
    let opened = spec.store.captured(&expected.id, 1);
    let opened = opened.inspect_err(|e| {
        tracing::warn!(id = expected.id, error = %e, "cannot open the files of a captured snapshot");
    });
    let (draft, mut overlays) = opened.ok()?;
    Some(CapturedDraft {
        draft,
        frozen: overlays.pop()?,
        // Every captured snapshot has these settings. The VMM received the size limit with the
        // request of the earlier process.
        spec: SnapshotSpec {
            id: expected.id.clone(),
            template: expected.template.clone(),
            then: AfterSnapshot::Resume,
            durability: Durability::PageCache,
            max_bytes: None,
            working_set: false,
            disk_only: false,
        },
        report: captured.report.clone(),
    })
}

/// Answer of a detached VMM to its new controller.
struct ReattachedVmm {
    running: bool,
    prepared_snapshot: Option<String>,
    captured: Option<Box<CapturedSnapshot>>,
    console: OwnedFd,
    overlay: File,
    supported_requests: VmmRequests,
    /// Number of memory layers. `None` from a VMM of an earlier version.
    memory_layers: Option<usize>,
}

/// Requests the state and the descriptors of a detached VMM. The VMM may be compromised, so its
/// answer is checked.
async fn reattach(link: &ControlSocket) -> Result<ReattachedVmm, AdoptError> {
    link.send(&Request::Reattach, &[])?;
    let reattached = |(event, fds)| match event {
        Event::Reattached {
            protocol,
            running,
            prepared_snapshot,
            captured,
            rollback,
            fold,
            disk_only,
            memory_layers,
            console,
            overlays,
        } => {
            let supported_requests = VmmRequests {
                rollback,
                fold,
                disk_only,
            };
            let state = (
                protocol,
                running,
                prepared_snapshot,
                captured,
                supported_requests,
                memory_layers,
            );
            Some((state, console, overlays, fds))
        }
        _ => None,
    };
    let (state, console, overlays, fds) = wait_for_event(link, reattached).await?;
    let (protocol, running, prepared_snapshot, captured, supported_requests, memory_layers) = state;
    if protocol != CONTROL_PROTOCOL_VERSION {
        return Err(AdoptError::Version(protocol));
    }
    // Each descriptor may be used once. The VMM chooses the indexes, so they are checked.
    let mut fds: Vec<Option<OwnedFd>> = fds.into_iter().map(Some).collect();
    let mut take = |at: FdIndex| {
        let fd = fds.get_mut(usize::from(at.0)).and_then(Option::take);
        fd.ok_or(AdoptError::Foreign("a descriptor is missing"))
    };
    let &[overlay] = overlays.as_slice() else {
        return Err(AdoptError::Foreign("the number of disks is not 1"));
    };
    Ok(ReattachedVmm {
        running,
        prepared_snapshot,
        captured,
        console: take(console)?,
        overlay: File::from(take(overlay)?),
        supported_requests,
        memory_layers,
    })
}

/// Waits for an event that `pick` accepts. Earlier events are dropped. If a greeting is dropped,
/// the agent sends it again.
async fn wait_for_event<T>(
    link: &ControlSocket,
    pick: impl Fn((Event, Vec<OwnedFd>)) -> Option<T>,
) -> Result<T, AdoptError> {
    loop {
        if let Some(value) = pick(link.recv().await?) {
            return Ok(value);
        }
    }
}

/// Checks that the overlay is an unnamed file of the store. No other file that a VMM can read may
/// become part of a snapshot.
fn check_overlay(overlay: &File, store: &Store) -> Result<(), AdoptError> {
    let foreign = |_: io::Error| AdoptError::Foreign("the overlay cannot be examined");
    let metadata = overlay.metadata().map_err(foreign)?;
    let root = fs::metadata(store.root()).map_err(foreign)?;
    let flags = fcntl(overlay, FcntlArg::F_GETFL).map_err(|e| foreign(e.into()))?;
    let writable = OFlag::from_bits_truncate(flags) & OFlag::O_ACCMODE == OFlag::O_RDWR;
    let nameless = metadata.is_file() && metadata.nlink() == 0 && metadata.dev() == root.dev();
    if writable && nameless {
        Ok(())
    } else {
        Err(AdoptError::Foreign(
            "the overlay is not an unnamed file of the store",
        ))
    }
}

/// Terminates every VMM that listens in `directory` and is not among `known`. Removes the sockets
/// of exited VMMs. Returns the number of terminated VMMs.
pub async fn end_unadopted(directory: &Path, known: &[ProcessInstance]) -> io::Result<usize> {
    // Terminate all in parallel: each may take up to twice the timeout.
    let mut work = tokio::task::JoinSet::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if known
            .iter()
            .all(|mark| control_socket_path(mark, directory) != path)
        {
            work.spawn(async move {
                let ended = terminate(&path).await;
                // Ignore the error: the next call removes a remaining socket.
                let _ = fs::remove_file(&path);
                ended
            });
        }
    }
    let ended = work.join_all().await;
    Ok(ended.into_iter().filter(|&ended| ended).count())
}

/// Terminates the VMM that listens at `path`. Returns whether a VMM was listening.
async fn terminate(path: &Path) -> bool {
    let channel = match connect_to(path) {
        // No process listens, and none will: a VMM listens before it is detached.
        Err(ChannelError::Io(Errno::ECONNREFUSED | Errno::ENOENT)) => return false,
        channel => channel,
    };
    // Process named by the socket. Only exactly this process may be killed: another process with
    // the same id may run now, which has another start time.
    let process = parse_socket_name(path)
        .and_then(|(pid, started)| Some((ProcessInstance::of(pid).ok()?, started)))
        .filter(|(mark, started)| mark.started == *started)
        .and_then(|(mark, _)| VmmProcess::find(&mark, DetachedSocket::default()).ok());
    if let Ok(link) = channel.and_then(ControlSocket::new) {
        // Ignore the error: a VMM that does not receive the request is killed below.
        let _ = link.send(&Request::Stop, &[]);
        // The VMM closes the connection when it exits.
        let exited = async { while link.recv().await.is_ok() {} };
        let _ = tokio::time::timeout(EXIT_TIMEOUT, exited).await;
    }
    let Some(mut process) = process else {
        return true;
    };
    let waited = tokio::time::timeout(EXIT_TIMEOUT, process.wait()).await;
    if waited.is_err() {
        process.kill();
        let _ = process.wait().await;
    }
    true
}
