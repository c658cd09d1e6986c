//! Network namespaces with a name, in a directory of our own.
//!
//! Not in the one of `ip netns`: the first `ip netns add` of any program on the host mounts that directory over itself. The names that
//! were there before are then out of reach below it, and can neither be used again nor removed until the host is restarted.

use crate::NetError;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;

/// Directory of names: a mount of its own, gone with the last of them.
const DIRECTORY: &str = "/run/jiffy-net/netns";
/// Directory of names in earlier versions, whose guests may still run.
const FORMER: &str = "/run/netns";
/// Held while the directory is mounted, unmounted, or given a name.
const LOCK: &str = "/run/jiffy-net/netns.lock";
/// Mounts on one name that are taken off before it counts as pinned.
const MAX_STACKED_MOUNTS: usize = 16;
/// The namespace of the thread that opens it.
const OWN: &str = "/proc/thread-self/ns/net";

/// Path of namespace `name`, which need not exist.
pub(crate) fn path(name: &str) -> PathBuf {
    let [own, former] = paths(name);
    if !own.exists() && former.exists() {
        return former;
    }
    own
}

fn paths(name: &str) -> [PathBuf; 2] {
    [DIRECTORY, FORMER].map(|directory| Path::new(directory).join(name))
}

/// Names that begin with `prefix`.
pub(crate) fn list(prefix: &str) -> Vec<String> {
    let entries = [DIRECTORY, FORMER].map(fs::read_dir).into_iter().flatten();
    let names = entries
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let names: BTreeSet<String> = names.filter(|name| name.starts_with(prefix)).collect();
    names.into_iter().collect()
}

/// Makes namespace `name` and runs `work` on a thread in it. If that fails there is none.
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
    let path = path(name);
    on_thread(|| {
        let failed = || NetError::host(format!("entering {}", path.display()));
        let namespace = File::open(&path).map_err(failed())?;
        setns(namespace, CloneFlags::CLONE_NEWNET).map_err(|e| failed()(e.into()))?;
        work()
    })
}

/// Takes its name away: it is gone with the last process, descriptor or device in it. Returns whether the name can be used again.
pub(crate) fn remove(name: &str) -> bool {
    let [own, former] = paths(name);
    // One of an earlier version may be pinned there for good, which is in nobody's way here.
    remove_at(&former);
    remove_at(&own)
}

fn remove_at(path: &Path) -> bool {
    // What is not mounted is a file that was left over; what is mounted twice was mounted over by another program.
    for _ in 0..MAX_STACKED_MOUNTS {
        if umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).is_err() {
            break;
        }
    }
    // Takes off copies of the mount in other mount namespaces, too (Linux 3.18).
    match fs::remove_file(path) {
        Ok(()) => true,
        Err(e) => matches!(
            e.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
        ),
    }
}

fn lock() -> Result<Flock<File>, NetError> {
    let path = Path::new(LOCK);
    let failed = || NetError::host(format!("locking {}", path.display()));
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed())?;
    }
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(failed())?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| failed()(e.into()))
}

/// Whether the directory is the mount that it should be.
fn is_mounted() -> bool {
    let device = |path: &Path| fs::metadata(path).map(|data| data.dev()).ok();
    let directory = Path::new(DIRECTORY);
    let above = directory.parent().and_then(device);
    device(directory).is_some_and(|own| Some(own) != above)
}

/// Mounts the directory, with the lock held: a file system of its own, whose mounts neither propagate nor follow a bind of `/run`.
fn prepare() -> Result<(), NetError> {
    if is_mounted() {
        return Ok(());
    }
    let failed = || NetError::host(format!("mounting {DIRECTORY}"));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(DIRECTORY)
        .map_err(failed())?;
    mount(
        Some("jiffy-netns"),
        DIRECTORY,
        Some("tmpfs"),
        MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC,
        Some("mode=0700"),
    )
    .map_err(|e| failed()(e.into()))?;
    let none = None::<&str>;
    mount(none, DIRECTORY, none, MsFlags::MS_UNBINDABLE, none).map_err(|e| {
        let _ = umount2(DIRECTORY, MntFlags::MNT_DETACH);
        failed()(e.into())
    })
}

/// Removes the directory if no name is left in it, of whichever data directory.
pub(crate) fn release() {
    let Ok(_lock) = lock() else {
        return;
    };
    let empty = fs::read_dir(DIRECTORY).is_ok_and(|mut names| names.next().is_none());
    if empty && is_mounted() {
        // One that somebody has open stays until the next who asks.
        let _ = umount2(DIRECTORY, MntFlags::UMOUNT_NOFOLLOW);
        let _ = fs::remove_dir(DIRECTORY);
    }
}

fn give_name(name: &str) -> Result<(), NetError> {
    let _lock = lock()?;
    prepare()?;
    let path = Path::new(DIRECTORY).join(name);
    let failed = || NetError::host(format!("mounting {}", path.display()));
    File::create_new(&path).map_err(failed())?;
    mount(
        Some(OWN),
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
