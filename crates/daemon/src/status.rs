//! Status of the daemon.

use jiffy_api_types::DaemonStatus;
use jiffy_rootless::current;
use jiffy_sandbox_manager::Sandboxes;
use std::time::Instant;

/// Returns the status of a daemon of `sandboxes` that started at `began`.
pub fn daemon_status(
    sandboxes: &Sandboxes,
    began: Instant,
    listen: Option<String>,
) -> DaemonStatus {
    let promised = sandboxes.figures().promised();
    let (figures, limit) = sandboxes.figures().host();
    let states = sandboxes.figures().states().into_iter();
    let refused = promised.refused.into_iter();
    DaemonStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_s: began.elapsed().as_secs(),
        listen,
        arguments: std::env::args().skip(2).collect(),
        sandboxes: states.map(|(name, n)| (name.to_owned(), n)).collect(),
        warm: sandboxes.pool().waiting(),
        rootless: missing_protections(),
        network: sandboxes.network(),
        snapshots: sandboxes.snapshots().count(),
        memory_committed_mib: promised.memory_mib,
        memory_limit_mib: limit,
        memory_available_mib: figures.memory_available_mib,
        refused: refused.map(|(why, n)| (why.name().to_owned(), n)).collect(),
    }
}

/// Protections that the daemon's sandboxes lack, on one line; none: it is root's.
fn missing_protections() -> Option<String> {
    let users = match current() {
        Some(own) if own.has_ranges() => "users of their own on gVisor",
        Some(_) => "no users of their own",
        None if nix::unistd::Uid::effective().is_root() => return None,
        None => "no namespaces, no network",
    };
    let out = current().and_then(|own| own.uplink().ok());
    let out = out.map_or(String::new(), |name| format!(", network through {name}"));
    Some(format!("without root: no jail, {users}{out}"))
}
