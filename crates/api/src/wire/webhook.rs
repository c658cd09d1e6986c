//! Conversion of webhooks and their deliveries to the bodies of the API.

use super::moment;
use jiffy_api_types::{LifecycleEventType, Webhook, WebhookDelivery, WebhookDeliveryState};
use jiffy_proto::agent::TEAM_ID;
use jiffy_webhooks::{Delivery, DeliveryState};

/// Returns a webhook as clients see it.
pub(crate) fn shown(webhook: jiffy_webhooks::Webhook) -> Webhook {
    Webhook {
        id: webhook.id,
        team_id: TEAM_ID.to_owned(),
        name: webhook.name,
        created_at: moment(webhook.created_ms),
        enabled: webhook.is_enabled,
        url: webhook.url,
        events: webhook.events,
        dropped: webhook.dropped,
    }
}

/// Returns a delivery as clients see it. `None` if its type is unknown to this version.
pub(crate) fn delivery(delivery: Delivery) -> Option<WebhookDelivery> {
    let mut kinds = LifecycleEventType::NAMES.into_iter();
    let (_, kind) = kinds.find(|(name, _)| *name == delivery.kind)?;
    Some(WebhookDelivery {
        id: delivery.id,
        event_id: delivery.event,
        event_type: kind,
        sandbox_id: delivery.sandbox,
        state: match delivery.state {
            DeliveryState::Pending => WebhookDeliveryState::Pending,
            DeliveryState::Failed => WebhookDeliveryState::Failed,
        },
        attempts: delivery.attempts,
        created_at: moment(delivery.created_ms),
        next_attempt_at: delivery.next_ms.map(moment),
        error: delivery.error,
    })
}
