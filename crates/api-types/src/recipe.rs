//! Recipes, from which a host builds its stock templates.

use crate::build::{BuildProgress, BuildState, FailureReason};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Recipe of a stock template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Recipe {
    /// Name of the recipe and of its template.
    pub name: String,
    /// Stock template that the recipe extends. Absent if the recipe extends none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// State of the template.
    pub state: RecipeState,
}

/// State of a stock template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RecipeState {
    /// The template is not built. Its first sandbox builds it.
    Missing,
    /// The template was built from another version of the recipe. Its next sandbox builds it.
    Outdated,
    /// The template is built from this version of the recipe.
    Ready,
    /// A client has started a build, which is running.
    Building,
}

/// Build of a stock template from its recipe. The host retains its state until the daemon stops.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RecipeBuild {
    /// Name of the recipe.
    pub name: String,
    /// State of the build.
    pub status: BuildState,
    /// Lines of the log.
    pub logs: Vec<String>,
    /// Progress of a running build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<BuildProgress>,
    /// Cause of a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<FailureReason>,
}
