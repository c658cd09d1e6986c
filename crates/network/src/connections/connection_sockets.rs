//! Sockets for the kernel's messages about one slot's connections.

use super::netlink::NetlinkSocket;
use super::{flow, refused_packet};
use std::io;

/// Sources that the host's kernel does not support.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct MissingSources {
    /// Connections are not reported.
    pub connections: bool,
    /// Bytes of connections are not counted.
    pub bytes: bool,
    /// Rejected packets are not logged.
    pub refusals: bool,
}

impl MissingSources {
    /// Marks refusals as missing if the table does not log them.
    pub fn with_refusals(self, unlogged: bool) -> Self {
        Self {
            refusals: self.refusals || unlogged,
            ..self
        }
    }

    /// Returns the names of the missing sources, as listed in the API's field `untold`.
    pub fn names(self) -> Vec<&'static str> {
        let all = [
            (self.connections, "connections"),
            (self.bytes, "bytes"),
            (self.refusals, "refusals"),
        ];
        all.into_iter().filter(|w| w.0).map(|w| w.1).collect()
    }
}

/// Sockets for the kernel's messages about a slot. Without kernel support, the sandbox still has a
/// network, and the record lists the missing sources.
#[derive(Debug)]
pub(crate) struct ConnectionSockets {
    pub(super) flows: Option<NetlinkSocket>,
    pub(super) refused: Option<NetlinkSocket>,
    pub missing: MissingSources,
}

impl ConnectionSockets {
    /// Opens the sockets in the network namespace of this thread. The slot's table must be active.
    pub fn open() -> Self {
        let optional = |source: &str, socket: io::Result<NetlinkSocket>| {
            let failed =
                |e: &io::Error| tracing::debug!(source, error = %e, "connections are not recorded");
            socket.inspect_err(failed).ok()
        };
        // Enable counting first: only connections that start later have counters.
        let bytes = !flow::enable_counting();
        let flows = optional("connections", flow::subscribe());
        let refused = optional("refused packets", refused_packet::subscribe());
        let missing = MissingSources {
            connections: flows.is_none(),
            bytes,
            refusals: refused.is_none(),
        };
        Self {
            flows,
            refused,
            missing,
        }
    }

    /// Creates a value without sockets.
    #[cfg(test)]
    pub fn none() -> Self {
        Self {
            flows: None,
            refused: None,
            missing: MissingSources::default(),
        }
    }
}
