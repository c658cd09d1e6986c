//! Namespaces of jailed VMM processes: empty namespaces that all VMMs share, and one PID namespace
//! per VMM.
//!
//! The VMM confines itself further: see `crates/vmm/src/jail.rs`.

use jiffy_proto::vm::jail::{FIRST_UID, MAKE_ARGUMENT, NAMESPACES, READY, UIDS};
use nix::sched::{CloneFlags, setns, unshare};
use parking_lot::Mutex;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Error of creating the VMM's namespaces.
#[derive(Debug, thiserror::Error)]
#[error("cannot confine the VMM: {what}: {source}; {}", remedy())]
pub struct JailError {
    what: &'static str,
    source: io::Error,
}

/// Returns the advice for a host that does not permit user namespaces.
fn remedy() -> String {
    if jiffy_rootless::is_chroot() {
        format!(
            "a chroot forbids user namespaces: {}",
            jiffy_rootless::CHROOT_REMEDY
        )
    } else {
        "allow user namespaces on this host (sysctl user.max_user_namespaces), or set \
                  JIFFY_JAIL=off to run VMMs as the user who starts them"
            .to_owned()
    }
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> JailError {
    move |source| JailError { what, source }
}

/// Namespaces that VMM processes enter. Clones share the same namespaces.
#[derive(Debug, Clone, Default)]
pub(crate) struct JailNamespaces(Arc<Mutex<Option<Vec<OwnedFd>>>>);

impl JailNamespaces {
    /// Returns descriptors of [`NAMESPACES`]. On the first call, `program` creates the namespaces.
    pub fn get(&self, program: &Path) -> Result<Vec<OwnedFd>, JailError> {
        // The lock is held during the creation, so that concurrent first calls wait for the same
        // namespaces.
        let mut namespaces = self.0.lock();
        if namespaces.is_none() {
            *namespaces = Some(create_namespaces(program)?);
        }
        let duplicates = namespaces.iter().flatten().map(OwnedFd::try_clone);
        let duplicates = duplicates.collect::<io::Result<_>>();
        duplicates.map_err(failed("cannot duplicate descriptors"))
    }
}

/// Runs `start` on this thread. The first process that it starts becomes process 1 of a new PID
/// namespace. `start` must start only one process.
pub(crate) fn in_new_pid_namespace<T>(start: impl FnOnce() -> T) -> Result<T, JailError> {
    // A descriptor is the only way back to this namespace.
    let own_namespace =
        File::open("/proc/self/ns/pid").map_err(failed("cannot open /proc/self/ns/pid"))?;
    // The call affects only processes that this thread starts afterwards.
    unshare(CloneFlags::CLONE_NEWPID)
        .map_err(|e| failed("cannot create a PID namespace")(e.into()))?;
    let started = start();
    // Return to the former namespace. Otherwise the thread would start its next process in the new
    // namespace, which fails after process 1 of that namespace has exited.
    setns(&own_namespace, CloneFlags::CLONE_NEWPID)
        .map_err(|e| failed("cannot return to the PID namespace")(e.into()))?;
    Ok(started)
}

/// Runs the program, which creates the namespaces, and opens them.
fn create_namespaces(program: &Path) -> Result<Vec<OwnedFd>, JailError> {
    let mut maker = Command::new(program)
        .arg(MAKE_ARGUMENT)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed("cannot start the VMM program"))?;
    let (stdin, stdout) = (maker.stdin.take(), maker.stdout.take());
    let opened = match (stdin, stdout) {
        (Some(stdin), Some(stdout)) => open_namespaces(maker.id(), stdin, stdout),
        _ => Err(io::ErrorKind::BrokenPipe.into()),
    };
    // The program exits when its standard input is closed.
    let output = maker.wait_with_output();
    opened.map_err(|e| {
        let message = output.map(|out| String::from_utf8_lossy(&out.stderr).trim().to_owned());
        let message = message.ok().filter(|message| !message.is_empty());
        failed("cannot create namespaces")(message.map_or(e, io::Error::other))
    })
}

/// Opens the namespaces that the process `maker` creates. The process and this function exchange a
/// byte after each step, because only this process may write the maps of user ids.
fn open_namespaces(
    maker: u32,
    mut input: impl Write,
    mut output: impl Read,
) -> io::Result<Vec<OwnedFd>> {
    let mut wait = || {
        let mut word = [0];
        output.read_exact(&mut word)?;
        match word {
            [READY] => Ok(()),
            _ => Err(io::Error::other("the version of the VMM program differs")),
        }
    };
    let process = PathBuf::from(format!("/proc/{maker}"));
    // First step: the process has created its user namespace.
    wait()?;
    let map = format!("0 {FIRST_UID} {UIDS}");
    for file in ["uid_map", "gid_map"] {
        fs::write(process.join(file), &map)?;
    }
    input.write_all(&[READY])?;
    // Second step: the process has completed all namespaces.
    wait()?;
    let open = |name| File::open(process.join("ns").join(name)).map(OwnedFd::from);
    NAMESPACES.iter().map(open).collect()
}
