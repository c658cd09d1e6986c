//! Sockets for the kernel's messages about one slot's connections.

use super::netlink::NetlinkSocket;
use super::{flow, refused_packet};
use std::io;

/// Sources that the kernel of this host lacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct MissingSources {
    pub connections: bool,
    pub bytes: bool,
    pub refusals: bool,
}

impl MissingSources {
    /// Adds refusals if the table does not log them.
    pub fn with_refusals(self, untold: bool) -> Self {
        Self {
            refusals: self.refusals || untold,
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

/// Sockets for the kernel's messages about a slot. A kernel without them leaves a sandbox
/// its network, and the record says so.
#[derive(Debug)]
pub(crate) struct ConnectionSockets {
    pub(super) flows: Option<NetlinkSocket>,
    pub(super) refused: Option<NetlinkSocket>,
    pub missing: MissingSources,
}

impl ConnectionSockets {
    /// Opens them in the network namespace of this thread, whose table is in force.
    pub fn open() -> Self {
        let here = |what: &str, socket: io::Result<NetlinkSocket>| {
            let failed = |e: &io::Error| tracing::debug!("no record of {what}: {e}");
            socket.inspect_err(failed).ok()
        };
        let bytes = !flow::count();
        let flows = here("connections", flow::listen());
        let refused = here("refused packets", refused_packet::listen());
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

    /// No sockets.
    #[cfg(test)]
    pub fn none() -> Self {
        Self {
            flows: None,
            refused: None,
            missing: MissingSources::default(),
        }
    }
}
