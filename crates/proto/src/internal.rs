//! Internal connections from functions and sandboxes to the daemon's control plane. Functions and
//! sandboxes cannot reach any address of the host. For one reserved host name, the daemon itself
//! makes the connection.

use std::any::Any;
use std::fmt::Debug;
use std::os::unix::net::UnixStream;

/// Host name under which functions and sandboxes reach the control plane, at port 80. No server on
/// the internet can have this name, since ICANN reserves `internal` for private use.
pub const API_HOST: &str = "api.jiffy.internal";

/// Returns whether `name` is [`API_HOST`], in any case and with or without the final dot.
#[must_use]
pub fn is_api_host(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name.eq_ignore_ascii_case(API_HOST)
}

/// Origin of an internal connection, as known to the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InternalOrigin {
    /// A function that was deployed with a key for sandboxes.
    Function {
        /// API key whose sandboxes the function may use.
        key: String,
        /// API key that owns the function. `None` if the host's owner owns it.
        owner: Option<String>,
        /// Name of the function.
        name: String,
        /// Set if the function may also send requests to ports of these sandboxes.
        reaches_ports: bool,
    },
    /// A sandbox whose egress rules allow [`API_HOST`].
    Sandbox {
        /// API key that owns the sandbox.
        key: String,
    },
}

/// Connector from functions and sandboxes to the control plane.
pub trait ControlPlaneConnector: Debug + Send + Sync {
    /// Passes the daemon's end of a connection, which must be non-blocking, and a value that is
    /// dropped when the connection is closed. Returns false if the connection is not served.
    fn connect(
        &self,
        origin: InternalOrigin,
        stream: UnixStream,
        permit: Box<dyn Any + Send + Sync>,
    ) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserved_name_is_recognised_in_any_spelling() {
        for name in [API_HOST, "API.Jiffy.internal", "api.jiffy.internal."] {
            assert!(is_api_host(name), "{name}");
        }
        for name in [
            "",
            ".",
            "api.jiffy.internal..",
            "jiffy.internal",
            "x.api.jiffy.internal",
            "api.jiffy.internal.example",
        ] {
            assert!(!is_api_host(name), "{name}");
        }
    }
}
