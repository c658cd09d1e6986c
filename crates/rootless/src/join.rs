//! Entry of this process into the namespaces of a holder.
//!
//! A *holder* is the process that keeps the namespaces and the uplink open. The *uplink* is a
//! program that connects the namespaces to the network of the host.

use crate::enter::EnterError;
use crate::holder::HolderReport;
use crate::router;
use nix::sched::{CloneFlags, setns};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;

/// Maximum size of a report in bytes.
const MAX_REPORT_BYTES: u64 = 64 << 10;

/// Reads the report of a ready holder.
pub(crate) fn report(stream: &UnixStream) -> Result<HolderReport, EnterError> {
    let mut line = String::new();
    let mut reader = BufReader::new(std::io::Read::take(stream, MAX_REPORT_BYTES));
    reader.read_line(&mut line).map_err(EnterError::io(
        "cannot read the report of the namespace holder",
    ))?;
    serde_json::from_str(&line).map_err(|_| match line.trim() {
        "" => EnterError::Holder("the namespace holder exited".to_owned()),
        message => EnterError::Holder(message.to_owned()),
    })
}

/// Moves this single-threaded process into the namespaces of the holder that sent `report`. The
/// holder keeps the namespaces while `stream`, the connection to the holder, is open.
pub(crate) fn join(uid: u32, report: HolderReport, stream: UnixStream) -> Result<(), EnterError> {
    let holder = report.pid;
    let open = |name: &str| {
        File::open(format!("/proc/{holder}/ns/{name}"))
            .map_err(EnterError::io("cannot open the namespaces"))
    };
    let (user, mounts) = (open("user")?, open("mnt")?);
    // Entering a mount namespace changes the working directory to its root.
    let directory = std::env::current_dir();
    // The user namespace comes first: it grants the capability to enter the mount namespace.
    setns(user, CloneFlags::CLONE_NEWUSER)
        .map_err(|e| EnterError::io("cannot enter the user namespace")(e.into()))?;
    setns(mounts, CloneFlags::CLONE_NEWNS)
        .map_err(|e| EnterError::io("cannot enter the mount namespace")(e.into()))?;
    // Restores the working directory if it still exists.
    if let Ok(directory) = directory {
        let _ = std::env::set_current_dir(directory);
    }
    router::set_current(report.directory, report.uplink, uid, stream);
    Ok(())
}

/// Returns whether this process is single-threaded, which entering a user namespace requires.
pub(crate) fn has_one_thread() -> bool {
    fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}
