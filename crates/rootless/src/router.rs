//! [`RootlessNamespaces`]: the namespaces that this process has entered.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. In rootless mode, the *router* is the network namespace to which
//! the slots are connected. The *uplink* is a program that connects the router to the network of
//! the host. A *holder* is the process that keeps the namespaces and the uplink open. A *claim* is
//! a file by which a daemon reserves a range of addresses for its slots.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

static CURRENT: OnceLock<RootlessNamespaces> = OnceLock::new();

/// Namespaces of an unprivileged user that this process has entered.
#[derive(Debug)]
pub struct RootlessNamespaces {
    /// Directory with claims and network namespaces. It is mounted in these namespaces only.
    directory: PathBuf,
    /// Name of the uplink, or the reason for its absence.
    uplink: Result<String, String>,
    /// Host user that is root in the namespaces.
    uid: u32,
    /// True if the namespaces map subordinate users.
    has_ranges: bool,
    /// Connection to the holder, which keeps the namespaces open while the connection is open.
    _holder: std::os::unix::net::UnixStream,
}

/// Name of the router's network namespace in [`RootlessNamespaces::directory`].
pub(crate) const ROUTER_NAME: &str = "router";

impl RootlessNamespaces {
    /// Returns the directory with claims and network namespaces.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the path of the router's network namespace.
    pub fn router(&self) -> PathBuf {
        self.directory.join(ROUTER_NAME)
    }

    /// Returns the name of the uplink program, or the reason for its absence.
    pub fn uplink(&self) -> Result<&str, &str> {
        self.uplink
            .as_ref()
            .map(String::as_str)
            .map_err(String::as_str)
    }

    /// Returns the host user that owns the namespaces.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Returns whether sandboxes can run as separate users.
    pub fn has_ranges(&self) -> bool {
        self.has_ranges
    }
}

/// Returns the namespaces that this process has entered. `None` if it has not entered any.
pub fn current() -> Option<&'static RootlessNamespaces> {
    CURRENT.get()
}

/// Records that this process is in the namespaces of a holder.
pub(crate) fn set_current(
    directory: PathBuf,
    uplink: Result<String, String>,
    uid: u32,
    holder: std::os::unix::net::UnixStream,
) {
    let current = RootlessNamespaces {
        directory,
        uplink,
        uid,
        has_ranges: !crate::ids::maps_only_itself(),
        _holder: holder,
    };
    // A process enters namespaces at most once.
    let _ = CURRENT.set(current);
}
