//! Named network namespaces. Each name is a file in a directory of the daemon, on which the
//! namespace is mounted, as `ip netns` does.
//!
//! The directory of `ip netns` is unsuitable: the first `ip netns add` of any program on the host
//! mounts that directory over itself. Earlier names are then hidden below the mount, and can
//! neither be used nor removed until the host reboots.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. In rootless mode, the *router* is the network namespace to which
//! the slots are connected.

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

/// Directory that contains the directory of names and the claims of address ranges (`claim.rs`), if
/// this process is root of the host.
const BASE_DIR: &str = "/run/jiffy-net";
/// Subdirectory of names: a separate mount, which is unmounted with the last name.
const NAMES_DIR: &str = "netns";
/// Directory of names in earlier versions, whose guests may still run.
const FORMER_NAMES_DIR: &str = "/run/netns";
/// Lock file in the base directory, held while the directory of names is mounted or unmounted, and
/// while a name is added.
const LOCK_FILE: &str = "netns.lock";
/// Maximum number of stacked mounts that are removed from a name before giving up.
const MAX_STACKED_MOUNTS: usize = 16;
/// File system type of namespaces (`linux/magic.h`).
const NSFS_MAGIC: FsType = FsType(0x6e73_6673);
/// Network namespace of the thread that opens the path.
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";

/// Returns the directory that contains the directory of names and the claims of address ranges.
pub(crate) fn base_dir() -> &'static Path {
    jiffy_rootless::current().map_or(Path::new(BASE_DIR), |own| own.directory())
}

/// Returns the directory of names.
fn directory() -> PathBuf {
    base_dir().join(NAMES_DIR)
}

/// Runs `work` in the network that slots are connected to. This is the network of the host, or in
/// rootless mode the network of the router. Threads that `work` starts are in this network, too.
pub(crate) fn outside<T: Send>(
    work: impl FnOnce() -> Result<T, NetError> + Send,
) -> Result<T, NetError> {
    match jiffy_rootless::current() {
        None => work(),
        Some(own) => enter_at(&own.router(), work),
    }
}

/// Returns the path of namespace `name`, which need not exist.
pub(crate) fn path(name: &str) -> PathBuf {
    let [own, former] = paths(name);
    if !own.exists() && former.exists() {
        return former;
    }
    own
}

/// Returns the paths of `name` in the current directory and in the directory of earlier versions.
fn paths(name: &str) -> [PathBuf; 2] {
    [
        directory().join(name),
        Path::new(FORMER_NAMES_DIR).join(name),
    ]
}

/// Returns whether `name` refers to a network namespace. The file may be missing or no longer
/// mounted.
pub(crate) fn exists(name: &str) -> bool {
    statfs(&path(name)).is_ok_and(|stat| stat.filesystem_type() == NSFS_MAGIC)
}

/// Returns the names that start with `prefix`.
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

/// Creates namespace `name` and runs `work` on a thread in it. Removes the namespace on failure.
pub(crate) fn create<T: Send>(
    name: &str,
    work: impl FnOnce() -> Result<T, NetError> + Send,
) -> Result<T, NetError> {
    on_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET)
            .map_err(|e| NetError::host("creating a network namespace")(e.into()))?;
        bind_name(name)?;
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

/// Runs `work` on a new thread in the network namespace of a file. The other threads remain in
/// their namespace.
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

/// Opens the network namespace of this thread.
pub(crate) fn current() -> Result<File, NetError> {
    File::open(OWN_NAMESPACE).map_err(NetError::host(format!("opening {OWN_NAMESPACE}")))
}

/// Removes a name. The namespace ends with its last process, descriptor or device. Returns true if
/// the name is free for reuse.
pub(crate) fn remove(name: &str) -> bool {
    let [own, former] = paths(name);
    // Ignore the result: a name of an earlier version may be permanently hidden, which is harmless.
    remove_at(&former);
    remove_at(&own)
}

/// Unmounts and removes the name of a network namespace. Returns whether the name is free.
fn remove_at(path: &Path) -> bool {
    // A name that is not mounted is a leftover file. A name with stacked mounts was mounted over by
    // another program.
    for _ in 0..MAX_STACKED_MOUNTS {
        if umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).is_err() {
            break;
        }
    }
    // Removing the file also detaches its mounts in other mount namespaces (Linux 3.18).
    match fs::remove_file(path) {
        Ok(()) => true,
        // The name is also free if the file or its directory does not exist.
        Err(e) => matches!(
            e.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
        ),
    }
}

/// Locks the directory of names. The lock is released when the result is dropped.
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

/// Returns true if the directory of names is a mount: then it is on another device than its parent.
fn is_mounted() -> bool {
    let device = |path: &Path| fs::metadata(path).map(|data| data.dev()).ok();
    let above = device(base_dir());
    device(&directory()).is_some_and(|own| Some(own) != above)
}

/// Mounts a tmpfs on the directory of names. Mounts in the tmpfs do not propagate to other mount
/// namespaces, and a bind mount of `/run` does not include them. The caller must hold the lock.
fn mount_names_dir() -> Result<(), NetError> {
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
        // Ignore a second error: the error of the mount is returned.
        let _ = umount2(&directory, MntFlags::MNT_DETACH);
        failed()(e.into())
    })
}

/// Unmounts the directory of names if no names remain.
///
/// Does not remove the directory itself: in another mount namespace, a daemon may have its own
/// mount on it, which this process does not see. Removing the directory would detach that mount
/// with all its names.
pub(crate) fn unmount_if_empty() {
    // Without the lock, another daemon may be adding a name.
    let Ok(_lock) = lock() else {
        return;
    };
    let directory = directory();
    let empty = fs::read_dir(&directory).is_ok_and(|mut names| names.next().is_none());
    if empty && is_mounted() {
        // If the directory is in use, a later call unmounts it.
        let _ = umount2(&directory, MntFlags::UMOUNT_NOFOLLOW);
    }
}

/// Mounts the network namespace of this thread on the file `name`, so that it outlives its
/// processes.
fn bind_name(name: &str) -> Result<(), NetError> {
    let _lock = lock()?;
    mount_names_dir()?;
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
        // Do not leave an unmounted file, which would look like a name.
        let _ = fs::remove_file(&path);
        failed()(e.into())
    })
}

/// Runs `work` on a new thread, so that a change of the namespace does not affect the caller's
/// thread.
fn on_thread<T: Send>(work: impl FnOnce() -> Result<T, NetError> + Send) -> Result<T, NetError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("netns".to_owned())
            .spawn_scoped(scope, work)
            .map_err(NetError::host("starting a thread"))?;
        thread.join().unwrap_or_else(|_| {
            Err(NetError::host("a thread in a network namespace")(
                io::Error::other("the thread panicked"),
            ))
        })
    })
}
