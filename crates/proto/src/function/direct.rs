//! Direct connections: connections of clients that a tenant's process serves itself. The daemon
//! accepts a client and reads the name of the function from the first request, without consuming
//! it. The daemon then passes the connection to the process of the function's owner.
//!
//! A *direct* connection is passed from the daemon to the process of the tenant, which then serves
//! its requests without the gateway.

use serde::{Deserialize, Serialize};

/// Connection of a client. Its descriptor is sent with the message. No bytes were consumed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectConnection {
    /// Number of the connection, to which [`DirectClosed`] refers.
    pub id: u64,
    /// Function that the connection is for. Other functions cannot be reached over it.
    pub function: String,
    /// Host of the first request as written, with the port. All further requests must have the same
    /// host.
    pub host: String,
}

/// End of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectClosed {
    /// Number of the connection.
    pub id: u64,
}

/// Change of a connection between idle and busy. A connection that was just passed on is busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectActivity {
    /// Number of the connection.
    pub id: u64,
    /// Set if a request is in flight.
    pub is_busy: bool,
}

/// Message of a tenant's process about a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DirectEvent {
    /// The connection became idle or busy.
    Activity(DirectActivity),
    /// The connection was closed.
    Closed(DirectClosed),
}

/// Response of a function to direct requests. The default applies to a function that was just
/// loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DirectAccess {
    /// The response for an unknown function.
    #[default]
    Hidden,
    /// The response for a disabled function.
    Disabled,
    /// The response of the function itself.
    Public,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_distinguished_by_their_fields() {
        for event in [
            DirectEvent::Closed(DirectClosed { id: 1 }),
            DirectEvent::Activity(DirectActivity {
                id: 2,
                is_busy: true,
            }),
        ] {
            let text = serde_json::to_string(&event).unwrap();
            assert_eq!(serde_json::from_str::<DirectEvent>(&text).unwrap(), event);
        }
        let closed = serde_json::to_string(&DirectClosed { id: 1 }).unwrap();
        let event: DirectEvent = serde_json::from_str(&closed).unwrap();
        assert_eq!(event, DirectEvent::Closed(DirectClosed { id: 1 }));
    }
}
