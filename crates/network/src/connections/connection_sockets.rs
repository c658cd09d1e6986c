//! Sockets for the kernel's messages about the connections of one slot.
//!
//! A slot is a network namespace with devices for one guest. Its nftables table logs the packets
//! that it rejects. The API calls these packets refusals.

use super::netlink::NetlinkSocket;
use super::{flow, refused_packet};
use std::io;

/// Sources of the record of connections that are not available, because the host's kernel does not
/// support them. A field is true if its source is missing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct MissingSources {
    /// Messages about connections.
    pub connections: bool,
    /// Byte counters of connections.
    pub bytes: bool,
    /// Messages about rejected packets.
    pub refusals: bool,
}

impl MissingSources {
    /// Marks refusals as missing if `unlogged` is true: the slot's nftables table was created
    /// without statements that log rejected packets.
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
    /// Messages about connections. `None` if the kernel does not send them.
    pub(super) flows: Option<NetlinkSocket>,
    /// Messages about rejected packets. `None` if the kernel does not send them.
    pub(super) refused: Option<NetlinkSocket>,
    /// Sources without a socket or a counter.
    pub missing: MissingSources,
}

impl ConnectionSockets {
    /// Opens the sockets in the network namespace of this thread. The slot's table must be active.
    pub fn open() -> Self {
        let optional = |source: &str, socket: io::Result<NetlinkSocket>| {
            let failed =
                |e: &io::Error| tracing::debug!(source, error = %e, "cannot record connections");
            socket.inspect_err(failed).ok()
        };
        // Enable counting first: only connections that start later have counters. `bytes` is true
        // if the counters are missing.
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
