//! Root directory with selected files of the host, and a user for a process that needs them.

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

/// Enters new mount, IPC, UTS and cgroup namespaces and `more`, a root that contains only
/// `visible`, and, if the host permits it, a separate user to which the files belong. This process
/// must be single-threaded, and process 1 of a PID namespace for a separate user (see
/// [`in_new_pid_namespace`]). `is_host` is false for root of an unprivileged user's namespace. The
/// caller must call [`crate::restrict_files`] in addition.
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
    // `/proc` still belongs to the parent's PID namespace: the link contains this process's id
    // there.
    let own_pid = fs::read_link("/proc/self")?;
    let own_pid = own_pid.to_str().and_then(|pid| pid.parse().ok());
    match unshare(namespaces) {
        // The root user of an unprivileged container. VMMs have no jail there either.
        Err(Errno::EPERM) => {
            drop_capabilities()?;
            return own(None, Some("cannot create namespaces".to_owned()));
        }
        other => other?,
    }
    // Creating a user requires a PID namespace, unless the host denies this.
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

/// Runs `start` on this thread. The first process that `start` creates is process 1 of a new PID
/// namespace.
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
