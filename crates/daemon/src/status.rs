//! Status of the daemon.

use jiffy_rootless::current;
use jiffy_sandbox_manager::Sandboxes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Instant;

/// Details of `GET /host` for the host's owner.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Version of the daemon.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Seconds since it began.
    pub uptime_s: u64,
    /// Address of the API; none: only the socket.
    pub listen: Option<String>,
    /// Arguments after `jiffy serve`.
    pub arguments: Vec<String>,
    /// Sandboxes by state.
    pub sandboxes: BTreeMap<String, usize>,
    /// Restored sandboxes that wait for their creator.
    pub warm: usize,
    /// Protections that are missing because the daemon is not root's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rootless: Option<String>,
    /// Network of the sandboxes.
    #[serde(default)]
    pub network: String,
    /// Snapshots there are.
    pub snapshots: usize,
    /// Memory promised to all guests, in MiB.
    pub memory_committed_mib: u64,
    /// Upper bound of it, in MiB.
    pub memory_limit_mib: Option<u64>,
    /// Memory the host has left, in MiB.
    pub memory_available_mib: Option<u64>,
    /// Refusals for want of room, by the resource that was short.
    pub refused: BTreeMap<String, u64>,
}

impl DaemonStatus {
    /// Of `sandboxes`, in a daemon that began at `began`.
    pub fn now(sandboxes: &Sandboxes, began: Instant, listen: Option<String>) -> Self {
        let promised = sandboxes.figures().promised();
        let (figures, limit) = sandboxes.figures().host();
        let states = sandboxes.figures().states().into_iter();
        let refused = promised.refused.into_iter();
        Self {
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
