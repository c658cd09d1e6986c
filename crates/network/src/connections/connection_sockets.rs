//! Sockets for the kernel's messages about one slot's connections.

use super::netlink::NetlinkSocket;
use super::{flow, refused_packet};
use std::io;

/// Sources that the host's kernel does not support.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct MissingSources {
    pub connections: bool,
    pub bytes: bool,
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

    pub fn words(self) -> Vec<&'static str> {
        let all = [
            (self.connections, "connections"),
            (self.bytes, "bytes"),
            (self.refusals, "refusals"),
        ];
        all.into_iter().filter(|w| w.0).map(|w| w.1).collect()
    }
}

/// Sockets for the kernel's messages about a slot. Without kernel support, the sandbox has a
/// network all the same, and the record lists the missing sources.
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
        let bytes = !flow::count();
        let flows = optional("connections", flow::listen());
        let refused = optional("refused packets", refused_packet::listen());
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
