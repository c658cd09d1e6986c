//! A user namespace with one user, who is no user of the host.

use crate::{clear_capabilities, drop_bounding_capabilities};
use jiffy_proto::vm::jail::FIRST_UID;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Gid, Uid, fork, pipe, read, setgroups, setresgid, setresuid, write};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// User namespace in which the only user has the id 0, and owns what root owns where a mount says
/// so ([`crate::enter_root`]).
#[derive(Debug)]
pub struct OwnUser(OwnedFd);

impl OwnUser {
    /// Creates the namespace of the user that belongs to this process, which must be root of the
    /// host, have one thread, and have a mount namespace and a process namespace of its own.
    /// Mounts `/proc` anew. `host_pid` is the id of this process on the host.
    pub fn create(host_pid: u32) -> io::Result<Self> {
        const NONE: Option<&str> = None;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(NONE, "/", NONE, private, NONE)?;
        let sealed = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("proc"), "/proc", Some("proc"), sealed, NONE)?;
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
        drop_bounding_capabilities();
        let (group, user) = (Gid::from_raw(0), Uid::from_raw(0));
        setresgid(group, group, group)?;
        setresuid(user, user, user)?;
        clear_capabilities()
    }
}

impl AsFd for OwnUser {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
