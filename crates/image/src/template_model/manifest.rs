//! Manifest of a template, `template.json`: name, owner, images, defaults and startup settings.

use super::error::TemplateError;
use super::reference::{DEFAULT_TAG, Reference};
use crate::verified::sum_of;
use jiffy_engine_api::{SandboxSize, Startup, TemplateNetwork};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Name of the manifest in the directory of its template.
pub(crate) const MANIFEST: &str = "template.json";

/// Format of `template.json`. The only other format that can be read is format 1, in which a
/// template has one image, stored in the directory of the manifest.
pub const MANIFEST_FORMAT: u32 = 2;

/// Maximum number of images of a template. A guest has at most eight disks, of which one is
/// writable and one is reserved for kernel modules.
pub const MAX_IMAGES: usize = 6;

/// `template.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TemplateManifest {
    /// [`MANIFEST_FORMAT`].
    pub format: u32,
    pub name: String,
    #[serde(default = "default_tag")]
    pub tag: String,
    /// Key that owns the template. `None` if the host's owner owns it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    #[serde(default)]
    pub visibility: Visibility,
    /// Creation time in seconds since 1970.
    pub created: u64,
    /// SHA-256 of all inputs of the build except the packages.
    pub recipe_sha256: String,
    /// Images of the root file system, lowest first; 1 to [`MAX_IMAGES`].
    pub images: Vec<ImageSum>,
    pub defaults: Defaults,
    /// Default idle timeout of its sandboxes in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_s: Option<u64>,
    /// Network rules of its sandboxes.
    #[serde(default, skip_serializing_if = "TemplateNetwork::is_empty")]
    pub network: TemplateNetwork,
    /// Command that runs in every sandbox, with its readiness check.
    #[serde(flatten)]
    pub startup: Startup,
    /// Origin of an imported template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<ImageOrigin>,
    /// Steps that created the template, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<HistoryStep>,
}

/// Fields of a new manifest.
pub(crate) struct ManifestFields<'a> {
    pub reference: &'a Reference,
    pub visibility: Visibility,
    /// SHA-256 of all inputs except the packages, lower-case hexadecimal. Becomes
    /// [`TemplateManifest::recipe_sha256`].
    pub hash: &'a str,
    /// Images of the root file system, lowest first.
    pub images: Vec<ImageSum>,
    pub defaults: &'a Defaults,
    pub idle_timeout_s: Option<u64>,
    pub network: TemplateNetwork,
    pub startup: Startup,
    pub origin: Option<ImageOrigin>,
    pub history: Vec<HistoryStep>,
}

impl ManifestFields<'_> {
    pub(crate) fn manifest(self) -> TemplateManifest {
        TemplateManifest {
            format: MANIFEST_FORMAT,
            name: self.reference.name().to_owned(),
            tag: self.reference.tag().to_owned(),
            owner: self.reference.owner().map(str::to_owned),
            visibility: self.visibility,
            created: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs(),
            recipe_sha256: self.hash.to_owned(),
            images: self.images,
            defaults: self.defaults.clone(),
            idle_timeout_s: self.idle_timeout_s,
            network: self.network,
            startup: self.startup,
            origin: self.origin,
            history: self.history,
        }
    }
}

/// Callers that may see and use a template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Visibility {
    /// The owner of the template and the host's owner.
    #[default]
    Private,
    /// Every key.
    Public,
    /// Builds only.
    Internal,
}

impl Visibility {
    /// Name in manifests and the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Public => "public",
            Self::Internal => "internal",
        }
    }
}

/// A step in the history of a template.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HistoryStep {
    /// Description on one line.
    pub text: String,
    /// Duration of the step.
    pub seconds: f64,
    /// Bytes that the step added, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// Origin of an imported template, and the configuration of its image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageOrigin {
    /// Reference of the image, or path of the archive or directory.
    pub from: String,
    /// SHA-256 of the image's manifest in lower-case hexadecimal. `None` if the origin has no
    /// manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest_sha256: Option<String>,
    /// Diff ids of the image's layers, lowest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<String>,
    /// Entry point of the image. It runs only if the import requests it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// Ports that the image declares, in the form `80/tcp`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exposed_ports: Vec<String>,
    /// Instructions (`ONBUILD`) that run in builds based on the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_build: Vec<String>,
}

/// Digest and size of an image.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ImageSum {
    /// SHA-256 in lower-case hexadecimal.
    pub sha256: String,
    /// Size in bytes.
    pub size: u64,
}

/// Default settings of a template's sandboxes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Defaults {
    pub user: String,
    pub workdir: String,
    /// Disk size in MiB.
    pub disk_mib: u64,
    /// Memory in MiB. Defaults to the memory of [`jiffy_engine_api::SandboxSize`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// Number of vCPUs. Defaults to the vCPUs of [`jiffy_engine_api::SandboxSize`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

impl Defaults {
    /// Returns the default size of sandboxes with these settings. The default is the same for every
    /// caller, so that all callers share the template's snapshot and pool.
    pub fn size(&self) -> SandboxSize {
        let standard = SandboxSize::default();
        SandboxSize {
            vcpus: self.vcpus.unwrap_or(standard.vcpus),
            memory_mib: self.memory_mib.unwrap_or(standard.memory_mib),
            disk_mib: self.disk_mib,
        }
    }
}

fn default_tag() -> String {
    DEFAULT_TAG.to_owned()
}

impl TemplateManifest {
    /// Returns the version of the template: the SHA-256 over images, defaults, startup settings and
    /// network rules in lower-case hexadecimal. Templates whose sandboxes are equal have equal
    /// versions. A snapshot is bound to the version of its template.
    pub fn version(&self) -> String {
        let (images, defaults, startup) = (&self.images, &self.defaults, &self.startup);
        // Without rules, the version is the version of earlier releases. With rules, it differs,
        // so that hosts of a fleet do not use a copy of the template with other rules.
        let text = if self.network.is_empty() {
            serde_json::to_vec(&(images, defaults, startup))
        } else {
            serde_json::to_vec(&(images, defaults, startup, &self.network))
        };
        // Serialization of strings and numbers cannot fail.
        sum_of(&text.unwrap_or_default())
    }

    /// Returns the name as `[owner/]name[:tag]`.
    pub fn reference(&self) -> String {
        let owner = self.owner.as_ref();
        let owner = owner.map_or_else(String::new, |owner| format!("{owner}/"));
        // The default tag is omitted.
        if self.tag == DEFAULT_TAG {
            format!("{owner}{}", self.name)
        } else {
            format!("{owner}{}:{}", self.name, self.tag)
        }
    }

    /// Sets name, owner and tag.
    pub(crate) fn rename(&mut self, to: &Reference) {
        self.owner = to.owner().map(str::to_owned);
        to.name().clone_into(&mut self.name);
        to.tag().clone_into(&mut self.tag);
    }

    /// Returns the bytes of all images, including shared images.
    pub fn size(&self) -> u64 {
        self.images.iter().map(|i| i.size).sum()
    }

    /// Reads and parses the manifest at `path`.
    pub(crate) fn read(path: &Path) -> Result<Self, TemplateError> {
        let broken = |problem: String| TemplateError::Manifest {
            path: path.to_owned(),
            problem,
        };
        let text = fs::read(path).map_err(|e| broken(e.to_string()))?;
        Self::parse(&text).map_err(broken)
    }

    /// Parses and checks a manifest of the current format or of format 1. An error is a description
    /// of the problem.
    pub(crate) fn parse(text: &[u8]) -> Result<Self, String> {
        // The format is read first, because it determines the other fields.
        let mut value: Value = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        let format = value.get("format").and_then(Value::as_u64);
        // Format 1 has one image in the field `image`.
        if format == Some(1) {
            let image = value.get_mut("image").map(Value::take).unwrap_or_default();
            value["images"] = Value::Array(vec![image]);
            value["format"] = MANIFEST_FORMAT.into();
        } else if format != Some(MANIFEST_FORMAT.into()) {
            let found = format.map_or("unknown".to_owned(), |f| f.to_string());
            return Err(format!(
                "its format is {found}, but this version supports format {MANIFEST_FORMAT}"
            ));
        }
        let manifest: Self = serde_json::from_value(value).map_err(|e| e.to_string())?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Checks the fields of a manifest, which may come from another host.
    fn check(&self) -> Result<(), String> {
        // Upper-case digits are rejected, so that each digest has only one form.
        let hexadecimal = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        let sound = |i: &ImageSum| i.sha256.len() == 64 && i.sha256.bytes().all(hexadecimal);
        if !(1..=MAX_IMAGES).contains(&self.images.len()) {
            let n = self.images.len();
            return Err(format!("it lists {n} images, expected 1 to {MAX_IMAGES}"));
        }
        // The digests become file names.
        if !self.images.iter().all(sound) {
            return Err("the checksum of an image is invalid".to_owned());
        }
        // Name, owner and tag become parts of a directory's name.
        Reference::parse(&self.reference()).map_err(|e| e.to_string())?;
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    /// Returns a manifest whose images have the given texts, repeated to 64 digits, as checksums.
    pub(crate) fn manifest(images: &[&str]) -> TemplateManifest {
        let image = |sum: &&str| json!({ "sha256": sum.repeat(64 / sum.len()), "size": 1 });
        let value = json!({
            "format": MANIFEST_FORMAT, "name": "x", "created": 1, "recipe_sha256": "",
            "images": images.iter().map(image).collect::<Vec<_>>(),
            "defaults": { "user": "user", "workdir": "/", "disk_mib": 64 },
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn templates_with_equal_sandboxes_have_equal_versions() {
        let one = manifest(&["a", "b"]);
        let mut other = TemplateManifest {
            name: "y".to_owned(),
            tag: "z".to_owned(),
            created: 2,
            recipe_sha256: "r".to_owned(),
            idle_timeout_s: Some(60),
            ..one.clone()
        };
        assert_eq!(one.version(), other.version());
        other.images.reverse();
        assert_ne!(one.version(), other.version());
        let mut other = one.clone();
        other.defaults.disk_mib = 65;
        assert_ne!(one.version(), other.version());
        let mut other = one.clone();
        other.network.allow_internet_access = Some(false);
        assert_ne!(one.version(), other.version());
    }

    #[test]
    fn a_manifest_without_owner_is_private_to_the_hosts_owner() {
        let read = manifest(&["a"]);
        assert_eq!((read.owner, read.visibility), (None, Visibility::Private));
    }

    #[test]
    fn manifest_format_1_has_one_image() {
        let mut old = serde_json::to_value(manifest(&["a"])).unwrap();
        old["image"] = old["images"][0].take();
        old.as_object_mut().unwrap().remove("images");
        old.as_object_mut().unwrap().remove("tag");
        old["format"] = json!(1);
        let read = TemplateManifest::parse(old.to_string().as_bytes()).unwrap();
        assert_eq!(read, manifest(&["a"]));
    }

    #[test]
    fn a_manifest_with_bad_names_or_without_images_is_refused() {
        let refused = |change: &dyn Fn(&mut Value)| {
            let mut value = serde_json::to_value(manifest(&["a"])).unwrap();
            change(&mut value);
            TemplateManifest::parse(value.to_string().as_bytes()).unwrap_err()
        };
        assert!(refused(&|v| v["images"] = json!([])).contains("0 images"));
        let many = vec![json!({ "sha256": "a".repeat(64), "size": 1 }); MAX_IMAGES + 1];
        assert!(refused(&|v| v["images"] = json!(many)).contains("7 images"));
        let path = format!("{:.<64}", "../");
        assert!(refused(&|v| v["images"][0]["sha256"] = json!(path)).contains("checksum"));
        assert!(refused(&|v| v["name"] = json!("../x")).contains("not a template name"));
        assert!(refused(&|v| v["owner"] = json!("..")).contains("not a template name"));
        assert!(refused(&|v| v["format"] = json!(3)).contains("format is 3"));
    }
}
