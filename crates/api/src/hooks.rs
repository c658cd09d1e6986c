//! Interfaces of other components to the control plane.

use axum::extract::Request;
use axum::response::Response;
use jiffy_engine_api::{GuestStream, SandboxSize};
use jiffy_function_manager::FunctionRecord;
use jiffy_image::{
    DEFAULT_TAG, Recipe, Reference, TemplateError, TemplateManifest, TemplateSummary, Templates,
    Visibility,
};
use std::any::Any;
use std::future::Future;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;

/// A template as the control plane shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateInfo {
    /// Its name, without owner and tag.
    pub name: String,
    /// API key whose template it is; none: the host's owner.
    pub owner: Option<String>,
    /// Callers for whom it exists.
    pub visibility: Visibility,
    /// Its tag.
    pub tag: String,
    /// SHA-256 of what it is in hexadecimal; none: it has not been built yet and is built when it
    /// is first used.
    pub version: Option<String>,
    /// Size of its sandboxes unless their creator says otherwise.
    pub size: SandboxSize,
    /// When it was built, in seconds since 1970.
    pub created: u64,
}

impl TemplateInfo {
    /// By which it is found: `[owner/]name[:tag]`.
    pub fn reference(&self) -> String {
        let name = self.without_tag();
        match self.tag.as_str() {
            DEFAULT_TAG => name,
            tag => format!("{name}:{tag}"),
        }
    }

    /// `[owner/]name`.
    pub fn without_tag(&self) -> String {
        match &self.owner {
            Some(owner) => format!("{owner}/{}", self.name),
            None => self.name.clone(),
        }
    }
}

/// Why templates are not to be had.
#[derive(Debug, thiserror::Error)]
pub enum TemplateRefusal {
    /// No such template.
    #[error("template `{0}` does not exist")]
    Unknown(String),
    /// One that every key may use, always.
    #[error("`{0}` is a stock template, which every key may use")]
    Stock(String),
    /// The data directory.
    #[error("{0}")]
    Failed(String),
}

/// The templates of this host, by `[owner/]name[:tag]`. Calls are short: no image is read.
pub trait TemplateSource: Send + Sync + 'static {
    /// Those that are built, from `from` on (`[owner/]name`; none: all), by owner, name and tag,
    /// until `each` breaks off.
    fn walk(
        &self,
        from: Option<&str>,
        each: &mut dyn FnMut(TemplateInfo) -> ControlFlow<()>,
    ) -> Result<(), TemplateRefusal>;
    /// All that are built.
    fn list(&self) -> Result<Vec<TemplateInfo>, TemplateRefusal> {
        let mut all = Vec::new();
        self.walk(None, &mut |info| {
            all.push(info);
            ControlFlow::Continue(())
        })?;
        Ok(all)
    }
    /// One by name: built, or one that can be.
    fn find(&self, name: &str) -> Result<TemplateInfo, TemplateRefusal>;
    /// Lets every key use one with all its tags, or its owner alone.
    fn set_public(&self, name: &str, public: bool) -> Result<(), TemplateRefusal>;
    /// Removes one. Sandboxes that run of it go on.
    fn remove(&self, name: &str) -> Result<(), TemplateRefusal>;
}

/// Request to a function, whose caller may invoke it.
pub struct FunctionCall {
    /// Function.
    pub record: Arc<FunctionRecord>,
    /// Path that was cut off from the request's; none if the function has a host name of its own.
    pub prefix: Option<String>,
    /// Held until the end of the response.
    pub permit: Option<Box<dyn Any + Send>>,
    /// Request with the path that the function sees.
    pub request: Request,
}

/// Response of a function that is awaited.
pub type Invoking<'a> = Pin<Box<dyn Future<Output = Response> + Send + 'a>>;

/// Passes requests to functions.
pub trait FunctionInvoker: Send + Sync + 'static {
    /// Passes a request, and the response back, or a refusal.
    fn invoke(&self, call: FunctionCall) -> Invoking<'_>;
}

fn info(manifest: TemplateManifest) -> TemplateInfo {
    TemplateInfo {
        visibility: manifest.visibility,
        owner: manifest.owner.clone(),
        version: Some(manifest.version()),
        size: manifest.defaults.size(),
        created: manifest.created,
        name: manifest.name,
        tag: manifest.tag,
    }
}

fn summary_info(summary: &TemplateSummary) -> TemplateInfo {
    TemplateInfo {
        name: summary.reference.name().to_owned(),
        owner: summary.reference.owner().map(str::to_owned),
        visibility: summary.visibility,
        tag: summary.reference.tag().to_owned(),
        version: Some(summary.version.clone()),
        size: summary.size,
        created: summary.created,
    }
}

fn refusal(error: TemplateError) -> TemplateRefusal {
    match error {
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
        // Without the memory that an index of all would take.
        let manifests = Templates::list(self).map_err(refusal)?;
        Ok(manifests.into_iter().map(info).collect())
    }

    fn find(&self, name: &str) -> Result<TemplateInfo, TemplateRefusal> {
        let reference = Reference::parse(name).map_err(refusal)?;
        if let Some(manifest) = self.look_up(&reference).map_err(refusal)? {
            return Ok(info(manifest));
        }
        let unknown = reference.to_string();
        // One that is not built yet. Every create comes by here, so the recipe is read only for
        // those.
        match Recipe::built_in(&unknown) {
            Ok(recipe) => Ok(TemplateInfo {
                name: unknown,
                owner: None,
                visibility: Visibility::Public,
                tag: DEFAULT_TAG.to_owned(),
                version: None,
                size: recipe.defaults().size(),
                created: 0,
            }),
            Err(_) => Err(TemplateRefusal::Unknown(unknown)),
        }
    }

    fn set_public(&self, name: &str, public: bool) -> Result<(), TemplateRefusal> {
        let visibility = match public {
            true => Visibility::Public,
            false => Visibility::Private,
        };
        self.set_visibility(name, visibility).map_err(refusal)
    }

    fn remove(&self, name: &str) -> Result<(), TemplateRefusal> {
        Templates::remove(self, name).map_err(refusal)
    }
}

/// Links to a port in a sandbox that whoever has them may follow.
pub trait PreviewLinks: Send + Sync + 'static {
    /// The link to `port` of `sandbox` that holds until `expires`, in seconds since 1970.
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

/// Why there is no stream to a port of a sandbox. Texts are for clients.
#[derive(Debug, thiserror::Error)]
pub enum PortRefusal {
    /// Nothing listens there.
    #[error("nothing listens on port {0} in the sandbox")]
    Closed(u16),
    /// The sandbox sleeps and is not to be woken, or is gone.
    #[error("the sandbox is not running: resume it first")]
    NotRunning,
    /// Its owner has as much as they may have.
    #[error("{0}")]
    Limit(String),
    /// Anything else.
    #[error("{0}")]
    Unavailable(String),
}

/// A stream that is being opened.
pub type Opening<'a> = Pin<Box<dyn Future<Output = Result<GuestStream, PortRefusal>> + Send + 'a>>;

/// The TCP ports of sandboxes.
pub trait Ports: Send + Sync + 'static {
    /// A stream to `port` in the guest, which is woken if it may be.
    fn open<'a>(&'a self, id: &'a str, port: u16) -> Opening<'a>;
}
