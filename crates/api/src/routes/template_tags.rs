//! Tags of templates.

use super::templates::{failed, record_of};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::hooks::TemplateInfo;
use crate::lookup::short;
use crate::page::unknown_token;
use crate::query::Query;
use crate::wire::moment;
use crate::wire::template::{build_id, created};
use axum::Json;
use axum::extract::{Path, State};
use jiffy_api_types::{
    Moment, Tag, TagAssignment, TagAssignments, TagCount, TagExists, TagGroup, TagGroups,
};
use jiffy_template_builder::BuildStatus as RecordedStatus;
use std::ops::ControlFlow;

/// Maximum number of tags or assignments of a page.
pub(crate) const MAX_GROUPS: u64 = 100;
/// Default number of tags of a page, as in E2B's API.
pub(crate) const DEFAULT_GROUPS: u64 = 25;
/// Orders of tags, and whether each is descending.
const ORDERS: [(&str, (Order, bool)); 4] = [
    ("name_asc", (Order::Name, false)),
    ("name_desc", (Order::Name, true)),
    ("latest_asc", (Order::Time, false)),
    ("latest_desc", (Order::Time, true)),
];

/// Order of tags.
#[derive(Debug, Clone, Copy)]
enum Order {
    /// By name.
    Name,
    /// By the time at which the build was ready.
    Time,
}

/// A tag, and the build to which it refers.
struct TaggedBuild {
    tag: String,
    build: String,
    requested: Moment,
    ready: Moment,
}

impl TaggedBuild {
    /// Returns the tag of a template that this host did not build.
    fn of_image(info: &TemplateInfo) -> Self {
        Self {
            tag: info.tag.clone(),
            build: build_id(info),
            requested: created(info),
            ready: created(info),
        }
    }

    /// Returns the assignment of the tag. Earlier assignments are not recorded.
    fn assignment(self) -> TagAssignment {
        TagAssignment {
            assignment_id: self.build.clone(),
            build_id: self.build,
            assigned_at: self.ready.clone(),
            build_created_at: self.requested,
            build_finished_at: Some(self.ready),
        }
    }
}

/// Returns the tags of a template.
fn tags_of(app: &App, caller: &Caller, id: &str) -> Result<Vec<TaggedBuild>, ApiError> {
    let info = app.template(caller, id)?;
    if caller.owns_template(&info)
        && let (Some(builder), Some(record)) = (&app.builder, record_of(app, &info)?)
    {
        let builds = builder.records().builds(&record.id)?;
        let ready = builds
            .into_iter()
            .filter(|build| build.status == RecordedStatus::Ready);
        let tags = ready.flat_map(|build| {
            let tagged = |tag| TaggedBuild {
                tag,
                build: build.id.clone(),
                requested: moment(build.created_ms),
                ready: moment(build.changed_ms),
            };
            build.tags.iter().cloned().map(tagged).collect::<Vec<_>>()
        });
        return Ok(tags.collect());
    }
    let mut tags = Vec::new();
    let name = info.without_tag();
    let walked = app.templates.walk(Some(&name), &mut |other| {
        if other.without_tag() != name {
            return ControlFlow::Break(());
        }
        tags.push(TaggedBuild::of_image(&other));
        ControlFlow::Continue(())
    });
    walked.map_err(failed)?;
    // `walk` passes built templates only. A stock template that is not built yet has one tag.
    if tags.is_empty() {
        tags.push(TaggedBuild::of_image(&info));
    }
    Ok(tags)
}

/// `GET /templates/{id}/tags`.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Vec<Tag>>, ApiError> {
    let tags = tags_of(&app, &caller, &id)?;
    let tags = tags.into_iter().map(|tagged| Tag {
        tag: tagged.tag,
        build_id: tagged.build,
        created_at: tagged.ready,
    });
    Ok(Json(tags.collect()))
}

/// `GET /templates/{id}/tags/count`.
pub(super) async fn count(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<TagCount>, ApiError> {
    let total = tags_of(&app, &caller, &id)?.len();
    Ok(Json(TagCount { total }))
}

/// `GET /templates/{id}/tags/exists?tag=TAG`.
pub(super) async fn exists(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: Query,
) -> Result<Json<TagExists>, ApiError> {
    let tags = tags_of(&app, &caller, &id)?;
    let tag = query.get("tag").filter(|tag| !tag.is_empty());
    let tag = tag.ok_or_else(|| ApiError::invalid("the parameter `tag` is missing"))?;
    Ok(Json(TagExists {
        exists: tags.iter().any(|known| known.tag == tag),
        normalized_tag: tag.to_owned(),
    }))
}

/// `GET /templates/{id}/tags/groups`: the tags with their builds, in pages by tag.
pub(super) async fn groups(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: Query,
) -> Result<Json<TagGroups>, ApiError> {
    let mut tags = tags_of(&app, &caller, &id)?;
    let limit = query.number("tagsLimit", 1..=MAX_GROUPS)?;
    let limit = usize::try_from(limit.unwrap_or(DEFAULT_GROUPS)).unwrap_or(usize::MAX);
    // Each tag has one assignment, so the parameter is only validated.
    query.number("assignmentLimit", 1..=MAX_GROUPS)?;
    let (order, is_descending) = query.word("sort", &ORDERS)?.unwrap_or((Order::Time, true));
    let (after, search) = (query.get("tagsCursor"), query.get("search"));
    tags.retain(|tag| search.is_none_or(|text| tag.tag.contains(text)));
    tags.sort_by(|a, b| {
        // Times of the API have one format, so that their texts have the same order.
        let time = a.ready.0.cmp(&b.ready.0);
        let name = a.tag.cmp(&b.tag);
        match order {
            Order::Name => name,
            Order::Time => time.then(name),
        }
    });
    if is_descending {
        tags.reverse();
    }
    if let Some(after) = after {
        let position = tags.iter().position(|tag| tag.tag == after);
        let position = position.ok_or_else(unknown_token)?;
        tags.drain(..=position);
    }
    let has_more = tags.len() > limit;
    tags.truncate(limit);
    let last = tags.last().map(|tag| tag.tag.clone());
    let groups = tags.into_iter().map(|tag| TagGroup {
        tag: tag.tag.clone(),
        assignments: vec![tag.assignment()],
        has_more: false,
    });
    Ok(Json(TagGroups {
        tags: groups.collect(),
        next_cursor: last.filter(|_| has_more),
    }))
}

/// `GET /templates/{id}/tags/{tag}/assignments`.
pub(super) async fn assignments(
    State(app): State<App>,
    caller: Caller,
    Path((id, tag)): Path<(String, String)>,
    query: Query,
) -> Result<Json<TagAssignments>, ApiError> {
    let tags = tags_of(&app, &caller, &id)?;
    let found = tags.into_iter().find(|known| known.tag == tag);
    let found = found.ok_or_else(|| {
        ApiError::not_found(
            "template_not_found",
            format!(
                "the tag `{}` of template `{}` does not exist",
                short(&tag),
                short(&id)
            ),
        )
    })?;
    query.number("limit", 1..=MAX_GROUPS)?;
    // There is one page, which has no cursor.
    if query.get("cursor").is_some() {
        return Err(unknown_token());
    }
    Ok(Json(TagAssignments {
        data: vec![found.assignment()],
        next_cursor: None,
    }))
}
