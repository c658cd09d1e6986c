//! Counters of the gateway's work, for the daemon's metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts while the gateway runs; see [`GatewayTotals`] for their meaning.
        #[derive(Debug, Default)]
        pub struct GatewayCounters { $(pub(crate) $name: AtomicU64,)* }

        /// The counts at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct GatewayTotals { $($(#[$doc])* pub $name: u64,)* }

        impl GatewayCounters {
            /// The counts now.
            #[must_use]
            pub fn totals(&self) -> GatewayTotals {
                GatewayTotals { $($name: self.$name.load(Relaxed),)* }
            }
        }

        impl GatewayTotals {
            /// Names and values, for an exposition format.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((concat!("gateway_", stringify!($name)), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Gauge: connections of clients that are open.
    connections_open,
    /// Connections accepted.
    connections,
    /// Connections turned away because there were too many.
    connections_refused,
    /// Connections closed because a request's head did not arrive in time, or because of idleness.
    connections_timed_out,
    /// TLS handshakes that failed or took too long.
    handshakes_failed,
    /// Gauge: requests to sandboxes under way, upgraded streams included.
    exchanges_open,
    /// Requests whose answer came from a guest.
    answered,
    /// Streams upgraded (WebSocket and the like).
    upgraded,
    /// Requests passed to the control plane.
    control_plane,
    /// Requests refused before a sandbox was looked for.
    refused,
    /// Requests refused for want of a token or a valid link, or for a path that is the host's.
    forbidden,
    /// Requests to sandboxes that are not there or do not run.
    not_found,
    /// Requests to ports on which nothing listens.
    port_closed,
    /// Requests to sandboxes that could not be reached, or broke off before answering.
    unavailable,
    /// Requests turned away because too many were under way.
    limited,
    /// Connections opened into sandboxes.
    guest_connections,
    /// Requests sent on a connection that had served before.
    reused,
    /// Requests sent again because such a connection turned out dead.
    retried,
    /// Bytes of bodies and upgraded streams from clients to guests.
    bytes_to_guests,
    /// Bytes of bodies and upgraded streams from guests to clients.
    bytes_to_clients,
}

pub(crate) fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Relaxed);
}

pub(crate) fn remove(counter: &AtomicU64) {
    counter.fetch_sub(1, Relaxed);
}
