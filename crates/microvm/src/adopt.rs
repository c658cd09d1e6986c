//! Guests that outlive the process that made them, and their adoption by the next.
//!
//! A VMM is found by its [`ProcessMark`], which means one process only. What it says and hands over then is checked: it may have been
//! taken over by its guest meanwhile.

use crate::jail::Vmm;
use crate::link::Link;
use crate::mark::{connect_to, listen_at, named, socket_of};
use crate::process::{Kept, Process};
use crate::saving::SaveError;
use crate::vm::{MicroVm, Parts};
use jiffy_engine::{BootReport, ProcessMark};
use jiffy_proto::agent::{Hello, Identity};
use jiffy_proto::channel::ChannelError;
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::vm::{Event, FdIndex, PROTOCOL, Request};
use jiffy_snapshot::Store;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// Time a VMM has to hand itself over. One that is in the middle of writing a snapshot for which it stands still answers after that.
const ADOPT_LIMIT: Duration = Duration::from_secs(15);
/// Time a VMM that nobody wants has to leave by itself before it is killed.
const LEAVE_LIMIT: Duration = Duration::from_millis(500);

/// Why a VMM was not adopted.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// It is not there.
    #[error("it ended while nobody watched it")]
    Gone,
    /// It cannot be watched.
    #[error("its VMM cannot be watched: {0}")]
    Host(io::Error),
    /// The connection failed.
    #[error("its VMM does not listen: {0}")]
    Control(#[from] ChannelError),
    /// It does not speak as we do.
    #[error(
        "its VMM speaks version {0} of the protocol, and this program version {PROTOCOL}: it was started by another version of jiffy"
    )]
    Version(u32),
    /// It hangs.
    #[error("its VMM did not answer within {} s", ADOPT_LIMIT.as_secs())]
    Silent,
    /// What it handed over is not what it was given.
    #[error("its VMM handed over what cannot be its own: {0}")]
    Foreign(&'static str),
}

/// What is known of a VMM that is to be adopted.
#[derive(Debug)]
pub struct AdoptSpec<'a> {
    /// Which it is.
    pub mark: ProcessMark,
    /// The program that it is a process of.
    pub vmm: &'a Vmm,
    /// Directory of the control sockets.
    pub directory: &'a Path,
    /// Where its snapshots are.
    pub store: &'a Store,
    /// Snapshot that it descends from.
    pub parent: Option<String>,
    /// Whether it has a network card.
    pub net: bool,
    /// Checksum of the image with its kernel's modules, if it has one.
    pub modules: Option<String>,
    /// What its agent is told if it greets again.
    pub identity: Identity,
    /// What its agent said.
    pub hello: Option<Hello>,
    /// How it came up.
    pub report: BootReport,
}

/// What a VMM hands over.
struct Estate {
    link: Link,
    console: ConsoleRing,
    overlay: File,
}

impl MicroVm {
    /// From now on the guest runs on when this process ends. Its control socket is in `directory`, which nobody else may enter, and
    /// what its VMM has to complain of goes to `log`.
    pub async fn keep(&self, directory: &Path, log: &File) -> Result<ProcessMark, SaveError> {
        let mut saving = self.saving.lock().await;
        let host = |what| move |source| SaveError::Host { what, source };
        let mark = ProcessMark::of(self.vmm_pid()).map_err(|_| SaveError::Gone)?;
        let path = socket_of(&mark, directory);
        let listener = listen_at(&path).map_err(host("making the VMM's control socket"))?;
        let greeting = saving.greeting.take();
        let mut fds = vec![listener.as_fd(), log.as_fd()];
        fds.extend(greeting.as_ref().map(AsFd::as_fd));
        let request = Request::Keep {
            listener: FdIndex(0),
            log: Some(FdIndex(1)),
            greeting: greeting.as_ref().map(|_| FdIndex(2)),
        };
        let kept = match self.link.send(&request, &fds) {
            Ok(()) => {
                let kept = |event| matches!(event, Event::Kept).then_some(());
                saving.reply(kept).await
            }
            Err(e) => Err(e.into()),
        };
        if let Err(e) = kept {
            let _ = fs::remove_file(&path);
            return Err(e);
        }
        // Only now does dropping it mean to let go of it.
        let _ = self.kept.set(path);
        Ok(mark)
    }

    /// The agent's greeting, as it is to be handed to whoever adopts the guest.
    pub async fn hello(&self) -> Option<Hello> {
        self.saving.lock().await.hello.clone()
    }

    /// Checksum of the image with its kernel's modules, if it has one.
    pub async fn modules(&self) -> Option<String> {
        self.saving.lock().await.modules.clone()
    }

    /// Takes over a VMM that an earlier process kept. One that cannot be adopted is ended.
    pub async fn adopt(spec: AdoptSpec<'_>) -> Result<Self, AdoptError> {
        let path = socket_of(&spec.mark, spec.directory);
        let kept = Kept::from(std::sync::OnceLock::from(path.clone()));
        let mut process = Process::find(&spec.mark, kept.clone()).map_err(|e| {
            // /proc has nothing of it, or there is no such process at all.
            let gone = e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH);
            if !gone {
                return AdoptError::Host(e);
            }
            let _ = fs::remove_file(&path);
            AdoptError::Gone
        })?;
        let taken = tokio::time::timeout(ADOPT_LIMIT, take_over(&path, spec.store)).await;
        let estate = match taken.unwrap_or(Err(AdoptError::Silent)) {
            Ok(estate) => estate,
            Err(e) => {
                process.kill();
                let _ = process.wait().await;
                spec.vmm.forget(spec.mark.pid);
                let _ = fs::remove_file(&path);
                return Err(e);
            }
        };
        let mut lost = false;
        let parent = spec.parent.and_then(|id| {
            let hold = spec.store.get(&id).and_then(|parent| parent.hold());
            let hold = hold.inspect_err(|e| {
                tracing::warn!(id, "a sandbox lies on a snapshot that is not usable: {e}");
                lost = true;
            });
            Some((id, hold.ok()?))
        });
        let vm = Self::assemble(Parts {
            link: estate.link,
            vmm: spec.vmm.clone(),
            process,
            pid: spec.mark.pid,
            kept,
            console: estate.console,
            overlay: estate.overlay,
            parent,
            net: spec.net,
            modules: spec.modules,
            identity: Some(spec.identity),
            report: spec.report,
            steps: None,
        });
        let mut saving = vm.saving.lock().await;
        saving.lost = lost;
        saving.hello = spec.hello;
        drop(saving);
        Ok(vm)
    }
}

async fn take_over(path: &Path, store: &Store) -> Result<Estate, AdoptError> {
    let link = Link::new(connect_to(path)?)?;
    let mut recalled = recall(&link).await?;
    if let Some(id) = recalled.undecided {
        let happened = store.ids().is_ok_and(|ids| ids.contains(&id));
        link.send(&Request::Settle { happened }, &[])?;
        let settled = |event| match event {
            (Event::Settled { failure }, _) => Some(failure),
            _ => None,
        };
        if let Some(failure) = answer(&link, settled).await? {
            tracing::warn!("a sandbox goes on, but could not be put back in order: {failure}");
        }
        recalled = recall(&link).await?;
    }
    if !recalled.running {
        link.send(&Request::Resume, &[])?;
        answer(&link, |event| {
            matches!(event.0, Event::Resumed).then_some(())
        })
        .await?;
    }
    let console = ConsoleRing::open(recalled.console)
        .map_err(|_| AdoptError::Foreign("its console is no console"))?;
    check_overlay(&recalled.overlay, store)?;
    Ok(Estate {
        link,
        console,
        overlay: recalled.overlay,
    })
}

struct Recalled {
    running: bool,
    undecided: Option<String>,
    console: OwnedFd,
    overlay: File,
}

async fn recall(link: &Link) -> Result<Recalled, AdoptError> {
    link.send(&Request::Recall, &[])?;
    let recalled = |(event, fds)| match event {
        Event::Recalled {
            protocol,
            running,
            undecided,
            console,
            overlays,
        } => Some((protocol, running, undecided, console, overlays, fds)),
        _ => None,
    };
    let (protocol, running, undecided, console, overlays, fds) = answer(link, recalled).await?;
    if protocol != PROTOCOL {
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
    Ok(Recalled {
        running,
        undecided,
        console: take(console)?,
        overlay: File::from(take(overlay)?),
    })
}

/// Waits for the answer that `pick` takes. Events of before belong to nobody; a guest that greets meanwhile does so again.
async fn answer<T>(
    link: &Link,
    pick: impl Fn((Event, Vec<OwnedFd>)) -> Option<T>,
) -> Result<T, AdoptError> {
    loop {
        if let Some(answer) = pick(link.recv().await?) {
            return Ok(answer);
        }
    }
}

/// An overlay is a nameless file of the store. Whatever else a VMM can read must not become part of a snapshot.
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

/// Ends every VMM that listens in `directory` and is not among `known`, and removes the sockets of those that are gone. Returns
/// how many were ended.
pub async fn end_others(directory: &Path, known: &[ProcessMark]) -> io::Result<usize> {
    let mut work = tokio::task::JoinSet::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if known.iter().all(|mark| socket_of(mark, directory) != path) {
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
        // Nobody listens, and nobody will: what is to be kept listens before it is.
        Err(ChannelError::Io(Errno::ECONNREFUSED | Errno::ENOENT)) => return false,
        channel => channel,
    };
    // Whose name it is. Only that very process may be killed, so nothing else is looked for.
    let process = named(path)
        .and_then(|(pid, started)| Some((ProcessMark::of(pid).ok()?, started)))
        .filter(|(mark, started)| mark.started == *started)
        .and_then(|(mark, _)| Process::find(&mark, Kept::default()).ok());
    if let Ok(link) = channel.and_then(Link::new) {
        let _ = link.send(&Request::Stop, &[]);
        // Until it closes the connection.
        let gone = async { while link.recv().await.is_ok() {} };
        let _ = tokio::time::timeout(LEAVE_LIMIT, gone).await;
    }
    let Some(mut process) = process else {
        return true;
    };
    let left = tokio::time::timeout(LEAVE_LIMIT, process.wait()).await;
    if left.is_err() {
        process.kill();
        let _ = process.wait().await;
    }
    true
}
