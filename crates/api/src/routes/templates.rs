//! Templates, and what old clients ask beside them.

use super::builds;
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::hooks::{TemplateInfo, TemplateRefusal};
use crate::lookup::{Origin, short};
use crate::page::{NEXT, Page, unknown_token};
use crate::query::Query;
use crate::wire::build::state;
use crate::wire::moment;
use crate::wire::template::{build_id, created, listed};
use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use jiffy_api_types::{Alias, BuildState, BuildStatus, Moment, Tag, Team, Template, TemplateBuild};
use jiffy_image::Visibility;
use jiffy_proto::agent::TEAM_ID;
use jiffy_template_builder::{
    BuildStatus as RecordedStatus, DEFAULT_TAG, TemplateRecord, is_visible,
};
use std::ops::ControlFlow;

/// Most templates of a list when nobody says. Clients of E2B know no pages here.
pub(crate) const MAX_UNPAGED: usize = 1000;

fn failed(e: TemplateRefusal) -> ApiError {
    ApiError::internal(e.to_string())
}

/// Returns what the builder knows about a template, if it built it.
fn record_of(app: &App, info: &TemplateInfo) -> Result<Option<TemplateRecord>, ApiError> {
    match &app.builder {
        Some(builder) => Ok(builder.template_named(info.owner.as_deref(), &info.name)?),
        None => Ok(None),
    }
}

/// Returns the id of the build that created a template. A template without a build on this host has
/// an id that is derived from its version.
fn build_of(
    app: &App,
    info: &TemplateInfo,
    record: Option<&TemplateRecord>,
) -> Result<String, ApiError> {
    let (Some(builder), Some(record)) = (&app.builder, record) else {
        return Ok(build_id(info));
    };
    let builds = builder.records().builds(&record.id)?;
    let made = builds.into_iter().find(|build| {
        build.status == RecordedStatus::Ready
            && build.version == info.version
            && build.tags.contains(&info.tag)
    });
    Ok(made.map_or_else(|| build_id(info), |build| build.id))
}

/// `GET /templates`: those that are built, each with all its tags, by owner and name, in pages.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Response, ApiError> {
    let page = Page::by_name(&query, MAX_UNPAGED)?;
    // Manifests that nobody has asked for are read first.
    let page = tokio::task::spawn_blocking(move || list_page(&app, &caller, &page)).await;
    let (shown, next) = page.map_err(|e| ApiError::internal(e.to_string()))??;
    let mut response = Json(shown).into_response();
    if let Some(next) = next {
        response.headers_mut().insert(NEXT, next);
    }
    Ok(response)
}

/// Templates of a page, and the token of the next. Looks at no more than that takes.
fn list_page(
    app: &App,
    caller: &Caller,
    page: &Page,
) -> Result<(Vec<Template>, Option<HeaderValue>), ApiError> {
    let mut shown: Vec<(String, Template)> = Vec::new();
    // All tags of one template, as they follow each other.
    let mut tags: Vec<TemplateInfo> = Vec::new();
    let mut failure = None;
    let mut show = |tags: &mut Vec<TemplateInfo>| {
        let tags = std::mem::take(tags);
        match entry_of(app, caller, &tags) {
            Ok(entry) => shown.extend(entry),
            Err(e) => failure = Some(e),
        }
        // One more says that there is a next page.
        match failure.is_some() || shown.len() > page.limit() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let walked = app.templates.walk(page.after_name(), &mut |info| {
        let name = info.without_tag();
        if page.after_name() == Some(&name)
            || !is_visible(info.owner.as_deref(), info.visibility, caller.bounds())
        {
            return ControlFlow::Continue(());
        }
        let others = tags
            .first()
            .is_some_and(|other| other.without_tag() != name);
        let next = match others {
            true => show(&mut tags),
            false => ControlFlow::Continue(()),
        };
        tags.push(info);
        next
    });
    walked.map_err(|e| match (e, page.after_name()) {
        (TemplateRefusal::Unknown(_), Some(_)) => unknown_token(),
        (e, _) => failed(e),
    })?;
    let _ = show(&mut tags);
    if let Some(e) = failure {
        return Err(e);
    }
    let more = shown.len() > page.limit();
    shown.truncate(page.limit());
    let last = shown.last().filter(|_| more);
    let next = last.and_then(|(name, _)| Page::next_name(name));
    Ok((shown.into_iter().map(|(_, value)| value).collect(), next))
}

/// A template with these tags as the caller sees it, and its name; none: it does not.
fn entry_of(
    app: &App,
    caller: &Caller,
    tags: &[TemplateInfo],
) -> Result<Option<(String, Template)>, ApiError> {
    let own = tags.iter().find(|t| t.tag == DEFAULT_TAG);
    let Some(info) = own.or(tags.first()) else {
        return Ok(None);
    };
    let name = info.without_tag();
    let record = record_of(app, info)?;
    let own = caller.bounds().map(|key| format!("{key}/{name}"));
    let own = own.filter(|_| info.owner.is_none());
    if record.is_none() && own.is_some_and(|own| has_tags(app, &own)) {
        // The name means the caller's own, and there is no other word for this one.
        return Ok(None);
    }
    let names: Vec<String> = tags.iter().map(|t| caller.called(&t.reference())).collect();
    let build = build_of(app, info, record.as_ref())?;
    let shown = listed(info, &caller.called(&name), record.as_ref(), &build, &names);
    Ok(Some((name, shown)))
}

/// True if a template of this name (`owner/name`) can be listed.
fn has_tags(app: &App, name: &str) -> bool {
    let mut found = false;
    let walked = app.templates.walk(Some(name), &mut |info| {
        let same = info.without_tag() == name;
        found = same && info.visibility != Visibility::Internal;
        match same && !found {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    });
    walked.is_ok() && found
}

/// `GET /templates/{id}`: one with its builds.
pub(super) async fn one(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Template>, ApiError> {
    let info = app.template(&caller, &id)?;
    let record = record_of(&app, &info)?;
    let called = caller.called(&info.without_tag());
    let names = [caller.called(&info.reference())];
    let made_by = build_of(&app, &info, record.as_ref())?;
    let mut shown = listed(&info, &called, record.as_ref(), &made_by, &names);
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

/// `DELETE /templates/{id}`: a template, or a snapshot. A snapshot's data go when nothing needs
/// them any more.
pub(super) async fn delete(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    if let Some(builder) = &app.builder
        && let Ok(record) = builder.owned_template(&id, caller.bounds())
    {
        match id.split_once(':') {
            Some((_, tag)) => builder.untag(&record, &[tag.to_owned()]).await?,
            None => builder.remove(&record).await?,
        }
        return Ok(StatusCode::NO_CONTENT);
    }
    let snapshot = match app.origin(&caller, &id)? {
        Origin::Snapshot(snapshot) => snapshot,
        Origin::Template(info) => {
            if !caller.owns_template(&info) {
                caller.require_admin("removing a template of others")?;
            }
            let templates = app.templates.clone();
            let reference = info.reference();
            // Hundreds of megabytes.
            let removed = tokio::task::spawn_blocking(move || templates.remove(&reference)).await;
            return match removed {
                Ok(Ok(())) => Ok(StatusCode::NO_CONTENT),
                // One that is only known as a recipe.
                Ok(Err(TemplateRefusal::Unknown(_))) => Err(ApiError::not_found(
                    "template_not_found",
                    "this template is not built: an image that could be removed does not exist",
                )),
                Ok(Err(e)) => Err(failed(e)),
                Err(e) => Err(ApiError::internal(e.to_string())),
            };
        }
    };
    app.sandboxes.snapshots().remove(snapshot.id())?;
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /templates/aliases/{alias}`: whether there is one of that name.
pub(super) async fn alias(
    State(app): State<App>,
    caller: Caller,
    Path(alias): Path<String>,
) -> Result<Json<Alias>, ApiError> {
    if let Some(builder) = &app.builder
        && let Ok(record) = builder.owned_template(&alias, caller.bounds())
        && builder.exists(&record)?
    {
        let built = app.templates.find(&record.reference(DEFAULT_TAG)).ok();
        let public = built.map_or(record.public, |info| info.visibility == Visibility::Public);
        return Ok(Json(Alias {
            template_id: record.id,
            public,
        }));
    }
    let info = app.template(&caller, &alias)?;
    let name = caller.called(&info.without_tag());
    let id = record_of(&app, &info)?.map_or(name, |record| record.id);
    Ok(Json(Alias {
        template_id: id,
        public: info.visibility == Visibility::Public,
    }))
}

/// `GET /templates/{id}/tags`.
pub(super) async fn tags(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Vec<Tag>>, ApiError> {
    let info = app.template(&caller, &id)?;
    let tag = |tag: &str, build: String, created: Moment| Tag {
        tag: tag.to_owned(),
        build_id: build,
        created_at: created,
    };
    if caller.owns_template(&info)
        && let (Some(builder), Some(record)) = (&app.builder, record_of(&app, &info)?)
    {
        let mut tags = Vec::new();
        for build in builder.records().builds(&record.id)? {
            if build.status == RecordedStatus::Ready {
                let at = moment(build.changed_ms);
                tags.extend(
                    build
                        .tags
                        .iter()
                        .map(|t| tag(t, build.id.clone(), at.clone())),
                );
            }
        }
        return Ok(Json(tags));
    }
    let mut tags = Vec::new();
    let name = info.without_tag();
    let walked = app.templates.walk(Some(&name), &mut |other| {
        if other.without_tag() != name {
            return ControlFlow::Break(());
        }
        tags.push(tag(&other.tag, build_id(&other), created(&other)));
        ControlFlow::Continue(())
    });
    walked.map_err(failed)?;
    // One that is still to be built.
    if tags.is_empty() {
        tags.push(tag(&info.tag, build_id(&info), created(&info)));
    }
    Ok(Json(tags))
}

/// `GET /templates/{id}/builds/{buildID}/status`: how far a build is; what was made in another way
/// is ready.
pub(super) async fn build_status(
    State(app): State<App>,
    caller: Caller,
    Path((id, build)): Path<(String, String)>,
    query: Query,
) -> Result<Json<BuildStatus>, ApiError> {
    if let Some(status) = builds::status_of(&app, &caller, &id, &build, &query)? {
        return Ok(Json(status));
    }
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
        template_id: caller.called(&info.without_tag()),
        build_id: build,
        status: BuildState::Ready,
        logs: Vec::new(),
        log_entries: Vec::new(),
        reason: None,
        progress: None,
    }))
}

/// `GET /teams`: clients want one before they do anything else.
pub(super) async fn teams(_: Caller) -> Json<Vec<Team>> {
    Json(vec![Team {
        team_id: TEAM_ID.to_owned(),
        name: TEAM_ID.to_owned(),
        slug: TEAM_ID.to_owned(),
        api_key: String::new(),
        is_default: true,
    }])
}
