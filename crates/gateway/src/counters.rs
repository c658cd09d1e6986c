//! Counters of the gateway, for the daemon's metrics.
//!
//! Each field counts events since the start of the daemon, or things that are open now.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[doc = $help:literal])* $name:ident,)*) => {
        /// Counters of a running gateway. See [`GatewayTotals`] for their meaning.
        #[derive(Debug, Default)]
        pub struct GatewayCounters { $(pub(crate) $name: AtomicU64,)* }

        /// Values of the counters at one time.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct GatewayTotals { $($(#[doc = $help])* pub $name: u64,)* }

        impl GatewayCounters {
            /// Returns the current values.
            #[must_use]
            // Relaxed: each counter is an independent statistic.
            pub fn totals(&self) -> GatewayTotals {
                GatewayTotals { $($name: self.$name.load(Relaxed),)* }
            }
        }

        impl GatewayTotals {
            /// Returns the names, help texts and values, for an exposition format.
            pub fn each(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((concat!("gateway_", stringify!($name)), concat!($($help),*), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Open connections of clients.
    connections_open,
    /// Accepted connections.
    connections,
    /// Connections rejected because the maximum number was open.
    connections_refused,
    /// Connections closed because a request head did not arrive in time, or because they were idle.
    connections_timed_out,
    /// TLS handshakes that failed or timed out.
    handshakes_failed,
    /// In-flight requests to sandboxes, including upgraded streams.
    exchanges_open,
    /// Requests answered by a guest.
    answered,
    /// Requests forwarded to the host that has their sandbox.
    forwarded,
    /// Forwarded requests that were sent again, because their sandbox had moved.
    repeated,
    /// Upgraded streams, such as WebSocket connections.
    upgraded,
    /// Requests passed to the control plane.
    control_plane,
    /// Requests rejected before their sandbox was determined.
    refused,
    /// Requests rejected: no token, no valid link, or a path reserved for the host.
    forbidden,
    /// Requests to sandboxes that do not exist or do not run.
    not_found,
    /// Requests to ports on which no program listens.
    port_closed,
    /// Requests to sandboxes that were unreachable or disconnected before an answer.
    unavailable,
    /// Requests rejected because too many were in flight.
    limited,
    /// Connections opened to sandboxes.
    guest_connections,
    /// Requests sent on a reused connection.
    reused,
    /// Requests sent again because a reused connection was closed.
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
