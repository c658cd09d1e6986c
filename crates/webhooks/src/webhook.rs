//! [`Webhook`]: the URL, filters and secret of a webhook, and the limits of its parts.

use crate::WebhookError;
use crate::target::Target;
use jiffy_api_types::{LifecycleEventType, MAX_WEBHOOK_NAME, MAX_WEBHOOK_SECRET};
use zeroize::Zeroizing;

/// Maximum number of webhooks of one owner.
pub const MAX_WEBHOOKS: usize = 16;

/// A webhook, without its signature secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Webhook {
    /// Id.
    pub id: String,
    /// Name.
    pub name: String,
    /// URL to which events are sent.
    pub url: String,
    /// False if events are not sent.
    pub is_enabled: bool,
    /// Types of events.
    pub events: Vec<LifecycleEventType>,
    /// Creation time in milliseconds since 1970.
    pub created_ms: u64,
    /// Number of events that were not queued, because too many deliveries were pending.
    pub dropped: u64,
}

/// A new webhook.
pub struct NewWebhook {
    /// Name.
    pub name: String,
    /// URL to which events are sent.
    pub url: String,
    /// False if events are not sent.
    pub is_enabled: bool,
    /// Types of events.
    pub events: Vec<LifecycleEventType>,
    /// Secret with which deliveries are signed.
    pub secret: Zeroizing<String>,
}

/// Changes of a webhook. `None` leaves a part unchanged.
#[derive(Default)]
pub struct WebhookUpdate {
    /// Name.
    pub name: Option<String>,
    /// URL to which events are sent.
    pub url: Option<String>,
    /// False if events are not sent.
    pub is_enabled: Option<bool>,
    /// Types of events.
    pub events: Option<Vec<LifecycleEventType>>,
    /// Secret with which deliveries are signed.
    pub secret: Option<Zeroizing<String>>,
}

impl WebhookUpdate {
    /// Changes a webhook. `events` are the checked types of events.
    pub(crate) fn apply(&self, webhook: &mut Webhook, events: Option<Vec<LifecycleEventType>>) {
        if let Some(name) = &self.name {
            webhook.name.clone_from(name);
        }
        if let Some(url) = &self.url {
            webhook.url.clone_from(url);
        }
        if let Some(events) = events {
            webhook.events = events;
        }
        webhook.is_enabled = self.is_enabled.unwrap_or(webhook.is_enabled);
    }
}

pub(crate) fn check_name(name: &str) -> Result<(), WebhookError> {
    let is_name = (1..=MAX_WEBHOOK_NAME).contains(&name.chars().count())
        && !name.chars().any(char::is_control);
    is_name.then_some(()).ok_or(WebhookError::Name)
}

pub(crate) fn check_url(url: &str) -> Result<(), WebhookError> {
    Target::parse(url).map(drop)
}

pub(crate) fn check_secret(secret: &str) -> Result<(), WebhookError> {
    let is_secret = (1..=MAX_WEBHOOK_SECRET).contains(&secret.len());
    is_secret.then_some(()).ok_or(WebhookError::Secret)
}

/// Returns the types in the order of [`LifecycleEventType::NAMES`], each once.
pub(crate) fn checked_events(
    events: &[LifecycleEventType],
) -> Result<Vec<LifecycleEventType>, WebhookError> {
    let all = LifecycleEventType::NAMES.into_iter();
    let selected: Vec<_> = all
        .map(|(_, kind)| kind)
        .filter(|kind| events.contains(kind))
        .collect();
    if selected.is_empty() {
        return Err(WebhookError::NoEvents);
    }
    Ok(selected)
}
