//! Confines a process that needs some files of the host: a root directory that contains only these
//! files, and a separate user to which they appear to belong (ID-mapped mounts).
//!
//! The fetcher of the store and the servers of volumes call [`enter_own_root`] at their start,
//! before they read untrusted input.

use crate::{
    MountTable, OwnUser, VisiblePath, drop_capabilities, enter_root, enter_user_namespace,
};
use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::Uid;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;

/// Result of [`enter_own_root`].
#[derive(Debug)]
pub struct OwnRoot {
    /// Mount table. `None` if the process still has the host's root or the table is unavailable.
    pub mounts: Option<MountTable>,
    /// Reason why the confinement is weaker than intended.
    pub weakness: Option<String>,
}

/// Confines this process. It enters new mount, IPC, UTS and cgroup namespaces, and the namespaces
/// in `more`. Its root directory then contains only `visible`, and its capabilities are dropped. If
/// the host permits it, the process also becomes a separate user.
///
/// The process must be single-threaded. For a separate user, it must be process 1 of a PID
/// namespace (see [`in_new_pid_namespace`]). `is_host` is false for root of an unprivileged user's
/// namespace, which cannot create users. A step that the host does not permit is omitted, and
/// [`OwnRoot::weakness`] describes it. The caller must call [`crate::restrict_files`] in addition.
///
/// # Errors
/// An I/O error of a step that must not be omitted. The process must then exit.
pub fn enter_own_root(
    visible: &[VisiblePath],
    more: CloneFlags,
    is_host: bool,
) -> io::Result<OwnRoot> {
    let namespaces = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP
        | more;
    let own = |mounts, weakness: Option<String>| Ok(OwnRoot { mounts, weakness });
    if !Uid::effective().is_root() {
        if let Err(e) = enter_user_namespace() {
            return own(None, Some(format!("cannot create a user namespace: {e}")));
        }
        unshare(namespaces)?;
        let mounts = enter_root(visible, None)?;
        drop_capabilities()?;
        return own(mounts, None);
    }
    // Read the id of this process on the host. `/proc` still belongs to the parent's PID namespace,
    // so its link `self` contains this id.
    let own_pid = fs::read_link("/proc/self")?;
    let own_pid = own_pid.to_str().and_then(|pid| pid.parse().ok());
    match unshare(namespaces) {
        // The root user of an unprivileged container. On such a host, VMMs have no namespaces of
        // their own either.
        Err(Errno::EPERM) => {
            drop_capabilities()?;
            return own(None, Some("cannot create namespaces".to_owned()));
        }
        other => other?,
    }
    // A separate user requires a PID namespace, in which this process has the id 1. If the parent
    // could not create the namespace, this process continues without a separate user.
    let (user, weakness) = match (is_host, own_pid, std::process::id()) {
        (true, Some(host_pid), 1) => match OwnUser::create(host_pid) {
            Ok(user) => (Some(user), None),
            Err(e) => (None, Some(format!("cannot create a user: {e}"))),
        },
        _ => (None, None),
    };
    let Some(user) = user else {
        let mounts = enter_root(visible, None)?;
        drop_capabilities()?;
        return own(mounts, weakness);
    };
    match enter_root(visible, Some(user.as_fd())) {
        Ok(mounts) => {
            user.enter()?;
            own(mounts, None)
        }
        Err(e) => {
            let weakness = format!("a file system does not support ID-mapped mounts: {e}");
            let mounts = enter_root(visible, None)?;
            drop_capabilities()?;
            own(mounts, Some(weakness))
        }
    }
}

/// Runs `start` on this thread, which starts a child. The child is process 1 of a new PID
/// namespace. If this process may not create namespaces, the child is an ordinary process.
pub fn in_new_pid_namespace<T>(start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let own = File::open("/proc/self/ns/pid")?;
    match unshare(CloneFlags::CLONE_NEWPID) {
        // The root user of an unprivileged container.
        Err(Errno::EPERM) => return start(),
        other => other?,
    }
    let started = start();
    // Restore the namespace. Otherwise later children of this thread would be in the new
    // namespace, and none could be started after its process 1 has exited.
    setns(&own, CloneFlags::CLONE_NEWPID)?;
    started
}
