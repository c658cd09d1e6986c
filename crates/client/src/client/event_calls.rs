//! Calls of the API for events.

use super::Client;
use hyper::Method;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::Duration;

/// Maximum number of events in a response.
const MAX_EVENTS: usize = 1000;

/// Sandboxes that changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SandboxChanges {
    /// Ids of the sandboxes.
    pub ids: BTreeSet<String>,
    /// Position after the events. `None` if no event exists.
    pub position: Option<String>,
    /// True if events before this position are no longer retained, so that other sandboxes may have
    /// changed too.
    pub is_incomplete: bool,
}

/// Page of events. Types of events that this version does not know are accepted.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Page {
    events: Vec<SandboxEvent>,
    next: Option<String>,
    dropped: Option<Value>,
}

/// Field of an event that this client uses.
#[derive(Debug, Deserialize)]
struct SandboxEvent {
    #[serde(rename = "sandboxID", default)]
    sandbox_id: Option<String>,
}

impl Client {
    /// Returns the position after the newest event. `None` if no event exists.
    pub async fn newest_event(&self) -> anyhow::Result<Option<String>> {
        let path = "/events?limit=1&order=desc";
        let page: Page = self.call(Method::GET, path, &()).await?;
        Ok(page.next)
    }

    /// Waits at most `limit` for events after `position`, and returns the sandboxes that they
    /// concern. The server waits at most 20 s.
    pub async fn sandbox_changes(
        &self,
        position: Option<String>,
        limit: Duration,
    ) -> anyhow::Result<SandboxChanges> {
        let mut path = format!("/events?limit={MAX_EVENTS}&wait={}", limit.as_secs());
        if let Some(position) = &position {
            path += &format!("&after={position}");
        }
        let page: Page = self.call(Method::GET, &path, &()).await?;
        let ids = page.events.into_iter().filter_map(|event| event.sandbox_id);
        Ok(SandboxChanges {
            ids: ids.collect(),
            position: page.next.or(position),
            is_incomplete: page.dropped.is_some(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn events_of_unknown_types_and_fields_are_accepted() {
        let page = json!({
            "events": [
                { "id": "1-h1", "type": "sandbox.renamed", "sandboxID": "a", "name": "x" },
                { "id": "2-h1", "type": "sandbox.teleported", "sandboxID": "b", "to": 7 },
                { "id": "3-h1", "type": "key.created", "keyID": "k" },
            ],
            "next": "3-h1", "more": false, "extra": {},
        });
        let page: Page = serde_json::from_value(page).unwrap();
        let ids: Vec<_> = page
            .events
            .iter()
            .map(|e| e.sandbox_id.as_deref())
            .collect();
        assert_eq!(ids, [Some("a"), Some("b"), None]);
        assert_eq!(page.next.as_deref(), Some("3-h1"));
        assert!(page.dropped.is_none());
    }
}
