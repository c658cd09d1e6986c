//! Direct connections: the daemon accepts a client, reads which function its first request names,
//! and hands the connection over to the process of that function's owner, which serves it.

use serde::{Deserialize, Serialize};

/// Connection of a client, whose descriptor comes with the message. Nothing was taken from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectConnection {
    /// Number of the connection, for [`DirectClosed`].
    pub id: u64,
    /// Function that it is for. Others cannot be reached over it.
    pub function: String,
    /// Host of its first request as it was written, with the port. Further ones must have it too.
    pub host: String,
}

/// End of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectClosed {
    /// Number of the connection.
    pub id: u64,
}

/// Change of a connection between idle and busy. A connection that was handed over is busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectActivity {
    /// Number of the connection.
    pub id: u64,
    /// A request is under way.
    pub is_busy: bool,
}

/// Message of a process about a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DirectEvent {
    /// It is idle, or busy again.
    Activity(DirectActivity),
    /// It has ended.
    Closed(DirectClosed),
}

/// Answer of a function to direct requests. A function that was just loaded has the first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DirectAccess {
    /// As if there were no such function.
    #[default]
    Hidden,
    /// That it is disabled.
    Disabled,
    /// Its own.
    Public,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_told_apart_by_their_fields() {
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
