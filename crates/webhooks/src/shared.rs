//! [`SharedWebhooks`]: webhooks that several hosts share, such as the hosts of a fleet.

use crate::{Webhook, WebhookError};
use std::fmt;
use tokio::sync::watch;

/// Webhook with its owner and its encrypted secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredWebhook {
    /// Id of the API key that owns the webhook. Empty for the owner of the hosts.
    pub owner: String,
    /// Webhook. The number of dropped events is not shared.
    pub webhook: Webhook,
    /// Encrypted secret.
    pub secret: Vec<u8>,
    /// Time in microseconds since 1970 after which events are sent.
    pub since_us: u64,
    /// Number of changes, including the creation.
    pub version: u64,
}

/// Webhooks that several hosts share. All of them have all webhooks in memory, and send the events
/// of their own sandboxes. A change blocks until the other hosts have received it.
pub trait SharedWebhooks: fmt::Debug + Send + Sync {
    /// Returns the webhooks of all owners, in no particular order.
    ///
    /// # Errors
    /// [`WebhookError::Shared`] if this host does not know the webhooks.
    fn all(&self) -> Result<Vec<StoredWebhook>, WebhookError>;

    /// Returns a number that changes with each change of the webhooks. Zero before this host knows
    /// them.
    fn number(&self) -> watch::Receiver<u64>;

    /// Adds a webhook.
    ///
    /// # Errors
    /// [`WebhookError`], also if the owner has too many webhooks.
    fn create(&self, created: StoredWebhook) -> Result<(), WebhookError>;

    /// Replaces a webhook whose version is one lower.
    ///
    /// # Errors
    /// [`WebhookError`], also if another caller has changed the webhook.
    fn replace(&self, changed: StoredWebhook) -> Result<(), WebhookError>;

    /// Removes the webhooks with these ids. Ids of removed webhooks are ignored.
    ///
    /// # Errors
    /// [`WebhookError`].
    fn remove(&self, ids: Vec<String>) -> Result<(), WebhookError>;
}
