//! JSON documents of an image: index, manifest and configuration (OCI image specification 1.1, and
//! Docker's equivalents). All documents are untrusted.
//!
//! A *layer* of a container image is an archive with the files that one step of its build changed.
//! Its *diff id* is the SHA-256 of the uncompressed archive.

use super::{ImportError, bounded};
use crate::layer::shown;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use std::collections::BTreeMap;

/// Maximum size of a document in bytes, as in registries.
pub(super) const MAX_DOCUMENT_BYTES: u64 = 4 << 20;
/// Maximum number of layers (overlayfs allows 500).
const MAX_LAYERS: usize = 400;
/// Maximum size of an image's environment in bytes. Every sandbox receives the environment in one
/// message.
const MAX_ENV_BYTES: usize = 128 << 10;

/// Descriptor of a document or layer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    pub digest: String,
    #[serde(default)]
    pub size: u64,
    pub platform: Option<Platform>,
    pub media_type: Option<String>,
    /// Type of the referenced manifest, if it is not an image.
    pub artifact_type: Option<String>,
    #[serde(default, deserialize_with = "bounded::map")]
    pub annotations: BTreeMap<String, String>,
}

/// Platform of an image.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Platform {
    pub architecture: String,
    pub os: String,
}

/// An index or a manifest. An index has `manifests`, a manifest has `config` and `layers`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Document {
    #[serde(default, deserialize_with = "bounded::list")]
    pub manifests: Vec<Descriptor>,
    pub config: Option<Descriptor>,
    #[serde(default, deserialize_with = "bounded::list")]
    pub layers: Vec<Descriptor>,
}

/// Configuration of an image.
#[derive(Debug, Deserialize)]
pub(super) struct ImageConfig {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    pub config: Option<RunConfig>,
    #[serde(default)]
    rootfs: Rootfs,
}

/// Digests of the uncompressed layers, lowest first.
#[derive(Debug, Default, Deserialize)]
struct Rootfs {
    #[serde(default, deserialize_with = "bounded::list")]
    diff_ids: Vec<String>,
}

/// Runtime configuration of an image.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct RunConfig {
    #[serde(deserialize_with = "bounded::list_or_null")]
    pub env: Option<Vec<String>>,
    pub user: Option<String>,
    pub working_dir: Option<String>,
    #[serde(deserialize_with = "bounded::list_or_null")]
    pub entrypoint: Option<Vec<String>>,
    #[serde(deserialize_with = "bounded::list_or_null")]
    pub cmd: Option<Vec<String>>,
    #[serde(deserialize_with = "bounded::map_or_null")]
    pub exposed_ports: Option<BTreeMap<String, IgnoredAny>>,
    #[serde(deserialize_with = "bounded::list_or_null")]
    pub on_build: Option<Vec<String>>,
}

/// Parses a document.
pub(super) fn parse<T: DeserializeOwned>(what: &str, text: &[u8]) -> Result<T, ImportError> {
    serde_json::from_slice(text).map_err(|e| ImportError::image(format!("its {what}: {e}")))
}

/// Returns the hexadecimal digits of a `sha256:` digest. They are validated, because they become
/// file names.
pub(super) fn sha256(digest: &str) -> Result<&str, ImportError> {
    let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    let digits = digest.strip_prefix("sha256:");
    let digits = digits.filter(|d| d.len() == 64 && d.bytes().all(is_hex));
    let shown = shown(digest.as_bytes());
    digits.ok_or_else(|| ImportError::image(format!("`{shown}` is not a sha256 digest")))
}

impl Document {
    /// Returns the descriptor of the linux/amd64 manifest in an index.
    pub(super) fn linux_amd64(&self) -> Result<&Descriptor, ImportError> {
        let is_linux_amd64 = |d: &&Descriptor| {
            let platform = d.platform.as_ref();
            platform.is_some_and(|p| p.os == "linux" && p.architecture == "amd64")
        };
        if let Some(found) = self.manifests.iter().find(is_linux_amd64) {
            return Ok(found);
        }
        // Indexes list attestations with the platform `unknown/unknown`.
        let platforms = self.manifests.iter().filter_map(|d| d.platform.as_ref());
        let platforms = platforms.filter(|p| p.os != "unknown");
        let mut found: Vec<String> = platforms
            .map(|p| shown(format!("{}/{}", p.os, p.architecture).as_bytes()))
            .collect();
        // Variants of one architecture have equal names and follow each other.
        found.dedup();
        Err(ImportError::Platform {
            found: if found.is_empty() {
                "an unspecified platform".to_owned()
            } else {
                found.join(", ")
            },
        })
    }
}

impl ImageConfig {
    /// Returns the diff ids of the layers, lowest first. The image must be for linux/amd64 and list
    /// exactly `layers` diff ids.
    pub(super) fn diff_ids(&self, layers: usize) -> Result<Vec<String>, ImportError> {
        if self.os != "linux" || self.architecture != "amd64" {
            let found = format!("{}/{}", self.os, self.architecture);
            return Err(ImportError::Platform {
                found: shown(found.as_bytes()),
            });
        }
        // Each diff id belongs to the layer at the same position.
        let ids = &self.rootfs.diff_ids;
        if ids.len() != layers {
            let problem = format!("it lists {} diff ids, but has {layers} layers", ids.len());
            return Err(ImportError::image(problem));
        }
        if layers > MAX_LAYERS {
            let problem = format!("it has {layers} layers, more than {MAX_LAYERS}");
            return Err(ImportError::image(problem));
        }
        ids.iter().map(|id| Ok(sha256(id)?.to_owned())).collect()
    }
}

impl RunConfig {
    /// Returns the environment. If a variable occurs twice, the last value applies.
    pub(super) fn environment(&self) -> Result<BTreeMap<String, String>, ImportError> {
        let list = self.env.as_deref().unwrap_or_default();
        if list.iter().map(String::len).sum::<usize>() > MAX_ENV_BYTES {
            let problem = format!("its environment is larger than {} KiB", MAX_ENV_BYTES >> 10);
            return Err(ImportError::image(problem));
        }
        // Docker allows a variable without a value.
        let pairs = list
            .iter()
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        // An empty name or a zero byte is not valid in the environment of a process.
        let usable =
            |name: &str, value: &str| !name.is_empty() && !format!("{name}{value}").contains('\0');
        Ok(pairs
            .filter(|(name, value)| usable(name, value))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect())
    }

    /// Returns the user as `name` or `uid`, optionally with `:group`. Defaults to root.
    pub(super) fn user(&self) -> Result<String, ImportError> {
        // An empty string means the same as a missing field.
        let user = self
            .user
            .as_deref()
            .filter(|u| !u.is_empty())
            .unwrap_or("root");
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-:$".contains(c);
        if user.len() > 128 || !user.chars().all(plain) {
            let shown = shown(user.as_bytes());
            return Err(ImportError::image(format!(
                "its user `{shown}` is not a valid user name"
            )));
        }
        Ok(user.to_owned())
    }

    /// Returns the working directory as an absolute path.
    pub(super) fn workdir(&self) -> Result<String, ImportError> {
        let path = self.working_dir.as_deref().unwrap_or_default();
        // A path has at most 4096 bytes with its zero byte (`PATH_MAX`).
        if path.len() > 4095 || path.contains('\0') {
            return Err(ImportError::image(
                "its working directory is not a valid path".to_owned(),
            ));
        }
        Ok(format!("/{}", path.trim_matches('/')))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_of_an_image_is_read_as_docker_does() {
        let text = br#"{"Env":["PATH=/bin","A=b=c","A=d","B"],"User":"1000:1000","WorkingDir":"srv/","Entrypoint":null}"#;
        let run: RunConfig = serde_json::from_slice(text).unwrap();
        let env = run.environment().unwrap();
        assert_eq!(
            (env["PATH"].as_str(), env["A"].as_str(), env["B"].as_str()),
            ("/bin", "d", "")
        );
        assert_eq!(run.user().unwrap(), "1000:1000");
        assert_eq!(run.workdir().unwrap(), "/srv");
        let run = RunConfig::default();
        assert_eq!(
            (run.user().unwrap(), run.workdir().unwrap()),
            ("root".into(), "/".into())
        );
    }

    #[test]
    fn digests_that_could_be_paths_are_refused() {
        let good = "a".repeat(64);
        assert_eq!(sha256(&format!("sha256:{good}")).unwrap(), good);
        for bad in ["sha256:../../etc", "sha512:aa", "", &good, "sha256:AA"] {
            assert!(sha256(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_document_of_many_small_entries_is_refused_while_it_is_read() {
        let many = |entry: &str| vec![entry; 5000].join(",");
        let layers = format!(r#"{{"layers":[{}]}}"#, many(r#"{"digest":""}"#));
        let message = parse::<Document>("manifest", layers.as_bytes()).unwrap_err();
        assert!(message.to_string().contains("more than 4096"), "{message}");
        let named: Vec<String> = (0..5000).map(|n| format!("\"{n}\":0")).collect();
        let named = named.join(",");
        for text in [
            format!(r#"{{"rootfs":{{"diff_ids":[{}]}}}}"#, many("\"\"")),
            format!(r#"{{"config":{{"Env":[{}]}}}}"#, many("\"\"")),
            format!(r#"{{"config":{{"ExposedPorts":{{{named}}}}}}}"#),
        ] {
            let message = parse::<ImageConfig>("configuration", text.as_bytes()).unwrap_err();
            assert!(message.to_string().contains("more than 4096"), "{message}");
        }
        let null = br#"{"config":{"Env":null,"Cmd":null,"ExposedPorts":null}}"#;
        assert!(parse::<ImageConfig>("configuration", null).is_ok());
    }

    #[test]
    fn another_platform_is_refused_by_its_name() {
        let index =
            br#"{"manifests":[{"digest":"x","platform":{"os":"linux","architecture":"arm64"}},
            {"digest":"y","platform":{"os":"unknown","architecture":"unknown"}}]}"#;
        let index: Document = parse("index", index).unwrap();
        let message = index.linux_amd64().unwrap_err().to_string();
        assert!(
            message.contains("linux/arm64") && !message.contains("unknown"),
            "{message}"
        );
        let config: ImageConfig =
            parse("c", br#"{"os":"windows","architecture":"amd64"}"#).unwrap();
        let message = config.diff_ids(0).unwrap_err().to_string();
        assert!(message.contains("windows/amd64"), "{message}");
    }
}
