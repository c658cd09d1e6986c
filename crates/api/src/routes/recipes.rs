//! Builds of stock templates from their recipes, which the program contains.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::hooks::TemplateRefusal;
use crate::lookup::short;
use crate::query::Query;
use crate::routes::bounds::MAX_PAGE;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_api_types::{Recipe, RecipeBuild, RecipeState};

/// Requires a caller that manages the host: a build uses its processors, network and disk.
fn require_admin(caller: &Caller) -> Result<(), ApiError> {
    caller.require_admin("building a stock template")
}

fn unknown(recipe: &str) -> ApiError {
    ApiError::not_found(
        "template_not_found",
        format!("recipe `{}` does not exist", short(recipe)),
    )
}

fn failed(error: TemplateRefusal) -> ApiError {
    ApiError::internal(error.to_string())
}

/// `GET /recipes`: lists the recipes with the states of their templates.
pub(super) async fn list(
    State(app): State<App>,
    _caller: Caller,
) -> Result<Json<Vec<Recipe>>, ApiError> {
    let templates = app.templates.clone();
    // Manifests are read from the disk.
    let recipes = tokio::task::spawn_blocking(move || templates.recipes()).await;
    let recipes = recipes.map_err(|e| ApiError::internal(e.to_string()))?;
    let mut recipes = recipes.map_err(failed)?;
    for recipe in &mut recipes {
        if app.recipe_builds.is_running(&recipe.name) {
            recipe.state = RecipeState::Building;
        }
    }
    Ok(Json(recipes))
}

/// `POST /recipes/{recipe}/build`: builds the template of a recipe, unless it is built from this
/// version of the recipe. The build continues after the response.
pub(super) async fn build(
    State(app): State<App>,
    caller: Caller,
    Path(recipe): Path<String>,
) -> Result<(StatusCode, Json<RecipeBuild>), ApiError> {
    require_admin(&caller)?;
    if !app.templates.has_recipe(&recipe) {
        return Err(unknown(&recipe));
    }
    app.recipe_builds.begin(&recipe)?;
    let started = app.recipe_builds.get(&recipe, 0, 0);
    let (builds, templates, name) = (app.recipe_builds, app.templates, recipe.clone());
    tokio::spawn(async move {
        let (reported, built) = (builds.clone(), name.clone());
        let build = tokio::task::spawn_blocking(move || {
            templates.build_recipe(&built, &mut |progress| {
                reported.on_progress(&built, progress);
            })
        });
        let failure = match build.await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(format!("the build was interrupted: {error}")),
        };
        if let Some(failure) = &failure {
            tracing::warn!(
                recipe = name,
                error = failure,
                "cannot build a stock template"
            );
        }
        builds.end(&name, failure);
    });
    let started = started.ok_or_else(|| unknown(&recipe))?;
    Ok((StatusCode::ACCEPTED, Json(started)))
}

/// `GET /recipes/{recipe}/build`: returns the state and the log of the latest build.
pub(super) async fn status(
    State(app): State<App>,
    caller: Caller,
    Path(recipe): Path<String>,
    query: Query,
) -> Result<Json<RecipeBuild>, ApiError> {
    require_admin(&caller)?;
    let from = query.number("logsOffset", 0..=u64::from(u32::MAX))?;
    let limit = query.number("limit", 0..=MAX_PAGE)?.unwrap_or(MAX_PAGE);
    let number = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let found = app
        .recipe_builds
        .get(&recipe, number(from.unwrap_or(0)), number(limit));
    let none = || {
        ApiError::not_found(
            "build_not_found",
            format!(
                "a build of recipe `{}` does not exist: start one",
                short(&recipe)
            ),
        )
    };
    found.map(Json).ok_or_else(none)
}
