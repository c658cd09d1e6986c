//! Operations on templates and their builds.

use crate::openapi::operation::Operation;
use crate::openapi::operation::query;
use crate::routes::bounds::{DEFAULT_GROUPS, MAX_GROUPS, MAX_MOMENT, MAX_PAGE, MAX_UNPAGED};
use axum::http::Method;
use jiffy_api_types::{
    AddTags, AddedTags, Alias, BuildLogs, BuildStart, BuildStatus, ChangedTemplate, ImageBuild,
    ImageRebuild, NewAlias, NewImageTemplate, NewTemplate, Prune, Pruned, Recipe, RecipeBuild,
    RemoveTags, RequestedBuild, Tag, TagAssignments, TagCount, TagExists, TagGroups, Template,
    TemplateChange, UploadLink,
};
use serde_json::json;

/// Operations on templates.
pub(super) fn templates() -> Vec<Operation> {
    let level = json!({ "type": "string", "enum": ["debug", "info", "warn", "error"] });
    let offset = json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX });
    let cursor = json!({
        "type": "integer", "minimum": 0, "maximum": MAX_MOMENT * 1000,
    });
    let source = json!({ "type": "string", "enum": ["temporary", "persistent"] });
    let limit = json!({ "type": "integer", "minimum": 0, "maximum": MAX_PAGE });
    let page = json!({ "type": "integer", "minimum": 1, "maximum": MAX_GROUPS });
    let text = json!({ "type": "string" });
    let mut tag = query("tag", "The tag", text.clone());
    tag["required"] = json!(true);
    vec![
        Operation::get("/templates", "listTemplates", "List templates by owner and name")
            .paged_by_name(MAX_UNPAGED)
            // In a fleet, the page is merged from the templates of all hosts. This adds the
            // parameters that select a host and that reject incomplete lists.
            .merged()
            .answers::<Vec<Template>>(200, "Page of templates"),
        Operation::get("/v2/templates", "listTemplatesV2", "List templates by owner and name")
            .paged_by_name(MAX_UNPAGED)
            .merged()
            .answers::<Vec<Template>>(200, "Page of templates"),
        Operation::get(
            "/default-templates",
            "listDefaultTemplates",
            "List the stock templates that are built",
        )
        .answers::<Vec<Template>>(200, "Stock templates"),
        Operation::post(
            "/templates",
            "buildFromImage",
            "Build a template from an image, in the form of CubeSandbox's clients",
        )
        .takes::<NewImageTemplate>()
        .answers::<ImageBuild>(202, "The build was started")
        .fails_with(&[409, 429, 501]),
        Operation::post(
            "/templates/{templateID}",
            "rebuildFromImage",
            "Build a template again that was built by `POST /templates`",
        )
        .may_take::<ImageRebuild>()
        .answers::<ImageBuild>(202, "The build was started")
        .fails_with(&[409, 429, 501]),
        Operation::put(
            "/templates/{templateID}/alias",
            "renameTemplate",
            "Rename a template with all its tags",
        )
        .takes::<NewAlias>()
        .answers::<Template>(200, "Renamed template")
        .fails_with(&[409, 429, 501]),
        Operation::new(
            Method::PATCH,
            "/templates/{templateID}",
            "changeTemplateV1",
            "Make a template public, or private to its owner",
        )
        .takes::<TemplateChange>()
        .answers::<ChangedTemplate>(200, "Names of the template")
        .fails_with(&[501]),
        Operation::get(
            "/templates/{templateID}",
            "getTemplate",
            "Get a template with its build",
        )
        .answers::<Template>(200, "Template"),
        Operation::delete(
            "/templates/{templateID}",
            "deleteTemplate",
            "Remove a template or a snapshot",
        )
        .answers_no_content()
        .fails_with(&[409]),
        Operation::get(
            "/templates/aliases/{alias}",
            "getAlias",
            "Get the template of a name",
        )
        .answers::<Alias>(200, "The template exists"),
        Operation::get("/templates/{templateID}/tags", "listTags", "List the tags of a template")
            .answers::<Vec<Tag>>(200, "Tags"),
        Operation::get(
            "/templates/{templateID}/tags/count",
            "countTags",
            "Count the tags of a template",
        )
        .answers::<TagCount>(200, "Number of tags"),
        Operation::get(
            "/templates/{templateID}/tags/exists",
            "hasTag",
            "Check whether a template has a tag",
        )
        .with(vec![tag])
        .answers::<TagExists>(200, "Whether the tag exists"),
        Operation::get(
            "/templates/{templateID}/tags/groups",
            "listTagGroups",
            "List the tags of a template with their builds",
        )
        .with(vec![
            query(
                "tagsLimit",
                &format!("Maximum number of tags. Defaults to {DEFAULT_GROUPS}"),
                page.clone(),
            ),
            query("assignmentLimit", "Maximum number of builds of a tag", page.clone()),
            query("tagsCursor", "`nextCursor` of the previous page", text.clone()),
            query("search", "Part of the tags", text.clone()),
            query(
                "sort",
                "Order of the tags",
                json!({
                    "type": "string",
                    "enum": ["name_asc", "name_desc", "latest_asc", "latest_desc"],
                }),
            ),
        ])
        .answers::<TagGroups>(200, "Page of tags"),
        Operation::get(
            "/templates/{templateID}/tags/{tag}/assignments",
            "listTagAssignments",
            "List the builds of a tag",
        )
        .with(vec![
            query("limit", "Maximum number of builds", page),
            query("cursor", "`nextCursor` of the previous page", text),
        ])
        .answers::<TagAssignments>(200, "Current build of the tag"),
        Operation::get(
            "/templates/{templateID}/builds/{buildID}/status",
            "buildStatus",
            "Get the status and log of a build",
        )
        .with(vec![
            query("logsOffset", "Number of lines to skip", offset),
            query("limit", "Maximum number of lines", limit.clone()),
            query("level", "Minimum severity", level.clone()),
        ])
        .answers::<BuildStatus>(200, "Status and lines of the log"),
        Operation::post(
            "/v3/templates",
            "requestBuild",
            "Request a build. Creates the template if it does not exist",
        )
        .takes::<NewTemplate>()
        .answers::<RequestedBuild>(202, "The build waits for its files and its start")
        .fails_with(&[409, 429, 501]),
        Operation::get(
            "/templates/{templateID}/files/{hash}",
            "buildFile",
            "Get a link to upload the files of a step. Upload them with `PUT` as a tar archive, which \
             may be gzipped",
        )
        .with(vec![query(
            "verified",
            "Accept only an archive that has this hash",
            json!({ "type": "boolean", "default": false }),
        )])
        .answers::<UploadLink>(201, "Link that is valid for an hour")
        .fails_with(&[403, 429, 501]),
        // `word` is the random token of the link, which authorises the upload.
        Operation::put(
            "/templates/uploads/{word}",
            "upload",
            "Upload files with a link. Needs no key",
        )
        .answers_with(200, "Stored")
        .fails_with(&[400, 404, 409, 413, 429, 501, 503, 507])
        .open(),
        Operation::post(
            "/v2/templates/{templateID}/builds/{buildID}",
            "startBuild",
            "Start a requested build",
        )
        .takes::<BuildStart>()
        .accepts("Build accepted")
        .fails_with(&[409, 429, 501]),
        Operation::get(
            "/templates/{templateID}/builds/{buildID}/logs",
            "buildLogs",
            "Get the log of a build",
        )
        .with(vec![
            query(
                "cursor",
                "Time of the first line, in milliseconds since 1970",
                cursor,
            ),
            query("limit", "Maximum number of lines", limit),
            query(
                "direction",
                "Order of the lines",
                json!({ "type": "string", "enum": ["forward", "backward"] }),
            ),
            query("source", "Ignored: both sources have the same lines", source),
            query("level", "Minimum severity", level),
        ])
        .answers::<BuildLogs>(200, "Lines")
        .fails_with(&[501]),
        Operation::post(
            "/templates/{templateID}/builds/{buildID}/cancel",
            "cancelBuild",
            "Cancel a build and wait until it has stopped. A finished build remains unchanged",
        )
        .answers_no_content()
        .fails_with(&[501]),
        Operation::get(
            "/templates/{templateID}/builds/{buildID}/ssh/{agent}",
            "streamSshAgent",
            "Wait for a connection of a build step to an SSH agent of the client, and receive it. \
             Requires HTTP/1.1 with `Upgrade: ssh-agent`",
        )
        .answers_with(101, "A program has connected. The bytes of the connection follow")
        .fails_with(&[403, 409, 426, 429, 501]),
        Operation::post(
            "/templates/tags",
            "addTags",
            "Add tags to a build of a template",
        )
        .takes::<AddTags>()
        .answers::<AddedTags>(201, "Added tags")
        .fails_with(&[404, 429, 501]),
        Operation::delete("/templates/tags", "removeTags", "Remove tags from a template")
            .takes::<RemoveTags>()
            .answers_no_content()
            .fails_with(&[404, 501]),
        Operation::new(
            Method::PATCH,
            "/v2/templates/{templateID}",
            "changeTemplate",
            "Make a template public or private",
        )
        .takes::<TemplateChange>()
        .answers::<ChangedTemplate>(200, "Changed template")
        .fails_with(&[403, 501]),
        Operation::post(
            "/templates/prune",
            "pruneTemplates",
            "Remove the build cache: snapshots of steps, and uploads. Callers of scope `create` prune \
             their own cache, callers of scope `admin` all caches",
        )
        .may_take::<Prune>()
        .answers::<Pruned>(200, "Removed parts of the cache")
        .fails_with(&[501]),
    ]
}

/// Operations on recipes of stock templates.
pub(super) fn recipes() -> Vec<Operation> {
    vec![
        Operation::get(
            "/recipes",
            "listRecipes",
            "List the recipes of this host's stock templates",
        )
        .tagged("templates")
        .answers::<Vec<Recipe>>(200, "Recipes"),
        Operation::post(
            "/recipes/{recipe}/build",
            "buildRecipe",
            "Build a stock template on this host, unless it is built from this version of its \
             recipe. Requires the scope `admin`",
        )
        .tagged("templates")
        .answers::<RecipeBuild>(202, "The build was started")
        .fails_with(&[403, 404, 409]),
        Operation::get(
            "/recipes/{recipe}/build",
            "recipeBuild",
            "Get state and log of the latest build of a stock template since the start of the \
             daemon. Requires the scope `admin`",
        )
        .tagged("templates")
        .with(vec![
            query(
                "logsOffset",
                "Number of the first line of the log",
                json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX }),
            ),
            query(
                "limit",
                "Maximum number of lines",
                json!({ "type": "integer", "minimum": 0, "maximum": MAX_PAGE }),
            ),
        ])
        .answers::<RecipeBuild>(200, "Build")
        .fails_with(&[403, 404]),
    ]
}
