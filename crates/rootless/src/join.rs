//! Entering the namespaces of a holder.

use crate::enter::EnterError;
use crate::holder::Report;
use crate::router;
use nix::sched::{CloneFlags, setns};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;

/// Longest report in bytes.
const MAX_REPORT: u64 = 64 << 10;

/// Reads what a holder says when it is ready.
pub(crate) fn report(stream: &UnixStream) -> Result<Report, EnterError> {
    let mut line = String::new();
    let mut reader = BufReader::new(std::io::Read::take(stream, MAX_REPORT));
    reader
        .read_line(&mut line)
        .map_err(EnterError::io("waiting for the namespaces"))?;
    serde_json::from_str(&line).map_err(|_| match line.trim() {
        "" => EnterError::Holder("it ended".to_owned()),
        said => EnterError::Holder(said.to_owned()),
    })
}

/// Moves this process, which has one thread, into the namespaces of the holder that gave `report`.
/// They stay for as long as `keeper`, the stream to it, is open.
pub(crate) fn join(uid: u32, report: Report, keeper: UnixStream) -> Result<(), EnterError> {
    let holder = report.pid;
    let open = |name: &str| {
        File::open(format!("/proc/{holder}/ns/{name}"))
            .map_err(EnterError::io("opening the namespaces"))
    };
    let (user, mounts) = (open("user")?, open("mnt")?);
    let here = std::env::current_dir();
    setns(user, CloneFlags::CLONE_NEWUSER)
        .map_err(|e| EnterError::io("entering the user namespace")(e.into()))?;
    setns(mounts, CloneFlags::CLONE_NEWNS)
        .map_err(|e| EnterError::io("entering the mount namespace")(e.into()))?;
    // Where it was, in the same tree; one that is gone is none there either.
    if let Ok(here) = here {
        let _ = std::env::set_current_dir(here);
    }
    router::entered(report.directory, report.uplink, uid, keeper);
    Ok(())
}

/// Tells if this process has one thread only, as entering a user namespace takes.
pub(crate) fn has_one_thread() -> bool {
    fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}
