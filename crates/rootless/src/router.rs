//! Namespaces that this process has entered.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

static CURRENT: OnceLock<Current> = OnceLock::new();

/// Namespaces of an ordinary user, as a process in them sees them.
#[derive(Debug)]
pub struct Current {
    /// Directory that is mounted in them alone; claims and names of network namespaces are there.
    directory: PathBuf,
    /// Name of the way out, or why there is none.
    uplink: Result<String, String>,
    /// User of the host that is root in them.
    uid: u32,
    /// Tells if there are other users than that one.
    has_ranges: bool,
    /// The holder keeps the namespaces while this is open.
    _keeper: std::os::unix::net::UnixStream,
}

/// Name of the router's network namespace in [`Current::directory`].
pub(crate) const ROUTER: &str = "router";

impl Current {
    /// Directory for claims and names of network namespaces.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Path of the router's network namespace.
    pub fn router(&self) -> PathBuf {
        self.directory.join(ROUTER)
    }

    /// Name of the program that leads out of the router, or why nothing does.
    pub fn uplink(&self) -> Result<&str, &str> {
        self.uplink
            .as_ref()
            .map(String::as_str)
            .map_err(String::as_str)
    }

    /// User of the host whose namespaces they are.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Tells if sandboxes can have users of their own.
    pub fn has_ranges(&self) -> bool {
        self.has_ranges
    }
}

/// Namespaces that this process has entered; none: it runs in those it was started in.
pub fn current() -> Option<&'static Current> {
    CURRENT.get()
}

/// Records that this process is in the namespaces of a holder.
pub(crate) fn entered(
    directory: PathBuf,
    uplink: Result<String, String>,
    uid: u32,
    keeper: std::os::unix::net::UnixStream,
) {
    let current = Current {
        directory,
        uplink,
        uid,
        has_ranges: !crate::ids::maps_only_itself(),
        _keeper: keeper,
    };
    // A process enters once.
    let _ = CURRENT.set(current);
}
