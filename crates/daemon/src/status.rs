//! Status of the daemon, as `jiffy status` shows it.

use jiffy_api_types::DaemonStatus;
use jiffy_rootless::current;
use jiffy_sandbox_manager::Sandboxes;
use std::time::Instant;

/// Returns the status of a daemon of `sandboxes` that was started at `start`.
pub fn daemon_status(
    sandboxes: &Sandboxes,
    start: Instant,
    listen: Option<String>,
) -> DaemonStatus {
    let reserved = sandboxes.figures().reservations();
    let (figures, limit) = sandboxes.figures().host();
    let states = sandboxes.figures().states().into_iter();
    let rejected = reserved.rejections.into_iter();
    DaemonStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_s: start.elapsed().as_secs(),
        listen,
        // The program and `serve` are omitted.
        arguments: std::env::args().skip(2).collect(),
        sandboxes: states.map(|(name, n)| (name.to_owned(), n)).collect(),
        warm: sandboxes.pool().waiting(),
        rootless: missing_protections(),
        network: sandboxes.network(),
        snapshots: sandboxes.snapshots().count(),
        memory_committed_mib: reserved.memory_mib,
        memory_limit_mib: limit,
        memory_available_mib: figures.memory_available_mib,
        refused: rejected
            .map(|(reason, n)| (reason.name().to_owned(), n))
            .collect(),
    }
}

/// Describes the missing protections of the daemon's sandboxes in one line. `None` if the daemon
/// runs as root.
fn missing_protections() -> Option<String> {
    // `current` returns the namespaces of an ordinary user that the daemon has entered.
    let users = match current() {
        Some(own) if own.has_ranges() => "separate users on gVisor only",
        Some(_) => "no separate users",
        None if nix::unistd::Uid::effective().is_root() => return None,
        None => "no namespaces, no network",
    };
    let uplink = current().and_then(|own| own.uplink().ok());
    let network = uplink.map_or(String::new(), |name| format!(", network through {name}"));
    Some(format!("without root: no jail, {users}{network}"))
}
