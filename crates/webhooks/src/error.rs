//! Errors of webhooks.

use crate::webhook::MAX_WEBHOOKS;
use jiffy_api_types::{MAX_WEBHOOK_NAME, MAX_WEBHOOK_SECRET, MAX_WEBHOOK_URL};
use jiffy_database::OpenError;
use std::path::PathBuf;

/// Error of a call on webhooks.
#[derive(Debug, thiserror::Error)]
pub enum WebhookError {
    /// The database cannot be used.
    #[error("cannot use the webhooks in {path}: {source}")]
    Database {
        /// File.
        path: PathBuf,
        /// Error.
        source: rusqlite::Error,
    },
    /// The database cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The host's key cannot be used.
    #[error("cannot encrypt the secrets of webhooks: {0}")]
    Key(#[from] jiffy_secrets::SecretError),
    /// The host has no random numbers for ids.
    #[error("cannot create an id: {0}")]
    Id(String),
    /// The event log cannot be read.
    #[error("cannot read events for webhooks: {0}")]
    Log(String),
    /// The name is invalid.
    #[error("the name of a webhook must have 1 to {MAX_WEBHOOK_NAME} characters")]
    Name,
    /// The address is invalid.
    #[error("the URL of a webhook is invalid: {0}")]
    Url(&'static str),
    /// The URL is too long.
    #[error("the URL of a webhook must have at most {MAX_WEBHOOK_URL} bytes")]
    LongUrl,
    /// The signature secret is invalid.
    #[error("the signature secret of a webhook must have 1 to {MAX_WEBHOOK_SECRET} bytes")]
    Secret,
    /// No event is selected.
    #[error("a webhook must select at least one type of event")]
    NoEvents,
    /// The owner has the maximum number of webhooks.
    #[error("the key has {MAX_WEBHOOKS} webhooks, which is the maximum: delete one first")]
    Full,
    /// The owner has no such webhook.
    #[error(
        "webhook `{0}` does not exist; `jiffy webhook ls` and `GET /events/webhooks` list the webhooks of this key"
    )]
    Unknown(String),
    /// Another caller has changed the webhook at the same time.
    #[error("webhook `{0}` was changed at the same time: try again")]
    Changed(String),
    /// The hosts that share the webhooks cannot read or change them.
    #[error("{reason}")]
    Shared {
        /// Reason.
        reason: String,
        /// True if the call may succeed later.
        is_temporary: bool,
    },
}
