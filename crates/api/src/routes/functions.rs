//! Calls on functions: listing, logs, rollback, enabling, disabling and removal.

mod deploy;
pub(super) mod invoke;

pub(super) use deploy::deploy;

use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::query::Query;
use crate::wire::function::{self, FunctionBase};
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_api_types::{
    Function, FunctionLog, FunctionMetrics, FunctionVersion, ModuleState, RollbackFunction,
};
use jiffy_function_manager::{FunctionError, FunctionRecord, Functions};
use jiffy_sandbox_manager::QuotaRefusal;
use std::sync::Arc;
use std::time::Duration;

/// Maximum wait for log entries, in seconds.
pub(crate) const MAX_LOG_WAIT_S: u64 = 60;
/// Maximum position in a log: 2^53, up to which a JavaScript number represents every integer.
pub(crate) const MAX_POSITION: u64 = 1 << 53;

impl From<FunctionError> for ApiError {
    fn from(error: FunctionError) -> Self {
        use FunctionError as F;
        let message = error.to_string();
        match error {
            F::NotInstalled => Self::unsupported(message),
            F::NotFound(_) => Self::not_found("function_not_found", message),
            F::NoModule(_) => Self::not_found("module_not_found", message),
            F::ModuleDamaged(_) => Self::conflict("module_damaged", message).permanent(),
            F::StoreUnavailable(after) => {
                let status = StatusCode::SERVICE_UNAVAILABLE;
                Self::new(status, "store_unavailable", message).after(after.as_secs().max(1))
            }
            F::NoVersion { .. } => Self::not_found("version_not_found", message),
            F::Name | F::Setting(_) | F::Limit(_) => Self::invalid(message),
            // A retry succeeds only after another function is removed.
            F::TooMany => Self::too_many("max_functions", message).permanent(),
            F::TooLarge => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "module_too_large", message).permanent()
            }
            F::RequestTooLarge => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
            }
            F::Module(_) => {
                Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_module", message).permanent()
            }
            F::Unavailable(_) => {
                let status = StatusCode::SERVICE_UNAVAILABLE;
                Self::new(status, "functions_unavailable", message).after(1)
            }
            F::QuotaExceeded(refusal) => match refusal.downcast::<QuotaRefusal>() {
                Ok(refusal) => (*refusal).into(),
                Err(other) => Self::internal(other.to_string()),
            },
            F::File { .. } | F::Store => Self::internal(message),
        }
    }
}

impl App {
    pub(crate) fn functions(&self) -> Result<&Functions, ApiError> {
        let functions = self.functions.as_ref().map(|f| &f.functions);
        // Without the program for functions, every call fails in the same way.
        let functions = functions.filter(|functions| functions.is_installed());
        functions.ok_or_else(|| FunctionError::NotInstalled.into())
    }

    /// Finds a function by name among the functions of the caller. Callers that see the functions
    /// of all keys may also use a function's label, which is its name in URLs.
    pub(crate) fn function(
        &self,
        caller: &Caller,
        name: &str,
    ) -> Result<Arc<FunctionRecord>, ApiError> {
        let functions = self.functions()?;
        if let Caller::Function(function) = caller {
            // Of callers with a key of a function, only sandboxes that call the function back reach
            // this code. They may invoke only this function.
            return if function.name == name {
                Ok(functions.find(function.owner.as_deref(), name)?)
            } else {
                Err(FunctionError::NotFound(name.to_owned()).into())
            };
        }
        let found = match functions.find(caller.owner_scope(), name) {
            // Labels contain the owner, so they are unique on the host.
            Err(FunctionError::NotFound(_)) if caller.owner_scope().is_none() => {
                functions.find_label(name)
            }
            found => found,
        };
        Ok(found?)
    }

    /// Converts a function for the response.
    fn function_info(&self, record: &FunctionRecord) -> Function {
        let functions = self.functions.as_ref().map(|f| &f.functions);
        let status = functions.and_then(|functions| {
            let status = functions.schedule_status(record.owner.as_deref(), &record.name);
            // A function that was removed meanwhile is shown without its schedule.
            status.ok().flatten()
        });
        let base = FunctionBase {
            scheme: self.config.scheme,
            domain: self.config.domain.as_deref(),
            direct_port: self.config.direct_port,
        };
        let state = |digest: &str| self.module_state(record, digest);
        function::function(record, status.as_ref(), &base, &state)
    }

    /// Returns the state of a function's module in the shared store. `None` if the host uses no
    /// store.
    fn module_state(&self, record: &FunctionRecord, digest: &str) -> Option<ModuleState> {
        let functions = self.functions.as_ref().map(|f| &f.functions)?;
        let stored = functions.is_stored(record.owner.as_deref(), digest)?;
        Some(if stored {
            ModuleState::Stored
        } else {
            ModuleState::Uploading
        })
    }
}

/// `GET /functions`: lists the caller's functions, or with `all` the functions of all keys. Without
/// `all`, callers that have no `owner_scope` see the functions of the host's owner.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Json<Vec<Function>>, ApiError> {
    // Callers that are restricted to their own functions cannot list others.
    let all = query.flag("all")? && caller.owner_scope().is_none();
    let records = app.functions()?.list().into_iter();
    let seen = records.filter(|record| all || record.owner.as_deref() == caller.owner_scope());
    Ok(Json(
        seen.map(|record| app.function_info(&record)).collect(),
    ))
}

/// `GET /functions/{name}`.
pub(super) async fn one(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Json<Function>, ApiError> {
    let record = app.function(&caller, &name)?;
    let functions = app.functions()?;
    let counts = functions.metrics(record.owner.as_deref(), &record.name);
    let counts = counts.await?;
    let mut shown = app.function_info(&record);
    shown.metrics = Some(function::metrics(counts));
    Ok(Json(shown))
}

/// `GET /functions/{name}/versions`.
pub(super) async fn versions(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Json<Vec<FunctionVersion>>, ApiError> {
    let record = app.function(&caller, &name)?;
    let state = |digest: &str| app.module_state(&record, digest);
    Ok(Json(function::versions(&record, &state)))
}

/// `GET /functions/{name}/metrics`.
pub(super) async fn metrics(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Json<FunctionMetrics>, ApiError> {
    let record = app.function(&caller, &name)?;
    let functions = app.functions()?;
    let counts = functions.metrics(record.owner.as_deref(), &record.name);
    Ok(Json(function::metrics(counts.await?)))
}

/// `GET /functions/{name}/logs`: returns the entries from position `after` on, and the next
/// position. Waits at most `wait` seconds if there are no entries.
pub(super) async fn logs(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
    query: Query,
) -> Result<Json<FunctionLog>, ApiError> {
    let after = query.number("after", 0..=MAX_POSITION)?.unwrap_or(0);
    let wait = query.number("wait", 0..=MAX_LOG_WAIT_S)?.unwrap_or(0);
    let record = app.function(&caller, &name)?;
    let (owner, wait) = (record.owner.as_deref(), Duration::from_secs(wait));
    let functions = app.functions()?;
    let (entries, next) = functions.logs(owner, &record.name, after, wait).await?;
    Ok(Json(FunctionLog {
        entries: entries.into_iter().map(function::log_entry).collect(),
        next: next.to_string(),
    }))
}

/// `POST /functions/{name}/rollback`: activates an earlier version.
pub(super) async fn rollback(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
    Optional(body): Optional<RollbackFunction>,
) -> Result<Json<Function>, ApiError> {
    let record = app.function(&caller, &name)?;
    let (owner, functions) = (record.owner.as_deref(), app.functions()?);
    let changed = functions.roll_back(owner, &record.name, body.version);
    Ok(Json(app.function_info(&*changed.await?)))
}

/// Enables a function if `enabled` is true, or disables it.
async fn enable(
    app: &App,
    caller: &Caller,
    name: &str,
    enabled: bool,
) -> Result<Json<Function>, ApiError> {
    let record = app.function(caller, name)?;
    let (owner, functions) = (record.owner.as_deref(), app.functions()?);
    let changed = functions.enable(owner, &record.name, enabled);
    Ok(Json(app.function_info(&*changed.await?)))
}

/// `POST /functions/{name}/enable`.
pub(super) async fn enable_one(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Json<Function>, ApiError> {
    enable(&app, &caller, &name, true).await
}

/// `POST /functions/{name}/disable`.
pub(super) async fn disable_one(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Json<Function>, ApiError> {
    enable(&app, &caller, &name, false).await
}

/// `DELETE /functions/{name}`.
pub(super) async fn remove(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    let record = app.function(&caller, &name)?;
    let (owner, functions) = (record.owner.as_deref(), app.functions()?);
    functions.remove(owner, &record.name).await?;
    // Revoke the key after the removal: if the removal fails, the function still needs its key.
    app.revoke_unused_sandbox_key(record.sandbox_key.as_ref(), None);
    Ok(StatusCode::NO_CONTENT)
}
