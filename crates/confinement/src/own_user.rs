//! Users of confined processes, who are no users of the host.

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

/// User and group id of the calling process after [`become_own_user`]: from its process id, as for
/// VMMs, so that no two processes share one.
pub fn own_user_id() -> u32 {
    FIRST_UID + std::process::id()
}

/// Switches to user and group `id`, without other groups. Makes system calls only.
pub fn switch_user(id: u32) -> nix::Result<()> {
    setgroups(&[])?;
    let group = Gid::from_raw(id);
    setresgid(group, group, group)?;
    let user = Uid::from_raw(id);
    setresuid(user, user, user)
}

/// Switches to a user of its own with the capabilities `kept`, which survive an exec. The process
/// can gain no others. Makes system calls only and does not allocate, so that it can run between
/// fork and exec.
pub fn become_own_user(kept: CapabilitySet) -> io::Result<()> {
    // Kept capabilities must stay in the bounding set to be inherited.
    limit_bounding_set(kept);
    if !kept.is_empty() {
        rustix::thread::set_keep_capabilities(true)?;
    }
    switch_user(own_user_id())?;
    set_capabilities(kept)
}

/// Makes an ordinary user root of a user namespace that maps this user only.
pub fn enter_user_namespace() -> io::Result<()> {
    let (user, group) = (getuid(), getgid());
    unshare(CloneFlags::CLONE_NEWUSER)?;
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("0 {group} 1"))
}

/// User namespace in which the only user has the id 0, and owns what root owns where a mount says
/// so ([`crate::enter_root`]).
#[derive(Debug)]
pub struct OwnUser(OwnedFd);

impl OwnUser {
    /// Creates the namespace of the user that belongs to this process, which must be root of the
    /// host, have one thread, and have a mount namespace and a process namespace of its own.
    /// Mounts `/proc` anew. `host_pid` is the id of this process on the host.
    pub fn create(host_pid: u32) -> io::Result<Self> {
        private_mounts()?;
        let proc = Some(c"proc");
        mount(proc, c"/proc", proc, crate::root::SEALED, None::<&str>)?;
        let ((ready, say_ready), (wait, go)) = (pipe()?, pipe()?);
        // SAFETY: this process has one thread, and the child makes system calls only.
        let child = match unsafe { fork() }? {
            ForkResult::Child => {
                drop((ready, go));
                let made = unshare(CloneFlags::CLONE_NEWUSER).is_ok();
                let _ = write(&say_ready, &[u8::from(made)]);
                let _ = read(&wait, &mut [0]);
                // SAFETY: ends the process without anything of its parent's.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => child,
        };
        drop((say_ready, wait));
        let open = || -> io::Result<OwnedFd> {
            let mut made = [0];
            read(&ready, &mut made)?;
            if made != [1] {
                return Err(io::Error::other("the kernel makes no user namespace"));
            }
            let map = format!("0 {} 1", FIRST_UID + host_pid);
            for file in ["uid_map", "gid_map"] {
                fs::write(format!("/proc/{child}/{file}"), &map)?;
            }
            File::open(format!("/proc/{child}/ns/user")).map(OwnedFd::from)
        };
        let opened = open();
        drop(go);
        let _ = kill(child, Signal::SIGKILL);
        let _ = waitpid(child, None);
        opened.map(Self)
    }

    /// Becomes that user, without capabilities. No later process of this one has any.
    pub fn enter(&self) -> io::Result<()> {
        setgroups(&[])?;
        setns(&self.0, CloneFlags::CLONE_NEWUSER)?;
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
