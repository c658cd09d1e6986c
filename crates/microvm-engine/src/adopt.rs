//! Guests that outlive the process that made them, and their adoption by the next.
//!
//! A VMM is found by its [`ProcessInstance`], which identifies one process only. Its messages and
//! descriptors are checked: its guest may have compromised it meanwhile.

use crate::control_path::{connect_to, control_socket_path, listen_at, parse_socket_name};
use crate::control_socket::ControlSocket;
use crate::snapshot_context::{CapturedDraft, SaveError, SnapshotSpec};
use crate::vm::{MicroVm, MicroVmParts, VmmRequests};
use crate::vmm::Vmm;
use crate::vmm_process::{KeptSocket, VmmProcess};
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

/// Time for a VMM to answer its adoption. One that is writing a snapshot with its guest paused
/// answers after that.
const ADOPT_TIMEOUT: Duration = Duration::from_secs(15);
/// Time for an unknown VMM to exit by itself before it is killed.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// Failure to adopt a VMM.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The process does not exist.
    #[error("it ended while nobody watched it")]
    Gone,
    /// The process cannot be watched.
    #[error("its VMM cannot be watched: {0}")]
    Host(io::Error),
    /// The connection failed.
    #[error("its VMM does not listen: {0}")]
    Control(#[from] ChannelError),
    /// Its version of the protocol differs.
    #[error(
        "its VMM speaks version {0} of the protocol, and this program version {CONTROL_PROTOCOL_VERSION}: it was started by another version of jiffy"
    )]
    Version(u32),
    /// It did not answer in time.
    #[error("its VMM did not answer within {} s", ADOPT_TIMEOUT.as_secs())]
    Silent,
    /// Its descriptors are not those that it was given.
    #[error("its VMM handed over what cannot be its own: {0}")]
    Foreign(&'static str),
}

/// Known state of a VMM that is to be adopted.
#[derive(Debug)]
pub struct AdoptSpec<'a> {
    /// Process of the VMM.
    pub mark: ProcessInstance,
    /// VMM program.
    pub vmm: &'a Vmm,
    /// Directory of the control sockets.
    pub directory: &'a Path,
    /// Store of its snapshots.
    pub store: &'a Store,
    /// Snapshot that it descends from.
    pub parent: Option<String>,
    /// True if it has a network interface.
    pub net: bool,
    /// Checksum of the image with its kernel's modules, if it has one.
    pub modules: Option<String>,
    /// Identity for its agent, sent if that greets again.
    pub identity: Identity,
    /// Greeting of its agent.
    pub hello: Option<Hello>,
    /// Boot mode and times.
    pub report: BootReport,
    /// Snapshot that the earlier process captured and did not publish, with the template of the
    /// sandbox; [`MicroVm::finish_captured`] completes it. Any other is aborted.
    pub captured: Option<CapturedSpec>,
}

/// Snapshot that an earlier process captured.
#[derive(Debug)]
pub struct CapturedSpec {
    /// Its id.
    pub id: String,
    /// Template of its sandbox.
    pub template: String,
}

/// State that an adopted VMM hands over.
struct AdoptedState {
    link: ControlSocket,
    console: ConsoleRing,
    overlay: File,
    knows: VmmRequests,
    captured: Option<CapturedDraft>,
}

impl MicroVm {
    /// Keeps the guest running when this process ends. Its control socket is in `directory`, which
    /// must be closed to other users; error messages of its VMM go to `log`.
    pub async fn keep(&self, directory: &Path, log: &File) -> Result<ProcessInstance, SaveError> {
        let mut context = self.context.lock().await;
        let host = |what| move |source| SaveError::Host { what, source };
        let mark = ProcessInstance::of(self.vmm_pid()).map_err(|_| SaveError::Gone)?;
        let path = control_socket_path(&mark, directory);
        let listener = listen_at(&path).map_err(host("making the VMM's control socket"))?;
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
            let _ = fs::remove_file(&path);
            return Err(e);
        }
        // Dropping the VM no longer ends it from here on.
        let _ = self.kept.set(path);
        Ok(mark)
    }

    /// The agent's greeting, needed to adopt the guest.
    pub async fn hello(&self) -> Option<Hello> {
        self.context.lock().await.hello.clone()
    }

    /// Checksum of the image with its kernel's modules, if it has one.
    pub async fn modules(&self) -> Option<String> {
        self.context.lock().await.modules.clone()
    }

    /// Adopts a VMM that an earlier process kept. A VMM that cannot be adopted is ended.
    pub async fn adopt(spec: AdoptSpec<'_>) -> Result<Self, AdoptError> {
        let path = control_socket_path(&spec.mark, spec.directory);
        let kept = KeptSocket::from(std::sync::OnceLock::from(path.clone()));
        let mut process = VmmProcess::find(&spec.mark, kept.clone()).map_err(|e| {
            // The process has no /proc entry, or does not exist.
            let gone = e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH);
            if !gone {
                return AdoptError::Host(e);
            }
            let _ = fs::remove_file(&path);
            AdoptError::Gone
        })?;
        let taken = tokio::time::timeout(ADOPT_TIMEOUT, take_over(&path, &spec)).await;
        let adopted = match taken.unwrap_or(Err(AdoptError::Silent)) {
            Ok(adopted) => adopted,
            Err(e) => {
                process.kill();
                let _ = process.wait().await;
                spec.vmm.remove_group(spec.mark.pid);
                let _ = fs::remove_file(&path);
                return Err(e);
            }
        };
        let mut lineage_lost = false;
        let parent = spec.parent.and_then(|id| {
            let hold = spec.store.get(&id).and_then(|parent| parent.hold());
            let hold = hold.inspect_err(|e| {
                tracing::warn!(id, "a sandbox lies on a snapshot that is not usable: {e}");
                lineage_lost = true;
            });
            Some((id, hold.ok()?))
        });
        let vm = Self::assemble(MicroVmParts {
            link: adopted.link,
            vmm: spec.vmm.clone(),
            process,
            pid: spec.mark.pid,
            kept,
            console: adopted.console,
            overlay: adopted.overlay,
            parent,
            net: spec.net,
            modules: spec.modules,
            identity: Some(spec.identity),
            report: spec.report,
            knows: adopted.knows,
            steps: None,
        });
        let mut context = vm.context.lock().await;
        context.lineage_lost = lineage_lost;
        context.hello = spec.hello;
        context.captured = adopted.captured;
        drop(context);
        Ok(vm)
    }
}

async fn take_over(path: &Path, spec: &AdoptSpec<'_>) -> Result<AdoptedState, AdoptError> {
    let store = spec.store;
    let link = ControlSocket::new(connect_to(path)?)?;
    let mut reattached = reattach(&link).await?;
    let mut captured = expected_capture(&reattached, spec);
    if captured.is_none() && reattached.captured.is_some() {
        // The earlier process did not acknowledge it.
        link.send(&Request::AbortCapture, &[])?;
        reattached = reattach(&link).await?;
    }
    if let Some(id) = reattached.prepared_snapshot.take()
        && captured.is_none()
    {
        let published = store.ids().is_ok_and(|ids| ids.contains(&id));
        let decision = SnapshotDecision::from(published);
        link.send(&Request::ResolveSnapshot { decision }, &[])?;
        let resolved = |event| match event {
            (Event::SnapshotResolved { failure }, _) => Some(failure),
            _ => None,
        };
        if let Some(failure) = answer(&link, resolved).await? {
            tracing::warn!("a sandbox goes on, but could not be put back in order: {failure}");
        }
        reattached = reattach(&link).await?;
    }
    if !reattached.running {
        link.send(&Request::Resume, &[])?;
        answer(&link, |event| {
            matches!(event.0, Event::Resumed).then_some(())
        })
        .await?;
        if captured.is_some() {
            // It may have been completed before that answer.
            reattached = reattach(&link).await?;
            captured = expected_capture(&reattached, spec);
        }
    }
    let console = ConsoleRing::open(reattached.console)
        .map_err(|_| AdoptError::Foreign("its console is no console"))?;
    check_overlay(&reattached.overlay, store)?;
    Ok(AdoptedState {
        link,
        console,
        overlay: reattached.overlay,
        knows: reattached.knows,
        captured,
    })
}

/// Opens the draft of the captured snapshot that both the VMM and the earlier process know.
fn expected_capture(reattached: &ReattachedVmm, spec: &AdoptSpec<'_>) -> Option<CapturedDraft> {
    let (captured, expected) = reattached.captured.as_ref().zip(spec.captured.as_ref())?;
    if captured.id != expected.id {
        return None;
    }
    let opened = spec.store.captured(&expected.id, 1);
    let opened = opened.inspect_err(|e| {
        tracing::warn!(id = expected.id, "the files of a captured snapshot: {e}");
    });
    let (draft, mut overlays) = opened.ok()?;
    Some(CapturedDraft {
        draft,
        frozen: overlays.pop()?,
        spec: SnapshotSpec {
            id: expected.id.clone(),
            template: expected.template.clone(),
            then: AfterSnapshot::Resume,
            durability: Durability::PageCache,
            max_bytes: None,
            working_set: false,
        },
        report: captured.report.clone(),
    })
}

struct ReattachedVmm {
    running: bool,
    prepared_snapshot: Option<String>,
    captured: Option<Box<CapturedSnapshot>>,
    console: OwnedFd,
    overlay: File,
    knows: VmmRequests,
}

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
            console,
            overlays,
        } => {
            let knows = VmmRequests { rollback, fold };
            let state = (protocol, running, prepared_snapshot, captured, knows);
            Some((state, console, overlays, fds))
        }
        _ => None,
    };
    let (state, console, overlays, fds) = answer(link, reattached).await?;
    let (protocol, running, prepared_snapshot, captured, knows) = state;
    if protocol != CONTROL_PROTOCOL_VERSION {
        return Err(AdoptError::Version(protocol));
    }
    let mut fds: Vec<Option<OwnedFd>> = fds.into_iter().map(Some).collect();
    let mut take = |at: FdIndex| {
        let fd = fds.get_mut(usize::from(at.0)).and_then(Option::take);
        fd.ok_or(AdoptError::Foreign("a descriptor is missing"))
    };
    let &[overlay] = overlays.as_slice() else {
        return Err(AdoptError::Foreign("it has another number of disks"));
    };
    Ok(ReattachedVmm {
        running,
        prepared_snapshot,
        captured,
        console: take(console)?,
        overlay: File::from(take(overlay)?),
        knows,
    })
}

/// Waits for an event that `pick` takes. Earlier events are dropped; a guest that greets meanwhile
/// greets again.
async fn answer<T>(
    link: &ControlSocket,
    pick: impl Fn((Event, Vec<OwnedFd>)) -> Option<T>,
) -> Result<T, AdoptError> {
    loop {
        if let Some(answer) = pick(link.recv().await?) {
            return Ok(answer);
        }
    }
}

/// Checks that an overlay is a nameless file of the store. No other file that a VMM can read may
/// become part of a snapshot.
fn check_overlay(overlay: &File, store: &Store) -> Result<(), AdoptError> {
    let foreign = |_: io::Error| AdoptError::Foreign("its overlay cannot be examined");
    let metadata = overlay.metadata().map_err(foreign)?;
    let root = fs::metadata(store.root()).map_err(foreign)?;
    let flags = fcntl(overlay, FcntlArg::F_GETFL).map_err(|e| foreign(e.into()))?;
    let writable = OFlag::from_bits_truncate(flags) & OFlag::O_ACCMODE == OFlag::O_RDWR;
    let nameless = metadata.is_file() && metadata.nlink() == 0 && metadata.dev() == root.dev();
    match writable && nameless {
        true => Ok(()),
        false => Err(AdoptError::Foreign(
            "its overlay is no nameless file of the store",
        )),
    }
}

/// Ends every VMM that listens in `directory` and is not among `known`, and removes the sockets of
/// those that have ended. Returns the number of VMMs ended.
pub async fn end_unadopted(directory: &Path, known: &[ProcessInstance]) -> io::Result<usize> {
    let mut work = tokio::task::JoinSet::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if known
            .iter()
            .all(|mark| control_socket_path(mark, directory) != path)
        {
            work.spawn(async move {
                let ended = end(&path).await;
                let _ = fs::remove_file(&path);
                ended
            });
        }
    }
    let ended = work.join_all().await;
    Ok(ended.into_iter().filter(|&ended| ended).count())
}

/// Ends the VMM that listens at `path`, if one does.
async fn end(path: &Path) -> bool {
    let channel = match connect_to(path) {
        // No process listens, and none will: a VMM listens before it is kept.
        Err(ChannelError::Io(Errno::ECONNREFUSED | Errno::ENOENT)) => return false,
        channel => channel,
    };
    // Process in the socket's name. Only that very process may be killed.
    let process = parse_socket_name(path)
        .and_then(|(pid, started)| Some((ProcessInstance::of(pid).ok()?, started)))
        .filter(|(mark, started)| mark.started == *started)
        .and_then(|(mark, _)| VmmProcess::find(&mark, KeptSocket::default()).ok());
    if let Ok(link) = channel.and_then(ControlSocket::new) {
        let _ = link.send(&Request::Stop, &[]);
        // Waits until it closes the connection.
        let gone = async { while link.recv().await.is_ok() {} };
        let _ = tokio::time::timeout(EXIT_TIMEOUT, gone).await;
    }
    let Some(mut process) = process else {
        return true;
    };
    let left = tokio::time::timeout(EXIT_TIMEOUT, process.wait()).await;
    if left.is_err() {
        process.kill();
        let _ = process.wait().await;
    }
    true
}
