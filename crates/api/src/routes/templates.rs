//! Templates, and what old clients ask beside them.

use super::builds;
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::hooks::{TemplateInfo, TemplateRefusal};
use crate::query::Query;
use crate::wire::moment;
use crate::wire::template::{build_id, created, is_public, listed};
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_build::{DEFAULT_TAG, Status, TemplateRecord};
use jiffy_engine::Engine;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Whose templates they are. There is one team on a host.
const TEAM: &str = "local";

fn failed(e: TemplateRefusal) -> ApiError {
    ApiError::internal(e.to_string())
}

/// What the builder knows about a template, if it built it.
fn record_of<E: Engine>(
    app: &App<E>,
    info: &TemplateInfo,
) -> Result<Option<TemplateRecord>, ApiError> {
    match &app.builder {
        Some(builder) => Ok(builder.known(&info.name)?),
        None => Ok(None),
    }
}

/// `GET /templates`: those that are built, each with all its tags.
pub(super) async fn list<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
) -> Result<Json<Vec<Value>>, ApiError> {
    let mut by_name: BTreeMap<String, Vec<TemplateInfo>> = BTreeMap::new();
    for info in app.templates.list().map_err(failed)? {
        by_name.entry(info.name.clone()).or_default().push(info);
    }
    let mut shown = Vec::new();
    for tags in by_name.values() {
        let own = tags.iter().find(|t| t.tag == DEFAULT_TAG);
        let Some(info) = own.or(tags.first()) else {
            continue;
        };
        let record = record_of(&app, info)?;
        let hers = |r: &TemplateRecord| r.owner.as_deref() == caller.bounds();
        let visible = caller.bounds().is_none()
            || is_public(record.as_ref())
            || record.as_ref().is_some_and(hers);
        if visible {
            let names: Vec<String> = tags.iter().map(TemplateInfo::reference).collect();
            shown.push(listed(info, record.as_ref(), &names));
        }
    }
    Ok(Json(shown))
}

/// `GET /templates/{id}`: one with its builds.
pub(super) async fn one<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let info = app.template(&caller, &id)?;
    let record = record_of(&app, &info)?;
    let mut shown = listed(&info, record.as_ref(), &[info.reference()]);
    let build = |id: String, status: &str, created: String, changed: String| {
        json!({
            "buildID": id,
            "status": status,
            "createdAt": created,
            "updatedAt": changed,
            "finishedAt": changed,
            "cpuCount": info.size.vcpus,
            "memoryMB": info.size.memory_mib,
            "diskSizeMB": info.size.disk_mib,
        })
    };
    let builds: Vec<Value> = match (&app.builder, &record) {
        (Some(builder), Some(record)) => (builder.records().builds(&record.id)?.into_iter())
            .map(|b| {
                build(
                    b.id,
                    b.status.name(),
                    moment(b.created_ms),
                    moment(b.changed_ms),
                )
            })
            .collect(),
        _ => vec![build(
            build_id(&info),
            "ready",
            created(&info),
            created(&info),
        )],
    };
    if let Some(map) = shown.as_object_mut() {
        map.insert("builds".to_owned(), json!(builds));
    }
    Ok(Json(shown))
}

/// `DELETE /templates/{id}`: a template, or a snapshot. A snapshot's data go when nothing needs them any more.
pub(super) async fn delete<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    if let Some(builder) = &app.builder
        && let Ok(record) = builder.own(&id, caller.bounds())
    {
        match id.split_once(':') {
            Some((_, tag)) => builder.untag(&record, &[tag.to_owned()]).await?,
            None => builder.remove(&record).await?,
        }
        return Ok(StatusCode::NO_CONTENT);
    }
    let unknown = match app.template(&caller, &id) {
        Ok(info) => {
            caller.require_admin("removing a template")?;
            let templates = app.templates.clone();
            let reference = info.reference();
            // Hundreds of megabytes.
            let removed = tokio::task::spawn_blocking(move || templates.remove(&reference)).await;
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
    caller: Caller,
    Path(alias): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let (name, bounds) = (alias.as_str(), caller.bounds());
    if let Some(builder) = &app.builder
        && let Some(record) = builder.known(name)?
        && builder.is_there(&record)?
    {
        let theirs = bounds.is_none() || record.owner.as_deref() == bounds;
        return match theirs || is_public(Some(&record)) {
            true => Ok(Json(
                json!({ "templateID": record.id, "public": is_public(Some(&record)) }),
            )),
            false => Err(ApiError::forbidden(format!(
                "the template `{name}` belongs to another key"
            ))),
        };
    }
    let info = app.template(&caller, &alias)?;
    Ok(Json(json!({ "templateID": info.name, "public": true })))
}

/// `GET /templates/{id}/tags`.
pub(super) async fn tags<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let info = app.template(&caller, &id)?;
    let tag = |tag: &str, build: String, created: String| json!({ "tag": tag, "buildID": build, "createdAt": created });
    if let (Some(builder), Some(record)) = (&app.builder, record_of(&app, &info)?) {
        let mut tags = Vec::new();
        for build in builder.records().builds(&record.id)? {
            if build.status == Status::Ready {
                let at = moment(build.changed_ms);
                tags.extend(
                    build
                        .tags
                        .iter()
                        .map(|t| tag(t, build.id.clone(), at.clone())),
                );
            }
        }
        return Ok(Json(json!(tags)));
    }
    let mut tags = Vec::new();
    for other in app.templates.list().map_err(failed)? {
        if other.name == info.name {
            tags.push(tag(&other.tag, build_id(&other), created(&other)));
        }
    }
    // One that is still to be built.
    if tags.is_empty() {
        tags.push(tag(&info.tag, build_id(&info), created(&info)));
    }
    Ok(Json(json!(tags)))
}

/// `GET /templates/{id}/builds/{buildID}/status`: how far a build is; what was made in another way is ready.
pub(super) async fn build_status<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path((id, build)): Path<(String, String)>,
    query: Query,
) -> Result<Json<Value>, ApiError> {
    if let Some(status) = builds::status_of(&app, &caller, &id, &build, &query)? {
        return Ok(Json(status));
    }
    query.number("logsOffset", 0..=u64::from(u32::MAX))?;
    query.number("limit", 0..=builds::MAX_PAGE)?;
    let info = app.template(&caller, &id)?;
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
