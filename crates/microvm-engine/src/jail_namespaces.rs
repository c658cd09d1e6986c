//! Jail of VMM processes: empty namespaces made once for all, and a PID namespace for each.
//!
//! A VMM then confines itself: `crates/vmm/src/jail.rs`.

use jiffy_proto::vm::jail::{FIRST_UID, MAKE_ARGUMENT, NAMESPACES, READY, UIDS};
use nix::sched::{CloneFlags, setns, unshare};
use parking_lot::Mutex;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Failure to make the VMM's namespaces.
#[derive(Debug, thiserror::Error)]
#[error("cannot confine the VMM: {what}: {source}; {}", remedy())]
pub struct JailError {
    what: &'static str,
    source: io::Error,
}

fn remedy() -> String {
    match jiffy_rootless::is_chroot() {
        true => format!(
            "a chroot forbids user namespaces: {}",
            jiffy_rootless::CHROOT_REMEDY
        ),
        false => "allow user namespaces on this host (sysctl user.max_user_namespaces), or set \
                  JIFFY_JAIL=off to run VMMs as the user who starts them"
            .to_owned(),
    }
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> JailError {
    move |source| JailError { what, source }
}

/// Namespaces that VMM processes enter. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct JailNamespaces(Arc<Mutex<Option<Vec<OwnedFd>>>>);

impl JailNamespaces {
    /// Returns descriptors of [`NAMESPACES`]. The first call has `program` make the namespaces.
    pub fn get(&self, program: &Path) -> Result<Vec<OwnedFd>, JailError> {
        let mut made = self.0.lock();
        if made.is_none() {
            *made = Some(make_namespaces(program)?);
        }
        let duplicates = made.iter().flatten().map(OwnedFd::try_clone);
        let duplicates = duplicates.collect::<io::Result<_>>();
        duplicates.map_err(failed("duplicating descriptors"))
    }
}

/// Runs `start` on this thread. The only process that it starts becomes process 1 of a new PID
/// namespace.
pub(crate) fn in_new_pid_namespace<T>(start: impl FnOnce() -> T) -> Result<T, JailError> {
    let own = File::open("/proc/self/ns/pid").map_err(failed("opening /proc/self/ns/pid"))?;
    unshare(CloneFlags::CLONE_NEWPID)
        .map_err(|e| failed("making a process namespace")(e.into()))?;
    let started = start();
    // Otherwise the thread could not start further processes.
    setns(&own, CloneFlags::CLONE_NEWPID)
        .map_err(|e| failed("going back to the process namespace")(e.into()))?;
    Ok(started)
}

/// Makes the program create the namespaces, and opens them.
fn make_namespaces(program: &Path) -> Result<Vec<OwnedFd>, JailError> {
    let mut maker = Command::new(program)
        .arg(MAKE_ARGUMENT)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed("starting the VMM program"))?;
    let (stdin, stdout) = (maker.stdin.take(), maker.stdout.take());
    let made = match (stdin, stdout) {
        (Some(stdin), Some(stdout)) => open_namespaces(maker.id(), stdin, stdout),
        _ => Err(io::ErrorKind::BrokenPipe.into()),
    };
    // It exits when its standard input is closed.
    let left = maker.wait_with_output();
    made.map_err(|e| {
        let said = left.map(|left| String::from_utf8_lossy(&left.stderr).trim().to_owned());
        let said = said.ok().filter(|said| !said.is_empty());
        failed("making namespaces")(said.map_or(e, io::Error::other))
    })
}

fn open_namespaces(
    maker: u32,
    mut say: impl Write,
    mut said: impl Read,
) -> io::Result<Vec<OwnedFd>> {
    let mut wait = || {
        let mut word = [0];
        said.read_exact(&mut word)?;
        match word {
            [READY] => Ok(()),
            _ => Err(io::Error::other("the VMM program is of another version")),
        }
    };
    let process = PathBuf::from(format!("/proc/{maker}"));
    wait()?;
    let map = format!("0 {FIRST_UID} {UIDS}");
    for file in ["uid_map", "gid_map"] {
        fs::write(process.join(file), &map)?;
    }
    say.write_all(&[READY])?;
    wait()?;
    let open = |name| File::open(process.join("ns").join(name)).map(OwnedFd::from);
    NAMESPACES.iter().map(open).collect()
}
