//! [`Event`]: the stored form of an event, one line of JSON.

use crate::log::page::Entry;
use jiffy_api_types::EventType;
use serde::{Deserialize, Serialize};

/// Maximum length of the cause of an event in bytes.
const MAX_CAUSE_BYTES: usize = 1024;

/// Event, as the log stores it. Members that the type does not use are `None`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// Time in microseconds since 1970. The feed sets it.
    #[serde(rename = "t")]
    pub time_us: u64,
    /// Type.
    pub kind: EventType,
    /// API key that owns the object. `None` if the host's owner does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Caller: the id of an API key, or [`Event::HOST_OWNER`]. `None` for events of the host
    /// itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caller: Option<String>,
    /// Id of the request that caused the event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// Id of the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// Name of the object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Reference of the template, or id of the template of a build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Id of the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Sandbox that the sandbox was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forked_from: Option<String>,
    /// Id of the build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<String>,
    /// Id of the key that was created or revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Number of sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// Deadline of the sandbox in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// Cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
}

impl Event {
    /// Caller of the host's owner.
    pub const HOST_OWNER: &'static str = "owner";

    /// Creates an event without details.
    #[must_use]
    pub fn new(kind: EventType) -> Self {
        Self {
            time_us: 0,
            kind,
            owner: None,
            caller: None,
            request: None,
            sandbox: None,
            name: None,
            template: None,
            snapshot: None,
            forked_from: None,
            build: None,
            key: None,
            count: None,
            deadline_ms: None,
            cause: None,
        }
    }

    /// Sets the cause. A long text is cut.
    #[must_use]
    pub fn because(mut self, cause: &str) -> Self {
        let mut end = cause.len().min(MAX_CAUSE_BYTES);
        while !cause.is_char_boundary(end) {
            end -= 1;
        }
        self.cause = Some(cause[..end].to_owned());
        self
    }
}

impl Entry for Event {
    fn time_us(&self) -> u64 {
        self.time_us
    }
}
