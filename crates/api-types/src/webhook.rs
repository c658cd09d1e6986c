//! Webhooks in E2B's form.

use crate::event::LifecycleEventType;
use crate::parts::Moment;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum length of the name of a webhook in characters.
pub const MAX_WEBHOOK_NAME: usize = 128;
/// Maximum length of the URL of a webhook in bytes.
pub const MAX_WEBHOOK_URL: usize = 2048;
/// Maximum length of the signature secret of a webhook in bytes.
pub const MAX_WEBHOOK_SECRET: usize = 512;
/// Pattern of names in the OpenAPI document.
const NAME: &str = "^[ -~]+$";
/// Pattern of URLs in the OpenAPI document.
const URL: &str = "^https?://[A-Za-z0-9.-]+(:[1-9][0-9]{0,3})?(/[A-Za-z0-9/._~-]*)?$";
/// Pattern of secrets in the OpenAPI document. It excludes accepted characters that are longer than
/// a byte, because lengths in the document are in characters.
const SECRET: &str = "^[ -~]+$";

fn all_events() -> Vec<LifecycleEventType> {
    LifecycleEventType::NAMES.map(|(_, kind)| kind).to_vec()
}

const fn enabled() -> bool {
    true
}

/// A new webhook.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewWebhook {
    /// Name.
    #[schemars(length(min = 1, max = MAX_WEBHOOK_NAME), regex(pattern = NAME))]
    pub name: String,
    /// URL to which each event is posted, with the scheme `https` or `http`. It must lead to the
    /// public internet or to a range of `--allow-private`.
    #[schemars(length(min = 1, max = MAX_WEBHOOK_URL), regex(pattern = URL))]
    pub url: String,
    /// False if events are not sent.
    #[serde(default = "enabled")]
    pub enabled: bool,
    /// Types of the events, at least one. By default all.
    #[serde(default = "all_events")]
    #[schemars(length(min = 1))]
    pub events: Vec<LifecycleEventType>,
    /// Secret of 1 to 512 bytes, with which the header `e2b-signature` is computed. No call returns
    /// it.
    #[schemars(length(min = 1, max = MAX_WEBHOOK_SECRET), regex(pattern = SECRET))]
    pub signature_secret: String,
}

/// Changes of a webhook. Absent members remain unchanged.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct WebhookUpdate {
    /// Name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = MAX_WEBHOOK_NAME), regex(pattern = NAME))]
    pub name: Option<String>,
    /// URL to which each event is posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = MAX_WEBHOOK_URL), regex(pattern = URL))]
    pub url: Option<String>,
    /// False if events are not sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Types of the events, at least one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub events: Option<Vec<LifecycleEventType>>,
    /// Secret with which the header `e2b-signature` is computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = MAX_WEBHOOK_SECRET), regex(pattern = SECRET))]
    pub signature_secret: Option<String>,
}

/// A webhook, without its signature secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Webhook {
    /// Id.
    pub id: String,
    /// Always the same, because a host has one team.
    pub team_id: String,
    /// Name.
    pub name: String,
    /// Time of the creation.
    pub created_at: Moment,
    /// False if events are not sent.
    pub enabled: bool,
    /// URL to which each event is posted.
    pub url: String,
    /// Types of the events.
    pub events: Vec<LifecycleEventType>,
    /// Number of events that were not sent, because 10,000 deliveries were pending.
    pub dropped: u64,
}

/// Delivery of an event that has not succeeded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WebhookDelivery {
    /// Id.
    pub id: u64,
    /// Id of the event.
    #[serde(rename = "eventID")]
    pub event_id: String,
    /// Type of the event.
    pub event_type: LifecycleEventType,
    /// Sandbox of the event.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// State.
    pub state: WebhookDeliveryState,
    /// Number of failed attempts.
    pub attempts: u32,
    /// Time at which the delivery was queued.
    pub created_at: Moment,
    /// Time of the next attempt. Absent for a failed delivery.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_attempt_at: Option<Moment>,
    /// Reason of the last failure. Absent before the first attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// State of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WebhookDeliveryState {
    /// The delivery will be sent, or sent again.
    Pending,
    /// The delivery failed for 24 hours, and is not sent again.
    Failed,
}

impl WebhookDeliveryState {
    /// Names of all states.
    pub const NAMES: [(&'static str, Self); 2] =
        [("pending", Self::Pending), ("failed", Self::Failed)];
}
