//! Calls on webhooks. A caller sees its own webhooks only, independent of the scope of its key.

use super::events::respond;
use crate::app::App;
use crate::body::Required;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::events::credentials;
use crate::fleet::Forwarded;
use crate::owned_objects::{blocking, for_owner};
use crate::page::{unknown_token, with_next};
use crate::query::Query;
use crate::wire::webhook::{delivery, shown};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri};
use axum::response::Response;
use axum::{Extension, Json};
use jiffy_api_types::{NewWebhook, Webhook, WebhookDelivery, WebhookDeliveryState, WebhookUpdate};
use jiffy_webhooks::{DeliveryState, WebhookError, Webhooks};
use zeroize::Zeroizing;

/// Maximum and default number of deliveries per page.
pub(crate) const MAX_DELIVERIES: u64 = 100;

/// `GET /events/webhooks`: lists the webhooks of the caller.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
) -> Result<Json<Vec<Webhook>>, ApiError> {
    let all = app.on_webhooks(&caller, |webhooks, owner, _| webhooks.list(owner));
    Ok(Json(all.await?.into_iter().map(shown).collect()))
}

/// `POST /events/webhooks`: creates a webhook.
pub(super) async fn create(
    State(app): State<App>,
    caller: Caller,
    Required(body): Required<NewWebhook>,
) -> Result<(StatusCode, Json<Webhook>), ApiError> {
    let new = jiffy_webhooks::NewWebhook {
        name: body.name,
        url: body.url,
        is_enabled: body.enabled,
        events: body.events,
        secret: Zeroizing::new(body.signature_secret),
    };
    let create =
        move |webhooks: &Webhooks, owner: &str, newest| webhooks.create(owner, &new, newest);
    let created = app.on_webhooks(&caller, create).await?;
    Ok((StatusCode::CREATED, Json(shown(created))))
}

/// `GET /events/webhooks/{webhookID}`: returns a webhook.
pub(super) async fn one(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Webhook>, ApiError> {
    let get = move |webhooks: &Webhooks, owner: &str, _| webhooks.get(owner, &id);
    Ok(Json(shown(app.on_webhooks(&caller, get).await?)))
}

/// `PATCH /events/webhooks/{webhookID}`: changes a webhook.
pub(super) async fn update(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(body): Required<WebhookUpdate>,
) -> Result<Json<Webhook>, ApiError> {
    let update = jiffy_webhooks::WebhookUpdate {
        name: body.name,
        url: body.url,
        is_enabled: body.enabled,
        events: body.events,
        secret: body.signature_secret.map(Zeroizing::new),
    };
    let update = move |webhooks: &Webhooks, owner: &str, newest| {
        webhooks.update(owner, &id, &update, newest)
    };
    Ok(Json(shown(app.on_webhooks(&caller, update).await?)))
}

/// `DELETE /events/webhooks/{webhookID}`: removes a webhook and its pending deliveries.
pub(super) async fn remove(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    let remove = move |webhooks: &Webhooks, owner: &str, _| webhooks.remove(owner, &id);
    app.on_webhooks(&caller, remove).await?;
    // E2B's documentation expects 200.
    Ok(StatusCode::OK)
}

/// `GET /events/webhooks/{webhookID}/deliveries`: deliveries that have not succeeded.
pub(super) async fn deliveries(
    State(app): State<App>,
    caller: Caller,
    forwarded: Option<Extension<Forwarded>>,
    Path(id): Path<String>,
    query: Query,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let state = query.word("state", &WebhookDeliveryState::NAMES)?;
    let state = state.map(|state| match state {
        WebhookDeliveryState::Pending => DeliveryState::Pending,
        WebhookDeliveryState::Failed => DeliveryState::Failed,
    });
    let limit = query.number("limit", 1..=MAX_DELIVERIES)?;
    let limit = usize::try_from(limit.unwrap_or(MAX_DELIVERIES)).unwrap_or(usize::MAX);
    let before = query.get("nextToken").map(str::parse);
    let before = before.transpose().map_err(|_| unknown_token())?;
    let read = move |webhooks: &Webhooks, owner: &str, _| {
        // One delivery more than the limit shows that a next page exists.
        webhooks.deliveries(owner, &id, state, before, limit + 1)
    };
    let mut found = app.on_webhooks(&caller, read).await?;
    let has_more = found.len() > limit;
    found.truncate(limit);
    let found: Vec<WebhookDelivery> = found.into_iter().filter_map(delivery).collect();
    let is_part = forwarded.is_some() || query.get("host").is_some();
    let ((found, has_more), missing) = match &app.fleet {
        Some(fleet) if !is_part => {
            let call = (&uri, credentials(&headers));
            let own = (found, has_more);
            fleet.webhook_deliveries(&caller, call, own, limit).await
        }
        _ => ((found, has_more), Vec::new()),
    };
    let next = found.last().filter(|_| has_more);
    let next = next.map(|last| HeaderValue::from(last.id));
    let response = respond(Json(found), &query, &missing)?;
    Ok(with_next(response, next))
}

impl App {
    /// Returns the webhooks of this host, or of its fleet.
    pub(crate) fn webhooks(&self) -> Result<&Webhooks, ApiError> {
        let webhooks = self.webhooks.as_ref();
        webhooks.ok_or_else(|| ApiError::unsupported_option("this host stores no webhooks"))
    }

    /// Calls `work` with the webhooks of this host, the owner of the caller's webhooks, and the
    /// time of the newest event.
    async fn on_webhooks<T: Send + 'static>(
        &self,
        caller: &Caller,
        work: impl FnOnce(&Webhooks, &str, u64) -> Result<T, WebhookError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let webhooks = self.webhooks()?.clone();
        let newest = self.sandboxes.events().newest().map_or(0, |id| id.time_us);
        let work = move |owner: &str| work(&webhooks, owner, newest);
        for_owner(caller, refused, work).await
    }

    /// Removes the webhooks of a revoked key whose resources are removed.
    pub(crate) async fn remove_webhooks_of(&self, key: &str) -> Result<(), ApiError> {
        let (Some(webhooks), owner) = (self.webhooks.clone(), key.to_owned()) else {
            return Ok(());
        };
        blocking(refused, move || webhooks.remove_all(&owner)).await
    }
}

fn refused(error: WebhookError) -> ApiError {
    let message = error.to_string();
    match error {
        WebhookError::Name
        | WebhookError::Url(_)
        | WebhookError::LongUrl
        | WebhookError::Secret
        | WebhookError::NoEvents => ApiError::invalid(message),
        WebhookError::Full => ApiError::conflict("max_webhooks", message),
        WebhookError::Changed(_) => ApiError::conflict("refused", message),
        WebhookError::Shared {
            is_temporary: true, ..
        } => ApiError::fleet_unavailable(message),
        WebhookError::Unknown(_) => ApiError::not_found("webhook_not_found", message),
        _ => ApiError::internal(message),
    }
}
