//! Namespaces that this process has entered.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

static CURRENT: OnceLock<RootlessNamespaces> = OnceLock::new();

/// Namespaces of an ordinary user that this process is in.
#[derive(Debug)]
pub struct RootlessNamespaces {
    /// Directory mounted in these namespaces only, with slot claims and names of network
    /// namespaces.
    directory: PathBuf,
    /// Name of the uplink, or the reason that there is none.
    uplink: Result<String, String>,
    /// Host user that is root in them.
    uid: u32,
    /// True if they map other users.
    has_ranges: bool,
    /// Connection to the holder, which keeps the namespaces while it is open.
    _keeper: std::os::unix::net::UnixStream,
}

/// Name of the router's network namespace in [`RootlessNamespaces::directory`].
pub(crate) const ROUTER_NAME: &str = "router";

impl RootlessNamespaces {
    /// Directory of slot claims and names of network namespaces.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Path of the router's network namespace.
    pub fn router(&self) -> PathBuf {
        self.directory.join(ROUTER_NAME)
    }

    /// Name of the uplink program, or the reason that there is none.
    pub fn uplink(&self) -> Result<&str, &str> {
        self.uplink
            .as_ref()
            .map(String::as_str)
            .map_err(String::as_str)
    }

    /// Host user that owns the namespaces.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Returns true if sandboxes can have users of their own.
    pub fn has_ranges(&self) -> bool {
        self.has_ranges
    }
}

/// Namespaces that this process has entered; none: it runs in those that it was started in.
pub fn current() -> Option<&'static RootlessNamespaces> {
    CURRENT.get()
}

/// Records that this process is in the namespaces of a holder.
pub(crate) fn set_current(
    directory: PathBuf,
    uplink: Result<String, String>,
    uid: u32,
    keeper: std::os::unix::net::UnixStream,
) {
    let current = RootlessNamespaces {
        directory,
        uplink,
        uid,
        has_ranges: !crate::ids::maps_only_itself(),
        _keeper: keeper,
    };
    // A process enters once.
    let _ = CURRENT.set(current);
}
