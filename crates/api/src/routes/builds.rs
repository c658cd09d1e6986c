//! Builds of templates: request, upload of files, start, status, logs and cancellation.
//!
//! A *permit* counts towards a limit until it is dropped.

use crate::app::App;
use crate::body::{Optional, Required};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::hooks::TemplateRefusal;
use crate::keys::KeyStatus;
use crate::query::Query;
use crate::quota::running;
use crate::routes::bounds::MAX_MOMENT;
use crate::wire::build::{LEVELS, entry, secrets, size, spec, ssh_clients, status};
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use jiffy_api_types::{
    AddTags, AddedTags, BuildLogs, BuildStart, BuildStatus, ChangedTemplate, NewTemplate, Prune,
    Pruned, RemoveTags, RequestedBuild, TemplateChange, UploadLink,
};
use jiffy_build_spec::spec::BuildSpec;
use jiffy_engine_api::SandboxSize;
use jiffy_image::TemplateError;
use jiffy_sandbox_manager::QuotaRequest;
use jiffy_template_builder::{
    BuildRecord, BuildRequest, BuildSecrets, Builder, BuilderError, DEFAULT_TAG, LogLevel,
    LogPosition, LogQuery, RecordError, SshClients, TemplateRecord, UploadError, UploadNaming,
    WantedSize,
};
use std::time::Duration;

/// Maximum number of log lines per response.
pub(crate) const MAX_PAGE: u64 = 100;
/// Maximum of `unused_seconds`: ten years. Greater values are reduced to it.
const MAX_UNUSED_S: u64 = 10 * 365 * 24 * 3600;

impl From<BuilderError> for ApiError {
    fn from(error: BuilderError) -> Self {
        use BuilderError as B;
        let message = error.to_string();
        match error {
            B::Name(_)
            | B::Reserved(_)
            | B::Tags
            | B::Spec(_)
            | B::Upload(UploadError::Name(_))
            | B::Template(TemplateError::Name { .. }) => Self::invalid(message),
            // A retry succeeds only after another build is started or cancelled.
            B::Waiting => Self::too_many("too_many_waiting_builds", message).permanent(),
            B::Taken(_) | B::NameInUse(_) => Self::conflict("name_taken", message),
            B::Building(_) => Self::conflict("build_started", message),
            B::Started(_) => Self::conflict("build_started", message),
            B::UnknownTemplate(_) | B::Template(TemplateError::Unknown { .. }) => {
                Self::not_found("template_not_found", message)
            }
            B::UnknownBuild { .. } => Self::not_found("build_not_found", message),
            B::NotRunning(_) | B::SshAgent(_) => Self::conflict("not_running", message),
            B::Upload(UploadError::Closed) => Self::not_found("upload_not_found", message),
            B::Upload(UploadError::TooLarge) => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "upload_too_large", message)
            }
            B::Upload(UploadError::TooMany(_) | UploadError::TooManyAtOnce) => {
                Self::too_many("too_many_uploads", message)
            }
            B::Upload(UploadError::Content(_)) => {
                Self::new(StatusCode::BAD_REQUEST, "wrong_content", message)
            }
            B::Upload(UploadError::Differs(_)) => Self::conflict("content_differs", message),
            B::Quota(refusal) | B::Upload(UploadError::Quota(refusal)) => refusal.into(),
            B::Upload(_) | B::Records(_) | B::Template(_) | B::Entropy(_) | B::Directory(_) => {
                Self::internal(message)
            }
        }
    }
}

impl From<RecordError> for ApiError {
    fn from(error: RecordError) -> Self {
        Self::internal(error.to_string())
    }
}

impl From<UploadError> for ApiError {
    fn from(error: UploadError) -> Self {
        BuilderError::Upload(error).into()
    }
}

impl App {
    /// Returns the query of upload links: in a fleet, the host that accepts the upload.
    fn upload_host(&self) -> String {
        let fleet = self.fleet.as_ref();
        fleet.map_or_else(String::new, |fleet| format!("?host={}", fleet.node().id()))
    }

    pub(crate) fn builder(&self) -> Result<&Builder, ApiError> {
        let none = || ApiError::unsupported("this host builds no templates");
        self.builder.as_ref().ok_or_else(none)
    }
}

/// `POST /v3/templates`: requests a build of a template. Creates the template unless it exists.
pub(super) async fn request(
    State(app): State<App>,
    caller: Caller,
    Required(new): Required<NewTemplate>,
) -> Result<(StatusCode, Json<RequestedBuild>), ApiError> {
    let size = size(&new);
    check_size(size)?;
    // Older clients send the name as `alias`.
    let name = new.name.or(new.alias).unwrap_or_default();
    let build_request = BuildRequest {
        name,
        tags: new.tags.unwrap_or_default(),
        size,
    };
    let key = caller.owner_id();
    let builder = app.builder()?;
    let (template, build) =
        builder.request(&build_request, caller.owner_scope(), key.as_deref())?;
    Ok((
        StatusCode::ACCEPTED,
        Json(RequestedBuild {
            template_id: template.id,
            build_id: build.id,
            public: template.public,
            names: vec![template.name.clone()],
            tags: build.tags,
            aliases: vec![template.name],
        }),
    ))
}

/// Rejects sizes that no sandbox can have.
pub(super) fn check_size(requested: WantedSize) -> Result<(), ApiError> {
    let valid = size_or_default(requested).check();
    valid.map_err(|e| ApiError::invalid(e.to_string()))
}

/// Returns the requested size, completed by the default size. This is an estimate: the build itself
/// uses the size of its base as the default.
fn size_or_default(requested: WantedSize) -> SandboxSize {
    let default_size = SandboxSize::default();
    SandboxSize {
        vcpus: requested.vcpus.unwrap_or(default_size.vcpus),
        memory_mib: requested.memory_mib.unwrap_or(default_size.memory_mib),
        // The request contains the minimum of free space, not the size of the disk. A value below
        // the default has no effect.
        disk_mib: requested.disk_mib.unwrap_or(0).max(default_size.disk_mib),
    }
}

/// `GET /templates/{id}/files/{hash}`: reports whether these files are stored, and returns a link
/// to upload them. With `verified=true`, only files whose content has this hash are considered and
/// accepted.
pub(super) async fn files(
    State(app): State<App>,
    caller: Caller,
    Path((id, hash)): Path<(String, String)>,
    headers: HeaderMap,
    query: Query,
) -> Result<(StatusCode, Json<UploadLink>), ApiError> {
    let verified = query.flag("verified")?;
    if caller.is_read_only() {
        return Err(ApiError::read_only());
    }
    let builder = app.builder()?;
    let template = builder.owned_template(&id, caller.owner_scope())?;
    let owner = template.owner.as_deref();
    let found = builder.uploads().find(owner, &hash)?;
    // Without `verified`, files that the client named by this hash are sufficient.
    let present = found.is_some_and(|found| found.is_verified || !verified);
    let naming = if verified {
        UploadNaming::OfArchive
    } else {
        UploadNaming::OfClient
    };
    let word = builder.uploads().create_ticket(owner, &hash, naming)?;
    let host = headers.get(header::HOST).and_then(|h| h.to_str().ok());
    let url = format!(
        "{}://{}/templates/uploads/{word}{}",
        app.config.scheme,
        // The client's own name for this host: the link must be reachable for the client.
        host.unwrap_or("localhost"),
        app.upload_host()
    );
    Ok((StatusCode::CREATED, Json(UploadLink { present, url })))
}

/// `PUT /templates/uploads/{word}`: receives files. The word in the link authorises the upload.
pub(super) async fn upload(
    State(app): State<App>,
    Path(word): Path<String>,
    query: Query,
    request: Request,
) -> Result<Response, ApiError> {
    let body = match &app.fleet {
        None => request.into_body(),
        Some(fleet) => match fleet.forward_upload(query.get("host"), request).await? {
            Ok(response) => return Ok(response),
            Err(request) => request.into_body(),
        },
    };
    receive(&app, &word, body)
        .await
        .map(IntoResponse::into_response)
}

/// Writes a body to the upload to which the link with `word` refers.
async fn receive(app: &App, word: &str, body: Body) -> Result<StatusCode, ApiError> {
    let mut upload = app.builder()?.uploads().begin(word).await?;
    let owner = upload.owner().map(str::to_owned);
    let is_closed = || app.keys.status(owner.as_deref()) != KeyStatus::InForce;
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        // An upload link is valid only as long as the key that created it. Check the key before
        // each piece, because an upload may take long.
        if is_closed() {
            return Err(BuilderError::from(UploadError::Closed).into());
        }
        let piece =
            piece.map_err(|e| ApiError::invalid(format!("the upload was interrupted: {e}")))?;
        upload.write(&piece).await?;
    }
    // The key may also have been revoked while the last piece was written.
    if is_closed() {
        return Err(BuilderError::from(UploadError::Closed).into());
    }
    upload.finish().await?;
    Ok(StatusCode::OK)
}

/// `POST /v2/templates/{id}/builds/{build}`: starts a build.
pub(super) async fn start(
    State(app): State<App>,
    caller: Caller,
    Path((id, build)): Path<(String, String)>,
    Required(mut start): Required<BuildStart<BuildSpec>>,
) -> Result<StatusCode, ApiError> {
    let builder = app.builder()?;
    let (template, build) = builder.owned_build(&id, &build, caller.owner_scope())?;
    let (secrets, ssh) = (secrets(&mut start)?, ssh_clients(&mut start)?);
    let spec = spec(start)?;
    start_build(&app, &template, &build, spec, (secrets, ssh)).await?;
    Ok(StatusCode::ACCEPTED)
}

/// Starts a build if the quota of its key permits.
pub(super) async fn start_build(
    app: &App,
    template: &TemplateRecord,
    build: &BuildRecord,
    spec: BuildSpec,
    (secrets, ssh): (BuildSecrets, SshClients),
) -> Result<(), ApiError> {
    // A build that exceeds the quota is rejected here, before it is queued. The build counts as one
    // create of its key. The permit ends with this request; each sandbox of the build reserves its
    // resources again.
    let owner = build.caller.as_deref().map(|id| app.keys.in_force(id));
    let owner = owner.transpose();
    let owner = owner.map_err(|e| ApiError::internal(e.to_string()))?;
    let _permit = match owner.flatten() {
        Some(key) => {
            let request = QuotaRequest {
                amount: running(size_or_default(build.size), 1),
                disk_floor: None,
            };
            Some(app.quota.reserve(&key, request, Some(1)).await?)
        }
        None => None,
    };
    Ok(app.builder()?.start(template, build, spec, secrets, ssh)?)
}

/// `POST /templates/{id}/builds/{build}/cancel`: responds when the build has terminated.
pub(super) async fn cancel(
    State(app): State<App>,
    caller: Caller,
    Path((id, build)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    let builder = app.builder()?;
    let (_, build) = builder.owned_build(&id, &build, caller.owner_scope())?;
    builder.cancel(&build)?;
    app.await_build_end(&build.id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the status of a build that the builder has recorded. `None` if this host has no builder,
/// or the builder does not know the template.
pub(super) fn status_of(
    app: &App,
    caller: &Caller,
    id: &str,
    build: &str,
    query: &Query,
) -> Result<Option<BuildStatus>, ApiError> {
    let Some(builder) = &app.builder else {
        return Ok(None);
    };
    let (template, build) = match builder.owned_build(id, build, caller.owner_scope()) {
        Ok(found) => found,
        Err(BuilderError::UnknownTemplate(_)) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let from = query.number("logsOffset", 0..=u64::from(u32::MAX))?;
    let limit = query.number("limit", 0..=MAX_PAGE)?.unwrap_or(MAX_PAGE);
    let level = query.word("level", &LEVELS)?;
    let which = LogQuery {
        from: LogPosition::Number(from.unwrap_or(0)),
        limit: usize::try_from(limit).unwrap_or(usize::MAX),
        backwards: false,
        level: level.unwrap_or(LogLevel::Debug),
    };
    // Read the status before the log: no line is written after the status is final, so a final
    // status implies a complete log.
    let build = builder.records().build(&build.id)?.unwrap_or(build);
    let lines = builder.records().log_lines(&build.id, which)?;
    let progress = builder.progress(&build.id);
    Ok(Some(status(&template.id, build, &lines, progress)))
}

/// `GET /templates/{id}/builds/{build}/logs`.
pub(super) async fn logs(
    State(app): State<App>,
    caller: Caller,
    Path((id, build)): Path<(String, String)>,
    query: Query,
) -> Result<Json<BuildLogs>, ApiError> {
    let builder = app.builder()?;
    let (_, build) = builder.owned_build(&id, &build, caller.owner_scope())?;
    let backwards = [("forward", false), ("backward", true)];
    let backwards = query.word("direction", &backwards)?.unwrap_or(false);
    // E2B has two sources of logs. Here both refer to the same log, so the parameter is only
    // validated.
    query.word("source", &[("temporary", ()), ("persistent", ())])?;
    // Without a cursor, start at the end of the log (backward) or at its beginning (forward).
    let default_start = if backwards { MAX_MOMENT * 1000 } else { 0 };
    let cursor = query.number("cursor", 0..=MAX_MOMENT * 1000)?;
    let which = LogQuery {
        from: LogPosition::Moment(cursor.unwrap_or(default_start)),
        limit: usize::try_from(query.number("limit", 0..=MAX_PAGE)?.unwrap_or(MAX_PAGE))
            .unwrap_or(usize::MAX),
        backwards,
        level: query.word("level", &LEVELS)?.unwrap_or(LogLevel::Debug),
    };
    let lines = builder.records().log_lines(&build.id, which)?;
    let logs = lines.iter().map(entry).collect();
    Ok(Json(BuildLogs { logs }))
}

/// `POST /templates/tags`: adds tags to the build to which `target` refers.
pub(super) async fn add_tags(
    State(app): State<App>,
    caller: Caller,
    Required(body): Required<AddTags>,
) -> Result<(StatusCode, Json<AddedTags>), ApiError> {
    let builder = app.builder()?;
    let target = body.target.unwrap_or_default();
    let template = builder.owned_template(&target, caller.owner_scope())?;
    let build = builder.tag(&template, &target, &body.tags).await?;
    Ok((
        StatusCode::CREATED,
        Json(AddedTags {
            tags: body.tags,
            build_id: build,
        }),
    ))
}

/// `DELETE /templates/tags`.
pub(super) async fn remove_tags(
    State(app): State<App>,
    caller: Caller,
    Required(body): Required<RemoveTags>,
) -> Result<StatusCode, ApiError> {
    let builder = app.builder()?;
    let template = builder.owned_template(&body.name.unwrap_or_default(), caller.owner_scope())?;
    builder.untag(&template, &body.tags).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `PATCH /v2/templates/{id}`: makes a template public or private.
pub(super) async fn change(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(change): Required<TemplateChange>,
) -> Result<Json<ChangedTemplate>, ApiError> {
    let builder = app.builder()?;
    let name = match builder.owned_template(&id, caller.owner_scope()) {
        Ok(template) => {
            if let Some(public) = change.public {
                builder.set_public(&template, public).await?;
            }
            template.reference(DEFAULT_TAG)
        }
        // The builder has no record of the template, for example of an imported one.
        Err(BuilderError::UnknownTemplate(_)) => {
            let info = app.template(&caller, &id)?;
            if !caller.owns_template(&info) {
                caller.require_admin("changing a template of another owner")?;
            }
            let name = info.without_tag();
            if let Some(public) = change.public {
                let (templates, name) = (app.templates.clone(), name.clone());
                let set = tokio::task::spawn_blocking(move || templates.set_public(&name, public));
                let set = set.await.map_err(|e| ApiError::internal(e.to_string()))?;
                set.map_err(|e| match e {
                    TemplateRefusal::Stock(_) => ApiError::invalid(e.to_string()),
                    e => ApiError::internal(e.to_string()),
                })?;
            }
            name
        }
        Err(e) => return Err(e.into()),
    };
    Ok(Json(ChangedTemplate {
        names: vec![caller.display_name(&name)],
    }))
}

/// `POST /templates/prune`: removes cached build steps and uploads. A key with the scope `create`
/// prunes its own data only.
pub(super) async fn prune(
    State(app): State<App>,
    caller: Caller,
    Optional(body): Optional<Prune>,
) -> Result<Json<Pruned>, ApiError> {
    let owner = caller.owner_scope().map(str::to_owned);
    let builder = app.builder()?.clone();
    let unused = Duration::from_secs(body.unused_seconds.min(MAX_UNUSED_S));
    let pruned = tokio::task::spawn_blocking(move || builder.prune(unused, owner.as_deref())).await;
    let pruned = pruned.map_err(|e| ApiError::internal(e.to_string()))??;
    Ok(Json(Pruned {
        steps: pruned.steps,
        upload_bytes: pruned.upload_bytes,
    }))
}
