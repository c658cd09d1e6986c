//! Bases of stages: resolves the names of templates, and imports images of registries.
//!
//! A *stage* is a part of a build that starts with a base image (`FROM`) and executes steps.

use super::names::{StoredTemplate, resolve};
use super::{BuilderError, BuilderInner, printable};
use jiffy_build_spec::spec::ImageSource;
use jiffy_engine_api::is_id;
use jiffy_image::{
    DiskBudget, Import, ImportError, ImportSource, ImportStart, Progress, Reference,
    RegistryAccess, Template, TemplateManifest, Visibility, imported_image,
};
use jiffy_registry_pull::Cancel;

impl BuilderInner {
    /// Resolves `which` (an id or name, optionally with a tag) for `owner`. An `owner` of `None` is
    /// the host's owner.
    pub(super) fn resolve_for(
        &self,
        which: &str,
        owner: Option<&str>,
    ) -> Result<String, BuilderError> {
        let look = |reference: &Reference| {
            let manifest = self.templates.look_up(reference);
            // A stock template that is not built yet is built on first use.
            let stock = reference.is_stock().then_some(StoredTemplate {
                visibility: Visibility::Public,
                version: None,
            });
            let stored = |m: TemplateManifest| StoredTemplate {
                visibility: m.visibility,
                version: Some(m.version()),
            };
            manifest
                .map(|manifest| manifest.map(stored).or(stock))
                .map_err(BuilderError::Template)
        };
        let resolved = resolve(which, owner, Some(&*self.records), &look)?;
        let resolved = resolved.map(|meaning| meaning.reference.to_string());
        resolved.ok_or_else(|| BuilderError::UnknownTemplate(printable(which)))
    }

    /// Distinguishes template names from registry images. `owner/name` is a template if the owner
    /// can be a key, even if the template does not exist. The name of a template that a key has
    /// withdrawn must not be sent to a registry. A name without an owner is a template if it
    /// resolves for `owner`.
    pub(super) fn is_template(&self, name: &str, owner: Option<&str>) -> bool {
        match name.split_once('/') {
            Some((key, _)) => is_id(key),
            None => self.resolve_for(name, owner).is_ok(),
        }
    }

    /// Imports an image as a template in the namespace of `owner`. The template's name is derived
    /// from the image. An image that has changed since its last import is imported again. `caller`
    /// is the key on whose behalf the registry is contacted. A `caller` of `None` is the host's
    /// owner.
    pub(super) fn import(
        &self,
        image: &ImageSource,
        owner: Option<&str>,
        caller: Option<&str>,
        cancel: &Cancel,
        disk: DiskBudget,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<TemplateManifest, ImportError> {
        // An internal name: the template does not appear in lists, and is pruned when unused.
        let name = imported_image(owner, &image.reference);
        let name = Reference::in_namespace(owner, &name)?.to_string();
        let host = image.reference.split('/').next().unwrap_or_default();
        let mut pull = self.settings.registries.pull(caller.is_some(), cancel);
        let own = host.starts_with("localhost:") || host.starts_with("127.0.0.1:");
        // Only the host's owner may reach registries in the host's own network.
        if caller.is_none() && (image.plain_http || own) {
            pull.registries.plain_http.push(host.to_owned());
        }
        let import = Import {
            name,
            visibility: Some(Visibility::Internal),
            source: ImportSource::Registry {
                reference: image.reference.clone(),
                pull,
                access: match &image.credentials {
                    Some((name, password)) => RegistryAccess::User {
                        name: name.clone(),
                        password: password.clone(),
                    },
                    // Credentials of the host's owner are not used for keys.
                    None if caller.is_some() => RegistryAccess::Anonymous,
                    None => RegistryAccess::Host,
                },
            },
            vcpus: None,
            memory_mib: None,
            disk_mib: None,
            // The build decides on the start command of its own template.
            start: ImportStart::Nothing,
            ready: None,
            limits: self.settings.limits,
            disk,
        };
        let template: Template = import.run(&self.templates, on_progress)?;
        Ok(template.manifest)
    }
}
