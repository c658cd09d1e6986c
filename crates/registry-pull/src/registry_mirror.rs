//! [`RegistryMirror`]: a server that has copies of the images of a registry.

use crate::registries::PullSettings;
use crate::registry_address::RegistryAddress;
use hyper::Uri;
use std::fmt;
use std::str::FromStr;

/// Name of Docker's registry in references of images.
const DOCKER: &str = "docker.io";
/// Hosts of Docker's registry.
const DOCKER_HOSTS: [&str; 2] = ["index.docker.io", "registry-1.docker.io"];

/// Mirror of a registry, in the form `HOST=URL`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryMirror {
    /// Registry whose images the mirror has, as in references of images: `host` or `host:port`.
    registry: String,
    /// `host` or `host:port` of the mirror.
    authority: String,
    /// [`Self::authority`] in the form of `--registry-allow`.
    address: RegistryAddress,
    /// True if the mirror is accessed by TLS.
    tls: bool,
}

impl RegistryMirror {
    /// Returns whether this is a mirror of the registry with this name.
    pub fn is_of(&self, registry: &str) -> bool {
        self.registry.eq_ignore_ascii_case(canonical(registry))
    }

    /// Returns the host and port of the mirror.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Returns the settings of a pull from the mirror. The host's owner named the mirror, so that
    /// it may be in a private network.
    pub fn pull(&self, pull: &PullSettings) -> PullSettings {
        let mut pull = pull.clone();
        pull.registries.allowed.push(self.address.clone());
        let plain_http = &mut pull.registries.plain_http;
        plain_http.retain(|host| !host.eq_ignore_ascii_case(&self.authority));
        if !self.tls {
            plain_http.push(self.authority.clone());
        }
        pull
    }
}

/// Returns the name of a registry as in references of images.
fn canonical(registry: &str) -> &str {
    let is_named = |host: &&str| host.eq_ignore_ascii_case(registry);
    if DOCKER_HOSTS.iter().any(is_named) {
        DOCKER
    } else {
        registry
    }
}

impl FromStr for RegistryMirror {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "`{text}` is not HOST=URL without a path, as in \
                 docker.io=https://mirror.example:5000"
            )
        };
        let (registry, url) = text.split_once('=').ok_or_else(bad)?;
        registry.parse::<RegistryAddress>()?;
        let url: Uri = url.parse().map_err(|_| bad())?;
        let tls = match url.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(bad()),
        };
        let authority = url.authority().ok_or_else(bad)?.as_str();
        let has_path = !matches!(url.path_and_query().map(|p| p.as_str()), None | Some("/"));
        if has_path {
            return Err(bad());
        }
        Ok(Self {
            registry: canonical(registry).to_owned(),
            // Rejects credentials in the URL.
            address: authority.parse()?,
            authority: authority.to_owned(),
            tls,
        })
    }
}

impl fmt::Display for RegistryMirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{}={scheme}://{}", self.registry, self.authority)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cancel::Cancel;
    use crate::registries::Registries;

    #[test]
    fn a_mirror_is_of_one_registry_and_may_be_in_a_private_network() {
        let mirror: RegistryMirror = "index.docker.io=http://10.0.0.1:5000/".parse().unwrap();
        assert_eq!(mirror.to_string(), "docker.io=http://10.0.0.1:5000");
        assert!(mirror.is_of("docker.io") && mirror.is_of("Index.docker.io"));
        assert!(!mirror.is_of("quay.io") && !mirror.is_of("docker.io.example"));
        let settings = Registries::default().pull(true, &Cancel::new().unwrap());
        let pull = mirror.pull(&settings);
        assert!(pull.by_key && pull.registries.allowed[0].is("10.0.0.1", 5000));
        assert_eq!(pull.registries.plain_http, ["10.0.0.1:5000"]);
        // The scheme of the mirror precedes `--plain-http`.
        let mirror: RegistryMirror = "quay.io:443=https://10.0.0.1:5000".parse().unwrap();
        assert!(mirror.pull(&pull).registries.plain_http.is_empty());
        assert!(mirror.is_of("quay.io:443") && !mirror.is_of("quay.io"));
        for bad in [
            "",
            "docker.io",
            "docker.io=mirror.example",
            "docker.io=ftp://mirror.example",
            "docker.io=https://mirror.example/path",
            "docker.io=https://user@mirror.example",
            "=https://mirror.example",
            "a b=https://mirror.example",
        ] {
            assert!(bad.parse::<RegistryMirror>().is_err(), "{bad}");
        }
    }
}
