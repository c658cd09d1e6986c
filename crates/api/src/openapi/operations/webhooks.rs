//! Operations on webhooks.

use crate::openapi::operation::{Operation, query};
use crate::routes::bounds::MAX_DELIVERIES;
use axum::http::Method;
use jiffy_api_types::{NewWebhook, Webhook, WebhookDelivery, WebhookUpdate};
use serde_json::json;

/// Operations on webhooks.
pub(super) fn webhooks() -> Vec<Operation> {
    vec![
        Operation::get(
            "/events/webhooks",
            "listWebhooks",
            "List the webhooks of the key in the order of their creation",
        )
        .answers::<Vec<Webhook>>(200, "Webhooks without their signature secrets"),
        Operation::post(
            "/events/webhooks",
            "createWebhook",
            "Create a webhook: events of sandboxes are posted to a URL",
        )
        .takes::<NewWebhook>()
        .answers::<Webhook>(201, "Webhook without its signature secret")
        .fails_with(&[409]),
        Operation::get(
            "/events/webhooks/{webhookID}",
            "getWebhook",
            "Get a webhook of the key",
        )
        .answers::<Webhook>(200, "Webhook without its signature secret"),
        Operation::new(
            Method::PATCH,
            "/events/webhooks/{webhookID}",
            "updateWebhook",
            "Change a webhook",
        )
        .takes::<WebhookUpdate>()
        .answers::<Webhook>(200, "Webhook without its signature secret"),
        Operation::delete(
            "/events/webhooks/{webhookID}",
            "deleteWebhook",
            "Remove a webhook and its pending deliveries",
        )
        .answers_with(200, "The webhook was removed"),
        Operation::get(
            "/events/webhooks/{webhookID}/deliveries",
            "listWebhookDeliveries",
            "List the deliveries of a webhook that are pending or have failed, newest first",
        )
        .with(vec![query(
            "state",
            "Only deliveries in this state",
            json!({ "type": "string", "enum": ["pending", "failed"] }),
        )])
        .paged_by_position(MAX_DELIVERIES, MAX_DELIVERIES)
        .merged()
        .answers::<Vec<WebhookDelivery>>(200, "Deliveries"),
    ]
}
