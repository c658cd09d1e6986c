//! Calls on secrets. A caller sees its own secrets only, independent of the scope of its key.

use crate::app::App;
use crate::body::Required;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::owned_objects::{blocking, for_owner};
use crate::page::Page;
use crate::query::Query;
use crate::wire::secret::shown;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use jiffy_api_types::{EventType, NewSecret, Secret, SecretUpdate};
use jiffy_secrets::{SecretError, Secrets};
use std::sync::Arc;
use zeroize::Zeroizing;

/// Default number of secrets per page.
pub(crate) const DEFAULT_PAGE: usize = 100;

/// `GET /secrets`: lists the secrets of the caller by name.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Response, ApiError> {
    let page = Page::by_name(&query, DEFAULT_PAGE)?;
    let (after, fetch) = (page.after_name().map(str::to_owned), page.fetch_limit());
    let list = move |secrets: &Secrets, owner: &str| secrets.list(owner, after.as_deref(), fetch);
    let found = app.on_secrets(&caller, list).await?;
    Ok(page.response_by_name(found, |secret| &secret.name, shown))
}

/// `GET /secrets/{secretID}`: returns a secret without its value.
pub(super) async fn one(
    State(app): State<App>,
    caller: Caller,
    Path(which): Path<String>,
) -> Result<Json<Secret>, ApiError> {
    let get = move |secrets: &Secrets, owner: &str| secrets.get(owner, &which);
    Ok(Json(shown(app.on_secrets(&caller, get).await?)))
}

/// `POST /secrets`: creates a secret.
pub(super) async fn create(
    State(app): State<App>,
    caller: Caller,
    Required(body): Required<NewSecret>,
) -> Result<(StatusCode, Json<Secret>), ApiError> {
    let new = jiffy_secrets::NewSecret {
        name: body.name,
        value: Zeroizing::new(body.value),
        metadata: body.metadata.unwrap_or_default(),
    };
    let create = move |secrets: &Secrets, owner: &str| secrets.create(owner, &new);
    let created = app.on_secrets(&caller, create).await?;
    app.report_object(EventType::SecretCreated, caller.owner_id(), &created.name);
    Ok((StatusCode::CREATED, Json(shown(created))))
}

/// `POST /secrets/{secretID}`: replaces the value of a secret.
pub(super) async fn update(
    State(app): State<App>,
    caller: Caller,
    Path(which): Path<String>,
    Required(body): Required<SecretUpdate>,
) -> Result<Json<Secret>, ApiError> {
    let value = Zeroizing::new(body.value);
    let update = move |secrets: &Secrets, owner: &str| {
        secrets.update(owner, &which, &value, body.metadata.as_ref())
    };
    let changed = app.on_secrets(&caller, update).await?;
    app.report_object(EventType::SecretChanged, caller.owner_id(), &changed.name);
    Ok(Json(shown(changed)))
}

/// `DELETE /secrets/{secretID}`: removes a secret.
pub(super) async fn remove(
    State(app): State<App>,
    caller: Caller,
    Path(which): Path<String>,
) -> Result<StatusCode, ApiError> {
    let remove = move |secrets: &Secrets, owner: &str| secrets.remove(owner, &which);
    let removed = app.on_secrets(&caller, remove).await?;
    app.report_object(EventType::SecretDeleted, caller.owner_id(), &removed.name);
    Ok(StatusCode::NO_CONTENT)
}

impl App {
    /// Returns the secrets of this host, or of its fleet.
    pub(crate) fn secrets(&self) -> Result<&Arc<Secrets>, ApiError> {
        let secrets = self.secrets.as_ref();
        secrets.ok_or_else(|| ApiError::unsupported_option("this host stores no secrets"))
    }

    /// Calls `work` with the secrets of this host and the owner of the caller's secrets.
    async fn on_secrets<T: Send + 'static>(
        &self,
        caller: &Caller,
        work: impl FnOnce(&Secrets, &str) -> Result<T, SecretError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let secrets = self.secrets()?.clone();
        for_owner(caller, ApiError::from, move |owner| work(&secrets, owner)).await
    }

    /// Removes the secrets of a revoked key whose resources are removed.
    pub(crate) async fn remove_secrets_of(&self, key: &str) -> Result<(), ApiError> {
        let (Some(secrets), owner) = (self.secrets.clone(), key.to_owned()) else {
            return Ok(());
        };
        let removed = blocking(ApiError::from, move || secrets.remove_all(&owner)).await?;
        for secret in removed {
            self.report_object(EventType::SecretDeleted, Some(key.to_owned()), &secret.name);
        }
        Ok(())
    }
}

impl From<SecretError> for ApiError {
    fn from(error: SecretError) -> Self {
        let message = error.to_string();
        match error {
            SecretError::Name(_) | SecretError::Value | SecretError::Metadata => {
                ApiError::invalid(message)
            }
            SecretError::Exists(_) => ApiError::conflict("name_taken", message),
            SecretError::Changed(_) => ApiError::conflict("refused", message),
            SecretError::Shared {
                is_temporary: true, ..
            } => ApiError::fleet_unavailable(message),
            SecretError::Full => ApiError::conflict("max_secrets", message),
            SecretError::Unknown(_) => ApiError::not_found("secret_not_found", message),
            _ => ApiError::internal(message),
        }
    }
}
