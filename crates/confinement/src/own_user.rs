//! [`OwnUser`]: a separate user for each confined process. No user of the host has its user id.

use crate::root::private_mounts;
use crate::{CapabilitySet, limit_bounding_set, set_capabilities};
use jiffy_proto::vm::jail::FIRST_UID;
use nix::mount::mount;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{
    ForkResult, Gid, Uid, fork, getgid, getuid, pipe, read, setgroups, setresgid, setresuid, write,
};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Returns the user and group id of the calling process after [`become_own_user`]. It is derived
/// from the process id, so that no two processes share a user.
pub fn own_user_id() -> u32 {
    // Cannot overflow: process ids are at most 2^22.
    FIRST_UID + std::process::id()
}

/// Switches to user and group `id`, without supplementary groups. Makes system calls only.
pub fn switch_user(id: u32) -> nix::Result<()> {
    // Groups are changed first: an unprivileged user may not change them.
    setgroups(&[])?;
    let group = Gid::from_raw(id);
    setresgid(group, group, group)?;
    let user = Uid::from_raw(id);
    setresuid(user, user, user)
}

/// Switches to the user [`own_user_id`] with the capabilities `retained`, which survive an exec.
/// The process cannot gain other capabilities. Makes system calls only and does not allocate
/// memory, so that it can run between fork and exec.
pub fn become_own_user(retained: CapabilitySet) -> io::Result<()> {
    // Retained capabilities must stay in the bounding set to be inherited.
    limit_bounding_set(retained);
    if !retained.is_empty() {
        // Without this flag, the kernel clears all permitted capabilities when root becomes
        // another user.
        rustix::thread::set_keep_capabilities(true)?;
    }
    switch_user(own_user_id())?;
    set_capabilities(retained)
}

/// Makes an unprivileged user root of a new user namespace that maps only this user.
pub fn enter_user_namespace() -> io::Result<()> {
    let (user, group) = (getuid(), getgid());
    unshare(CloneFlags::CLONE_NEWUSER)?;
    // The kernel lets an unprivileged process write `gid_map` only if `setgroups` is denied.
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("0 {group} 1"))
}

/// User namespace with a single user, whose id inside the namespace is 0. A mount can map this user
/// to root of the host ([`crate::enter_root`]).
#[derive(Debug)]
pub struct OwnUser(OwnedFd);

impl OwnUser {
    /// Creates the namespace for the user that belongs to this process. The process must be root of
    /// the host, be single-threaded, and have its own mount and PID namespaces. Mounts a new
    /// `/proc`, which has the process ids of this PID namespace. `host_pid` is the id of this
    /// process on the host.
    pub fn create(host_pid: u32) -> io::Result<Self> {
        private_mounts()?;
        let proc = Some(c"proc");
        mount(proc, c"/proc", proc, crate::root::RESTRICTED, None::<&str>)?;
        // Only a process outside of a user namespace can map ids other than its own. Therefore a
        // child creates the namespace, and this process writes the maps. The child waits on a pipe,
        // since the namespace would end with its last process before the descriptor is opened.
        let ((ready, ready_sender), (wait, go)) = (pipe()?, pipe()?);
        // SAFETY: this process has one thread, and the child makes system calls only.
        let child = match unsafe { fork() }? {
            ForkResult::Child => {
                drop((ready, go));
                let made = unshare(CloneFlags::CLONE_NEWUSER).is_ok();
                // Ignore the error: without a byte, the parent reports a failure.
                let _ = write(&ready_sender, &[u8::from(made)]);
                // Returns when the parent closes its end of the pipe.
                let _ = read(&wait, &mut [0]);
                // SAFETY: exits without running any code or destructors of the parent.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => child,
        };
        drop((ready_sender, wait));
        let open = || -> io::Result<OwnedFd> {
            let mut made = [0];
            read(&ready, &mut made)?;
            if made != [1] {
                return Err(io::Error::other(
                    "the kernel does not permit user namespaces",
                ));
            }
            let map = format!("0 {} 1", FIRST_UID + host_pid);
            for file in ["uid_map", "gid_map"] {
                fs::write(format!("/proc/{child}/{file}"), &map)?;
            }
            File::open(format!("/proc/{child}/ns/user")).map(OwnedFd::from)
        };
        let opened = open();
        // Ignore the errors: the child exits by itself, and the result of this function is known.
        drop(go);
        let _ = kill(child, Signal::SIGKILL);
        let _ = waitpid(child, None);
        opened.map(Self)
    }

    /// Switches to this user, without capabilities. Child processes cannot gain any.
    pub fn enter(&self) -> io::Result<()> {
        // The host's supplementary groups would remain effective inside the namespace.
        setgroups(&[])?;
        setns(&self.0, CloneFlags::CLONE_NEWUSER)?;
        // Requires CAP_SETPCAP, so the bounding set is changed before the capabilities are dropped.
        limit_bounding_set(CapabilitySet::empty());
        let (group, user) = (Gid::from_raw(0), Uid::from_raw(0));
        setresgid(group, group, group)?;
        setresuid(user, user, user)?;
        set_capabilities(CapabilitySet::empty())
    }
}

impl AsFd for OwnUser {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
