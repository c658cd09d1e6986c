//! Confinement of a VMM process before it reads any input: user, capabilities, file systems,
//! network and the view of other processes.
//!
//! The starter (crate `microvm-engine`) creates the namespaces in advance with [`make_namespaces`],
//! once for all of its VMMs. The shared root directory is and remains empty, and the shared network
//! receives no interface. Each VMM has a PID namespace of its own. Seccomp filters are installed
//! when the threads start ([`crate::seccomp`]).

use crate::error::VmmError;
use jiffy_confinement as confinement;
use jiffy_proto::vm::CONTROL_FD;
use jiffy_proto::vm::jail::{ENTER_ARGUMENT, FIRST_FD, NAMESPACES, READY};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::resource::Resource;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{Gid, Uid, chdir, setresgid, setresuid, setsid};
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::process::ExitCode;

/// Maximum number of threads and processes of one VMM: vCPUs, event loop and snapshot writers.
const MAX_TASKS: u64 = 64;

/// Confines this process, which must be single-threaded. With [`ENTER_ARGUMENT`], the whole jail is
/// applied. Without the argument, only the restrictions are applied that an unprivileged process
/// can impose on itself.
pub fn confine(argument: Option<&str>) -> Result<(), VmmError> {
    // Signals from the terminal must reach only the command in the guest. In the starter's session,
    // the kernel would also kill a stopped VMM when the starter exits (orphaned process group).
    // Ignore the error: the process is then already the leader of a session.
    let _ = setsid();
    limit_resources().map_err(failed("setting resource limits"))?;
    match argument {
        None => {}
        Some(ENTER_ARGUMENT) => {
            // The process id becomes the user id, so each VMM has its own user. Read the id now:
            // the namespaces contain no /proc.
            let user = process_id()?;
            enter_namespaces().map_err(failed("entering the namespaces of the jail"))?;
            close_fds_from(FIRST_FD)?;
            drop_privileges(user).map_err(failed("dropping privileges"))?;
        }
        Some(other) => {
            let reason = format!("unknown argument {other:?}");
            return Err(VmmError::Config(reason));
        }
    }
    // Only the standard streams and the control socket remain. All other descriptors arrive later,
    // over the control socket.
    close_fds_from(CONTROL_FD + 1)?;
    // Without the flag `no_new_privs`, an unprivileged process can use neither seccomp filters nor
    // Landlock.
    confinement::forbid_new_privileges().map_err(failed("no_new_privs"))?;
    confinement::restrict_everything().map_err(failed("landlock"))
}

/// Returns a conversion of errors. `what` names the failed operation.
fn failed<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> VmmError {
    move |e| VmmError::host(what, e)
}

/// Closes all descriptors from `first` on.
fn close_fds_from(first: i32) -> Result<(), VmmError> {
    let first = u32::try_from(first).unwrap_or(u32::MAX);
    // SAFETY: no value in this process owns a descriptor above the control socket yet.
    unsafe { confinement::close_descriptors(first) }.map_err(failed("closing descriptors"))
}

/// Raises the limit of open files to the hard limit. Every vsock connection uses a descriptor, and
/// the common limit of 1024 is too low for
/// [`MAX_CONNECTIONS`](crate::virtio::vsock::MAX_CONNECTIONS) and the machine's own descriptors.
fn limit_resources() -> io::Result<()> {
    confinement::raise_descriptor_limit()?;
    // A core file would contain the guest's memory.
    confinement::set_limit(Resource::RLIMIT_CORE, 0)
}

/// Limits files that this process writes to `bytes`. The caller derives the limit from the sizes of
/// memory and disks: an overlay is as long as its disk, and a memory layer as long as memory. A
/// longer write fails with `EFBIG`, similar to a write to a full disk.
pub fn limit_file_size(bytes: u64) -> Result<(), VmmError> {
    // By default, a write beyond the limit would kill the process.
    let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
    // SAFETY: no signal handler is installed.
    unsafe { sigaction(Signal::SIGXFSZ, &ignore) }.map_err(failed("ignoring SIGXFSZ"))?;
    confinement::set_limit(Resource::RLIMIT_FSIZE, bytes)
        .map_err(failed("limiting the size of files"))
}

/// Returns the process id in the host's PID namespace. In the process's own namespace the id is 1.
fn process_id() -> Result<u32, VmmError> {
    let failed = |e: &dyn std::fmt::Display| VmmError::host("reading /proc/self", e);
    let link = std::fs::read_link("/proc/self").map_err(|e| failed(&e))?;
    let name = link.to_string_lossy();
    name.parse().map_err(|e| failed(&e))
}

/// Enters the namespaces whose descriptors start at [`FIRST_FD`].
fn enter_namespaces() -> nix::Result<()> {
    for (fd, _) in (FIRST_FD..).zip(NAMESPACES) {
        // SAFETY: the starter placed the namespaces at these numbers. If a number is not open, the
        // system call fails.
        let namespace = unsafe { BorrowedFd::borrow_raw(fd) };
        setns(namespace, CloneFlags::empty())?;
    }
    // The root directory of the namespace is empty.
    chdir("/")
}

/// Becomes user `id` of the user namespace, without supplementary groups and capabilities.
fn drop_privileges(id: u32) -> io::Result<()> {
    // The kernel counts tasks per user, and this process is the only process of its user.
    confinement::set_limit(Resource::RLIMIT_NPROC, MAX_TASKS)?;
    confinement::switch_user(id)?;
    confinement::drop_capabilities()
}

/// Main function of the process that creates the namespaces. They exist while this process runs or
/// a descriptor refers to them.
pub fn make_namespaces() -> ExitCode {
    match hold_namespaces() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("jiffy-vmm: cannot create the namespaces of the jail: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Creates the namespaces. The starter controls the steps with single bytes over standard input and
/// output.
fn hold_namespaces() -> io::Result<()> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    unshare(
        CloneFlags::CLONE_NEWUSER
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWNS,
    )?;
    // First step: the starter now writes the user map of the new user namespace, which this process
    // may not write itself.
    output.write_all(&[READY])?;
    output.flush()?;
    input.read_exact(&mut [0])?;
    // In the user map written now, root of the namespace is the host's user `FIRST_UID` (crate
    // `proto`). No VMM uses this user, because no process has the id 0.
    setresgid(Gid::from_raw(0), Gid::from_raw(0), Gid::from_raw(0))?;
    setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0))?;
    nix::unistd::sethostname("jail")?;
    // A nested namespace would give its creator capabilities again.
    for kind in ["user", "mnt", "net", "ipc", "uts", "pid", "cgroup", "time"] {
        std::fs::write(format!("/proc/sys/user/max_{kind}_namespaces"), "0")?;
    }
    confinement::enter_empty_root()?;
    // Second step: the namespaces are complete, and the starter opens them.
    output.write_all(&[READY])?;
    output.flush()?;
    // Hold the namespaces until the starter closes the pipe.
    input.read_to_end(&mut Vec::new())?;
    Ok(())
}
