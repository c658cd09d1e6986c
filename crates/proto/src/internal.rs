//! Connections to the daemon's control plane from inside: from functions and from sandboxes, which
//! reach no address of the host. They are made by the daemon itself, under one reserved name.

use std::any::Any;
use std::fmt::Debug;
use std::os::unix::net::UnixStream;

/// Name under which functions and sandboxes reach the control plane, at port 80. No server of the
/// internet can have it (ICANN reserves `internal` for private use).
pub const API_HOST: &str = "api.jiffy.internal";

/// Returns true if `name`, in any case and with or without the root's dot, is [`API_HOST`].
#[must_use]
pub fn is_api_host(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name.eq_ignore_ascii_case(API_HOST)
}

/// Other end of a connection from inside, as the daemon knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InternalOrigin {
    /// A function that was deployed with a key for sandboxes.
    Function {
        /// API key whose sandboxes it may call.
        key: String,
        /// API key that the function belongs to; none: the host's owner.
        owner: Option<String>,
        /// Name of the function.
        name: String,
        /// True if it may also send requests to ports of these sandboxes.
        reaches_ports: bool,
    },
    /// A sandbox whose rules name [`API_HOST`].
    Sandbox {
        /// API key that the sandbox belongs to.
        key: String,
    },
}

/// Connects functions and sandboxes to the control plane.
pub trait ControlPlaneConnector: Debug + Send + Sync {
    /// Hands over the daemon's end of a connection, which does not block, and what is to be kept
    /// until its end. Returns false if it is not served.
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
    fn the_reserved_name_is_told_from_others_however_it_is_written() {
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
