//! [`WebhookRow`]: webhook of an API key in the tables of the fleet. A *webhook* sends events of
//! sandboxes to an HTTP server.

use super::super::{UnknownFields, check_text, rule};
use super::row::MAX_ID_BYTES;
use serde::{Deserialize, Serialize};

/// Maximum number of webhooks of one owner.
pub const MAX_OWNER_WEBHOOKS: usize = 16;
/// Maximum length of a name in bytes.
const MAX_NAME: usize = 1024;
/// Maximum length of a URL.
const MAX_URL: usize = 4096;
/// Maximum length of an encrypted secret in base64.
const MAX_SECRET: usize = 4096;
/// Maximum number of types of events, and of the bytes of a type.
const MAX_EVENTS: usize = 64;

/// Webhook of an API key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WebhookRow {
    /// Id.
    pub id: String,
    /// Id of the key that owns the webhook. `None` for the owner of the fleet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Name.
    pub name: String,
    /// URL to which events are sent.
    pub url: String,
    /// False if events are not sent.
    pub enabled: bool,
    /// Types of events.
    pub events: Vec<String>,
    /// Encrypted secret of the signatures, in base64.
    pub secret: String,
    /// Number of changes, including the creation.
    pub version: u64,
    /// Creation time in milliseconds since 1970.
    pub created_ms: u64,
    /// Time in microseconds since 1970 after which events are sent: the time at which the webhook
    /// was created or enabled.
    pub since_us: u64,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl WebhookRow {
    /// Checks the fields of a webhook.
    pub(super) fn check(&self) -> Result<(), String> {
        check_text("id", &self.id, MAX_ID_BYTES)?;
        if let Some(owner) = &self.owner {
            check_text("owner", owner, MAX_ID_BYTES)?;
        }
        rule(
            (1..=MAX_NAME).contains(&self.name.len()) && !self.name.chars().any(char::is_control),
            "the name of a webhook is too long, or contains control characters",
        )?;
        check_text("url", &self.url, MAX_URL)?;
        check_text("secret", &self.secret, MAX_SECRET)?;
        rule(
            (1..=MAX_EVENTS).contains(&self.events.len()),
            "a webhook has no or too many types of events",
        )?;
        let mut events = self.events.iter();
        events.try_for_each(|event| check_text("events", event, MAX_EVENTS))?;
        rule(
            (1..u64::MAX).contains(&self.version),
            "the version of a webhook is out of range",
        )
    }
}
