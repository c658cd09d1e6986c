//! Templates that builds begin with: those of the image store, and images of registries.

use super::names::resolve;
use super::{BuilderError, BuilderInner, shown};
use crate::spec::ImageSource;
use jiffy_engine::Engine;
use jiffy_image::{
    Access, DiskBudget, Import, ImportError, Manifest, Progress, Reference, Source, Start,
    Template, Visibility, imported_image, is_id,
};
use jiffy_pull::Cancel;

impl<E: Engine> BuilderInner<E> {
    /// The template that `which` (an id or name, perhaps with a tag) means for `owner`; none: the
    /// host's owner.
    pub(super) fn resolve_for(
        &self,
        which: &str,
        owner: Option<&str>,
    ) -> Result<String, BuilderError> {
        let look = |reference: &Reference| {
            let found = self.templates.look_up(reference);
            let stock = reference.is_stock().then_some(Visibility::Public);
            // One that is not built yet is built when it is used.
            found
                .map(|manifest| manifest.map(|m| m.visibility).or(stock))
                .map_err(BuilderError::Template)
        };
        let found = resolve(which, owner, Some(&*self.records), &look)?;
        let found = found.map(|meaning| meaning.reference.to_string());
        found.ok_or_else(|| BuilderError::UnknownTemplate(shown(which)))
    }

    /// Tells names of templates from images in a registry: `owner/name` is a template, if the owner
    /// can be a key, so that no registry is asked for what a key withdrew; a bare name is, if it
    /// means a template for `owner`.
    pub(super) fn is_template(&self, name: &str, owner: Option<&str>) -> bool {
        match name.split_once('/') {
            Some((key, _)) => is_id(key),
            None => self.resolve_for(name, owner).is_ok(),
        }
    }

    /// The template of an image, in the namespace of `owner`. It is kept under a name that says
    /// which image it is of, and made anew when that changed. `caller` is who asks the registry.
    pub(super) fn import(
        &self,
        image: &ImageSource,
        owner: Option<&str>,
        caller: Option<&str>,
        cancel: &Cancel,
        disk: DiskBudget,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Manifest, ImportError> {
        let name = imported_image(owner, &image.reference);
        let name = Reference::in_namespace(owner, &name)?.to_string();
        let host = image.reference.split('/').next().unwrap_or_default();
        let mut pull = self.settings.registries.pull(caller.is_some(), cancel);
        let own = host.starts_with("localhost:") || host.starts_with("127.0.0.1:");
        // Only its owner may have this host ask around in its own network.
        if caller.is_none() && (image.plain_http || own) {
            pull.registries.plain_http.push(host.to_owned());
        }
        let import = Import {
            name,
            visibility: Some(Visibility::Internal),
            source: Source::Registry {
                reference: image.reference.clone(),
                pull,
                access: match &image.credentials {
                    Some((name, password)) => Access::User {
                        name: name.clone(),
                        password: password.clone(),
                    },
                    // What the host's owner may read is not for everybody.
                    None if caller.is_some() => Access::Nobody,
                    None => Access::Host,
                },
            },
            vcpus: None,
            memory_mib: None,
            disk_mib: None,
            start: Start::Nothing,
            ready: None,
            limits: self.settings.limits,
            disk,
        };
        let template: Template = self.templates.import(&import, on_progress)?;
        Ok(template.manifest)
    }
}
