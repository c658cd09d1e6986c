//! Templates, and what old clients ask beside them.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::hooks::TemplateRefusal;
use crate::query::Query;
use crate::wire::template::{build_id, created, listed};
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_engine::Engine;
use serde_json::{Value, json};

/// Whose templates they are. There is one team on a host.
const TEAM: &str = "local";

fn failed(e: TemplateRefusal) -> ApiError {
    ApiError::internal(e.to_string())
}

/// `GET /templates`: those that are built.
pub(super) async fn list<E: Engine>(
    State(app): State<App<E>>,
    _: Caller,
) -> Result<Json<Vec<Value>>, ApiError> {
    let all = app.templates.list().map_err(failed)?;
    Ok(Json(all.iter().map(listed).collect()))
}

/// `GET /templates/{id}`: one with its build.
pub(super) async fn one<E: Engine>(
    State(app): State<App<E>>,
    _: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let info = app.template(&id)?;
    let mut shown = listed(&info);
    if let Some(map) = shown.as_object_mut() {
        let build = json!({
            "buildID": build_id(&info),
            "status": "ready",
            "createdAt": created(&info),
            "updatedAt": created(&info),
            "finishedAt": created(&info),
            "cpuCount": info.size.vcpus,
            "memoryMB": info.size.memory_mib,
            "diskSizeMB": info.size.disk_mib,
        });
        map.insert("builds".to_owned(), json!([build]));
    }
    Ok(Json(shown))
}

/// `DELETE /templates/{id}`: a template, or a snapshot. A snapshot's data go when nothing needs them any more.
pub(super) async fn delete<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    let unknown = match app.template(&id) {
        Ok(info) => {
            caller.require_admin("removing a template")?;
            let templates = app.templates.clone();
            // Hundreds of megabytes.
            let removed = tokio::task::spawn_blocking(move || templates.remove(&info.name)).await;
            return match removed {
                Ok(Ok(())) => Ok(StatusCode::NO_CONTENT),
                // One that is only known as a recipe.
                Ok(Err(TemplateRefusal::Unknown(_))) => Err(ApiError::not_found(
                    "template_not_found",
                    "this template is not built: there is nothing to remove",
                )),
                Ok(Err(e)) => Err(failed(e)),
                Err(e) => Err(ApiError::internal(e.to_string())),
            };
        }
        Err(e) if e.error_code == "template_not_found" => e,
        Err(e) => return Err(e),
    };
    let Ok(snapshot) = app.snapshot(&caller, &id) else {
        return Err(unknown);
    };
    // Its owner is told what still needs it; clients expect that it is simply gone.
    match caller.is_owner() {
        true => app.sandboxes.remove_snapshot(&snapshot.id)?,
        false => app.sandboxes.release_snapshot(&snapshot.id)?,
    };
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /templates/aliases/{alias}`: whether there is one of that name.
pub(super) async fn alias<E: Engine>(
    State(app): State<App<E>>,
    _: Caller,
    Path(alias): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let info = app.template(&alias)?;
    Ok(Json(json!({ "templateID": info.name, "public": true })))
}

/// `GET /templates/{id}/tags`: the one tag every template has.
pub(super) async fn tags<E: Engine>(
    State(app): State<App<E>>,
    _: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let info = app.template(&id)?;
    Ok(Json(json!([{
        "tag": "default",
        "buildID": build_id(&info),
        "createdAt": created(&info),
    }])))
}

/// `GET /templates/{id}/builds/{buildID}/status`: what is there is ready.
pub(super) async fn build_status<E: Engine>(
    State(app): State<App<E>>,
    _: Caller,
    Path((id, build)): Path<(String, String)>,
    query: Query,
) -> Result<Json<Value>, ApiError> {
    query.number("logsOffset", 0..=u64::from(u32::MAX))?;
    query.number("limit", 0..=100)?;
    let info = app.template(&id)?;
    if build != build_id(&info) {
        return Err(ApiError::not_found(
            "build_not_found",
            format!("template `{}` has no such build", info.name),
        ));
    }
    Ok(Json(json!({
        "templateID": info.name,
        "buildID": build,
        "status": "ready",
        "logs": [],
        "logEntries": [],
    })))
}

/// Building.
pub(super) async fn no_building(_: Caller) -> ApiError {
    ApiError::unsupported(
        "templates are not built over this interface yet: build one on the host with `jiffy template build`",
    )
}

/// Tags.
pub(super) async fn no_tagging(_: Caller) -> ApiError {
    ApiError::unsupported("templates have the tag `default` and no other")
}

/// Changes.
pub(super) async fn no_change(_: Caller) -> ApiError {
    ApiError::unsupported("every template of this host is there for all of its keys")
}

/// `GET /teams`: clients want one before they do anything else.
pub(super) async fn teams(_: Caller) -> Json<Value> {
    Json(json!([{
        "teamID": TEAM,
        "name": TEAM,
        "slug": TEAM,
        "apiKey": "",
        "isDefault": true,
    }]))
}
