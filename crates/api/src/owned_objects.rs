//! Common parts of the calls on secrets, volumes and webhooks.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use jiffy_api_types::EventType;
use jiffy_engine_api::steps;
use jiffy_event_log::Event;

/// Calls `work` with the owner of the caller's objects, which is empty for the owner of the host.
/// `work` waits for the disk. `refused` converts its error.
pub(crate) async fn for_owner<T, E>(
    caller: &Caller,
    refused: fn(E) -> ApiError,
    work: impl FnOnce(&str) -> Result<T, E> + Send + 'static,
) -> Result<T, ApiError>
where
    T: Send + 'static,
    E: Send + 'static,
{
    let owner = caller.owner_id().unwrap_or_default();
    blocking(refused, move || work(&owner)).await
}

/// Calls `work`, which waits for the disk. `refused` converts its error.
pub(crate) async fn blocking<T, E>(
    refused: fn(E) -> ApiError,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, ApiError>
where
    T: Send + 'static,
    E: Send + 'static,
{
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.map_err(|e| ApiError::internal(e.to_string()))?;
    done.map_err(refused)
}

impl App {
    /// Records an event of a secret or a volume, with the caller of the request in flight.
    pub(crate) fn report_object(&self, kind: EventType, owner: Option<String>, name: &str) {
        let request = steps::request();
        let caller = request.as_ref().map(|request| match &request.caller {
            Some(caller) => caller.to_string(),
            None => Event::HOST_OWNER.to_owned(),
        });
        self.sandboxes.events().append(Event {
            owner,
            caller,
            request: request.and_then(|request| request.id.as_ref().map(|id| id.to_string())),
            name: Some(name.to_owned()),
            ..Event::new(kind)
        });
    }
}
