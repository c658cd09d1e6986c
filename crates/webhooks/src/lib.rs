//! Webhooks: events of sandboxes, sent to HTTP servers of users in E2B's form.
//!
//! [`Webhooks`] stores webhooks and pending deliveries in `<home>/webhooks.db`. A delivery contains
//! its event, so that it outlives the event log. [`Webhooks::run`] queues the events of the log and
//! sends them: in order for each sandbox, repeated for 24 hours, and at least once. Several hosts
//! can share their webhooks ([`SharedWebhooks`]).

mod connect;
mod database;
mod error;
mod shared;
mod target;
mod webhook;
mod webhooks;

pub use connect::{Connect, Connecting, Connection};
pub use error::WebhookError;
pub use shared::{SharedWebhooks, StoredWebhook};
pub use webhook::{MAX_WEBHOOKS, NewWebhook, Webhook, WebhookUpdate};
pub use webhooks::{Delivery, DeliveryState, EventForm, OwnWebhooks, Webhooks};
