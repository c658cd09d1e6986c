//! Operations on templates and their builds.

use crate::openapi::operation::Operation;
use crate::openapi::operation::query;
use crate::routes::bounds::{MAX_MOMENT, MAX_PAGE, MAX_UNPAGED};
use axum::http::Method;
use jiffy_api_types::{
    AddTags, AddedTags, Alias, BuildLogs, BuildStart, BuildStatus, ChangedTemplate, NewTemplate,
    Prune, Pruned, RemoveTags, RequestedBuild, Tag, Template, TemplateChange, UploadLink,
};
use serde_json::json;

/// Operations on templates.
pub(super) fn templates() -> Vec<Operation> {
    let level = json!({ "type": "string", "enum": ["debug", "info", "warn", "error"] });
    let offset = json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX });
    let cursor = json!({
        "type": "integer", "minimum": 0, "maximum": MAX_MOMENT * 1000,
        "description": "Time of the first line, in milliseconds since 1970",
    });
    let source = json!({ "type": "string", "enum": ["temporary", "persistent"] });
    let limit = json!({ "type": "integer", "minimum": 0, "maximum": MAX_PAGE });
    vec![
        Operation::get("/templates", "listTemplates", "Templates of this host, by owner and name")
            .paged_by_name(MAX_UNPAGED)
            .answers::<Vec<Template>>(200, "A page of them"),
        Operation::get(
            "/templates/{templateID}",
            "getTemplate",
            "One template with its build",
        )
        .answers::<Template>(200, "The template"),
        Operation::delete(
            "/templates/{templateID}",
            "deleteTemplate",
            "Remove a template, or a snapshot",
        )
        .answers_nothing()
        .refuses(&[409]),
        Operation::get(
            "/templates/aliases/{alias}",
            "getAlias",
            "Whether there is a template of that name",
        )
        .answers::<Alias>(200, "There is"),
        Operation::get("/templates/{templateID}/tags", "listTags", "Its tags").answers::<Vec<Tag>>(200, "All of them"),
        Operation::get(
            "/templates/{templateID}/builds/{buildID}/status",
            "buildStatus",
            "How far a build is",
        )
        .with(vec![
            query("logsOffset", offset),
            query("limit", limit.clone()),
            query("level", level.clone()),
        ])
        .answers::<BuildStatus>(200, "Its status and its lines"),
        Operation::post(
            "/v3/templates",
            "requestBuild",
            "Ask for a build of a template, which is made if there is none of its name",
        )
        .takes::<NewTemplate>()
        .answers::<RequestedBuild>(202, "It waits for its files and its start")
        .refuses(&[409, 429, 501]),
        Operation::get(
            "/templates/{templateID}/files/{hash}",
            "buildFile",
            "Whether files are there, and where to send them to with `PUT`, as a tar, perhaps gzipped",
        )
        .with(vec![query(
            "verified",
            json!({
                "type": "boolean", "default": false,
                "description": "Only files count, and are accepted, whose archive has this hash",
            }),
        )])
        .answers::<UploadLink>(201, "A link that holds for an hour")
        .refuses(&[403, 429, 501]),
        Operation::put(
            "/templates/uploads/{word}",
            "upload",
            "Send files, as a link says; needs no key",
        )
        .answers_with(200, "Kept")
        .refuses(&[400, 404, 409, 413, 429, 501, 503, 507])
        .open(),
        Operation::post(
            "/v2/templates/{templateID}/builds/{buildID}",
            "startBuild",
            "Start a build",
        )
        .takes::<BuildStart>()
        .accepts()
        .refuses(&[409, 429, 501]),
        Operation::get(
            "/templates/{templateID}/builds/{buildID}/logs",
            "buildLogs",
            "What a build said",
        )
        .with(vec![
            query("cursor", cursor),
            query("limit", limit),
            query(
                "direction",
                json!({ "type": "string", "enum": ["forward", "backward"] }),
            ),
            query("source", source),
            query("level", level),
        ])
        .answers::<BuildLogs>(200, "Its lines")
        .refuses(&[501]),
        Operation::post(
            "/templates/{templateID}/builds/{buildID}/cancel",
            "cancelBuild",
            "End a build, and answer when it has; one that is over stays as it is",
        )
        .answers_nothing()
        .refuses(&[501]),
        Operation::post(
            "/templates/tags",
            "addTags",
            "Give more tags to what a tag is at",
        )
        .takes::<AddTags>()
        .answers::<AddedTags>(201, "It has them")
        .refuses(&[404, 429, 501]),
        Operation::delete("/templates/tags", "removeTags", "Take tags from a template")
            .takes::<RemoveTags>()
            .answers_nothing()
            .refuses(&[404, 501]),
        Operation::new(
            Method::PATCH,
            "/v2/templates/{templateID}",
            "changeTemplate",
            "Let every key use a template, or only the one that built it",
        )
        .takes::<TemplateChange>()
        .answers::<ChangedTemplate>(200, "It is so")
        .refuses(&[403, 501]),
        Operation::post(
            "/templates/prune",
            "pruneTemplates",
            "Remove what only makes later builds faster: snapshots of steps, and uploads; the \
             caller's own, or all for whoever manages the host",
        )
        .may_take::<Prune>()
        .answers::<Pruned>(200, "What is gone")
        .refuses(&[501]),
    ]
}
