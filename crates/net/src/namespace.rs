//! Network namespaces with a name, as `ip netns` shows them.

use crate::NetError;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

/// Where `ip netns` looks.
const DIRECTORY: &str = "/run/netns";
/// The namespace of the thread that opens it.
const OWN: &str = "/proc/thread-self/ns/net";

pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(DIRECTORY).join(name)
}

/// Names that begin with `prefix`.
pub(crate) fn list(prefix: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(DIRECTORY) else {
        return Vec::new();
    };
    let names = entries.filter_map(|e| e.ok()?.file_name().into_string().ok());
    names.filter(|name| name.starts_with(prefix)).collect()
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
        work().inspect_err(|_| remove(name))
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

/// Takes its name away: it is gone with the last process, descriptor or device in it.
pub(crate) fn remove(name: &str) {
    let path = path(name);
    // What is not mounted is a file that was left over.
    let _ = umount2(&path, MntFlags::MNT_DETACH);
    let _ = fs::remove_file(&path);
}

fn give_name(name: &str) -> Result<(), NetError> {
    let path = path(name);
    let failed = || NetError::host(format!("mounting {}", path.display()));
    fs::create_dir_all(DIRECTORY).map_err(failed())?;
    File::create_new(&path).map_err(failed())?;
    mount(
        Some(OWN),
        &path,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .map_err(|e| {
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
