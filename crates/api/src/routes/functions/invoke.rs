//! Requests to functions: by path with a key (`/functions/NAME/invoke/...`), or by the function's
//! host name. The first label of this host name, which contains owner and name, identifies the
//! function.

use crate::app::App;
use crate::caller::{Caller, identify};
use crate::error::{ApiError, FunctionAnswer, convert_error};
use crate::fleet::route_function;
use crate::hooks::FunctionCall;
use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::uri::PathAndQuery;
use axum::http::{StatusCode, Uri};
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::Response;
use axum::routing::any;
use jiffy_function_manager::{FunctionError, FunctionRecord};
use std::sync::Arc;

/// Label of a function's host name. The listener inserts the label into the request's extensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionHost(pub String);

/// Requests by path: `/functions/{name}/invoke/...`.
pub(in crate::routes) fn by_path() -> Router<App> {
    Router::new()
        .route("/functions/{name}/invoke", any(invoke_by_path))
        .route("/functions/{name}/invoke/", any(invoke_by_path))
        .route("/functions/{name}/invoke/{*rest}", any(invoke_below))
}

/// Returns the router for requests with a [`FunctionHost`]. It accepts any path.
pub fn function_router(app: App) -> Router {
    Router::new()
        .fallback(invoke_by_host)
        .layer(from_fn_with_state(app.clone(), route_function))
        .layer(map_response(convert_error))
        .with_state(app)
}

async fn invoke_below(
    state: State<App>,
    caller: Caller,
    Path((name, _)): Path<(String, String)>,
    request: Request,
) -> Result<Response, ApiError> {
    invoke_by_path(state, caller, Path(name), request).await
}

/// `/functions/{name}/invoke/...`: the function receives the rest of the path.
async fn invoke_by_path(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
    mut request: Request,
) -> Result<Response, ApiError> {
    may_invoke(&caller)?;
    let record = app.function(&caller, &name)?;
    // The path is not decoded, because the function must receive the remainder as sent.
    let written = request.uri().path();
    // The parts of `/functions/{name}/invoke/{rest}`: an empty part before the first slash, three
    // parts, and the remainder.
    let rest = written.splitn(5, '/').nth(4);
    // The prefix is everything before the slash that starts the remainder.
    let prefix_bytes = written.len() - rest.map_or(0, |rest| rest.len() + 1);
    let prefix = written.get(..prefix_bytes).unwrap_or(written).to_owned();
    let mut path = format!("/{}", rest.unwrap_or_default());
    if let Some(query) = request.uri().query() {
        path.push('?');
        path.push_str(query);
    }
    let path: PathAndQuery = path
        .parse()
        .map_err(|_| ApiError::invalid("the path after `/invoke` is invalid"))?;
    *request.uri_mut() = Uri::from(path);
    app.invoke(record, Some(prefix), request).await
}

/// Request to the host name of a function. A public function needs no key.
async fn invoke_by_host(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let label = request.extensions().get::<FunctionHost>().cloned();
    let label = label.map(|FunctionHost(label)| label).unwrap_or_default();
    let functions = app.functions()?;
    // An invalid label is handled like an unknown function.
    let found = functions.find_label(&label).ok();
    // A function of a key whose resources are being removed is handled like an unknown function as
    // well.
    let found = found
        .filter(|record| app.keys.status(record.owner.as_deref()) != crate::keys::KeyStatus::Ended);
    let record = match found {
        Some(record) if record.public => record,
        // Authenticate first: the response to a caller without a key must not reveal whether the
        // function exists.
        found => {
            let caller = match request.extensions().get::<Caller>() {
                Some(caller) => caller.clone(),
                None => identify(&app, &request)?,
            };
            may_invoke(&caller)?;
            let visible = found.filter(|record| caller.sees(record.owner.as_deref()));
            visible.ok_or(FunctionError::NotFound(label))?
        }
    };
    app.invoke(record, None, request).await
}

/// Rejects read-only callers.
fn may_invoke(caller: &Caller) -> Result<(), ApiError> {
    if caller.is_read_only() {
        Err(ApiError::read_only())
    } else {
        Ok(())
    }
}

impl App {
    /// Passes an authenticated request to a function, within the limit of concurrent requests of
    /// its owner. `prefix` is the part of the path that was removed.
    async fn invoke(
        &self,
        record: Arc<FunctionRecord>,
        prefix: Option<String>,
        request: Request,
    ) -> Result<Response, ApiError> {
        if !record.enabled {
            let message = "the function is disabled: enable it with `jiffy function enable`";
            let status = StatusCode::SERVICE_UNAVAILABLE;
            return Err(ApiError::new(status, "function_disabled", message));
        }
        // Functions of a key whose resources are being removed are no longer reachable.
        if self.keys.status(record.owner.as_deref()) == crate::keys::KeyStatus::Ended {
            return Err(FunctionError::NotFound(record.name.clone()).into());
        }
        // A request to a function counts like a request to a sandbox. The permit is held until the
        // response ends.
        let permit = record.owner.as_deref().map(|key| self.quota.exchange(key));
        let permit = permit.transpose()?;
        let invoker = self.functions.as_ref().map(|f| f.invoker.clone());
        let invoker = invoker.ok_or(FunctionError::NotInstalled)?;
        let call = FunctionCall {
            record,
            prefix,
            permit: permit.map(|permit| Box::new(permit) as _),
            request,
        };
        let mut response = invoker.invoke(call).await;
        // Error responses of the function must reach the client unchanged.
        response.extensions_mut().insert(FunctionAnswer);
        Ok(response)
    }
}
