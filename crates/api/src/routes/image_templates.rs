//! Templates from images, as CubeSandbox's clients build, rebuild and rename them.

use super::{builds, templates};
use crate::app::App;
use crate::body::{Optional, Required};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::wire::image_template::{size, spec, started, with_credentials};
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_api_types::{ImageBuild, ImageRebuild, NewAlias, NewImageTemplate, Template};
use jiffy_engine_api::new_id;
use jiffy_template_builder::{
    BuildRequest, BuildSecrets, BuilderError, DEFAULT_TAG, SshClients, TemplateRecord,
};

/// Prefix of generated names.
const GENERATED_PREFIX: &str = "tpl-";

fn generated_name() -> Result<String, ApiError> {
    let id = new_id().map_err(|e| ApiError::internal(e.to_string()))?;
    Ok(format!("{GENERATED_PREFIX}{id}"))
}

/// `POST /templates`: builds a template from an image.
pub(super) async fn create(
    State(app): State<App>,
    caller: Caller,
    Required(new): Required<NewImageTemplate>,
) -> Result<(StatusCode, Json<ImageBuild>), ApiError> {
    let name = new.name.clone().filter(|name| !name.trim().is_empty());
    let name = match name {
        Some(name) => name.trim().to_owned(),
        None => generated_name()?,
    };
    build(&app, &caller, name, new).await
}

/// `POST /templates/{id}`: builds a template again from the image of its first build.
pub(super) async fn rebuild(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(again): Optional<ImageRebuild>,
) -> Result<(StatusCode, Json<ImageBuild>), ApiError> {
    let builder = app.builder()?;
    let template = builder.owned_template(&id, caller.owner_scope())?;
    let stored = builder.records().image_request(&template.id)?;
    let stored = stored.ok_or_else(|| {
        ApiError::invalid(format!(
            "template `{}` was not built from an image by `POST /templates`: build it again with \
             its own request",
            template.name
        ))
    })?;
    let new: NewImageTemplate =
        serde_json::from_str(&stored).map_err(|e| ApiError::internal(e.to_string()))?;
    let new = with_credentials(new, again);
    build(&app, &caller, template.name, new).await
}

/// Requests and starts a build.
async fn build(
    app: &App,
    caller: &Caller,
    name: String,
    new: NewImageTemplate,
) -> Result<(StatusCode, Json<ImageBuild>), ApiError> {
    let builder = app.builder()?;
    let wanted = size(&new)?;
    builds::check_size(wanted)?;
    // Without the password, which is used for one build only.
    let stored = NewImageTemplate {
        registry_password: None,
        ..new.clone()
    };
    let spec = spec(new)?;
    let request = BuildRequest {
        name,
        tags: Vec::new(),
        size: wanted,
    };
    let key = caller.owner_id();
    let (template, build) = builder.request(&request, caller.owner_scope(), key.as_deref())?;
    let stored = serde_json::to_string(&stored).map_err(|e| ApiError::internal(e.to_string()))?;
    builder.records().set_image_request(&template.id, &stored)?;
    let none = (BuildSecrets::default(), SshClients::default());
    let begun = builds::start_build(app, &template, &build, spec, none).await;
    if let Err(e) = begun {
        // The caller does not learn the id of the build, and cannot start it later.
        builder.cancel(&build)?;
        return Err(e);
    }
    Ok((StatusCode::ACCEPTED, Json(started(template, build))))
}

/// `PUT /templates/{id}/alias`: renames a template.
pub(super) async fn rename(
    state: State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(new): Required<NewAlias>,
) -> Result<Json<Template>, ApiError> {
    let builder = state.builder()?;
    let template = builder.owned_template(&id, caller.owner_scope())?;
    let name = match new.alias.trim() {
        "" => generated_name()?,
        name => name.to_ascii_lowercase(),
    };
    // Another member of a fleet may have a template of this name.
    let renamed = TemplateRecord {
        name,
        ..template.clone()
    };
    let is_new = renamed.name != template.name;
    if is_new && state.is_named_in_fleet(&renamed.reference(DEFAULT_TAG)) {
        return Err(BuilderError::NameInUse(renamed.name).into());
    }
    builder.rename(&template, &renamed.name).await?;
    templates::one(state, caller, Path(template.id)).await
}
