//! Traits through which the control plane uses other components: templates, functions, preview
//! links (signed addresses of ports) and ports. The daemon provides the implementations, so that
//! this crate does not depend on them.
//!
//! A *stock template* is a template whose recipe Jiffy contains. A *recipe* is a directory with the
//! packages, files and settings of a template.

use axum::extract::Request;
use axum::response::Response;
use jiffy_api_types::{Recipe as WireRecipe, RecipeState};
use jiffy_engine_api::{SandboxSize, TemplateNetwork};
use jiffy_function_manager::FunctionRecord;
use jiffy_image::{
    DEFAULT_TAG, Progress, Recipe, RecipeStatus, Reference, TemplateError, TemplateManifest,
    TemplateSummary, Templates, Visibility, build_if_needed, recipe_status, stock_names,
};
use jiffy_sandbox_manager::SandboxStream;
use std::any::Any;
use std::future::Future;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;

/// Description of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateInfo {
    /// Name without owner and tag.
    pub name: String,
    /// API key that owns the template. `None` if the host's owner owns it.
    pub owner: Option<String>,
    /// Callers that may use the template.
    pub visibility: Visibility,
    /// Tag.
    pub tag: String,
    /// Version: SHA-256 of the template's content in hexadecimal. `None` if the template has not
    /// been built yet; its first use builds it.
    pub version: Option<String>,
    /// Default size of its sandboxes.
    pub size: SandboxSize,
    /// Default idle timeout of its sandboxes in seconds. 0 means none.
    pub idle_timeout_s: Option<u64>,
    /// Network rules of its sandboxes. `None` if it has none.
    pub network: Option<Arc<TemplateNetwork>>,
    /// Time of the build, in seconds since 1970. 0 if the template has not been built yet.
    pub created: u64,
}

impl TemplateInfo {
    /// Returns the reference `[owner/]name[:tag]`.
    pub fn reference(&self) -> String {
        let name = self.without_tag();
        match self.tag.as_str() {
            DEFAULT_TAG => name,
            tag => format!("{name}:{tag}"),
        }
    }

    /// Returns `[owner/]name`.
    pub fn without_tag(&self) -> String {
        match &self.owner {
            Some(owner) => format!("{owner}/{}", self.name),
            None => self.name.clone(),
        }
    }
}

/// Errors of a template source.
#[derive(Debug, thiserror::Error)]
pub enum TemplateRefusal {
    /// The template does not exist.
    #[error("template `{0}` does not exist")]
    Unknown(String),
    /// The template is a stock template, which is always public.
    #[error("`{0}` is a stock template, which every key may use")]
    Stock(String),
    /// The data directory cannot be read or written.
    #[error("{0}")]
    Failed(String),
}

/// Templates of this host, named by `[owner/]name[:tag]`. Calls are short, because no image is
/// read.
pub trait TemplateSource: Send + Sync + 'static {
    /// Passes built templates to `each`, ordered by owner, name and tag, until `each` breaks.
    /// Starts at `from` (`[owner/]name`), or at the first template if `from` is `None`.
    fn walk(
        &self,
        from: Option<&str>,
        each: &mut dyn FnMut(TemplateInfo) -> ControlFlow<()>,
    ) -> Result<(), TemplateRefusal>;
    /// Returns all built templates.
    fn list(&self) -> Result<Vec<TemplateInfo>, TemplateRefusal> {
        let mut all = Vec::new();
        self.walk(None, &mut |info| {
            all.push(info);
            ControlFlow::Continue(())
        })?;
        Ok(all)
    }
    /// Returns a template by name: a built template or a stock template that is not built yet.
    fn find(&self, name: &str) -> Result<TemplateInfo, TemplateRefusal>;
    /// Makes a template with all its tags public or private.
    fn set_public(&self, name: &str, public: bool) -> Result<(), TemplateRefusal>;
    /// Removes a template. Running sandboxes continue.
    fn remove(&self, name: &str) -> Result<(), TemplateRefusal>;
    /// Returns the recipes of the stock templates, with the states of their templates.
    fn recipes(&self) -> Result<Vec<WireRecipe>, TemplateRefusal>;
    /// Returns whether a recipe has this name.
    fn has_recipe(&self, name: &str) -> bool;
    /// Builds the template of a recipe, unless it was built from an equal recipe. Takes minutes.
    fn build_recipe(
        &self,
        name: &str,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), TemplateRefusal>;
}

/// A request to a function. The caller's permission was checked.
pub struct FunctionCall {
    /// Function.
    pub record: Arc<FunctionRecord>,
    /// Prefix that was removed from the request's path. `None` if the function has its own host
    /// name.
    pub prefix: Option<String>,
    /// Permit within the owner's limit of concurrent requests, held until the end of the response.
    /// `None` if the host's owner owns the function.
    pub permit: Option<Box<dyn Any + Send>>,
    /// Request with the path that the function receives.
    pub request: Request,
}

/// Future of a function's response.
pub type Invoking<'a> = Pin<Box<dyn Future<Output = Response> + Send + 'a>>;

/// Forwards requests to functions.
pub trait FunctionInvoker: Send + Sync + 'static {
    /// Forwards a request and returns the function's response or an error response.
    fn invoke(&self, call: FunctionCall) -> Invoking<'_>;
}

fn rules(network: TemplateNetwork) -> Option<Arc<TemplateNetwork>> {
    (!network.is_empty()).then(|| Arc::new(network))
}

/// Converts a manifest into the description of a template.
fn info(manifest: TemplateManifest) -> TemplateInfo {
    TemplateInfo {
        visibility: manifest.visibility,
        owner: manifest.owner.clone(),
        version: Some(manifest.version()),
        size: manifest.defaults.size(),
        idle_timeout_s: manifest.idle_timeout_s,
        network: rules(manifest.network),
        created: manifest.created,
        name: manifest.name,
        tag: manifest.tag,
    }
}

/// Converts a summary from the index into the description of a template.
fn summary_info(summary: &TemplateSummary) -> TemplateInfo {
    TemplateInfo {
        name: summary.reference.name().to_owned(),
        owner: summary.reference.owner().map(str::to_owned),
        visibility: summary.visibility,
        tag: summary.reference.tag().to_owned(),
        version: Some(summary.version.clone()),
        size: summary.size,
        idle_timeout_s: summary.idle_timeout_s,
        network: rules(summary.network.clone()),
        created: summary.created,
    }
}

fn refusal(error: TemplateError) -> TemplateRefusal {
    match error {
        // An invalid name cannot exist.
        TemplateError::Name { name } | TemplateError::Unknown { name, .. } => {
            TemplateRefusal::Unknown(name)
        }
        TemplateError::Stock { name } => TemplateRefusal::Stock(name),
        e => TemplateRefusal::Failed(e.to_string()),
    }
}

impl TemplateSource for Templates {
    fn walk(
        &self,
        from: Option<&str>,
        each: &mut dyn FnMut(TemplateInfo) -> ControlFlow<()>,
    ) -> Result<(), TemplateRefusal> {
        Templates::walk(self, from, &mut |summary| each(summary_info(summary))).map_err(refusal)
    }

    fn list(&self) -> Result<Vec<TemplateInfo>, TemplateRefusal> {
        // Unlike `walk`, this needs no index of all templates in memory.
        let manifests = Templates::list(self).map_err(refusal)?;
        Ok(manifests.into_iter().map(info).collect())
    }

    fn find(&self, name: &str) -> Result<TemplateInfo, TemplateRefusal> {
        let reference = Reference::parse(name).map_err(refusal)?;
        if let Some(manifest) = self.look_up(&reference).map_err(refusal)? {
            return Ok(info(manifest));
        }
        // The name in normalised form, for example in lower case.
        let unknown = reference.to_string();
        // The template is not built. Stock templates can be used nevertheless: their first use
        // builds them. The recipe is read only in this case, because every request to create a
        // sandbox looks up its template here.
        match Recipe::built_in(&unknown) {
            Ok(recipe) => Ok(TemplateInfo {
                name: unknown,
                owner: None,
                visibility: Visibility::Public,
                tag: DEFAULT_TAG.to_owned(),
                version: None,
                size: recipe.defaults().size(),
                idle_timeout_s: None,
                network: None,
                created: 0,
            }),
            Err(_) => Err(TemplateRefusal::Unknown(unknown)),
        }
    }

    fn set_public(&self, name: &str, public: bool) -> Result<(), TemplateRefusal> {
        let visibility = if public {
            Visibility::Public
        } else {
            Visibility::Private
        };
        self.set_visibility(name, visibility).map_err(refusal)
    }

    fn remove(&self, name: &str) -> Result<(), TemplateRefusal> {
        Templates::remove(self, name).map_err(refusal)
    }

    fn recipes(&self) -> Result<Vec<WireRecipe>, TemplateRefusal> {
        let recipe = |name: &str| -> Result<WireRecipe, TemplateRefusal> {
            let recipe = Recipe::built_in(name).map_err(|e| failure(&e))?;
            let state = match recipe_status(self, &recipe).map_err(refusal)? {
                RecipeStatus::Missing => RecipeState::Missing,
                RecipeStatus::Outdated => RecipeState::Outdated,
                RecipeStatus::Current => RecipeState::Ready,
            };
            Ok(WireRecipe {
                name: name.to_owned(),
                from: recipe.base().map(|base| base.name().to_owned()),
                state,
            })
        };
        stock_names().map(recipe).collect()
    }

    fn has_recipe(&self, name: &str) -> bool {
        Recipe::is_built_in(name)
    }

    fn build_recipe(
        &self,
        name: &str,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), TemplateRefusal> {
        let recipe = Recipe::built_in(name).map_err(|e| failure(&e))?;
        let built = build_if_needed(self, &recipe, on_progress);
        built.map(drop).map_err(|e| failure(&e))
    }
}

/// Returns an error with its causes.
fn failure(error: &dyn std::error::Error) -> TemplateRefusal {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let texts: Vec<String> = causes.map(ToString::to_string).collect();
    TemplateRefusal::Failed(texts.join(": "))
}

/// Creates signed links to ports of sandboxes.
pub trait PreviewLinks: Send + Sync + 'static {
    /// Returns the link to `port` of `sandbox`, valid until `expires` (seconds since 1970).
    fn link(&self, sandbox: &str, port: u16, expires: u64) -> String;
}

impl<F: Fn(&str, u16, u64) -> String + Send + Sync + 'static> PreviewLinks for F {
    fn link(&self, sandbox: &str, port: u16, expires: u64) -> String {
        self(sandbox, port, expires)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_image::Home;

    #[test]
    fn a_stock_template_is_known_before_it_is_built_and_a_path_never_is() {
        let dir = tempfile::tempdir().unwrap();
        let templates = Templates::new(&Home::at(dir.path().join("home")).unwrap());
        let base = templates.find("base").unwrap();
        assert_eq!((base.name.as_str(), base.version), ("base", None));
        assert_eq!(templates.find("BASE").unwrap().name, "base");
        for name in ["nope", "..", "../templates", "/etc", "", "a\0"] {
            let found = templates.find(name);
            assert!(matches!(found, Err(TemplateRefusal::Unknown(_))), "{name}");
        }
        assert!(TemplateSource::list(&templates).unwrap().is_empty());
    }
}

/// Reasons why a port of a sandbox cannot be reached. The texts are shown to clients.
#[derive(Debug, thiserror::Error)]
pub enum PortRefusal {
    /// No process in the sandbox listens on the port.
    #[error("nothing listens on port {0} in the sandbox")]
    Closed(u16),
    /// The sandbox was killed, or is paused and may not be resumed.
    #[error("the sandbox is not running: resume it first")]
    NotRunning,
    /// The sandbox is paused, and its owner's quota does not permit a resume.
    #[error("{0}")]
    Limit(String),
    /// Other failure.
    #[error("{0}")]
    Unavailable(String),
}

/// Future of a stream to a port.
pub type Opening<'a> =
    Pin<Box<dyn Future<Output = Result<SandboxStream, PortRefusal>> + Send + 'a>>;

/// TCP ports of sandboxes.
pub trait Ports: Send + Sync + 'static {
    /// Opens a stream to `port` in the guest. Resumes the sandbox first if auto-resume is enabled.
    fn open<'a>(&'a self, id: &'a str, port: u16) -> Opening<'a>;
}
