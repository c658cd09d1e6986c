//! Named network namespaces, in a directory of the daemon's own.
//!
//! Not in the one of `ip netns`: the first `ip netns add` of any program on the host mounts that
//! directory over itself. The earlier names are then out of reach below it, and can neither be used
//! again nor removed until the host is restarted.

use crate::NetError;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{FsType, statfs};
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;

/// Directory of claims and names, if this process is root of the host.
const BASE_DIR: &str = "/run/jiffy-net";
/// Directory of names in it: a mount of its own, which is unmounted with the last of them.
const NAMES_DIR: &str = "netns";
/// Directory of names in earlier versions, whose guests may still run.
const FORMER_NAMES_DIR: &str = "/run/netns";
/// File there that is locked while the directory is mounted or unmounted, or while a name is added.
const LOCK_FILE: &str = "netns.lock";
/// Mounts on one name that are taken off before it counts as pinned.
const MAX_STACKED_MOUNTS: usize = 16;
/// File system of namespaces (`linux/magic.h`).
const NSFS_MAGIC: FsType = FsType(0x6e73_6673);
/// The namespace of the thread that opens it.
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";

/// Directory of claims and names.
pub(crate) fn base_dir() -> &'static Path {
    jiffy_rootless::current().map_or(Path::new(BASE_DIR), |own| own.directory())
}

fn directory() -> PathBuf {
    base_dir().join(NAMES_DIR)
}

/// Runs `work` in the network to which slots lead: the host's, or the router of an ordinary user.
/// Threads that it starts are there, too.
pub(crate) fn outside<T: Send>(
    work: impl FnOnce() -> Result<T, NetError> + Send,
) -> Result<T, NetError> {
    match jiffy_rootless::current() {
        None => work(),
        Some(own) => enter_at(&own.router(), work),
    }
}

/// Path of namespace `name`, which need not exist.
pub(crate) fn path(name: &str) -> PathBuf {
    let [own, former] = paths(name);
    if !own.exists() && former.exists() {
        return former;
    }
    own
}

fn paths(name: &str) -> [PathBuf; 2] {
    [
        directory().join(name),
        Path::new(FORMER_NAMES_DIR).join(name),
    ]
}

/// Returns whether `name` leads to a network namespace. The file may be missing, or no longer be a
/// mount.
pub(crate) fn is_there(name: &str) -> bool {
    statfs(&path(name)).is_ok_and(|found| found.filesystem_type() == NSFS_MAGIC)
}

/// Names that begin with `prefix`.
pub(crate) fn list(prefix: &str) -> Vec<String> {
    let entries = [directory(), FORMER_NAMES_DIR.into()]
        .map(fs::read_dir)
        .into_iter()
        .flatten();
    let names = entries
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let names: BTreeSet<String> = names.filter(|name| name.starts_with(prefix)).collect();
    names.into_iter().collect()
}

/// Makes namespace `name` and runs `work` on a thread in it. Removes it again on failure.
pub(crate) fn create<T: Send>(
    name: &str,
    work: impl FnOnce() -> Result<T, NetError> + Send,
) -> Result<T, NetError> {
    on_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET)
            .map_err(|e| NetError::host("making a network namespace")(e.into()))?;
        give_name(name)?;
        work().inspect_err(|_| {
            remove(name);
        })
    })
}

/// Runs `work` on a thread in namespace `name`.
pub(crate) fn enter<T: Send>(
    name: &str,
    work: impl FnOnce() -> Result<T, NetError> + Send,
) -> Result<T, NetError> {
    enter_at(&path(name), work)
}

fn enter_at<T: Send>(
    path: &Path,
    work: impl FnOnce() -> Result<T, NetError> + Send,
) -> Result<T, NetError> {
    on_thread(|| {
        let failed = || NetError::host(format!("entering {}", path.display()));
        let namespace = File::open(path).map_err(failed())?;
        setns(namespace, CloneFlags::CLONE_NEWNET).map_err(|e| failed()(e.into()))?;
        work()
    })
}

/// The network namespace of this thread.
pub(crate) fn current() -> Result<File, NetError> {
    File::open(OWN_NAMESPACE).map_err(NetError::host(format!("opening {OWN_NAMESPACE}")))
}

/// Removes its name: the namespace ends with the last process, descriptor or device in it. Returns
/// true if the name can be used again.
pub(crate) fn remove(name: &str) -> bool {
    let [own, former] = paths(name);
    // One of an earlier version may be pinned there for good, which does no harm.
    remove_at(&former);
    remove_at(&own)
}

fn remove_at(path: &Path) -> bool {
    // A name that is no mount is a leftover file; one that is mounted twice was mounted over by
    // another program.
    for _ in 0..MAX_STACKED_MOUNTS {
        if umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).is_err() {
            break;
        }
    }
    // Also detaches copies of the mount in other mount namespaces (Linux 3.18).
    match fs::remove_file(path) {
        Ok(()) => true,
        Err(e) => matches!(
            e.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
        ),
    }
}

fn lock() -> Result<Flock<File>, NetError> {
    let path = base_dir().join(LOCK_FILE);
    let failed = || NetError::host(format!("locking {}", path.display()));
    fs::create_dir_all(base_dir()).map_err(failed())?;
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(failed())?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| failed()(e.into()))
}

/// Returns true if the directory is mounted as it should be.
fn is_mounted() -> bool {
    let device = |path: &Path| fs::metadata(path).map(|data| data.dev()).ok();
    let above = device(base_dir());
    device(&directory()).is_some_and(|own| Some(own) != above)
}

/// Mounts the directory, with the lock held: a file system of its own, whose mounts neither
/// propagate nor follow a bind of `/run`.
fn prepare() -> Result<(), NetError> {
    if is_mounted() {
        return Ok(());
    }
    let directory = directory();
    let failed = || NetError::host(format!("mounting {}", directory.display()));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&directory)
        .map_err(failed())?;
    mount(
        Some("jiffy-netns"),
        &directory,
        Some("tmpfs"),
        MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC,
        Some("mode=0700"),
    )
    .map_err(|e| failed()(e.into()))?;
    let none = None::<&str>;
    mount(none, &directory, none, MsFlags::MS_UNBINDABLE, none).map_err(|e| {
        let _ = umount2(&directory, MntFlags::MNT_DETACH);
        failed()(e.into())
    })
}

/// Unmounts the directory if no name of any data directory is left in it.
///
/// The directory itself stays. A daemon in another mount namespace may have a mount of its own on
/// it, which this process does not see: the kernel would detach that mount, with all names in it.
pub(crate) fn release() {
    let Ok(_lock) = lock() else {
        return;
    };
    let directory = directory();
    let empty = fs::read_dir(&directory).is_ok_and(|mut names| names.next().is_none());
    if empty && is_mounted() {
        // One that is in use stays until the next call.
        let _ = umount2(&directory, MntFlags::UMOUNT_NOFOLLOW);
    }
}

fn give_name(name: &str) -> Result<(), NetError> {
    let _lock = lock()?;
    prepare()?;
    let path = directory().join(name);
    let failed = || NetError::host(format!("mounting {}", path.display()));
    File::create_new(&path).map_err(failed())?;
    mount(
        Some(OWN_NAMESPACE),
        &path,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .map_err(|e: Errno| {
        let _ = fs::remove_file(&path);
        failed()(e.into())
    })
}

fn on_thread<T: Send>(work: impl FnOnce() -> Result<T, NetError> + Send) -> Result<T, NetError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("netns".to_owned())
            .spawn_scoped(scope, work)
            .map_err(NetError::host("starting a thread"))?;
        thread.join().unwrap_or_else(|_| {
            Err(NetError::host("a thread in a network namespace")(
                io::Error::other("it died"),
            ))
        })
    })
}
