//! Calls on templates, and on teams, which older clients require.
//!
//! A *stock template* is a template whose recipe Jiffy contains. The *warm pool* has guests that
//! were started in advance and wait for a create. A *recipe* is a directory with the packages,
//! files and settings of a template.

use super::builds;
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::fleet::ListPart;
use crate::hooks::{TemplateInfo, TemplateRefusal};
use crate::lookup::{Origin, short};
use crate::page::{Page, unknown_token, with_next};
use crate::query::Query;
use crate::wire::build::state;
use crate::wire::moment;
use crate::wire::template::{build_id, created, listed};
use axum::extract::{Path, State};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use jiffy_api_types::{Alias, BuildState, BuildStatus, Moment, Team, Template, TemplateBuild};
use jiffy_image::{Visibility, stock_names};
use jiffy_proto::agent::TEAM_ID;
use jiffy_template_builder::{
    BuildStatus as RecordedStatus, DEFAULT_TAG, TemplateRecord, is_visible,
};
use std::ops::ControlFlow;

/// Default page size of the list of templates. It is large because E2B's clients do not support
/// pages here.
pub(crate) const MAX_UNPAGED: usize = 1000;

pub(super) fn failed(e: TemplateRefusal) -> ApiError {
    ApiError::internal(e.to_string())
}

/// Returns the builder's record of a template. `None` if the builder did not build it.
pub(super) fn record_of(
    app: &App,
    info: &TemplateInfo,
) -> Result<Option<TemplateRecord>, ApiError> {
    match &app.builder {
        Some(builder) => Ok(builder.template_named(info.owner.as_deref(), &info.name)?),
        None => Ok(None),
    }
}

/// Returns the id of the build that created a template. If no build on this host created it, the id
/// is derived from the version of the template.
fn build_of(
    app: &App,
    info: &TemplateInfo,
    record: Option<&TemplateRecord>,
) -> Result<String, ApiError> {
    let (Some(builder), Some(record)) = (&app.builder, record) else {
        return Ok(build_id(info));
    };
    let builds = builder.records().builds(&record.id)?;
    let build = builds.into_iter().find(|build| {
        build.status == RecordedStatus::Ready
            && build.version == info.version
            && build.tags.contains(&info.tag)
    });
    Ok(build.map_or_else(|| build_id(info), |build| build.id))
}

/// `GET /templates`: lists built templates with all their tags, by owner and name, in pages.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    part: Option<Extension<ListPart>>,
    query: Query,
) -> Result<Response, ApiError> {
    let page = Page::by_name(&query, MAX_UNPAGED)?;
    // List on a blocking thread, because manifests that are not cached are read from the disk.
    let page = tokio::task::spawn_blocking(move || list_page(&app, &caller, &page)).await;
    let (shown, next) = page.map_err(|e| ApiError::internal(e.to_string()))??;
    // Another member merges these templates with its own, and orders all by their complete names.
    let response = if part.is_some() {
        Json(shown).into_response()
    } else {
        let shown: Vec<_> = shown.into_iter().map(|(_, template)| template).collect();
        Json(shown).into_response()
    };
    Ok(with_next(response, next))
}

/// Templates with their complete names, and the token of the next page.
type ListedPage = (Vec<(String, Template)>, Option<HeaderValue>);

/// Returns the templates of a page with their complete names, and the token of the next page. Stops
/// as soon as the page is complete.
fn list_page(app: &App, caller: &Caller, page: &Page) -> Result<ListedPage, ApiError> {
    let mut shown: Vec<(String, Template)> = Vec::new();
    // Collects the tags of one template, which are consecutive.
    let mut tags: Vec<TemplateInfo> = Vec::new();
    let mut failure = None;
    let mut show = |tags: &mut Vec<TemplateInfo>| {
        let tags = std::mem::take(tags);
        match entry_of(app, caller, &tags) {
            Ok(entry) => shown.extend(entry),
            Err(e) => failure = Some(e),
        }
        // One template more than the limit shows that a next page exists.
        if failure.is_some() || shown.len() > page.limit() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    let walked = app.templates.walk(page.after_name(), &mut |info| {
        let name = info.without_tag();
        // The walk starts at the last template of the previous page.
        if page.after_name() == Some(&name)
            || !is_visible(info.owner.as_deref(), info.visibility, caller.owner_scope())
        {
            return ControlFlow::Continue(());
        }
        let others = tags
            .first()
            .is_some_and(|other| other.without_tag() != name);
        let next = if others {
            show(&mut tags)
        } else {
            ControlFlow::Continue(())
        };
        tags.push(info);
        next
    });
    walked.map_err(|e| match (e, page.after_name()) {
        // No template can have this name, so the token is invalid.
        (TemplateRefusal::Unknown(_), Some(_)) => unknown_token(),
        (e, _) => failed(e),
    })?;
    // The tags of the last template. The result does not matter, because the walk has ended.
    let _ = show(&mut tags);
    if let Some(e) = failure {
        return Err(e);
    }
    let more = shown.len() > page.limit();
    shown.truncate(page.limit());
    let last = shown.last().filter(|_| more);
    let next = last.and_then(|(name, _)| Page::next_name(name));
    Ok((shown, next))
}

/// Returns the name and the description of the template with these tags. `None` if `tags` is empty,
/// or a template of the caller hides this template.
fn entry_of(
    app: &App,
    caller: &Caller,
    tags: &[TemplateInfo],
) -> Result<Option<(String, Template)>, ApiError> {
    // The default tag describes the template. Without it, use the first tag.
    let default_tag = tags.iter().find(|t| t.tag == DEFAULT_TAG);
    let Some(info) = default_tag.or(tags.first()) else {
        return Ok(None);
    };
    let name = info.without_tag();
    let record = record_of(app, info)?;
    let own = caller.owner_scope().map(|key| format!("{key}/{name}"));
    let own = own.filter(|_| info.owner.is_none());
    if record.is_none() && own.is_some_and(|own| has_tags(app, &own) || app.is_named_in_fleet(&own))
    {
        // A template without a builder's record has no id, so it is addressed by its name. Without
        // an owner, this name means the caller's own template, which hides this template of the
        // host.
        return Ok(None);
    }
    let names: Vec<String> = tags
        .iter()
        .map(|t| caller.display_name(&t.reference()))
        .collect();
    let build = build_of(app, info, record.as_ref())?;
    let shown = listed(
        info,
        &caller.display_name(&name),
        record.as_ref(),
        &build,
        &names,
    );
    Ok(Some((name, shown)))
}

/// Returns whether the template `owner/name` is listed.
fn has_tags(app: &App, name: &str) -> bool {
    let mut found = false;
    let walked = app.templates.walk(Some(name), &mut |info| {
        let same = info.without_tag() == name;
        // Internal templates are intermediate results of builds.
        found = same && info.visibility != Visibility::Internal;
        if same && !found {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    });
    walked.is_ok() && found
}

/// `GET /templates/{id}`: describes a template with its builds.
pub(super) async fn one(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Template>, ApiError> {
    let info = app.template(&caller, &id)?;
    let record = record_of(&app, &info)?;
    let called = caller.display_name(&info.without_tag());
    let names = [caller.display_name(&info.reference())];
    let current_build = build_of(&app, &info, record.as_ref())?;
    let mut shown = listed(&info, &called, record.as_ref(), &current_build, &names);
    let build = |id: String, status: BuildState, created: Moment, changed: Moment| TemplateBuild {
        build_id: id,
        status,
        created_at: created,
        updated_at: changed.clone(),
        finished_at: changed,
        cpu_count: info.size.vcpus,
        memory_mb: info.size.memory_mib,
        disk_size_mb: info.size.disk_mib,
    };
    shown.builds = Some(match (&app.builder, &record) {
        (Some(builder), Some(record)) if caller.owns_template(&info) => {
            (builder.records().builds(&record.id)?.into_iter())
                .map(|b| {
                    let (created, changed) = (moment(b.created_ms), moment(b.changed_ms));
                    build(b.id, state(b.status), created, changed)
                })
                .collect()
        }
        _ => {
            let created = created(&info);
            vec![build(
                build_id(&info),
                BuildState::Ready,
                created.clone(),
                created,
            )]
        }
    });
    Ok(Json(shown))
}

/// Retires the snapshots of removed templates, whose guests in warm pools would remain otherwise.
async fn retire_snapshots(app: App) -> Result<(), ApiError> {
    let retire = move || app.sandboxes.templates().retire_removed();
    let retired = tokio::task::spawn_blocking(retire).await;
    retired.map_err(|e| ApiError::internal(e.to_string()))
}

/// `DELETE /templates/{id}`: removes a template or a snapshot. If `id` is `NAME:TAG`, only this tag
/// of the template is removed. The data of a snapshot is removed when no other snapshot or sandbox
/// needs it.
pub(super) async fn delete(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    // The builder also removes its own records.
    if let Some(builder) = &app.builder
        && let Ok(record) = builder.owned_template(&id, caller.owner_scope())
    {
        match id.split_once(':') {
            Some((_, tag)) => builder.untag(&record, &[tag.to_owned()]).await?,
            None => builder.remove(&record).await?,
        }
        retire_snapshots(app).await?;
        return Ok(StatusCode::NO_CONTENT);
    }
    let snapshot = match app.origin(&caller, &id)? {
        Origin::Snapshot(snapshot) => snapshot,
        Origin::Template(info) => {
            if !caller.owns_template(&info) {
                caller.require_admin("removing a template of another owner")?;
            }
            let templates = app.templates.clone();
            let reference = info.reference();
            // Remove on a blocking thread, because removing an image of hundreds of megabytes takes
            // time.
            let removed = tokio::task::spawn_blocking(move || templates.remove(&reference)).await;
            return match removed {
                Ok(Ok(())) => {
                    retire_snapshots(app).await?;
                    Ok(StatusCode::NO_CONTENT)
                }
                // The template is a stock template whose image was not built: only its recipe
                // exists.
                Ok(Err(TemplateRefusal::Unknown(_))) => Err(ApiError::not_found(
                    "template_not_found",
                    "cannot remove the template: its image does not exist, because the stock template was not built",
                )),
                Ok(Err(e)) => Err(failed(e)),
                Err(e) => Err(ApiError::internal(e.to_string())),
            };
        }
    };
    app.sandboxes.snapshots().remove(snapshot.id())?;
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /templates/aliases/{alias}`: checks whether a template of this name exists.
pub(super) async fn alias(
    State(app): State<App>,
    caller: Caller,
    Path(alias): Path<String>,
) -> Result<Json<Alias>, ApiError> {
    if let Some(builder) = &app.builder
        && let Ok(record) = builder.owned_template(&alias, caller.owner_scope())
        && builder.exists(&record)?
    {
        let built = app.templates.find(&record.reference(DEFAULT_TAG)).ok();
        // The image has the current setting, and the record has the setting for the first build.
        let public = built.map_or(record.public, |info| info.visibility == Visibility::Public);
        return Ok(Json(Alias {
            template_id: record.id,
            public,
        }));
    }
    let info = app.template(&caller, &alias)?;
    let name = caller.display_name(&info.without_tag());
    let id = record_of(&app, &info)?.map_or(name, |record| record.id);
    Ok(Json(Alias {
        template_id: id,
        public: info.visibility == Visibility::Public,
    }))
}

/// `GET /default-templates`: lists the stock templates that are built.
pub(super) async fn list_stock(
    State(app): State<App>,
    caller: Caller,
) -> Result<Json<Vec<Template>>, ApiError> {
    // List on a blocking thread, because manifests that are not cached are read from the disk.
    let listed = tokio::task::spawn_blocking(move || {
        let mut stock = Vec::new();
        for name in stock_names() {
            match app.templates.find(name) {
                // A template that is not built has no version.
                Ok(info) if info.version.is_some() => {
                    stock.extend(entry_of(&app, &caller, &[info])?)
                }
                Ok(_) | Err(TemplateRefusal::Unknown(_)) => {}
                Err(e) => return Err(failed(e)),
            }
        }
        Ok(stock.into_iter().map(|(_, template)| template).collect())
    });
    let listed = listed
        .await
        .map_err(|e| ApiError::internal(e.to_string()))?;
    listed.map(Json)
}

/// `GET /templates/{id}/builds/{buildID}/status`: returns the status of a build. A template that
/// was not created by the builder is always ready.
pub(super) async fn build_status(
    State(app): State<App>,
    caller: Caller,
    Path((id, build)): Path<(String, String)>,
    query: Query,
) -> Result<Json<BuildStatus>, ApiError> {
    if let Some(status) = builds::status_of(&app, &caller, &id, &build, &query)? {
        return Ok(Json(status));
    }
    // Invalid parameters are rejected although there is no log.
    query.number("logsOffset", 0..=u64::from(u32::MAX))?;
    query.number("limit", 0..=builds::MAX_PAGE)?;
    let info = app.template(&caller, &id)?;
    if build != build_id(&info) {
        return Err(ApiError::not_found(
            "build_not_found",
            format!("this build of template `{}` does not exist", short(&id)),
        ));
    }
    Ok(Json(BuildStatus {
        template_id: caller.display_name(&info.without_tag()),
        build_id: build,
        status: BuildState::Ready,
        logs: Vec::new(),
        log_entries: Vec::new(),
        reason: None,
        progress: None,
    }))
}

/// `GET /teams`: returns one team, which older clients require.
pub(super) async fn teams(_: Caller) -> Json<Vec<Team>> {
    Json(vec![Team {
        team_id: TEAM_ID.to_owned(),
        name: TEAM_ID.to_owned(),
        slug: TEAM_ID.to_owned(),
        api_key: String::new(),
        is_default: true,
    }])
}
