//! Bases of stages: resolves the names of templates, and imports images of registries. A build is
//! requested by the owner of the host, or by an API key, which owns templates of its own.
//!
//! A *stage* is a part of a build that starts with a base image (`FROM`) and executes steps.

use super::names::{StoredTemplate, resolve};
use super::{BuilderError, BuilderInner, printable};
use jiffy_build_spec::spec::{CloudCredentials, ImageSource};
use jiffy_engine_api::is_id;
use jiffy_image::{
    DiskBudget, Import, ImportError, ImportSource, ImportStart, Progress, Reference,
    RegistryAccess, SignaturePolicy, Template, TemplateManifest, Visibility, imported_image,
};
use jiffy_registry_pull::{Cancel, Credentials, RegistryLogin};

/// Variable with the endpoint of the API of Amazon ECR, which AWS's own programs use as well.
const ECR_ENDPOINT_VARIABLE: &str = "AWS_ENDPOINT_URL_ECR";

/// Returns the authentication for an image. If a key has requested the build (`by_key`), the
/// credentials of the host's owner are not used.
fn access(image: &ImageSource, by_key: bool) -> Result<RegistryAccess, ImportError> {
    let login = match (&image.cloud, &image.credentials) {
        (Some(CloudCredentials::Gcp(key)), _) => RegistryLogin::Gcp {
            service_account: key.clone(),
        },
        (
            Some(CloudCredentials::Aws {
                access_key_id,
                secret_access_key,
                region,
            }),
            _,
        ) => RegistryLogin::Aws {
            access_key_id: access_key_id.clone(),
            secret_access_key: secret_access_key.clone(),
            endpoint: ecr_endpoint(region, std::env::var(ECR_ENDPOINT_VARIABLE).ok())?,
            region: region.clone(),
        },
        (None, Some((user, password))) => RegistryLogin::Password(Credentials {
            user: user.clone(),
            password: password.clone(),
        }),
        (None, None) if by_key => return Ok(RegistryAccess::Anonymous),
        (None, None) => return Ok(RegistryAccess::Host),
    };
    Ok(RegistryAccess::Login(login))
}

/// Returns the URL of the API of Amazon ECR in a region. `configured` replaces the URL of AWS.
fn ecr_endpoint(region: &str, configured: Option<String>) -> Result<String, ImportError> {
    let is_region = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    // The region becomes a part of a host name.
    if region.is_empty() || region.len() > 32 || !region.chars().all(is_region) {
        return Err(ImportError::Choice(format!(
            "`{}` is not a region of AWS",
            printable(region)
        )));
    }
    let domain = if region.starts_with("cn-") {
        "amazonaws.com.cn"
    } else {
        "amazonaws.com"
    };
    let configured = configured.filter(|url| !url.is_empty());
    Ok(configured.unwrap_or_else(|| format!("https://api.ecr.{region}.{domain}")))
}

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

    /// Distinguishes template names from registry images. A name without an owner is a template if
    /// it resolves for `owner`. `owner/name` is a template if the owner has the form of a key's id,
    /// even if no such template exists. A removed or private template of a key may have this name,
    /// which must not be sent to a registry.
    pub(super) fn is_template(&self, name: &str, owner: Option<&str>) -> bool {
        match name.split_once('/') {
            Some((key, _)) => is_id(key),
            None => self.resolve_for(name, owner).is_ok(),
        }
    }

    /// Imports an image as a template in the namespace of `owner`. The template's name is derived
    /// from the image. An image that has changed since its last import is imported again. `caller`
    /// is the key on whose behalf the registry is contacted. A `caller` of `None` is the host's
    /// owner. The image must have a signature that `signatures` accepts.
    pub(super) fn import(
        &self,
        image: &ImageSource,
        owner: Option<&str>,
        caller: Option<&str>,
        (cancel, disk, signatures): (&Cancel, DiskBudget, &SignaturePolicy),
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<TemplateManifest, ImportError> {
        // The name is internal: the template does not appear in lists, and is pruned when unused.
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
                access: access(image, caller.is_some())?,
            },
            vcpus: None,
            memory_mib: None,
            disk_mib: None,
            // The build decides on the start command of its own template.
            start: ImportStart::Nothing,
            ready: None,
            limits: self.settings.limits,
            disk,
            signatures: signatures.clone(),
        };
        let template: Template = import.run(&self.templates, on_progress)?;
        Ok(template.manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_of_ecr_are_in_their_region() {
        let of = |region: &str| ecr_endpoint(region, None).map_err(|e| e.to_string());
        assert_eq!(
            of("eu-west-1").unwrap(),
            "https://api.ecr.eu-west-1.amazonaws.com"
        );
        assert_eq!(
            of("cn-north-1").unwrap(),
            "https://api.ecr.cn-north-1.amazonaws.com.cn"
        );
        for bad in ["", "eu.west", "a/b", "x@y", "EU"] {
            assert!(of(bad).is_err(), "{bad}");
        }
        let local = ecr_endpoint("eu-west-1", Some("http://localhost:1".to_owned()));
        assert_eq!(local.unwrap(), "http://localhost:1");
    }
}
